"""The command `attn-variants sweep`."""

import argparse
import importlib
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from ..command_line import CommandParser

__all__ = ["JSON_FILE", "MARKDOWN_FILE", "PNG_FILE", "main", "parse_args"]

JSON_FILE, MARKDOWN_FILE, PNG_FILE = "sweep_results.json", "sweep_results.md", "sweep_results.png"

EXAMPLE = """\
example (with --dry_run in place of --output_dir, print the commands):
  attn-variants sweep sweeps/fewer_heads.yaml \\
      --set DATA=~/data TOKENIZER=vocabulary-256 --output_dir runs/fewer-heads

docs/experiments.md describes the file. Repeat the command to continue a sweep: it skips finished runs, continues an
interrupted training from its last checkpoint, and tries failed runs again. Calls with one folder share its runs."""


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line, or `argv`."""
    parser = CommandParser(
        prog="attn-variants sweep",
        description="Run variants and seeds of one training command, and compare them in one table and one plot.",
        epilog=EXAMPLE,
    )
    parser.add_argument("file", metavar="FILE", help="the YAML file of the sweep")
    parser.add_argument("--output_dir", help="folder for runs, table and plot: a new one, or that of an earlier call")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="values of variables of the file")
    parser.add_argument("--dry_run", action="store_true", help="print all commands, and run none")
    parser.add_argument("--disable_tqdm", action="store_true", help="show no progress bar")
    args = parser.parse_intermixed_args(argv)
    if args.output_dir is None and not args.dry_run:
        parser.error("--output_dir is needed, except with --dry_run")
    if wrong := [each for each in args.set if "=" not in each.strip("=")]:
        parser.error(f"--set must be NAME=VALUE, got {wrong[0]}")
    args.set = dict(each.split("=", 1) for each in args.set)
    return args


def main(args: argparse.Namespace) -> dict[str, Any] | None:
    """Check the sweep, run what is left of it, write the results, and return them.

    Raises:
        ValueError, OSError: if the file is wrong, the folder is not of this sweep, or runs failed.
        KeyboardInterrupt, TerminatedError: on Ctrl-C or SIGTERM.
    """
    from ..files import check_output_dir, make_folders
    from ..progress import no_progress_bars, progress_bar
    from ..sweep.plan import plan_runs, read_sweep
    from ..sweep.runner import DEFAULT_METRICS, LOG_NAME, RunFolder, markdown

    file, output_dir = Path(args.file).expanduser(), Path(args.output_dir or "OUTPUT_DIR").expanduser()
    sweep = read_sweep(file, args.set, DEFAULT_METRICS)
    try:
        runs = plan_runs(sweep, _module)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    if args.dry_run:
        _print_commands(runs, output_dir)
        return None
    if not (output_dir / JSON_FILE).is_file():
        check_output_dir(output_dir)
    folders = [RunFolder(run, output_dir) for run in runs]
    left = [folder for folder in folders if folder.results is None]
    _check_models([folder.run for folder in left if not folder.is_converted])
    make_folders(output_dir)
    found = _write(sweep, folders, output_dir)
    with no_progress_bars(args.disable_tqdm), progress_bar(left, desc="Sweep", unit="run", smoothing=0) as bar:
        for folder in bar:
            bar.set_postfix_str(folder.run.name)
            folder.execute()
            found = _write(sweep, folders, output_dir)
    print(markdown(found))
    print(f"Table, numbers and plot: {', '.join(str(output_dir / n) for n in (MARKDOWN_FILE, JSON_FILE, PNG_FILE))}.")
    if failed := [f"{f.run.name} ({f.failure}; see {f.path / LOG_NAME})" for f in folders if f.failure]:
        raise ValueError(
            f"{len(failed)} of {len(runs)} runs failed, the same command tries again: {'; '.join(failed)}"
        )
    return found


def _module(command: str) -> ModuleType:
    return importlib.import_module(f".{command.replace('-', '_')}", __package__)


def _check_models(runs: Sequence[Any]) -> None:
    """Check the new model or the conversion of each variant now, because its turn may come after hours.

    Raises:
        ValueError: if a file does not exist, or the configuration does not describe a model.
    """
    from ..training.engine.models import check_new_model
    from ..training.engine.settings import NewModelSettings

    for run in {run.contestant: run for run in runs}.values():  # a seed does not change the model
        command, *words = run.commands(Path("RUN"))[0]
        settings = _module(command).parse_args(words)
        try:
            if run.convert is not None:
                _module(command).check_convertible(settings)
            elif isinstance(settings, NewModelSettings) and settings.model_name_or_path is None:
                check_new_model(settings)
        except (ValueError, OSError) as error:
            raise ValueError(f"{run.contestant!r}: {error}") from error


def _print_commands(runs: Sequence[Any], output_dir: Path) -> None:
    for run in runs:
        *conversion, training = run.commands(output_dir / run.folder)
        launch = [*run.launch, "-m", "attn_variants"] if run.launch else ["attn-variants"]
        commands = [*(["attn-variants", *words] for words in conversion), [*launch, *training]]
        print(f"# {run.name}", *map(shlex.join, commands), sep="\n")
    print(f"# {len(runs)} runs, {len({run.contestant for run in runs})} variants")


def _write(sweep: Any, folders: Sequence[Any], output_dir: Path) -> dict[str, Any]:
    """Write and return the results of all finished runs, with those of other calls of the sweep."""
    from ..files import atomic_write, write_picture
    from ..sweep.runner import collect, draw_sweep, markdown
    from ..training.engine.checkpoints import lock_folder

    with lock_folder(str(output_dir)):  # another call would write older results over these
        for folder in folders:
            folder.read()
        found = collect(sweep, folders)
        atomic_write(output_dir / JSON_FILE, json.dumps(found, indent=2) + "\n")
        atomic_write(output_dir / MARKDOWN_FILE, markdown(found))
        write_picture(output_dir / PNG_FILE, lambda: draw_sweep(found), dpi=120)
    return found
