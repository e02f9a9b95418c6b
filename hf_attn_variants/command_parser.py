"""Command-line parsing shared by all commands."""

import argparse
import difflib
import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

# The supported architectures, as listed by `--help`.
MODEL_NAMES = (
    "BERT, RoBERTa, ELECTRA, ALBERT, DistilBERT, ModernBERT, NomicBERT, EuroBERT, T5 and mT5, UMT5, T5Gemma, "
    "BART, mBART, Marian, M2M100 and NLLB, PEGASUS, Whisper"
)
# The minimum similarity (0 to 1) between a misspelled name and a suggestion. "convrt" and "convert" have 0.92.
MIN_SIMILARITY = 0.7


class StoreOnce(argparse._StoreAction):
    """Store action that, unlike the one in argparse, does not silently replace an earlier value of the same flag.

    A second list is an error, because users may expect the two lists to be joined. If a flag with a
    single value is repeated, a note is printed and the last value is used. This way, flags at the end of a command
    line override those from a script.
    """

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, flag: str | None = None
    ) -> None:
        previous_value = getattr(namespace, self.dest)
        if flag is not None and previous_value is not self.default and previous_value != values:
            if isinstance(values, list):
                parser.error(f"{flag} can only be used once. List all values after a single {flag}.")
            print(f"note: {flag} was set twice with different values. The last value is used.", file=sys.stderr)
        super().__call__(parser, namespace, values, flag)


PLUGIN_FLAG = "--plugin"


class _LoadPlugin(argparse.Action):
    """The action of --plugin, which stores nothing."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options | {"dest": argparse.SUPPRESS})

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, flag: str | None = None) -> None:
        parser.load_plugins([values])


class CommandParser(argparse.ArgumentParser):
    """Argument parser that uses `HelpFormatter` and prints errors without the usage.

    Errors about an unknown flag, command or choice suggest the most similar valid one. The parser has the flag
    --plugin, and loads plugins before it checks the other flags.

    Args:
        loads_plugins: False for the parser that only reads the name of a command.
        options: the arguments of `argparse.ArgumentParser`.
    """

    def __init__(self, loads_plugins: bool = True, **options: Any) -> None:
        super().__init__(formatter_class=HelpFormatter, **options)
        for name in (None, "store"):
            self.register("action", name, StoreOnce)
        self.loads_plugins = loads_plugins
        if not loads_plugins:
            return
        help_text = "Python file that registers score functions or kernels (can be repeated)"
        self.add_argument(PLUGIN_FLAG, action=_LoadPlugin, metavar="FILE", help=help_text)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Load the plugins before the choices of the other flags are checked, and parse the command line."""
        words = list(sys.argv[1:] if args is None else args)
        values = [value for flag, value in pairwise(words) if flag == PLUGIN_FLAG]
        if values and self.loads_plugins:
            self.load_plugins(values)
        return super().parse_known_args(words, namespace)

    def load_plugins(self, files: Sequence[str]) -> None:
        """Load plugins and add their mechanisms to the choices of the flags."""
        # Other commands should not wait for these imports.
        from .modeling.fields.field_table import VARIANT_FIELDS
        from .plugins import load_plugin

        for file in files:
            load_plugin(file)
        choices = {prefix + row.name: row.get_choices(prefix) for row in VARIANT_FIELDS for prefix in row.prefixes}
        for action in self._actions:
            action.choices = choices.get(action.dest) or action.choices

    def _get_value(self, action: argparse.Action, text: str) -> Any:
        # The shell does not expand the ~ in --flag=~/path.
        is_path = action.type in (None, str) and text.startswith("~/")
        return super()._get_value(action, os.path.expanduser(text) if is_path else text)

    def error(self, message: str) -> NoReturn:
        """Print the error and a hint to use `--help`, and exit with status 2."""
        self.exit(2, f"error: {self._add_suggestion(message)}\nRun `{self.prog} --help` to see all options.\n")

    def _add_suggestion(self, message: str) -> str:
        suggestions: list[str | None] = []
        if message.startswith("unrecognized arguments:"):
            flags = [name for name in self._option_string_actions if name.startswith("--")]
            suggestions = [find_closest_name(flag, flags) for flag in re.findall(r"(?<=\s)--[^\s=]+", message)]
        elif match := re.search(r"invalid choice: '([^']*)'( \(choose from (.*)\))", message):
            suggestions = [find_closest_name(match[1], match[3].replace("'", "").split(", "))]
            message = message.replace(match[2], "") if any(suggestions) else message
        likely_names = list(dict.fromkeys(filter(None, suggestions)))
        return message + (f"; did you mean {' and '.join(likely_names)}?" if likely_names else "")


def find_closest_name(name: str, names: Iterable[str]) -> str | None:
    """Return the name that is most similar to a misspelled name, or None if no name is similar.

    The comparison ignores case and treats hyphens as underscores.

    Example:
        >>> find_closest_name("--kv-head", ["--num_heads", "--kv_heads"])
        '--kv_heads'
    """

    def normalize(text: str) -> str:
        return text.replace("-", "_").lower().replace("_kv_", "_key_value_")

    originals = {normalize(candidate): candidate for candidate in names}
    matches = difflib.get_close_matches(normalize(name), originals, 1, MIN_SIMILARITY)
    return originals[matches[0]] if matches else None


