"""The `auto_map` of a config.json put right, and every other byte of it left."""

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from ..files import CONFIG_NAME

__all__ = ["with_auto_map"]

BOM = "\ufeff"


def with_auto_map(content: bytes, own: Mapping[str, str], known: Collection[str]) -> tuple[bytes, list[str]]:
    """Return a config.json whose `auto_map` names today's code.

    Args:
        content: the file.
        own: the entries of today's code.
        known: names of all files that this package has or had: an entry that names another one is somebody's own.

    Returns:
        The new content, the same bytes where nothing changes, and the Auto classes whose entries are somebody's own.

    Raises:
        ValueError: if it is not JSON text.
    """
    try:
        text = content.decode()
        start, end, old = _value_span(text, "auto_map")
    except ValueError as error:
        raise ValueError(f"{CONFIG_NAME} cannot be read: {error}") from error
    ours = {key for key, value in old.items() if _file(value) in known}
    new = {key: own.get(key) if key in ours else value for key, value in old.items()}
    new = {key: value for key, value in new.items() if key not in ours or value is not None}
    new |= {key: value for key, value in own.items() if key not in new}
    kept = [key for key in new if key not in ours and key in old]
    if new == old:
        return content, kept
    made = text[:start] + _dumped(new, text, start) + text[end:]
    expected = json.loads(text.removeprefix(BOM)) | {"auto_map": new}
    if json.dumps(json.loads(made.removeprefix(BOM))) != json.dumps(expected):  # as text, for NaN is not NaN
        raise ValueError(f"{CONFIG_NAME} has an unusual `auto_map`: save the model again by `save_pretrained`.")
    return made.encode(), kept


def _file(value: Any) -> str | None:
    """Return the file that an entry names, in this repository or (`repository--file.Class`) another."""
    return f"{value.split('--')[-1].rpartition('.')[0]}.py" if isinstance(value, str) else None


def _value_span(text: str, wanted: str) -> tuple[int, int, dict[str, Any]]:
    """Return where the value of a key of the outermost object begins and ends, and the value; of two, the last."""
    decoder, found = json.JSONDecoder(), None
    position = _skipped(text, len(BOM) if text.startswith(BOM) else 0) + 1
    while (position := _skipped(text, position)) < len(text) and text[position] != "}":
        if text[position] == ",":
            position += 1
            continue
        key, position = decoder.raw_decode(text, position)
        start = _skipped(text, _skipped(text, position) + 1)
        value, position = decoder.raw_decode(text, start)
        if key == wanted:
            found = start, position, value
    if found is None or not isinstance(found[2], dict):
        raise ValueError(f"it has no object `{wanted}`")
    return found


def _skipped(text: str, position: int) -> int:
    blank: Any = re.compile(r"[ \t\r\n]*").match(text, position)  # of any length, none too
    return blank.end()


def _dumped(value: dict[str, Any], text: str, start: int) -> str:
    """Write a value as the text around it is written: on one line, or indented."""
    line = text[text.rfind("\n", 0, start) + 1 : start]
    indent = line[: len(line) - len(line.lstrip(" \t"))]
    if "\n" not in text[:start] or not indent:
        return json.dumps(value, ensure_ascii=False)
    newline = "\r\n" if "\r\n" in text else "\n"
    return json.dumps(value, indent=indent, ensure_ascii=False).replace("\n", newline + indent)
