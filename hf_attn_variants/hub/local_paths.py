"""What names a place on the machine that a run was made on, and is shortened before it leaves that."""

import re
from pathlib import PurePath, PureWindowsPath
from typing import Any

__all__ = ["is_local_path", "without_local_paths"]

LOCAL_PATH = re.compile(r"(/|~|\.\.?[/\\]|[A-Za-z]:[/\\]|\\\\)")
# Arguments that name a file or folder however it is written.
PATH_ARGUMENT = re.compile(r".*_(file|files|dir)")


def is_local_path(value: Any) -> bool:
    """Whether a value is text that can be nothing but a path: absolute, or from the home or the working folder."""
    return isinstance(value, str) and LOCAL_PATH.match(value) is not None


def without_local_paths(value: Any, name: str = "") -> Any:
    """Return JSON values with each path shortened to its last part.

    Args:
        value: the values.
        name: of the field that holds them; what a "..._file" or "..._dir" says is a path also where it is relative.
    """
    if isinstance(value, dict):
        return {key: without_local_paths(each, str(key)) for key, each in value.items()}
    if isinstance(value, list):
        return [without_local_paths(each, name) for each in value]
    if is_local_path(value) or (isinstance(value, str) and PATH_ARGUMENT.fullmatch(name)):
        # A Windows path splits at both kinds of slash; on other systems a backslash is a letter like any other.
        path = PureWindowsPath(value) if re.match(r"[A-Za-z]:|\\\\", value) else PurePath(value)
        return path.name
    return value
