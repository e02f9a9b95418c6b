"""The `attn-variants` command. The module of a subcommand is imported only when the user runs the subcommand."""

import argparse
import importlib.util
import logging
import sys
from collections.abc import Sequence
from typing import Any

from .command_parser import MODEL_NAMES, CommandParser, find_readme, get_package_version
from .commands import TRAINING_COMMANDS, load_command
from .errors import run_script, unwind_on_interrupt

# The groups of commands in the output of `--help`, with a summary of each command.
COMMAND_GROUPS: dict[str, dict[str, str]] = {
    "convert and inspect": {
        "inspect": "show the size and cost of a checkpoint and its variants",
        "benchmark": "time a model and its variants on this machine",
        "frontier": "measure the quality of variants with smaller caches",
        "convert": "convert a checkpoint into a variant",
        "visualize": "plot the attention of each head",
    },
    "train": {
        "uptrain": "train a converted checkpoint to restore its quality",
        "pretrain": "pretrain an encoder as a language model",
        "pretrain-t5": "pretrain a T5 model with span corruption",
        "classify": "fine-tune and evaluate a classifier on your own tables",
        "glue": "fine-tune and evaluate on a GLUE task",
        "average": "print a table of GLUE scores averaged over seeds",
        "squad": "fine-tune and evaluate on SQuAD",
        "seq2seq": "fine-tune and evaluate an encoder-decoder on text pairs",
        "ner": "fine-tune and evaluate a token classifier (named entities)",
        "sweep": "repeat a training run for several variants and seeds",
    },
    "share and serve": {
        "export": "export a variant for runtimes without support for custom code",
        "push": "push a checkpoint, its code and its model card to the Hub",
        "refresh": "update the code in a repository to the installed version",
    },
}
COMMANDS = {name: summary for group in COMMAND_GROUPS.values() for name, summary in group.items()}

# The packages in the `train` extra ({import name: distribution name}), and the commands that need them.
TRAIN_PACKAGES = {
    "datasets": "datasets",
    "evaluate": "evaluate",
    "matplotlib": "matplotlib",
    "scipy": "scipy",
    "sklearn": "scikit-learn",
}
TRAIN_EXTRA_COMMANDS = (*TRAINING_COMMANDS, "sweep")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand, or print the help if there is no subcommand.

    Args:
        argv: the arguments, starting with the subcommand. If None, the arguments of the process are used.

    Returns:
        The exit status (see `errors.run_script`).
    """
    parser = _build_parser()
    argv = sys.argv[1:] if argv is None else argv
    if not argv:
        parser.print_help()
        return 2
    args = parser.parse_args(argv)
    return run(args.command, args.arguments, f"attn-variants {args.command}")


def run(command: Any, argv: Sequence[str] | None = None, program: str | None = None) -> int:
    """Parse the arguments of a command, run it and return the exit status.

    Args:
        command: a name in `COMMANDS`, or an object with the functions `parse_args` and `main`. If it is a name, the
            log messages of this package are printed to stderr.
        argv: the arguments of the command. If None, the arguments of the process are used.
        program: the program name to show in the help text. If None, the name of the process is used.
    """

    def run_command() -> None:
        module = load_command(command) if isinstance(command, str) else command
        # The parsers of the commands read the program name from `sys.argv[0]` (`command_parser.get_program_name`).
        original_name, sys.argv[0] = sys.argv[0], program or sys.argv[0]
        try:
            args = module.parse_args(argv)
        finally:
            sys.argv[0] = original_name
        if isinstance(command, str):
            _check_train_extra(command)
            logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s", stream=sys.stderr)
            logging.getLogger("hf_attn_variants").setLevel(logging.INFO)
            logging.getLogger("huggingface_hub").propagate = False  # it has its own handler
        # Imported only now, because the import takes several seconds, and flag errors should be reported immediately.
        from .registration import register

        register()
        unwind_on_interrupt()
        module.main(args)

    return run_script(run_command)


def _check_train_extra(command: str) -> None:
    missing = [name for module, name in TRAIN_PACKAGES.items() if importlib.util.find_spec(module) is None]
    if missing and command in TRAIN_EXTRA_COMMANDS:
        raise ValueError(
            f"`{command}` requires {', '.join(missing)}. Install this package with the `train` extra: "
            "`pip install -e '.[train]'` in a clone, or `pip install 'FILE.whl[train]'` with a wheel."
        )


def _build_parser() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    groups = "\n\n".join(
        f"{title}:\n" + "\n".join(f"  {name:<{width}}  {summary}" for name, summary in group.items())
        for title, group in COMMAND_GROUPS.items()
    )
    parser = CommandParser(
        loads_plugins=False,
        prog="attn-variants",
        description="Multi-query, grouped-query, latent, linear and talking-heads attention for Transformers "
        f"checkpoints: {MODEL_NAMES}.",
        epilog=f"{groups}\n\nRun `attn-variants COMMAND --help` to see the options of a command."
        + (f"\n\ndocumentation:\n  {pages}" if (pages := find_readme()) is not None else ""),
    )
    parser.add_argument("--version", action="version", version=f"hf_attn_variants {get_package_version()}")
    parser.add_argument("command", choices=sorted(COMMANDS), metavar="COMMAND", help="one of the commands below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="the arguments of the command")
    return parser


if __name__ == "__main__":
    sys.exit(main())
