"""The command `attn-variants sweep`."""

import argparse
import importlib
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..command_line import CommandParser

__all__ = ["JSON_FILE", "MARKDOWN_FILE", "PNG_FILE", "TRAININGS", "main", "parse_args"]

# The commands that a sweep can have, with their modules here.
TRAININGS = {
    "classify": "classify",
    "glue": "glue",
    "ner": "ner",
    "pretrain": "pretrain",
    "pretrain-t5": "pretrain_t5",
    "seq2seq": "seq2seq",
    "squad": "squad",
    "uptrain": "uptrain",
}
# Flags that a sweep gives each command itself.
OWN = ("output_dir", "seed")
OWN_OF_TRAININGS = (*OWN, "overwrite_output_dir", "resume_from_checkpoint")

JSON_FILE, MARKDOWN_FILE, PNG_FILE = "sweep_results.json", "sweep_results.md", "sweep_results.png"
# By this file a later call knows the folder as a sweep's.
PLAN_FILE = "sweep.json"
# How long to wait for other calls of a sweep that write its table and plot.
WRITE_SECONDS = 120.0

EXAMPLE = """\
examples (what would run, then the runs):
  attn-variants sweep sweeps/fewer_heads.yaml \\
      --set DATA=~/data TOKENIZER=vocabulary-256 --dry_run
  attn-variants sweep sweeps/fewer_heads.yaml \\
      --set DATA=~/data TOKENIZER=vocabulary-256 --output_dir runs/fewer-heads

on two GPUs, a run on each at a time:
  CUDA_VISIBLE_DEVICES=0 attn-variants sweep FILE --output_dir DIR &
  CUDA_VISIBLE_DEVICES=1 attn-variants sweep FILE --output_dir DIR &

A file (YAML or JSON) in full:
  title: Fewer key/value heads        # of the table and the plot
  command: pretrain-t5                # any training command
  # may be left out: one process
  launch: [accelerate, launch, --num_processes, 2]
  seeds: [0, 1]                       # of each variant; default: [0]
  metrics: [eval_loss]                # to show; default: the command's own
  # ${DATA} stands for its value; --set gives others; null: must be given
  variables: {DATA: null, STEPS: 1000}
  # of every run, as the command has them: lists, numbers, true, objects
  flags:
    model_type: t5
    tokenizer_name: ${DATA}/tokenizers/t5
    config_overrides: {d_model: 128, num_layers: 2}
    train_file: ["${DATA}/wikipedia/train-*.txt.gz"]
    max_train_steps: ${STEPS}
  # name: flags on top of those; of objects, the fields that differ
  variants:
    multi-head: {}
    multi-query: {num_key_value_heads: 1}

Two more keys multiply the variants: `grid`, with a list of values of a flag (num_key_value_heads: [1, 2, 4]) or an
object of names and flags; along its first axis of numbers the plot is a curve. `references` are variants that the grid
does not multiply. `convert`, of all runs or of one variant, has the flags of `attn-variants convert`, whose checkpoint
is then trained; null: not converted; a grid's axis of its flags is called convert.FLAG.

Before any runs, every command is checked by its own parser, each model from scratch is made without its weights, and
each conversion is checked by what the checkpoint's files say. A run has a folder, runs/VARIANT/seed-N, with what its
commands printed in output.log. Ctrl-C and SIGTERM end the running training with a checkpoint. The same command goes on
where an earlier call ended, however it ended: a finished run is never run again, an interrupted one goes on from its
last checkpoint (the flag checkpointing_steps saves some), and variants and seeds may be added. A run that fails is
told at the end (status 1), and the others run. Several calls of one command, on other GPUs or machines that see the
folder, share the runs: each takes the next one that no other has. Paths in a file are relative to the working
directory."""


