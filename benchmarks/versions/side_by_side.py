"""Compare the speed of the current code with an earlier commit: decoding, windows, talking heads and training.

Each version runs in a separate process on one thread. The processes take turns, and the process that starts a round
changes. Times are CPU times of the process, which other load hardly affects. Each ratio is the median over the pairs
of times of all rounds. The models have the same random weights in both versions, and their outputs must have equal
bits.

Example:
    python -m benchmarks.versions.side_by_side --before 48fcfa1^ --rounds 20
"""

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BERT = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "intermediate_size": 512}
T5 = {"d_model": 256, "d_kv": 32, "d_ff": 512, "num_layers": 4, "num_heads": 8, "vocab_size": 1000}
# The divisor of the input lengths and of the number of new tokens.
SIZES = {"small": 4, "large": 1}


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", required=True, help="the earlier commit")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--size", choices=SIZES, default="large", help="size of the inputs; tests use small")
    parser.add_argument("--output", type=Path, help="a JSON file for the report")
    return parser.parse_args(arguments)


def make_tasks(size: str) -> dict[str, Callable[[], Any]]:
    """Return a dictionary of the timed functions. Each function returns its outputs."""
    import torch
    import transformers

    import hf_attn_variants as package

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    sizes = SIZES[size]

    def bert(**fields: Any) -> Any:
        torch.manual_seed(0)
        config = package.AttnVariantBertConfig(**BERT, vocab_size=1000, max_position_embeddings=1024, **fields)
        return package.AttnVariantBertForMaskedLM(config).eval()

    def passes(length: int, **fields: Any) -> Callable[[], Any]:
        model, ids = bert(**fields), torch.arange(2 * length).view(2, length) % 1000
        return lambda: model(input_ids=ids).logits

    def decoding(beams: int, **fields: Any) -> Callable[[], Any]:
        torch.manual_seed(0)
        config = package.AttnVariantT5Config(**T5, decoder_start_token_id=0, **fields)
        model = package.AttnVariantT5ForConditionalGeneration(config).eval()
        model.generation_config.eos_token_id = None
        ids = torch.arange(2, 2 + 4 * 128 // sizes).view(4, -1) % 1000
        return lambda: model.generate(input_ids=ids, num_beams=beams, max_new_tokens=24 // sizes, do_sample=False)

    def training() -> Any:
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        return model.bert.encoder.layer[0].attention.self.key.weight.grad

    model, ids = bert(num_key_value_heads=2, talking_heads="both").train(), torch.arange(512 // sizes).view(4, -1)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    functions = {
        "decoding, 2 of 8 heads": decoding(1, num_key_value_heads=2),
        "decoding, latents, 4 beams": decoding(4, kv_lora_rank=64, cross_kv_lora_rank=128),
        "pass, 2 of 8 heads": passes(256 // sizes, num_key_value_heads=2),
        "pass, window": passes(1024 // sizes, attention_pattern="sliding_window", attention_window=128 // sizes),
        "pass, talking heads": passes(256 // sizes, talking_heads="both"),
        "pass, elu kernel": passes(1024 // sizes, attention_kernel="elu"),
    }
    no_grad = {name: torch.no_grad()(call) for name, call in functions.items()}
    return no_grad | {"training, talking heads": training}


def serve(size: str) -> None:
    """Print the path of the package and the names of the tasks, then run each task whose name is read from stdin.

    For each task, the function prints the CPU seconds and a digest of the outputs.
    """
    import hf_attn_variants

    calls = make_tasks(size)
    print(json.dumps({"package": hf_attn_variants.__path__[0], "tasks": list(calls)}), flush=True)
    for line in sys.stdin:
        begin = time.process_time()
        outputs = calls[line.strip()]()
        seconds = time.process_time() - begin
        digest = hashlib.sha256(outputs.detach().numpy().tobytes()).hexdigest()
        print(json.dumps({"seconds": seconds, "digest": digest}), flush=True)


@contextmanager
def start_worker(code: Path, size: str) -> Iterator[Callable[[str | None], Any]]:
    """Start a process that imports the package from a folder, and yield a function that sends requests to it.

    The function runs the task with a given name. With None, it returns the names of all tasks. The current folder of
    the process must not contain the package, because Python would import that one.
    """
    # Both processes run the current version of this file with the package of their folder.
    program = "import runpy, sys; runpy.run_path(sys.argv[1])['serve'](sys.argv[2])"
    command = [sys.executable, "-c", program, __file__, size]
    environment = os.environ | {"PYTHONPATH": str(code), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, cwd=code.parent, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    input_pipe, output_pipe = process.stdin, process.stdout
    if input_pipe is None or output_pipe is None:
        raise RuntimeError("The process has no pipes.")

    def ask(task: str | None) -> Any:
        if task is not None:
            input_pipe.write(f"{task}\n")
            input_pipe.flush()
        line = output_pipe.readline()
        if not line:
            raise SystemExit(f"The process of {code} ended. Its error is printed above.")
        answer = json.loads(line)
        if task is None:
            if Path(answer["package"]).parent != code:
                raise SystemExit(f"The process of {code} imported the package from {answer['package']}")
            return answer["tasks"]
        return answer

    try:
        yield ask
    finally:
        process.kill()
        process.wait()


def main(args: argparse.Namespace) -> dict[str, Any]:
    """Time both versions, print the medians and the middle halves of the ratios, and return the report."""
    # These imports are not at the top, because a process with an earlier commit may not have these modules.
    from benchmarks.machine import describe_machine
    from benchmarks.page_faults import describe_memory
    from hf_attn_variants.files import atomic_write

    with tempfile.TemporaryDirectory() as stage:
        old = Path(stage) / "before"
        subprocess.run(["git", "-C", str(ROOT), "worktree", "add", "--detach", str(old), args.before], check=True)
        try:
            with start_worker(old, args.size) as before, start_worker(ROOT, args.size) as after:
                report = compare(before, after, args.rounds)
        finally:
            subprocess.run(["git", "-C", str(ROOT), "worktree", "remove", "--force", str(old)], check=True)
    report |= {"before": args.before, "machine": describe_machine("cpu"), "memory": describe_memory()}
    if args.output is not None:
        atomic_write(args.output, json.dumps(report, indent=1) + "\n")
    return report


def compare(before: Callable[[str | None], Any], after: Callable[[str | None], Any], rounds: int) -> dict[str, Any]:
    """Return the seconds of each task in both versions, and whether the outputs are equal."""
    names = before(None)
    if after(None) != names:
        raise SystemExit("The two processes have different tasks.")
    rows: dict[str, Any] = {}
    for name in names:
        pairs, equal = [], True
        for number in range(rounds + 1):
            order = (before, after) if number % 2 else (after, before)
            answers = {ask: ask(name) for ask in order}
            equal &= answers[before]["digest"] == answers[after]["digest"]
            if number:  # the first round warms up
                pairs.append((answers[before]["seconds"], answers[after]["seconds"]))
        ratios = sorted(new / old for old, new in pairs)
        low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
        rows[name] = {"ratio": statistics.median(ratios), "middle_half": [low, high], "equal": equal, "seconds": pairs}
        ratio = f"{rows[name]['ratio']:.3f} ({low:.3f} to {high:.3f})"
        print(f"{name}: current / earlier time {ratio}, outputs {'equal' if equal else 'DIFFER'}", flush=True)
    return {"rounds": rounds, "rows": rows}


if __name__ == "__main__":
    main(parse_args())
