"""The `attn-variants` command: one subcommand for each thing the scripts do, imported when it is called."""

import argparse
import importlib
import logging
import sys
from collections.abc import Sequence

__all__ = ["COMMANDS", "HelpFormatter", "add_checkpoint_argument", "main", "parse_with_checkpoint", "program_name"]

# Each name with the module that has its `parse_args(argv)` and `main(args)`, and what it does.
COMMANDS: dict[str, tuple[str, str]] = {
    "inspect": ("hf_attn_variants.commands.inspect", "what a checkpoint costs with fewer key/value heads"),
    "benchmark": ("hf_attn_variants.commands.benchmark", "how fast it runs here with fewer key/value heads"),
    "convert": ("hf_attn_variants.commands.convert", "a multi-head checkpoint into a variant"),
    "uptrain": ("hf_attn_variants.commands.uptrain", "train a converted checkpoint back to its quality"),
    "pretrain": ("hf_attn_variants.commands.pretrain", "pretrain a BERT or ALBERT as a masked language model"),
    "pretrain-t5": ("hf_attn_variants.commands.pretrain_t5", "pretrain a T5 by span corruption"),
    "glue": ("hf_attn_variants.commands.glue", "fine-tune and evaluate on a GLUE task"),
    "squad": ("hf_attn_variants.commands.squad", "fine-tune and evaluate on SQuAD"),
    "seq2seq": ("hf_attn_variants.commands.seq2seq", "fine-tune and evaluate a T5 on pairs of texts"),
    "ner": ("hf_attn_variants.commands.ner", "fine-tune and evaluate a token classifier, on named entities"),
    "visualize": ("hf_attn_variants.commands.visualize", "draw what each head attends to"),
    "push": ("hf_attn_variants.commands.push", "a checkpoint with its code and model card to the Hub"),
}


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of descriptions and examples, and adds to an option's help the default that it has."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        shown = action.help
        # 0 is a default to show, and equals False.
        unsaid = action.default is False or action.default in (None, argparse.SUPPRESS, "", [], {})
        if not action.option_strings or unsaid:
            return shown
        return shown if "default" in (shown or "") else f"{(shown or '').removesuffix('.')} (default: %(default)s)."


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand of the command line, or of `argv`.

    Returns:
        The exit status, as `training.errors.run_script` says.
    """
    args = _parser().parse_args(argv)
    command = importlib.import_module(COMMANDS[args.command][0])
    from .errors import run_script

    # The subcommands' parsers take their name from here.
    shown, sys.argv[0] = sys.argv[0], f"attn-variants {args.command}"
    try:
        options = command.parse_args(args.arguments)
    finally:
        sys.argv[0] = shown
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s", stream=sys.stderr)
    logging.getLogger("hf_attn_variants").setLevel(logging.INFO)
    return run_script(lambda: command.main(options))


def add_checkpoint_argument(parser: argparse._ActionsContainer, shown: str) -> None:
    """Add the checkpoint to a command or a group of its options: by its place, or as --model_name_or_path.

    Args:
        parser: of the command; it is parsed by `parse_with_checkpoint`.
        shown: the help.
    """
    parser.add_argument("checkpoint", nargs="?", metavar="CHECKPOINT", help=shown)
    parser.add_argument("--model_name_or_path", metavar="CHECKPOINT", help="the same, by name")


def parse_with_checkpoint(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None, required: bool = True
) -> argparse.Namespace:
    """Read a command line that names a checkpoint before its options, after them, or as --model_name_or_path.

    Args:
        parser: with the arguments of `add_checkpoint_argument`.
        argv: the command line; None = that of the process.
        required: False where the command can do without a checkpoint.

    Returns:
        The arguments, the checkpoint as `model_name_or_path`. Two different ones, or none where one is required, end
        the process with a line and status 2, as all errors of argparse do.
    """
    # Older versions of argparse take an optional place as empty as soon as an option comes before it.
    args = parser.parse_intermixed_args(argv)
    placed, named = vars(args).pop("checkpoint"), args.model_name_or_path
    if placed is not None and named is not None and placed != named:
        parser.error(f"two checkpoints: {placed!r} and --model_name_or_path {named!r}; give one")
    args.model_name_or_path = placed if named is None else named
    if required and args.model_name_or_path is None:
        parser.error(
            "no checkpoint: name its folder or Hub id first, before options that take several values, or by "
            "--model_name_or_path"
        )
    return args


def program_name(script: str) -> str:
    """Return how a user calls what `scripts/<script>` does: as that, or as a subcommand that is being run."""
    return sys.argv[0] if sys.argv[0].startswith("attn-variants ") else f"python scripts/{script}"


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    listed = "\n".join(f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="attn-variants",
        description="Multi-query, grouped-query and talking-heads attention for BERT, ALBERT and T5 checkpoints.",
        epilog=f"commands:\n{listed}\n\n`attn-variants COMMAND --help` says what each takes.",
        formatter_class=HelpFormatter,
    )
    from . import __version__

    parser.add_argument("--version", action="version", version=f"hf_attn_variants {__version__}")
    parser.add_argument("command", choices=sorted(COMMANDS), metavar="COMMAND", help="see below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="the command's own arguments")
    return parser


if __name__ == "__main__":
    sys.exit(main())
