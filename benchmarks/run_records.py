"""Record benchmark runs as rows in a JSON file, and reuse finished training runs in a work folder.

A benchmark can run in parts. Each part adds its rows to the file and keeps the others. A finished training run is
reused only if it used the requested arguments.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.page_faults import describe_memory
from hf_attn_variants.files import atomic_write

__all__ = ["check_arguments", "check_data_dir", "check_source", "write_rows"]

# Arguments about paths and output that do not affect results.
IGNORED = ("output_dir", "overwrite_output_dir", "disable_tqdm")


def write_rows(path: Path, head: dict[str, Any], rows: Sequence[dict[str, Any]], key: Sequence[str]) -> None:
    """Write `head` and `rows` to a JSON file, and keep the existing rows that have other keys.

    Dictionaries in `head` are merged with those in the file. A new file also records the allocator settings.

    Args:
        path: the path of the JSON file, {..., "runs": rows}.
        head: the other fields of the file.
        rows: the rows to add. Each replaces an existing row with the same key.
        key: the names of the fields that identify a row.
    """
    report = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}

    def key_of(row: dict[str, Any]) -> tuple:
        return tuple(row.get(name) for name in key)

    merged = {key_of(row): row for row in [*report.pop("runs", []), *rows]}
    for name, value in head.items():
        report[name] = report.get(name, {}) | value if isinstance(value, dict) else value
    report.setdefault("memory", describe_memory())
    atomic_write(path, json.dumps(report | {"runs": list(merged.values())}, indent=1) + "\n")


def check_data_dir(data_dir: Path, *names: str) -> None:
    """Exit if the data folder lacks a file or folder that the benchmark reads."""
    missing = [name for name in names if not (data_dir / name).exists()]
    if missing:
        raise SystemExit(f"--data_dir {data_dir} must contain {', '.join(missing)}")


def check_arguments(
    folder: Path, parse_args: Callable[[Sequence[str]], argparse.Namespace], flags: Sequence[str]
) -> dict[str, Any]:
    """Return the `all_results.json` of a finished run, after checking its arguments.

    Args:
        folder: the folder of the run.
        parse_args: the `parse_args` function of the script that executed the run.
        flags: the flags with which the script would run now.

    Raises:
        SystemExit: if the run used other arguments. The message lists them.
    """
    results = json.loads((folder / "all_results.json").read_text(encoding="utf-8"))
    requested = json.loads(json.dumps(vars(parse_args(flags)), default=str))
    used = results["arguments"]
    # Omitted arguments are None here, and the results contain the values that the script used.
    checked = {name: value for name, value in requested.items() if value is not None and name not in IGNORED}
    different = {
        name: f"{used[name]!r}, now {value!r}"
        for name, value in checked.items()
        if name in used and _remove_folders(used[name]) != _remove_folders(value)
    }
    if different:
        raise SystemExit(f"{folder} contains a run with other arguments {different}. Use another --work_dir.")
    return results


def check_source(checkpoint: Path, model: Path | str) -> None:
    """Exit if a checkpoint in the work folder was converted from another model."""
    report = checkpoint / "conversion_report.json"
    if report.is_file():
        source = json.loads(report.read_text(encoding="utf-8"))["source"]
        if Path(source).name != Path(model).name:
            raise SystemExit(f"{checkpoint} was converted from {source}, not from {model}. Use another --work_dir.")


def _remove_folders(value: Any) -> str:
    # The same data can have another path, and numbers from a command line can be strings.
    return Path(value).name if isinstance(value, str) and "/" in value else str(value)