class HelpFormatter(argparse.HelpFormatter):
    """Help formatter that wraps prose, keeps the line breaks of indented examples, and shows default values."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        wrap = super()._fill_text
        return "\n\n".join(
            part if re.search(r"^ ", part, re.MULTILINE) else wrap(part, width, indent)
            for part in re.split(r"\n\n+", text.strip("\n"))
        )

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = action.help
        # A default of 0 is shown, although 0 equals False.
        has_no_default = action.default is False or action.default in (None, argparse.SUPPRESS, "", (), [], {})
        if not action.option_strings or has_no_default:
            return text
        text = text or ""
        end = "." if text.endswith(".") else ""
        return text if "default" in text else f"{text.removesuffix('.')} (default: %(default)s){end}"


class Flag(NamedTuple):
    """The definition of a flag, with the arguments for argparse's `add_argument`.

    The type can be bool or a tuple of choices.
    """

    name: str
    type: Any = str
    default: Any = None
    nargs: str | None = None
    metavar: str | None = None


# The help texts of flags that several commands have.
COMMON_FLAGS = {
    Flag("seed", int, 0): "random seed",
    Flag("allow_pickle", bool): "allow reading pytorch_model.bin (with weights_only=True)",
    Flag("json", bool): "print JSON instead of a table",
    Flag("revision"): "branch, tag or commit on the Hub",
    Flag("token"): "Hub token, for private and gated repositories (default: the stored login)",
    Flag("disable_tqdm", bool): "disable the progress bars",
}


def add_flags(group: argparse._ActionsContainer, flags: Mapping[Flag, str], *common: str) -> None:
    """Add flags to a parser or an argument group.

    Args:
        group: the parser or the group.
        flags: the flags to add, with their help texts.
        common: the names of the `COMMON_FLAGS` to add after `flags`.
    """
    shared_flags = {flag: text for flag, text in COMMON_FLAGS.items() if flag.name in common}
    for flag, text in {**flags, **shared_flags}.items():
        options = {name: value for name, value in flag._asdict().items() if value is not None}
        name, kind = options.pop("name"), options.pop("type")
        if kind is bool:
            options["action"] = "store_true"
        else:
            options["choices" if isinstance(kind, tuple) else "type"] = kind
        group.add_argument(f"--{name}", help=text, **options)


def add_checkpoint_argument(parser: argparse._ActionsContainer, help_text: str) -> None:
    """Add the checkpoint argument to a parser or an argument group, as a positional argument and as a flag.

    The flag is --model_name_or_path.

    Args:
        parser: the parser of a command that calls `parse_with_checkpoint`, or one of its groups.
        help_text: the help text of the positional argument.
    """
    parser.add_argument("checkpoint", nargs="?", metavar="CHECKPOINT", help=help_text)
    text = "the checkpoint, as a flag instead of the positional argument"
    add_flags(parser, {Flag("model_name_or_path", metavar="CHECKPOINT"): text})


def parse_with_checkpoint(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None, required: bool = True
) -> argparse.Namespace:
    """Parse a command line that contains the checkpoint before or after the options, or as --model_name_or_path.

    As with all argparse errors, the process exits with status 2 if the command line contains two different
    checkpoints, or if a required checkpoint is missing.

    Args:
        parser: a parser with the arguments of `add_checkpoint_argument`.
        argv: the command line. If None, the command line of the process is used.
        required: whether the command needs a checkpoint.

    Returns:
        The arguments, including the checkpoint as `model_name_or_path`.
    """
    # In older Python versions, `parse_args` leaves an optional positional argument empty if an option precedes it.
    args = parser.parse_intermixed_args(argv)
    positional, flag_value = vars(args).pop("checkpoint"), args.model_name_or_path
    if positional is not None and flag_value is not None and positional != flag_value:
        parser.error(
            f"CHECKPOINT and --model_name_or_path must be the same, got {positional!r} and {flag_value!r}. "
            "Pass only one of them."
        )
    args.model_name_or_path = positional if flag_value is None else flag_value
    if required and args.model_name_or_path is None:
        parser.error(
            "CHECKPOINT is required. Pass a folder or Hub id before options that take several values, or use "
            "--model_name_or_path."
        )
    return args


def get_package_version() -> str:
    """Return the package version, which is read from a source file because importing the package takes seconds."""
    source = Path(__file__).parent / "modeling/variant_names.py"
    match: Any = re.search(r'^ATTN_VARIANTS_VERSION = "(.+)"$', source.read_text(encoding="utf-8"), re.MULTILINE)
    return match[1]


def find_readme() -> Path | None:
    """Return the path of the README that links to the documentation, or None if it is not installed."""
    root = Path(__file__).parents[1]
    if (root / "docs" / "tour.md").is_file():  # a clone
        return root / "README.md"
    # A wheel installs the documentation in the virtual environment, the user scheme or the folder set with `--target`.
    schemes = ("posix_user" if os.name == "posix" else "nt_user", sysconfig.get_default_scheme())
    roots = [root, *(Path(sysconfig.get_path("data", scheme)) for scheme in schemes)]
    candidates = (root / "share/doc/hf_attn_variants/README.md" for root in roots)
    return next((path for path in candidates if path.is_file()), None)


def get_program_name(script: str) -> str:
    """Return the program name for `--help`: the current subcommand, or `python` and the path of the script."""
    if sys.argv[0].startswith("attn-variants "):
        return sys.argv[0]
    return f"python {script}" if "/" in script else f"python scripts/{script}"
