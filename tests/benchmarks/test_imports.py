"""Check that every name that a benchmark imports from the package exists, because many benchmarks are run by hand."""

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "benchmarks").rglob("*.py"))


def find_imports(path):
    """Return the imports of a file from the package and the benchmarks, as pairs of a module and a name."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in (
            "hf_attn_variants",
            "benchmarks",
        ):
            yield from ((node.module, alias.name) for alias in node.names)


def is_there(module, name):
    """Return whether a module, or a package, has a name."""
    if hasattr(importlib.import_module(module), name):
        return True
    try:
        importlib.import_module(f"{module}.{name}")
    except ModuleNotFoundError:
        return False
    return True


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT / "benchmarks")))
def test_imports_of_benchmarks_exist(path):
    assert not [pair for pair in find_imports(path) if not is_there(*pair)]
