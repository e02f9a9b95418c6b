"""Check that the code in repositories and exports reads no environment, opens no files or sockets, and runs no text.

`docs/security.md` promises this. `get_code_files` and `write_code` are the exceptions: they copy the code files when a
model is saved.
"""

import ast
import sys
from pathlib import Path

import pytest

import hf_attn_variants
from hf_attn_variants.export.custom_generate import export_custom_generate
from hf_attn_variants.modeling.code_builder import build_code

ARCHITECTURES = Path(hf_attn_variants.__file__).parent / "modeling/architectures"
PACKAGES = {"torch", "transformers", "triton"}
UNSAFE_MODULES = {
    *("os", "io", "shutil", "tempfile", "subprocess", "multiprocessing", "threading", "asyncio", "importlib", "runpy"),
    *("socket", "ssl", "http", "urllib", "ftplib", "smtplib", "pickle", "marshal", "shelve", "ctypes", "builtins"),
}
UNSAFE_FUNCTIONS = {"open", "eval", "exec", "compile", "__import__", "input"}
UNSAFE_METHODS = {
    *("read_bytes", "read_text", "write_bytes", "write_text", "open", "unlink", "mkdir", "rmdir", "rename", "touch"),
    *("iterdir", "glob", "rglob", "environ", "getenv", "system", "popen"),
    *("load", "hf_hub_download", "snapshot_download"),
}
FILE_FUNCTIONS = {"get_code_files", "write_code"}


def find_violations(text):
    """Yield what a file must not do, outside of the functions that copy code files."""
    tree = ast.parse(text)
    tree.body = [node for node in tree.body if getattr(node, "name", None) not in FILE_FUNCTIONS]
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
        for name in (name.partition(".")[0] for name in names):
            if name in UNSAFE_MODULES or name not in PACKAGES | set(sys.stdlib_module_names):
                yield f"imports {name}"
        if isinstance(node, ast.Name) and node.id in UNSAFE_FUNCTIONS:
            yield f"uses {node.id}"
        if isinstance(node, ast.Attribute) and node.attr in UNSAFE_METHODS and "tl" != ast.unparse(node.value):
            yield f"uses {ast.unparse(node)}"


@pytest.mark.parametrize("name", sorted(path.stem for path in ARCHITECTURES.glob("modeling_*.py")))
def test_repository_code_is_safe(name):
    files = build_code((("configuration_attn_variants", "*"), (name, "*")), None)
    assert len(files) > 5
    assert {file: violations for file, text in files.items() if (violations := list(find_violations(text)))} == {}


def test_custom_generate_code_is_safe(tmp_path):
    export_custom_generate(tmp_path / "out")
    assert list(find_violations((tmp_path / "out/custom_generate/generate.py").read_text())) == []


@pytest.mark.parametrize(
    "text",
    [
        "import os",
        "from urllib.request import urlopen",
        "import requests",
        "def f():\n    import subprocess",
        "text = open('/etc/passwd').read()",
        "run = eval",
        "Path('x').write_text('')",
        "weights = torch.load('x')",
        "home = os.environ['HOME']",
    ],
)
def test_unsafe_code_is_detected(text):
    assert list(find_violations(text))
    assert not list(find_violations("import torch\nfrom .other import name\nx = torch.ones(2).numpy()"))
