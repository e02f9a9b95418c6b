"""What a card takes from files, as Markdown shows it: text as text, code as code, neither as marks of its own."""

import re
from typing import Any

__all__ = ["code", "plain"]

ENTITIES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;"})
MARKS = re.compile(r"[\\`*\[\]|$~]|(?<![^\W_])_|_(?![^\W_])|^[#+=-]")


def plain(value: Any) -> str:
    """Return a value as one line of text in which nothing is Markdown or HTML."""
    return MARKS.sub(r"\\\g<0>", " ".join(str(value).split()).translate(ENTITIES))


def code(value: Any) -> str:
    """Return a value as one line of code, between as many backticks as it takes."""
    text = " ".join(str(value).split())
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    space = " " if "`" in text else ""
    return f"{fence}{space}{text}{space}{fence}"
