"""The `attn-variants` command: one subcommand for each thing the scripts do, imported when it is called."""

import argparse
import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

from .command_line import HOSTS, CommandParser, documentation, package_version
from .errors import run_script, unwind_on_interrupt

__all__ = ["COMMANDS", "main", "run"]

# Each name with the module that has its `parse_args(argv)` and `main(args)`, and what it does.
COMMANDS: dict[str, tuple[str, str]] = {
    "inspect": ("hf_attn_variants.commands.inspect", "what a checkpoint costs with fewer key/value heads"),
    "benchmark": ("hf_attn_variants.commands.benchmark", "how fast it runs here with fewer key/value heads"),
    "frontier": ("hf_attn_variants.commands.frontier", "what it loses with a smaller cache: variants tried on text"),
    "convert": ("hf_attn_variants.commands.convert", "a multi-head checkpoint into a variant"),
    "uptrain": ("hf_attn_variants.commands.uptrain", "train a converted checkpoint back to its quality"),
    "pretrain": ("hf_attn_variants.commands.pretrain", "pretrain an encoder as a language model"),
    "pretrain-t5": ("hf_attn_variants.commands.pretrain_t5", "pretrain a T5 by span corruption"),
    "classify": ("hf_attn_variants.commands.classify", "fine-tune and evaluate a classifier on your own tables"),
    "glue": ("hf_attn_variants.commands.glue", "fine-tune and evaluate on a GLUE task"),
    "average": ("hf_attn_variants.commands.average", "one table of runs on GLUE, over seeds"),
    "squad": ("hf_attn_variants.commands.squad", "fine-tune and evaluate on SQuAD"),
    "seq2seq": ("hf_attn_variants.commands.seq2seq", "fine-tune and evaluate an encoder-decoder on pairs of texts"),
    "ner": ("hf_attn_variants.commands.ner", "fine-tune and evaluate a token classifier, on named entities"),
    "sweep": ("hf_attn_variants.commands.sweep", "variants x seeds of one training: one table, one plot"),
    "visualize": ("hf_attn_variants.commands.visualize", "draw what each head attends to"),
    "export": ("hf_attn_variants.commands.export", "a variant for those who run no code of ours"),
    "push": ("hf_attn_variants.commands.push", "a checkpoint with its code and model card to the Hub"),
    "refresh": ("hf_attn_variants.commands.refresh", "save a repository with the current code"),
}

# What the extra `train` installs, as it is imported and as it is called, and the commands that work without it.
TRAIN = {
    "datasets": "datasets",
    "evaluate": "evaluate",
    "matplotlib": "matplotlib",
    "scipy": "scipy",
    "sklearn": "scikit-learn",
}
SERVING = ("inspect", "benchmark", "average", "convert", "frontier", "visualize", "export", "push", "refresh")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand of the command line, or of `argv`; without one, print the help.

    Returns:
        The exit status, as `errors.run_script` says.
    """
    parser = _parser()
    argv = sys.argv[1:] if argv is None else argv
    if not argv:
        parser.print_help()
        return 2
    args = parser.parse_args(argv)
    return run(args.command, args.arguments, f"attn-variants {args.command}")


def run(command: Any, argv: Sequence[str] | None = None, program: str | None = None) -> int:
    """Parse a command's arguments and do its work; return the exit status.

    Args:
        command: a name of `COMMANDS`, with which this package's log goes to stderr; or what has a `parse_args` and a
            `main`.
        argv: its own arguments; None = those of the process.
        program: what its help calls it; None = as the process was called.
    """

    def work() -> None:
        _check_surroundings()
        module = importlib.import_module(COMMANDS[command][0]) if isinstance(command, str) else command
        _check_unicode(sys.argv[1:] if argv is None else argv)
        # The commands' parsers take their name from here (`command_line.program_name`).
        called, sys.argv[0] = sys.argv[0], program or sys.argv[0]
        try:
            args = module.parse_args(argv)
        finally:
            sys.argv[0] = called
        if isinstance(command, str):
            _check_extra(command)
            logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s", stream=sys.stderr)
            logging.getLogger("hf_attn_variants").setLevel(logging.INFO)
            logging.getLogger("huggingface_hub").propagate = False  # it prints its lines itself
        from .registration import register  # only now: a mistyped flag does not wait for these imports

        register()
        if isinstance(command, str):
            _say_retries_once()
        unwind_on_interrupt()
        module.main(args)

    return run_script(work)


class _RetriesOnce(logging.Filter):
    """Lets each kind of line on a repeated request through once: the Hub's client prints them anew for every try."""

    KINDS = (" thrown while requesting ", "Retrying in ", "Rate limited. ")

    def __init__(self) -> None:
        super().__init__()
        self._said: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        kind = next((kind for kind in self.KINDS if kind in record.getMessage()), None)
        if kind is None:
            return True
        is_new = kind not in self._said
        self._said.add(kind)
        return is_new


def _say_retries_once() -> None:
    for handler in logging.getLogger("huggingface_hub").handlers:
        for old in [each for each in handler.filters if isinstance(each, _RetriesOnce)]:
            handler.removeFilter(old)
        handler.addFilter(_RetriesOnce())


def _check_extra(command: str) -> None:
    missing = [name for module, name in TRAIN.items() if importlib.util.find_spec(module) is None]
    if missing and command not in SERVING:
        raise ValueError(
            f"`{command}` needs {', '.join(missing)}: install this package with its extra `train`, as "
            "`pip install -e '.[train]'` does in a clone and `pip install 'FILE.whl[train]'` of a wheel"
        )


def _check_surroundings() -> None:
    # transformers cannot be imported in either.
    if sys.flags.optimize > 1:
        raise ValueError(
            "Python runs without docstrings (PYTHONOPTIMIZE=2 or -OO), and transformers reads them: use 1, or none"
        )
    try:
        os.getcwd()
    except OSError:
        raise FileNotFoundError("the working directory is not there any more: change into one that is") from None


def _check_unicode(argv: Sequence[str]) -> None:
    # Neither tokenizers nor safetensors, nor JSON, take other text or names of files.
    for argument in argv:
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise ValueError(
                f"the argument {argument!r} is not UTF-8: write texts as UTF-8, and rename a file or folder whose "
                "name is not"
            ) from None


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    listed = "\n".join(f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items())
    parser = CommandParser(
        prog="attn-variants",
        description="Multi-query, grouped-query, latent, linear and talking-heads attention for checkpoints of "
        f"transformers: {HOSTS}.",
        epilog=f"commands:\n{listed}\n\n`attn-variants COMMAND --help` says what each takes."
        + (f"\n\ndocumentation:\n  {pages}" if (pages := documentation()) is not None else ""),
    )
    parser.add_argument("--version", action="version", version=f"hf_attn_variants {package_version()}")
    parser.add_argument("command", choices=sorted(COMMANDS), metavar="COMMAND", help="see below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="the command's own arguments")
    return parser


if __name__ == "__main__":
    sys.exit(main())
