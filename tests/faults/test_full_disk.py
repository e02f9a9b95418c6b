"""Check each command on a disk that becomes full at any write: a one-line error, and no partial results.

Each command runs in a new process once per file that it opens for writing and per file size, and another write fails
each time. Some of the cases run by default, and all of them with `-m slow`.
"""

import contextlib
import errno
import importlib.util
import io
import json
import logging
import os
import re
import sys
from pathlib import Path

import pytest
from faults.test_kills import DATA, assert_readable, read_contents
from fixtures.full_disk import full_disk
from fixtures.glue.tiny_bert import make_tiny_bert
from fixtures.processes import run_processes
from fixtures.tiny_t5 import make_lines_of_words, make_tiny_t5

from hf_attn_variants import cli

GLUE = ["--task_name", "stsb", "--data_dir", DATA, "--max_length", 16, "--max_train_steps", 2, "--logging_steps", 1]
GLUE += ["--checkpointing_steps", 1, "--cpu", "--disable_tqdm", "--metric_for_best_model", "loss"]
# The original model, the arguments after `attn-variants COMMAND SOURCE`, and whether the output must be complete or
# absent.
COMMANDS = {
    "convert": ("bert", ["--num_key_value_heads", 2], True),
    "export, transformers": ("gqa", ["--to", "transformers"], True),
    "export, onnx": ("gqa", ["--to", "onnx"], True),
    "export, ctranslate2": ("t5", ["--to", "ctranslate2"], True),
    "visualize": ("bert", ["--text", "The cats were fine."], True),
    "frontier": ("t5", ["--calibration_file", "TEXT", "--calibration_target_file", "TEXT", "--fit_steps", 0], False),
    "glue": ("bert", GLUE, False),
}
if importlib.util.find_spec("ctranslate2") is None:
    del COMMANDS["export, ctranslate2"]
QUICK = ("convert", "export, transformers")


def make_argv(command, source, flags, out):
    named = command in ("glue", "visualize")
    return [
        str(item) for item in [command.split(",")[0], *(["--model_name_or_path"] if named else []), source, *flags]
    ] + [
        "--output_dir",
        str(out),
    ]


class DiskFullAtOpen:
    """An audit hook that makes one `open` for writing below a folder fail, by the number of the call."""

    def __init__(self, folder):
        self.folder, self.number, self.seen = str(folder), None, 0
        sys.addaudithook(self)

    def __call__(self, event, args):
        writes = event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if not writes or self.number is None or not str(args[0]).startswith(self.folder):
            return
        self.seen += 1
        if self.seen == self.number:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(args[0]))

    @contextlib.contextmanager
    def at(self, number):
        self.number, self.seen = number, 0
        try:
            yield
        finally:
            self.number = None


def call_command(argv):
    """Return the exit status of a command and its stderr without warnings."""
    shown = io.StringIO()
    with contextlib.redirect_stderr(shown), contextlib.redirect_stdout(io.StringIO()):
        status = cli.main(argv)
    return status, [line for line in shown.getvalue().splitlines() if line.startswith(("error", "Traceback"))]


def fill_at_each_write(command, source, flags, whole_or_nothing, folder, max_tries):
    """Run all tries of a command in this process, or about `max_tries` of them, and print how many failed."""
    logging.raiseExceptions = False  # stderr is a file on the same full disk
    no_room, failed = DiskFullAtOpen(folder), []
    with no_room.at(0):
        status, errors = call_command(make_argv(command, source, flags, folder / "whole"))
    assert status == 0, errors
    opened, complete_contents = no_room.seen, read_contents(folder / "whole")
    tries = [(f"open {number}", lambda number=number: no_room.at(number)) for number in range(1, opened + 1)]
    sizes = sorted({len(content) for content in complete_contents.values()})
    tries += [(f"size {size - 1}", lambda size=size: full_disk(size - 1)) for size in sizes if size]
    tries = tries[:: max(1, len(tries) // max_tries)] if max_tries else tries
    for name, fault in tries:
        before = sorted(folder.iterdir())
        out = folder / f"out {name}"
        with fault():
            status, errors = call_command(make_argv(command, source, flags, out))
        if status == 0:  # the file is optional
            assert read_contents(out).keys() == complete_contents.keys(), name
            continue
        failed.append(name)
        assert status == 2 and len(errors) == 1 and errors[0].startswith("error: "), (name, status, errors)
        assert re.search("No space left|File too large|disk|could not", errors[0]), (name, errors)
        if whole_or_nothing:
            assert sorted(folder.iterdir()) == before, (name, sorted(folder.iterdir()))
        elif out.exists():
            assert_readable(out)
            assert not (out / "config.json").exists() or (out / "model.safetensors").exists(), name
    print(json.dumps({"tries": len(tries), "failed": len(failed)}))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("command", "max_tries"),
    [*((item, 8) for item in QUICK), *(pytest.param(item, None, marks=pytest.mark.slow) for item in COMMANDS)],
)
def test_full_disk_at_any_write_leaves_no_partial_results(command, max_tries, tmp_path):
    kind, flags, whole_or_nothing = COMMANDS[command]
    sources = tmp_path / "sources"
    (sources / "text").mkdir(parents=True)
    (sources / "text/lines.txt").write_text("\n".join(make_lines_of_words(64)))
    source = make_tiny_t5(sources / "t5") if kind == "t5" else make_tiny_bert(sources / "bert")
    if kind == "gqa":
        assert (
            cli.main(["convert", str(source), "--output_dir", str(sources / "gqa"), "--num_key_value_heads", "2"]) == 0
        )
        source = sources / "gqa"
    flags = [sources / "text/lines.txt" if item == "TEXT" else item for item in flags]
    (tmp_path / "runs").mkdir()
    call = (command, source, flags, whole_or_nothing, tmp_path / "runs", max_tries)
    statuses, output = run_processes(1, fill_at_each_write, *call)
    assert statuses == [0], output
    done = json.loads([line for line in output.splitlines() if line.startswith('{"tries"')][-1])
    assert done["failed"] >= 3, done


def test_push_dry_run_writes_no_file(tmp_path):
    """Check that `push --dry_run` needs no disk space."""
    bert = make_tiny_bert(tmp_path / "bert")
    assert cli.main(["convert", str(bert), "--output_dir", str(tmp_path / "gqa"), "--num_key_value_heads", "2"]) == 0
    before = read_contents(tmp_path)
    with full_disk(0):
        status, errors = call_command(["push", str(tmp_path / "gqa"), "--repo_id", "me/gqa", "--dry_run"])
    assert (status, errors) == (0, []) and read_contents(tmp_path) == before
    assert Path(tmp_path / "gqa").is_dir()
