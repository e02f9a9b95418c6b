"""Record what the package computes, as digests, to compare before and after a change that must change nothing.

For every host with every mechanism that it takes: the names and shapes of its tensors, its outputs by "sdpa" and by
"eager", the gradients of all parameters and the tokens that it generates, greedily and with beams. Then what
conversions leave (weights, config.json, reports), and the help of all commands. Trainings: tests/golden.

The same file runs on both trees, each with its own tests: PYTHONPATH says which.

Example:
    PYTHONPATH=OLD:OLD/tests python -m benchmarks.versions.recorded_outputs --output before.json
    PYTHONPATH=.:tests python -m benchmarks.versions.recorded_outputs --output after.json --compare before.json
"""

import argparse
import contextlib
import hashlib
import importlib
import io
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

# What is another for each run, or each version.
TEMPORARY = re.escape(tempfile.gettempdir()).encode() + rb"/[\w./-]+"
VOLATILE = re.compile(rb'"(seconds|minutes|created|date|time[a-z_]*)": [0-9.]+|\d+(\.\d+)? s\b|' + TEMPORARY)


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSON with a digest for each thing")
    parser.add_argument(
        "--compare", type=Path, help="an earlier one: say what differs, and end with 1 if anything does"
    )
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    return parser.parse_args()


def digest(*things: Any) -> str:
    """Return a digest of tensors, to the bit, and of what JSON can hold."""
    found = hashlib.sha256()
    for each in things:
        if isinstance(each, torch.Tensor):
            found.update(str(each.dtype).encode() + each.detach().contiguous().view(torch.uint8).numpy().tobytes())
        else:
            found.update(json.dumps(each, sort_keys=True, default=str).encode())
    return found.hexdigest()[:16]


def models() -> dict[str, str]:
    """Return the digests of every host with every mechanism."""
    repositories = importlib.import_module("fixtures.golden_repositories")
    found = {}
    for host, (row, head) in repositories.HOSTS.items():
        for mechanism in repositories.MECHANISMS:
            if repositories.takes(host, mechanism):
                torch.manual_seed(0)
                model, batch = row.model(head, **repositories.fields_of(host, mechanism)), row.batch(head)
                found |= {f"{host}, {mechanism}, {name}": each for name, each in of_model(model, batch).items()}
        print(host, flush=True)
    return found


def of_model(model: Any, batch: dict[str, torch.Tensor]) -> dict[str, str]:
    """Return the digests of one model on a batch."""
    state = {name: list(each.shape) for name, each in model.state_dict().items()}
    found = {"tensors": digest(state, *model.state_dict().values())}
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            found[implementation] = digest(model(**batch, use_cache=False).logits)
        model.zero_grad()
        model(**batch, use_cache=False).logits.float().square().mean().backward()
        gradients = [(name, each.grad) for name, each in sorted(model.named_parameters()) if each.grad is not None]
        found[f"{implementation}, gradients"] = digest(
            [name for name, _ in gradients], *(each for _, each in gradients)
        )
    model.set_attn_implementation("sdpa")
    decodes = model.config.is_encoder_decoder or getattr(model.config, "is_decoder", False)
    if model.can_generate() and decodes and model.main_input_name == "input_ids":
        inputs = {name: each for name, each in batch.items() if not name.startswith(("decoder_", "labels"))}
        options: dict[str, Any] = {"max_new_tokens": 6, "min_new_tokens": 6, "pad_token_id": 0}
        for beams in (1, 3):
            with torch.no_grad():
                found[f"{beams} beams"] = digest(model.generate(**inputs, num_beams=beams, do_sample=False, **options))
    return found


def conversions() -> dict[str, str]:
    """Return the digests of what conversions leave, but for the code and its version."""
    made, found = importlib.import_module("fixtures.golden_conversions"), {}
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            (Path(folder) / "out").mkdir()
            made.save_converted(Path(folder) / "out")
            for path in sorted((Path(folder) / "out").rglob("*")):
                if path.is_file() and path.suffix != ".py":
                    text = VOLATILE.sub(b"", path.read_bytes())
                    found[path.relative_to(Path(folder) / "out").as_posix()] = hashlib.sha256(text).hexdigest()[:16]
        finally:
            os.chdir(here)
    return found


def helps() -> dict[str, str]:
    """Return the digests of all commands' help."""
    commands, found = importlib.import_module("hf_attn_variants.cli").COMMANDS, {}
    for name, (module, _) in commands.items():
        text = io.StringIO()
        with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
            importlib.import_module(module).parse_args(["--help"])
        found[name] = digest(text.getvalue())
    return found


PARTS = {"models": models, "conversions": conversions, "helps": helps}


def main(args: argparse.Namespace) -> None:
    """Record, and compare with an earlier record."""
    torch.set_num_threads(1)
    found = {part: PARTS[part]() for part in args.parts}
    args.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for part, digests in found.items():
        print(f"{part}: {len(digests)} digests")
    if args.compare is None:
        return
    before, others = json.loads(args.compare.read_text(encoding="utf-8")), []
    for part, digests in found.items():
        old = before.get(part, {})
        others += [f"{part}: {name}" for name in old if digests.get(name) != old[name]]
        print(f"{part}: {sum(digests.get(name) == each for name, each in old.items())} of {len(old)} as before")
    print("\n".join(others))
    sys.exit(bool(others))


if __name__ == "__main__":
    main(parse_args())
