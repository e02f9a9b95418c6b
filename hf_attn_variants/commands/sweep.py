"""The `attn-variants sweep` command."""

import argparse
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..command_parser import CommandParser
from . import load_command

JSON_FILE, MARKDOWN_FILE, PNG_FILE = "sweep_results.json", "sweep_results.md", "sweep_results.png"

EXAMPLE = """\
example (use --dry_run instead of --output_dir to print the commands):
  attn-variants sweep sweeps/fewer_heads.yaml \\
      --set DATA=~/data TOKENIZER=vocabulary-256 --output_dir runs/fewer-heads

docs/experiments.md describes the file format. To continue a sweep, repeat the command. It skips finished runs, resumes
interrupted training runs from their last checkpoint, and repeats failed runs. Several processes can share a folder."""


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command-line arguments."""
    parser = CommandParser(
        prog="attn-variants sweep",
        description="Run one training command for several variants and seeds, and compare them in a table and a plot.",
        epilog=EXAMPLE,
    )
    parser.add_argument("file", metavar="FILE", help="YAML file that defines the sweep")
    parser.add_argument(
        "--output_dir", help="folder for the runs, the table and the plot (new, or from an earlier call)"
    )
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="values of variables in the file")
    parser.add_argument("--dry_run", action="store_true", help="print all commands without running them")
    parser.add_argument("--disable_tqdm", action="store_true", help="disable the progress bar")
    args = parser.parse_intermixed_args(argv)
    if args.output_dir is None and not args.dry_run:
        parser.error("--output_dir is required unless --dry_run is set.")
    if invalid_settings := [text for text in args.set if "=" not in text.strip("=")]:
        parser.error(f"--set must be NAME=VALUE, got {invalid_settings[0]}.")
    args.set = dict(text.split("=", 1) for text in args.set)
    return args


def main(args: argparse.Namespace) -> dict[str, Any] | None:
    """Check the sweep, execute its unfinished runs, and write and return the results.

    Raises:
        ValueError: if the file is not valid, the folder belongs to another sweep, or runs failed.
        OSError: if a file cannot be read or written.
        KeyboardInterrupt: after Ctrl-C.
        TerminatedError: after SIGTERM.
    """
    from ..files import check_output_dir, make_folders
    from ..plugins import load_plugin
    from ..progress import disable_progress_bars, progress_bar
    from ..sweep.plan import plan_runs, read_sweep
    from ..sweep.runner import DEFAULT_METRICS, LOG_NAME, RunFolder, format_markdown

    file, output_dir = Path(args.file).expanduser(), Path(args.output_dir or "OUTPUT_DIR").expanduser()
    sweep = read_sweep(file, args.set, DEFAULT_METRICS)
    if "plugin" in sweep.base:  # the checks below build the models
        load_plugin(sweep.base["plugin"])
    try:
        runs = plan_runs(sweep, load_command)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    if args.dry_run:
        _print_commands(runs, output_dir)
        return None
    if not (output_dir / JSON_FILE).is_file():
        check_output_dir(output_dir)
    folders = [RunFolder(run, output_dir) for run in runs]
    unfinished = [folder for folder in folders if folder.results is None]
    _check_models([folder.run for folder in unfinished if not folder.is_converted])
    make_folders(output_dir)
    results = _write_results(sweep, folders, output_dir)
    with (
        disable_progress_bars(args.disable_tqdm),
        progress_bar(unfinished, desc="Sweep", unit="run", smoothing=0) as bar,
    ):
        for folder in bar:
            bar.set_postfix_str(folder.run.name)
            folder.execute()
            results = _write_results(sweep, folders, output_dir)
    print(format_markdown(results))
    print(f"Table, numbers and plot: {', '.join(str(output_dir / n) for n in (MARKDOWN_FILE, JSON_FILE, PNG_FILE))}.")
    if failed := [f"{f.run.name} ({f.failure}; see {f.path / LOG_NAME})" for f in folders if f.failure]:
        raise ValueError(
            f"{len(failed)} of {len(runs)} runs failed: {'; '.join(failed)}. Repeat the command to try them again."
        )
    return results


def _check_models(runs: Sequence[Any]) -> None:
    """Check the new model or the conversion for each variant, because some runs may not start until hours later.

    Raises:
        ValueError: if a file does not exist, or a configuration is not valid.
    """
    from ..training.engine.models import check_new_model
    from ..training.engine.settings import NewModelSettings

    for run in {run.contestant: run for run in runs}.values():  # all seeds of a variant use the same model
        command, *words = run.build_commands(Path("RUN"))[0]
        settings = load_command(command).parse_args(words)
        try:
            if run.convert is not None:
                load_command(command).check_convertible(settings)
            elif isinstance(settings, NewModelSettings) and settings.model_name_or_path is None:
                check_new_model(settings)
        except (ValueError, OSError) as error:
            raise ValueError(f"{run.contestant!r}: {error}") from error


def _print_commands(runs: Sequence[Any], output_dir: Path) -> None:
    for run in runs:
        *conversion, training = run.build_commands(output_dir / run.folder)
        launch = [*run.launch, "-m", "attn_variants"] if run.launch else ["attn-variants"]
        commands = [*(["attn-variants", *words] for words in conversion), [*launch, *training]]
        print(f"# {run.name}", *map(shlex.join, commands), sep="\n")
    print(f"# {len(runs)} runs, {len({run.contestant for run in runs})} variants")


def _write_results(sweep: Any, folders: Sequence[Any], output_dir: Path) -> dict[str, Any]:
    """Write and return the results of all finished runs, including runs from other processes."""
    from ..files import atomic_write, save_plot
    from ..sweep.runner import collect_results, format_markdown, plot_sweep
    from ..training.engine.checkpoints import lock_folder

    with lock_folder(str(output_dir)):  # otherwise, another process could overwrite newer results
        for folder in folders:
            folder.load_record()
        results = collect_results(sweep, folders)
        atomic_write(output_dir / JSON_FILE, json.dumps(results, indent=2) + "\n")
        atomic_write(output_dir / MARKDOWN_FILE, format_markdown(results))
        save_plot(output_dir / PNG_FILE, lambda: plot_sweep(results), dpi=120)
    return results
