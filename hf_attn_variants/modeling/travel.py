"""What writes this code into a model's repository: all files side by side.

transformers finds `from .name import` in the folder of the file alone. So each file here has a name of its own, whatever
room it lies in, and its relative imports lose the rooms on the way. It is done when a configuration is saved, by the
copy in a repository as by the package: nothing else here opens a file.
"""

import re
from pathlib import Path

__all__ = ["code_files", "lies_in_a_room", "write_code"]

HERE = Path(__file__).parent
RELATIVE_IMPORT = re.compile(r"^(\s*from\s+)\.+(?:\w+\.)*(\w+)(?=\s+import\b)", re.MULTILINE)


def code_files(*modules: str) -> dict[str, str]:
    """Return the files that some modules need, {name: text}, as they stand in a repository.

    Args:
        modules: names without their rooms. One that is not here is left out: of a Hub repository whose configuration
            alone was loaded, the model's file was not downloaded.
    """
    paths = {path.stem: path for path in sorted(HERE.rglob("*.py"))}
    files: dict[str, str] = {}
    wanted = [name for name in modules if name in paths]
    while wanted:
        name = wanted.pop()
        if f"{name}.py" in files:
            continue
        text = paths[name].read_bytes().decode()
        files[f"{name}.py"] = RELATIVE_IMPORT.sub(r"\1.\2", text)
        wanted += [match[2] for match in RELATIVE_IMPORT.finditer(text)]
    return dict(sorted(files.items()))


def lies_in_a_room(cls: type) -> bool:
    """Say whether a class is of a file in one of these rooms, which transformers cannot copy by itself.

    In a repository there are none, nor around a class that somebody derives from ours.
    """
    package = __name__.rpartition(".")[0]
    return re.match(rf"{re.escape(package)}\.\w+\.", cls.__module__) is not None


def write_code(folder: str | Path, *modules: str) -> None:
    """Write the files that some modules need into a folder; arguments as for `code_files`."""
    for name, text in code_files(*modules).items():
        (Path(folder) / name).write_bytes(text.encode())
