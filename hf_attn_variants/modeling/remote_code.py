"""What writes this code into a model's repository: a file a room, and the host's own, all side by side.

transformers looks for relative imports in the folder of the file alone, and asks the Hub for each file by itself. So
the files of a room become one, in the order in which they import each other, and imports lose the rooms on the way. In
a room no name at a file's top has two meanings. A configuration that is saved does all this; in a repository, where
there are no rooms, it copies what is there. Nothing else here opens a file.
"""

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

__all__ = ["code_files", "is_package_class", "travelling_names", "write_code"]

HERE = Path(__file__).parent
# A repository has one host, whose file travels as it is.
NOT_JOINED = ("architectures",)


class _Import(NamedTuple):
    """A relative import, the file that it is from, and whether it is made when its own file is imported."""

    node: ast.ImportFrom
    module: str
    is_needed: bool


class _File(NamedTuple):
    """One file here: its text, its imports, and the file that it travels in, without ".py"."""

    text: str
    imports: list[_Import]
    travels_in: str


@cache  # a save of each checkpoint of a training writes the same
def code_files(*modules: str) -> Mapping[str, str]:
    """Return the files that some modules need, {name: text}, as they stand in a repository.

    Args:
        modules: names without their rooms. One that is not here is left out: of a Hub repository whose configuration
            alone was loaded, the model's file was not downloaded.
    """
    paths = {path.stem: path for path in sorted(HERE.rglob("*.py"))}
    files: dict[str, _File] = {}
    wanted = [name for name in modules if name in paths]
    while wanted:
        name = wanted.pop()
        if name not in files:
            files[name] = _read(paths[name])
            wanted += [each.module for each in files[name].imports]
    texts: dict[str, list[str]] = {}
    for name in _in_order(files):
        texts.setdefault(files[name].travels_in, []).append(_moved(files[name], files))
    return {f"{name}.py": "\n\n".join(texts[name]) for name in sorted(texts)}


def is_package_class(cls: type) -> bool:
    """Say whether a class is of a file in one of these rooms, which transformers cannot copy by itself.

    In a repository there are none, nor around a class that somebody derives from ours.
    """
    package = __name__.rpartition(".")[0]
    inside = cls.__module__.removeprefix(f"{package}.")
    return inside != cls.__module__ and "." in inside


def write_code(folder: str | Path, *modules: str) -> None:
    """Write the files that some modules need into a folder; arguments as for `code_files`."""
    for name, text in code_files(*modules).items():
        (Path(folder) / name).write_bytes(text.encode())


def travelling_names() -> set[str]:
    """Return the names of all files that some repository has."""
    return {f"{_travels_in(path)}.py" for path in HERE.rglob("*.py")} - {"__init__.py"}


def _read(path: Path) -> _File:
    text = path.read_bytes().decode()
    return _File(text, list(_imports(ast.parse(text))), _travels_in(path))


def _travels_in(path: Path) -> str:
    room = path.relative_to(HERE).parts[0]
    is_joined = path.parent != HERE and path.stem != "__init__" and room not in NOT_JOINED
    return f"attn_variants_{room}" if is_joined else path.stem


def _imports(tree: ast.AST, is_needed: bool = True) -> Iterator[_Import]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ImportFrom):
            if node.level and node.module is not None:
                yield _Import(node, node.module.rpartition(".")[2], is_needed)
        else:  # an import in a function is made when that is called, and one for type checkers never
            is_later = isinstance(node, ast.FunctionDef) or (
                isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            )
            yield from _imports(node, is_needed and not is_later)


def _in_order(files: dict[str, _File]) -> Iterator[str]:
    """Yield the names of files, each after those that it needs to be imported."""
    done: set[str] = set()

    def visit(name: str) -> Iterator[str]:
        if name not in done:
            done.add(name)
            for each in files[name].imports:
                if each.is_needed:
                    yield from visit(each.module)
            yield name

    for name in sorted(files):
        yield from visit(name)


def _moved(file: _File, files: dict[str, _File]) -> str:
    """Return a file's text as it travels: with imports of what stands beside it, and none of what is joined to it."""
    lines = file.text.splitlines(keepends=True)
    for node, module, _ in sorted(file.imports, key=lambda each: -each.node.lineno):
        source = files[module].travels_in
        names = ", ".join(
            alias.name if alias.asname is None else f"{alias.name} as {alias.asname}" for alias in node.names
        )
        new = "pass" if source == file.travels_in else f"from .{source} import {names}"
        end: int = node.end_lineno or node.lineno
        behind = lines[end - 1].encode()[node.end_col_offset or 0 :].decode()
        lines[node.lineno - 1 : end] = [f"{' ' * node.col_offset}{new}{behind}"]
    return "".join(lines)
