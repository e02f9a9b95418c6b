"""The tree of `docs/tree.md`: the package's folders and files, each with the first sentence of its docstring.

`make tree` writes it into the page; `tests/test_layers.py` compares the two.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "hf_attn_variants"
PAGE = ROOT / "docs/tree.md"
# Folders in the order of their layers; other folders are sorted by name.
FOLDERS = (
    "modeling",
    "reference",
    "shared_memory",
    "quantization",
    "conversion",
    "inspection",
    "training",
    "sweep",
    "hub",
    "export",
    "commands",
)
# The column of the sentence, relative to the column of the name.
SENTENCE_COLUMN = 29


def make_tree(package: Path = PACKAGE) -> str:
    """Return the tree of the package. It lists only the `__init__.py` of the package itself."""
    first = _format_line("  ", "__init__.py", package / "__init__.py")
    return "\n".join([f"{package.name}/", first, *_iterate_lines(package, "  ")])


def find_tree(page: str) -> str:
    """Return the tree that the text of the page contains."""
    return page[slice(*_find_place(page))]


def _iterate_lines(folder: Path, indent: str) -> Iterator[str]:
    for file in sorted(folder.glob("*.py")):
        if file.name != "__init__.py":
            yield _format_line(indent, file.name, file)
    for inner in sorted({file.parent for file in folder.glob("*/*.py")}, key=_order):
        yield _format_line(indent, f"{inner.name}/", inner / "__init__.py")
        yield from _iterate_lines(inner, f"{indent}  ")


def _order(folder: Path) -> tuple[int, str]:
    return (FOLDERS.index(folder.name) if folder.name in FOLDERS else len(FOLDERS), folder.name)


def _format_line(indent: str, name: str, file: Path) -> str:
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) if file.exists() else None
    paragraph = " ".join((docstring or "").partition("\n\n")[0].split())
    sentence = re.split(r"\.(?: |$)", paragraph)[0]
    return f"{indent}{name:{SENTENCE_COLUMN - 2}}  {sentence}".rstrip()


def _find_place(page: str) -> tuple[int, int]:
    start = page.index(f"```\n{PACKAGE.name}/\n") + len("```\n")
    return start, page.index("\n```", start)


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    start, end = _find_place(text)
    PAGE.write_text(text[:start] + make_tree() + text[end:], encoding="utf-8")
