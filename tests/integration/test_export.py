"""Check torch.export and ONNX: an exported model gives equal outputs at other sizes.

Exports use paths of torch's operators, because a graph must not contain operators of this package.
"""

from collections import Counter

import onnxruntime
import pytest
import torch
from architectures import ALBERT, BERT, T5, make_token_ids
from fixtures.caches import get_cache, with_cache
from torch.export import Dim
from transformers import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

pytestmark = pytest.mark.cross_product

BASES = {"bert": "BertModel", "albert": "AlbertModel", "t5": "T5EncoderModel"}
CASES = [
    *((BERT, variant) for variant in ("mha", "gqa", "mqa", "talking", "latent")),
    *((architecture, variant) for architecture in (ALBERT, T5) for variant in ("gqa", "talking", "latent")),
]
EVERY_CASE = pytest.mark.parametrize(
    "architecture, variant", CASES, ids=[f"{architecture.name}-{variant}" for architecture, variant in CASES]
)
SLOW = [pytest.mark.slow]
# The (batch, length) of the exported inputs, and others that the graph must support.
EXPORTED, OTHERS = (2, 7), [(1, 5), (9, 12)]

# Each ONNX export takes seconds. By default, test one with repeated heads, and one with grouped heads and T5's bias.
QUICK = [("bert", "mqa", 18), ("t5", "gqa", 23)]
ONNX_CASES = [
    pytest.param(architecture, variant, opset, marks=[] if (architecture.name, variant, opset) in QUICK else SLOW)
    for architecture, variant, opset in [*((*case, opset) for case in CASES for opset in (18, 23)), (BERT, "gqa", 20)]
]
ONNX_IDS = [f"{case.values[0].name}-{case.values[1]}-opset{case.values[2]}" for case in ONNX_CASES]


def make_sentences(batch, length):
    torch.manual_seed(batch)
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[0, length - 2 :] = 0
    return {"input_ids": make_token_ids(batch, length), "attention_mask": mask}


def make_dynamic_sizes():
    sizes = {0: Dim("batch"), 1: Dim("length", min=2, max=32)}
    return {"input_ids": sizes, "attention_mask": sizes}


@pytest.mark.thorough
@EVERY_CASE
@torch.no_grad()
def test_torch_export_supports_any_batch_and_length(architecture, variant):
    check_export(architecture.make_model(BASES[architecture.name], variant))


@pytest.mark.thorough
@pytest.mark.parametrize("architecture", [BERT, T5], ids=lambda row: row.name)
@torch.no_grad()
def test_torch_export_supports_windows(architecture):
    """Check also texts shorter than the window, for which eager calls use no mask."""
    fields = {"attention_pattern": "sliding_window", "attention_window": 10, "num_global_tokens": 1}
    if architecture is T5:
        fields = {f"encoder_{name}": value for name, value in fields.items()}
    check_export(architecture.make_model(BASES[architecture.name], "gqa", **fields))


def check_export(model):
    program = torch.export.export(model, (), kwargs=make_sentences(*EXPORTED), dynamic_shapes=make_dynamic_sizes())
    namespaces = {node.target.namespace for node in program.graph.nodes if hasattr(node.target, "namespace")}
    assert namespaces == {"aten"}
    for size in OTHERS:
        inputs = make_sentences(*size)
        actual = program.module()(**inputs).last_hidden_state
        torch.testing.assert_close(actual, model(**inputs).last_hidden_state, atol=1e-5, rtol=0)


def make_onnx_session(program):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    serialized = program.model_proto.SerializeToString()
    return onnxruntime.InferenceSession(serialized, options, providers=["CPUExecutionProvider"])


@pytest.mark.thorough
@pytest.mark.parametrize("architecture, variant, opset", ONNX_CASES, ids=ONNX_IDS)
@torch.no_grad()
def test_onnx_supports_any_batch_and_length(architecture, variant, opset):
    model = architecture.make_model(BASES[architecture.name], variant)
    inputs = make_sentences(*EXPORTED)
    options = {"opset_version": opset, "dynamo": True, "verbose": False}
    program = torch.onnx.export(model, (), kwargs=inputs, dynamic_shapes=make_dynamic_sizes(), **options)
    operators = Counter(node.op_type for node in program.model.graph)
    # Opset 23 has an operator for grouped attention, so each layer uses one operator and repeats no heads. Talking
    # heads cannot use it, because they need matrix products before and after the softmax.
    assert operators["Attention"] == (2 if opset == 23 and variant != "talking" else 0)
    session = make_onnx_session(program)
    for size in OTHERS:
        inputs = make_sentences(*size)
        actual = session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})[0]
        expected = model(**inputs).last_hidden_state
        torch.testing.assert_close(torch.from_numpy(actual), expected, atol=1e-4, rtol=0)


