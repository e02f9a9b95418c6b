"""Digests of tensors, files and printed text, without the parts that differ between two runs of the same code."""

import contextlib
import hashlib
import importlib
import io
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

__all__ = [
    "MissingCommand",
    "Record",
    "digest",
    "in_empty_folder",
    "record_each",
    "record_folder",
    "record_json",
    "run",
    "scrub",
]

Record = dict[str, Any]

# Fields of JSON files: times, versions, and the names of the code files that ship with a checkpoint.
VOLATILE_FIELDS = re.compile(
    r"(.*_)?(seconds|minutes|runtime|date|created|time|mfu|flops_per_second|versions?|auto_map)(_.*)?|.*per_second.*"
)
# Parts of text: temporary folders, times, dates, the version of the package and the checksum of a model card.
VOLATILE_TEXT = (
    (re.compile(re.escape(tempfile.gettempdir()) + r"/[\w.-]+"), "TMP"),
    (re.compile(r"\b\d+(\.\d+)? (s|seconds|minutes|h)\b"), "TIME"),
    (re.compile(r"\b20\d\d-\d\d-\d\d\b"), "DATE"),
    (re.compile(r"(hf[_-]attn[_-]variants|version|release) v?\d+\.\d+\.\d+[\w.]*"), r"\1 VERSION"),
    (re.compile(r"digest [0-9a-f]{16}"), "digest DIGEST"),
)
# Longer values are stored as digests.
MOST_CHARACTERS = 32


class MissingCommand(Exception):
    """Raised if the recorded checkout does not have a command."""


def digest(*values: Any) -> str:
    """Return a digest of the exact bits of tensors, and of values that can be stored as JSON."""
    hasher = hashlib.sha256()
    for value in values:
        if isinstance(value, torch.Tensor):
            hasher.update(f"{value.dtype} {list(value.shape)}".encode())
            hasher.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        else:
            hasher.update(json.dumps(value, sort_keys=True, default=str).encode())
    return hasher.hexdigest()[:12]


def scrub(text: str) -> str:
    """Replace the parts of a text that differ between two runs by placeholders."""
    for pattern, replacement in VOLATILE_TEXT:
        text = pattern.sub(replacement, text)
    return text


def record_json(value: Any) -> Record:
    """Return a record of each field of a JSON object: the value if it is short, otherwise its digest."""
    fields = _remove_volatile(value)
    fields = fields if isinstance(fields, dict) else {"content": fields}
    return {
        name: field_value if len(json.dumps(field_value)) <= MOST_CHARACTERS else digest(field_value)
        for name, field_value in fields.items()
    }


def record_folder(folder: Path) -> Record:
    """Return the records of the files in a folder, except code, images, Markdown files and subfolders."""
    records: Record = {}
    for path in sorted(entry for entry in folder.iterdir() if entry.is_file()):
        if path.suffix == ".safetensors":
            tensors = load_file(path)
            records[path.name] = digest(sorted(tensors), *(tensors[name] for name in sorted(tensors)))
        elif path.name in ("conversion_report.json", "all_results.json"):
            values = record_json(json.loads(path.read_text(encoding="utf-8")))
            records |= {f"{path.name}, {name}": value for name, value in values.items()}
        elif path.suffix in (".json", ".jsonl"):
            lines = [path.read_text(encoding="utf-8")] if path.suffix == ".json" else path.read_text().splitlines()
            records[path.name] = digest([_remove_volatile(json.loads(line)) for line in lines])
        elif path.suffix not in (".py", ".png", ".md"):
            records[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    return records


def run(*argv: Any) -> str:
    """Run a console command in this process and return the text that it printed.

    Raises:
        MissingCommand: if the checkout does not have the command.
        RuntimeError: if the command fails.
    """
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()) as errors:
        try:
            status = importlib.import_module("hf_attn_variants.cli").main([str(argument) for argument in argv])
        except SystemExit as stop:
            status = stop.code
    if status:
        last = (errors.getvalue().strip().splitlines() or [""])[-1]
        if f"invalid choice: '{argv[0]}'" in last:
            raise MissingCommand(argv[0])
        raise RuntimeError(scrub(last))
    return printed.getvalue()


def record_each(items: Iterable[str], make: Callable[[str], Record]) -> Record:
    """Return the records of all items. If an item fails, its only record is the error."""
    records: Record = {}
    for item in items:
        print(f"  {item}", flush=True)
        try:
            record = make(item)
        except MissingCommand as error:
            print(f"    This checkout does not have the command {error}.", flush=True)
            continue
        except Exception as error:
            record = {"error": f"{type(error).__name__}: {scrub(str(error)).strip()[:300]}"}
            print(f"    {record['error']}", flush=True)
        records |= {f"{item}, {key}": value for key, value in record.items()}
    return records


@contextlib.contextmanager
def in_empty_folder() -> Iterator[None]:
    """Run the body in an empty temporary folder, so that relative paths name the same files in each run."""
    previous_folder = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(previous_folder)


def _remove_volatile(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _remove_volatile(item) for key, item in value.items() if not VOLATILE_FIELDS.fullmatch(str(key))}
    if isinstance(value, list):
        return [_remove_volatile(item) for item in value]
    return scrub(value) if isinstance(value, str) else value