class SweepFailed(ValueError):
    """Some runs of a sweep failed; the message says which, and why."""

    exit_status = 1


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line, or `argv`."""
    parser = CommandParser(
        prog="attn-variants sweep",
        description="Run variants times seeds of one training command, and make one table and one plot of them.",
        epilog=EXAMPLE,
    )
    parser.add_argument("file", metavar="FILE", help="the sweep, YAML or JSON")
    parser.add_argument(
        "--output_dir",
        help=f"a new or empty folder, or that of an earlier call, which goes on; it gets {MARKDOWN_FILE}, {JSON_FILE} "
        f"and {PNG_FILE}, anew after each run",
    )
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="NAME=VALUE", help="values of variables, in place of the file's"
    )
    parser.add_argument("--dry_run", action="store_true", help="print every command and their number, and run none")
    parser.add_argument("--disable_tqdm", action="store_true", help="no progress bar")
    args = parser.parse_intermixed_args(argv)
    if args.output_dir is None and not args.dry_run:
        parser.error("--output_dir is needed: a folder for the runs (or --dry_run)")
    pairs = [each.partition("=") for each in args.set]
    if wrong := ["".join(pair) for pair in pairs if not pair[0] or not pair[1]]:
        parser.error(f"--set {wrong[0]}: write NAME=VALUE")
    args.set = {name: value for name, _, value in pairs}
    if len(args.set) < len(pairs):
        parser.error("--set gives a variable twice")
    return args


def main(args: argparse.Namespace) -> Any:
    """Check the whole file, run what is left of it, write table and plot, and return the `SweepResults`.

    Raises:
        ValueError, OSError: for a file that is wrong, or a folder that is not this sweep's; and, once all others have
            run, for runs that failed.
        KeyboardInterrupt, TerminatedError: on Ctrl-C or SIGTERM.
    """
    from ..sweep.plan import plan_runs
    from ..sweep.runner import check_launcher
    from ..sweep.sweep_file import read_sweep

    sweep = read_sweep(Path(args.file).expanduser(), args.set, TRAININGS)
    try:
        runs = plan_runs(sweep, {"convert": _flags("convert"), sweep.command: _flags(sweep.command)})
    except ValueError as error:
        raise ValueError(f"{args.file}: {error}") from None
    check_launcher(sweep.launch)
    if args.dry_run:
        try:
            _check_models(args.file, runs, download=False)
        except OSError as error:
            print(f"# models are not checked: {error}")  # the tokenizer may be where the runs will be
        _print_commands(runs, Path(args.output_dir or "OUTPUT_DIR"))
        return None
    return _run(args, sweep, runs, Path(args.output_dir).expanduser())


def _flags(command: str) -> Any:
    """Return the flags of a command, as its own parser knows them."""
    from ..sweep.flags import CommandFlags

    module = importlib.import_module(f".{TRAININGS.get(command, command)}", __package__)
    own = OWN_OF_TRAININGS if command in TRAININGS else OWN
    return CommandFlags(command, module.make_parser(), module.parse_args, own)


def _check_models(file: str, runs: Sequence[Any], download: bool) -> None:
    """Check what the trainings begin with, once a variant: the turn of one that cannot be made may come after hours.

    A model from scratch is made without its weights; a conversion is planned, and its examples are read. Checkpoints
    that are on the Hub alone are fetched if `download` says so, else not there.

    Raises:
        OSError: if a tokenizer, a checkpoint or examples are not there.
        ValueError: if there is no such model; both messages name the variant.
    """
    first: dict[str, Any] = {}
    for run in runs:
        first.setdefault(run.contestant, run)  # a seed changes no model
    for run in first.values():
        try:
            if run.convert is None:
                _check_new_model(run)
            else:
                _check_conversion(run, download)
        except (ValueError, OSError) as error:
            kind = OSError if isinstance(error, OSError) else ValueError
            raise kind(f"{file}: {f'{run.contestant!r}: ' if run.contestant else ''}{error}") from error


def _check_new_model(run: Any) -> None:
    from ..training.engine.settings import NewModelSettings

    command, *words = run.training(Path("RUN"))
    settings = importlib.import_module(f".{TRAININGS[command]}", __package__).parse_args(words)
    if isinstance(settings, NewModelSettings) and settings.model_name_or_path is None:
        from ..training.engine.new_model import check_new_model

        check_new_model(settings)


def _check_conversion(run: Any, download: bool) -> None:
    from ..conversion.checkpoint.source import cached_folder
    from .convert import check_convertible, parse_args

    _, *words = run.conversion(Path("RUN"))
    args = parse_args(words)
    if not download and cached_folder(args.model_name_or_path, args.revision) is None:
        raise FileNotFoundError(f"{args.model_name_or_path} is not on this machine")
    check_convertible(args)


def _print_commands(runs: Sequence[Any], output_dir: Path) -> None:
    count = 0
    for run in runs:
        print(f"# {run.name}")
        folder = output_dir / run.folder
        conversion = run.conversion(folder)
        commands = [*([] if conversion is None else [["attn-variants", *conversion]])]
        program = [*run.launch, "-m", "attn_variants"] if run.launch else ["attn-variants"]
        commands.append([*program, *run.training(folder)])
        for words in commands:
            print(shlex.join(words))
        count += len(commands)
    seeds = len({run.seed for run in runs})
    of_each = f"{seeds} seed{'s' if seeds > 1 else ''}"
    print(f"# {count} commands: {len(runs)} runs, {len(runs) // seeds} variants with {of_each} each")


def _run(args: argparse.Namespace, sweep: Any, runs: Sequence[Any], output_dir: Path) -> Any:
    from ..inspection.tables import print_text
    from ..progress import no_progress_bars, progress_bar
    from ..sweep.plan import check_files
    from ..sweep.runner import LOG_NAME, RunFolder, SweepRunner

    _take_folder(output_dir)
    with no_progress_bars(args.disable_tqdm):
        folders = [RunFolder(run, output_dir) for run in runs]
        left = [folder for folder in folders if folder.results is None]
        for folder in left:
            check_files(folder.run)
        _check_models(args.file, [each.run for each in left if not each.is_converted], download=True)
        _note_file(output_dir, args.file, sweep.variables)
        done = len(runs) - len(left)
        with progress_bar(total=len(runs), initial=done, desc="Sweep", unit="run", smoothing=0) as bar:

            def on_finish(folder: Any) -> None:
                found = _collect(sweep, folders, output_dir)
                bar.update(sum(each.results is not None for each in folders) - bar.n)
                if left and folder is left[0] and (missing := found.missing_metrics()):
                    bar.write(_about_missing(missing, found.reported()), file=sys.stderr)

            def on_wait(name: str) -> None:
                bar.set_postfix_str(name, refresh=False)
                bar.update(0)

            SweepRunner(folders, on_finish, on_wait).run()
        found = _collect(sweep, folders, output_dir)
    _print(found, output_dir)
    if elsewhere := [each.run.name for each in folders if each.results is None and each.failure is None]:
        print_text(f"Other calls of this sweep run {'; '.join(elsewhere)}: they write table and plot anew.")
    if failed := [each for each in folders if each.has_failed]:
        told = "; ".join(f"{each.run.name} ({each.failure}; see {each.path / LOG_NAME})" for each in failed)
        raise SweepFailed(f"{len(failed)} of {len(runs)} runs failed: {told}. The same command runs them again")
    return found


def _collect(sweep: Any, folders: Sequence[Any], output_dir: Path) -> Any:
    """Read what other calls have finished meanwhile, write table, numbers and plot of all, and return the results."""
    from ..sweep.plan import curve_axis
    from ..sweep.results import collect
    from ..training.engine.folder_lock import held_folder

    with held_folder(str(output_dir), WRITE_SECONDS):  # another call would write what it read before over this
        for folder in folders:
            if folder.results is None:
                folder.read()
        found = collect(folders, sweep.title, sweep.command, sweep.metrics, curve_axis(sweep))
        _write(found, output_dir)
    return found


def _take_folder(output_dir: Path) -> None:
    """Make the sweep's folder, unless an earlier call did.

    Raises:
        OSError: if the folder has something else, or cannot be made.
        ValueError: if another process holds it.
    """
    from ..files import check_output_dir, make_folders
    from ..training.engine.folder_lock import held_folder

    if not output_dir.is_dir():
        check_output_dir(output_dir)
        make_folders(output_dir)
    with held_folder(str(output_dir)):  # calls may begin together
        temporary = output_dir / f".tmp-{PLAN_FILE}"
        if temporary.is_file() and [*output_dir.iterdir()] == [temporary]:
            temporary.unlink()  # of a call that was killed in its first write
        if not (output_dir / PLAN_FILE).is_file():
            check_output_dir(output_dir)


def _note_file(output_dir: Path, file: str, variables: dict[str, Any]) -> None:
    """Write into the sweep's folder which file it is of, and what that says."""
    from ..files import atomic_write
    from ..training.engine.folder_lock import held_folder

    text = Path(file).expanduser().read_text(encoding="utf-8")
    note = {"file": file, "variables": variables, "text": text}
    with held_folder(str(output_dir)):
        atomic_write(output_dir / PLAN_FILE, json.dumps(note, indent=2) + "\n")


