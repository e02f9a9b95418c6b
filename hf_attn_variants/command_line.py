"""How the commands read their command lines: their parser, the checkpoint, the name that `--help` shows."""

import argparse
import difflib
import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

__all__ = [
    "HOSTS",
    "CommandParser",
    "HelpFormatter",
    "add_checkpoint_argument",
    "documentation",
    "nearest_name",
    "package_version",
    "parse_with_checkpoint",
    "program_name",
]


# The models of transformers that this package changes, as `--help` names them.
HOSTS = (
    "BERT, RoBERTa, ELECTRA, ALBERT, DistilBERT, T5 and mT5, UMT5, BART, mBART, Marian, M2M100 and NLLB, PEGASUS, "
    "Whisper"
)
# How alike a mistyped name is to the one that is meant, of 1: "convrt" and "convert" are 0.92.
NEAR = 0.7


class StoreOnce(argparse._StoreAction):
    """A flag with a value or several, which does not replace its first value silently, as argparse does.

    Two lists may have been meant to add up, so the second one is an error. The second single value counts, so that
    flags at the end override those of a script; a note is printed.
    """

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, flag: str | None = None
    ) -> None:
        before = getattr(namespace, self.dest)
        if flag is not None and before is not self.default and before != values:
            if isinstance(values, list):
                parser.error(f"{flag} is given twice: give all its values behind one {flag}, divided by spaces")
            print(f"note: {flag} is given twice, with two values: the last one counts", file=sys.stderr)
        super().__call__(parser, namespace, values, flag)


class CommandParser(argparse.ArgumentParser):
    """The parser of a command: help as `HelpFormatter` writes it, and errors without the usage before them.

    An error about a flag, a command or a choice that does not exist names the nearest one that does.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=HelpFormatter, **options)
        for name in (None, "store"):
            self.register("action", name, StoreOnce)

    def _get_value(self, action: argparse.Action, text: str) -> Any:
        # The shell leaves the ~ of --flag=~/path unchanged.
        is_path = action.type in (None, str) and text.startswith("~/")
        return super()._get_value(action, os.path.expanduser(text) if is_path else text)

    def error(self, message: str) -> NoReturn:
        """End the process with the error, where to read more, and status 2."""
        self.exit(2, f"error: {self._with_nearest(message)}\n`{self.prog} --help` has all options.\n")

    def _with_nearest(self, message: str) -> str:
        guesses: list[str | None] = []
        if message.startswith("unrecognized arguments:"):
            flags = [name for name in self._option_string_actions if name.startswith("--")]
            guesses = [nearest_name(flag, flags) for flag in re.findall(r"(?<=\s)--[^\s=]+", message)]
        elif found := re.search(r"invalid choice: '([^']*)'( \(choose from (.*)\))", message):
            guesses = [nearest_name(found[1], found[3].replace("'", "").split(", "))]
            message = message.replace(found[2], "") if any(guesses) else message
        likely = list(dict.fromkeys(filter(None, guesses)))
        return message + (f"; did you mean {' and '.join(likely)}?" if likely else "")


def nearest_name(name: str, names: Iterable[str]) -> str | None:
    """Return the one of `names` that a mistyped one means, if any is near; hyphens and capitals are no difference."""

    def plain(name: str) -> str:
        return name.replace("-", "_").lower().replace("_kv_", "_key_value_")

    written = {plain(each): each for each in names}
    found = difflib.get_close_matches(plain(name), written, 1, NEAR)
    return written[found[0]] if found else None


class HelpFormatter(argparse.HelpFormatter):
    """Wraps prose, but keeps the lines of examples, which are indented; adds to an option's help its default."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        wrap = super()._fill_text
        return "\n\n".join(
            part if re.search(r"^ ", part, re.MULTILINE) else wrap(part, width, indent)
            for part in re.split(r"\n\n+", text.strip("\n"))
        )

    def _get_help_string(self, action: argparse.Action) -> str | None:
        shown = action.help
        # 0 is a default to show, and equals False.
        unsaid = action.default is False or action.default in (None, argparse.SUPPRESS, "", [], {})
        if not action.option_strings or unsaid:
            return shown
        return shown if "default" in (shown or "") else f"{(shown or '').removesuffix('.')} (default: %(default)s)."


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


def package_version() -> str:
    """Return the package's version: read from the file that says it, whose import takes seconds."""
    source = Path(__file__).parent / "modeling/variant_names.py"
    found: Any = re.search(r'^ATTN_VARIANTS_VERSION = "(.+)"$', source.read_text(encoding="utf-8"), re.MULTILINE)
    return found[1]


def documentation() -> Path | None:
    """Return the README beside whose links the documentation lies: in a clone, or where the wheel put it."""
    above = Path(__file__).parents[1]
    if (above / "docs" / "tour.md").is_file():
        return above / "README.md"
    # A venv, the user's own packages, or `pip install --target`.
    schemes = ("posix_user" if os.name == "posix" else "nt_user", sysconfig.get_default_scheme())
    roots = [above, *(Path(sysconfig.get_path("data", scheme)) for scheme in schemes)]
    found = (root / "share/doc/hf_attn_variants/README.md" for root in roots)
    return next((path for path in found if path.is_file()), None)


def program_name(script: str) -> str:
    """Return how a user calls `scripts/<script>`, another path of a script, or the subcommand that is being run."""
    if sys.argv[0].startswith("attn-variants "):
        return sys.argv[0]
    return f"python {script}" if "/" in script else f"python scripts/{script}"
