"""Removal of local paths, passwords and tokens from values that leave the machine."""

import json
import re
from fnmatch import fnmatchcase
from pathlib import Path, PurePath, PureWindowsPath
from typing import Any

from ..files import load_json

__all__ = ["holds_secret", "names_places", "shared_content", "without_local_paths"]

LOCAL_PATH = re.compile(r"(/|~|\.\.?[/\\]|[A-Za-z]:[/\\]|\\\\|file:)")
# Arguments that name a file or folder however it is written.
PATH_ARGUMENT = re.compile(r".*_(file|files|dir)")
PART = r"""[^\s/\\"'`<>|;,()\[\]{}]"""
# In the middle of a text: from the root or the home, of two parts at least; of Windows; of a server.
PATH_IN_TEXT = re.compile(
    rf"(?<![\w/.~])(?:file:/{{0,2}})?(?:~[\w.-]*/(?:{PART}+/)*|\.{{0,2}}/(?:{PART}+/)+){PART}*"
    rf"|(?<!\w)[A-Za-z]:[/\\]+(?:{PART}+[/\\]+)*{PART}*|(?<![\w\\])\\\\{PART}+(?:\\+{PART}+)+"
)
# Anybody's home, on any system: what follows is of a user, and is taken out.
HOME = re.compile(r"(file:/*)?/(home|Users)/[^/]+/?|~[^/]*/?|/root/?|[A-Za-z]:[/\\]+Users[/\\]+[^/\\]+[/\\]*")
# User and password of an address, tokens of the Hub, and what addresses that were signed end in.
SECRETS = (
    (re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^/\s]*@", re.IGNORECASE), r"\1"),
    (re.compile(r"\bhf_[A-Za-z0-9]{16,}"), "hf_..."),
    (
        re.compile(
            r"([?&][\w.-]*(?:token|key|secret|password|passwd|signature|sig|credential)[\w.-]*=)[^&\s\"'#]+",
            re.IGNORECASE,
        ),
        r"\1...",
    ),
)
# Of a model's JSON files: words of vocabularies and labels may look like anything and stay.
WORDS = re.compile(r"id2label|label2id|.*_tokens?|added_tokens_decoder|chat_template|prompts|prefix|weight_map")
WORD_FILES = ("tokenizer.json", "vocab*.json", "added_tokens.json", "*.index.json")


def names_places(text: str) -> bool:
    """Return whether a text names folders of some machine."""
    return PATH_IN_TEXT.search(text) is not None


def holds_secret(text: str) -> bool:
    """Return whether a text holds a token, or an address with a password."""
    return any(pattern.search(text) for pattern, _ in SECRETS)


def without_local_paths(value: Any, name: str = "", is_report: bool = True) -> Any:
    """Return JSON values with each path shortened to its last part, and without passwords and tokens.

    Args:
        value: the values.
        name: of the field that holds them.
        is_report: whether they are of this package: each text that begins like a path is one, and so is any text in a
            field called "..._file" or "..._dir". In configurations of others a text must be both, words stay, and a
            field may be called "...path" too.
    """
    if not is_report and WORDS.fullmatch(name):
        return value
    if isinstance(value, dict):
        return {key: without_local_paths(each, str(key), is_report) for key, each in value.items()}
    if isinstance(value, list):
        return [without_local_paths(each, name, is_report) for each in value]
    if not isinstance(value, str):
        return value
    is_named, is_path = PATH_ARGUMENT.fullmatch(name) is not None, LOCAL_PATH.match(value) is not None
    if (is_named or is_path) if is_report else (is_named or name.endswith("path")) and is_path:
        return _last_part(_without_secrets(value))
    return PATH_IN_TEXT.sub(lambda found: _last_part(found[0]), _without_secrets(value))


def shared_content(path: Path, is_report: bool) -> bytes | None:
    """Return the content of a JSON file for the Hub; None = the file goes there unchanged.

    Args:
        path: the file.
        is_report: as for `without_local_paths`.

    Raises:
        OSError, ValueError: if it cannot be read.
    """
    if not path.name.endswith(".json") or any(fnmatchcase(path.name, pattern) for pattern in WORD_FILES):
        return None
    value = load_json(path)
    if is_report and not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object; got {type(value).__name__}.")
    shared = without_local_paths(value, is_report=is_report)
    return None if shared == value else f"{json.dumps(shared, indent=2, ensure_ascii=False)}\n".encode()


def _without_secrets(text: str) -> str:
    for pattern, instead in SECRETS:
        text = pattern.sub(instead, text)
    return text


def _last_part(path: str) -> str:
    if HOME.fullmatch(path):
        return "~"  # whose it is is a name too
    # A Windows path splits at both kinds of slash; on other systems a backslash is a letter like any other.
    windows = re.match(r"[A-Za-z]:|\\\\", path)
    return (PureWindowsPath(path) if windows else PurePath(path)).name