def _write(found: Any, output_dir: Path) -> None:
    """Write the table, the numbers and the plot of what is finished."""
    from ..files import atomic_write
    from ..pictures import write_picture
    from ..sweep.drawing import draw_sweep

    atomic_write(output_dir / JSON_FILE, json.dumps(found.to_dict(), indent=2) + "\n")
    atomic_write(output_dir / MARKDOWN_FILE, found.markdown())
    write_picture(output_dir / PNG_FILE, lambda: draw_sweep(found), dpi=120)


def _print(found: Any, output_dir: Path) -> None:
    from ..inspection.tables import print_table, print_text

    print_table(found.title, found.header(), found.rows())
    print_text("Means over seeds, with the range where there are several.")
    if context := found.about_context():
        print_text(context)
    if missing := found.missing_metrics():
        print_text(_about_missing(missing, found.reported()))
    print(f"Table, numbers and plot: {', '.join(str(output_dir / n) for n in (MARKDOWN_FILE, JSON_FILE, PNG_FILE))}.")


def _about_missing(missing: Sequence[str], reported: Sequence[str]) -> str:
    return (
        f"No run reports {', '.join(missing)}; there are {', '.join(reported)}. Name some of these under `metrics` in "
        "the file: the same command then writes table and plot anew, and runs nothing twice."
    )
