"""The flags of a command, from an object of a sweep's file to the words of a command line."""

import argparse
import contextlib
import glob
import io
import json
import os
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from .sweep_file import did_you_mean

__all__ = ["CommandFlags"]

PATTERN = ("*", "?", "[")
# What a command's own error ends with: of a sweep, the file is what is to be mended.
HELP_LINE = re.compile(r"\s*`[^`]*--help` has all options\.$")


class CommandFlags:
    """What a command takes, asked of its own parser.

    Args:
        command: its name.
        parser: of its command line.
        parse_args: what reads its command line and checks the values.
        own: flags that a sweep gives itself.
    """

    def __init__(
        self,
        command: str,
        parser: argparse.ArgumentParser,
        parse_args: Callable[[list[str]], Any],
        own: Collection[str],
    ):
        self.command, self.own, self._parse_args = command, own, parse_args
        long = {name.removeprefix("--"): action for name, action in parser._option_string_actions.items()}
        self._actions = {name: action for name, action in long.items() if not name.startswith(("-", "no-", "help"))}

    def words(self, flags: Mapping[str, Any]) -> list[str]:
        """Return flags as words of a command line; those that are null are left out.

        Raises:
            ValueError: for a flag that the command does not have or that a sweep gives itself, or a value of another
                kind.
        """
        words = []
        for name, value in flags.items():
            if name in self.own:
                raise ValueError(f"`{name}` of `attn-variants {self.command}` is given by the sweep: leave it out")
            if name not in self._actions:
                known = [each for each in self._actions if each not in self.own]
                hint = did_you_mean(name, known)
                raise ValueError(f"`attn-variants {self.command}` has no flag `{name}`: {hint}")
            if value is not None:
                words += self._flag(name, value)
        return words

    def check(self, words: list[str]) -> None:
        """Check a whole command line as the command itself does.

        Raises:
            ValueError: with what the command says.
        """
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
                self._parse_args(words)
        except SystemExit:
            message = said.getvalue().rpartition("error: ")[2].strip()
            raise ValueError(HELP_LINE.sub("", message)) from None

    def _flag(self, name: str, value: Any) -> list[str]:
        action = self._actions[name]
        if isinstance(action, argparse.BooleanOptionalAction):
            return [f"--{'' if self._switch(name, value) else 'no-'}{name}"]
        if action.nargs == 0:
            return [f"--{name}"] if self._switch(name, value) else []
        if action.nargs in ("+", "*") or isinstance(action.nargs, int):
            values = value if isinstance(value, list) else [value]
            if not values:
                raise ValueError(f"`{name}` of `attn-variants {self.command}` is an empty list: give a value, or null")
            found = [self._word(name, each) for each in values]
            if name.endswith("_file"):
                found = [path for word in found for path in self._files(name, word)]
            return [f"--{name}", *found]
        word = self._word(name, value)
        return [f"--{name}={word}"] if word.startswith("-") else [f"--{name}", word]

    def _switch(self, name: str, value: Any) -> bool:
        if not isinstance(value, bool):
            raise ValueError(f"`{name}` of `attn-variants {self.command}` is true or false, got {value!r}")
        return value

    def _word(self, name: str, value: Any) -> str:
        if isinstance(value, dict):
            return json.dumps(value)
        if isinstance(value, bool | list) or value is None:
            raise ValueError(f"`{name}` of `attn-variants {self.command}` takes text or a number, got {value!r}")
        return str(value)

    def _files(self, name: str, word: str) -> list[str]:
        """Return the files that a pattern names, as a shell does."""
        if not any(each in word for each in PATTERN):
            return [word]
        found = sorted(glob.glob(os.path.expanduser(word)))
        if not found:
            raise ValueError(f"`{name}`: no file is called {word}")
        return found
