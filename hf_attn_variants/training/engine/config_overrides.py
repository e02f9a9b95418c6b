"""What `--config_overrides` says: FIELD=VALUE,... whose values are JSON or plain text, or one JSON object."""

import json
from typing import Any

__all__ = ["overrides_text", "read_overrides"]

# What the value of a list, an object or a text in quotes begins with: it goes on to its own end, commas and all.
BEGINS_JSON = ("[", "{", '"')
# What Python calls JSON's words; as plain text they would be taken for true.
PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}


def read_overrides(text: str) -> dict[str, Any]:
    """Return the fields that a text of overrides gives, with their values.

    A value is JSON where it can be read as such, else plain text up to the next comma.

    Args:
        text: "num_layers=2,feed_forward_proj=gated-gelu", 'talking_heads_dynamic=["x2l", "m2l"],num_layers=2' or
            '{"num_layers": 2}'; an empty item says nothing.

    Raises:
        ValueError: for what is no FIELD=VALUE, a field that is given twice, JSON that does not end, and a word of
            Python's; the message names the field.
    """
    if text.lstrip().startswith("{"):
        try:
            return json.loads(text, object_pairs_hook=_once)
        except json.JSONDecodeError as error:
            raise ValueError(f"--config_overrides is not JSON, as it begins: {error}") from None
    pairs, rest, before = [], text, None
    while rest:
        item = rest.partition(",")[0]
        name, equals, _ = (part.strip() for part in item.partition("="))
        if not item.strip():
            rest = rest[len(item) + 1 :]
            continue
        if not equals or not name:
            hint = f", behind `{before}`: a value with commas is JSON, as in {before}=[1, 2]" if before else ""
            raise ValueError(f"--config_overrides: {item.strip()!r} is no FIELD=VALUE{hint}")
        value, rest = _value(name, rest.partition("=")[2])
        pairs.append((name, value))
        before = name
    return _once(pairs)


def overrides_text(name: str, value: Any) -> str:
    """Return one override as somebody would write it, for a message."""
    return f"{name}={value if isinstance(value, str) else json.dumps(value)}"


def _value(name: str, text: str) -> tuple[Any, str]:
    """Return the value that a text begins with, and what is behind the comma after it."""
    text = text.lstrip()
    if text.startswith(BEGINS_JSON):
        try:
            value, end = json.JSONDecoder(object_pairs_hook=_once).raw_decode(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"--config_overrides: the value of `{name}` is not JSON, as it begins: {error}") from None
        behind = text[end:].lstrip()
        if behind and not behind.startswith(","):
            raise ValueError(f"--config_overrides: the value of `{name}` ends before {behind!r}: a comma is missing")
        return value, behind[1:]
    plain, _, rest = text.partition(",")
    plain = plain.strip()
    if not plain:
        raise ValueError(f"--config_overrides: '{name}=' is no FIELD=VALUE: `{name}` has no value")
    if plain in PYTHON_WORDS:
        raise ValueError(f"--config_overrides: `{name}` is {plain}, which JSON writes {PYTHON_WORDS[plain]}")
    try:
        return json.loads(plain), rest
    except ValueError:
        return plain, rest


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return pairs as a dictionary.

    Raises:
        ValueError: for a field that stands twice.
    """
    names = [name for name, _ in pairs]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"--config_overrides gives `{twice[0]}` twice")
    return dict(pairs)