# The inputs of the graph of a decoding step.
NAMES = ["token", "source_mask", "own.0", "own.1", "source"]


class DecodingStep(torch.nn.Module):
    """A decoding step of T5 with latents as plain tensors: [b, 1, n, r] per layer, and one [b, 1, m, r] for all."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, token, source_mask, self_attention_keys, source):
        cache = EncoderDecoderCache(
            *(DynamicCache([(c, c[..., :0]) for c in part]) for part in (self_attention_keys, [source]))
        )
        # The model uses only the length of the encoder outputs.
        nothing = BaseModelOutput(last_hidden_state=torch.zeros(*source_mask.shape, self.model.config.d_model))
        output = self.model(
            encoder_outputs=nothing,
            attention_mask=source_mask,
            decoder_input_ids=token,
            **with_cache(cache),
            use_cache=True,
        )
        return output.logits[:, -1], [layer.keys for layer in get_cache(output).self_attention_cache.layers]


def make_latent_model(cross_rank, variant="mha"):
    return T5.make_model("T5ForConditionalGeneration", variant, cross_kv_lora_rank=cross_rank, kv_lora_rank=16)


def make_decoding_step(model, batch, source, past):
    """Return the inputs of the step after `past` tokens, and its expected logits."""
    torch.manual_seed(batch)
    tokens, ids = make_token_ids(batch, past + 1), make_token_ids(batch, source)
    mask = torch.ones(batch, source, dtype=torch.long)
    mask[0, source - 2 :] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    expected = model(**inputs, decoder_input_ids=tokens, use_cache=False).logits[:, -1]
    cache = get_cache(model(**inputs, decoder_input_ids=tokens[:, :-1]))
    self_attention_keys = [layer.keys for layer in cache.self_attention_cache.layers]
    memory = cache.cross_attention_cache.layers[0].keys
    return {
        "token": tokens[:, -1:],
        "source_mask": mask,
        "self_attention_keys": self_attention_keys,
        "source": memory,
    }, expected


def step_sizes():
    batch, past, source = Dim("batch"), Dim("past", min=2, max=32), Dim("source", min=3, max=32)
    dynamic_sizes = [{0: batch, 2: past} for _ in range(T5.tiny["num_layers"])]
    return {
        "token": {0: batch},
        "source_mask": {0: batch, 1: source},
        "self_attention_keys": dynamic_sizes,
        "source": {0: batch, 2: source},
    }


@pytest.mark.thorough
@pytest.mark.parametrize("cross_rank, variant", [(40, "mha"), (24, "gqa")])
@torch.no_grad()
def test_decoding_step_with_a_latent_cache_can_be_exported(cross_rank, variant):
    model = make_latent_model(cross_rank, variant)
    inputs, _ = make_decoding_step(model, 2, 9, 5)
    program = torch.export.export(DecodingStep(model), (), kwargs=inputs, dynamic_shapes=step_sizes())
    for size in ((1, 4, 2), (10, 30, 7)):
        inputs, expected = make_decoding_step(model, *size)
        logits, self_attention_keys = program.module()(**inputs)
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)
        assert [c.shape for c in self_attention_keys] == [(size[0], 1, size[2] + 1, 16)] * 2


@pytest.mark.slow
@pytest.mark.parametrize("opset", [18, pytest.param(23, marks=SLOW)])
@torch.no_grad()
def test_decoding_step_with_a_latent_cache_runs_in_onnx(opset):
    model = make_latent_model(40)
    inputs, _ = make_decoding_step(model, 2, 9, 5)
    options = {"opset_version": opset, "dynamo": True, "verbose": False}
    program = torch.onnx.export(
        DecodingStep(model), (), kwargs=inputs, dynamic_shapes=step_sizes(), input_names=NAMES, **options
    )
    session = make_onnx_session(program)
    for size in ((1, 4, 2), (10, 30, 7)):
        inputs, expected = make_decoding_step(model, *size)
        model_inputs = [inputs["token"], inputs["source_mask"], *inputs["self_attention_keys"], inputs["source"]]
        actual = session.run(None, {name: tensor.numpy() for name, tensor in zip(NAMES, model_inputs, strict=True)})
        torch.testing.assert_close(torch.from_numpy(actual[0]), expected, atol=1e-4, rtol=0)
