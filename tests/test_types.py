"""Check the public names and annotations that a type checker sees, and that no module is excluded from mypy."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import get_type_hints

import pytest

import hf_attn_variants

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "hf_attn_variants"
CHECKED = sorted([*PACKAGE.rglob("*.py"), *(ROOT / "scripts").glob("*.py"), ROOT / "attn_variants.py"])
LAZY = ("", ".conversion", ".inspection", ".training")
IGNORE = re.compile(r"#\s*type:\s*ignore(\[[a-z-]+\]  # \w.*)?")
MOST_IGNORES = 9
USER = """
import hf_attn_variants
from hf_attn_variants import AttnVariantBertConfig, AttnVariantBertModel, convert
from hf_attn_variants.conversion import Calibration

reveal_type(convert("bert", num_key_value_heads=4))
reveal_type(convert("bert", num_key_value_heads=4, output_dir="gqa"))
reveal_type(AttnVariantBertConfig(num_key_value_heads=4).num_key_value_heads)
reveal_type(AttnVariantBertModel.from_pretrained("bert"))
reveal_type(Calibration(["a", "b"]).max_length)
hf_attn_variants.convrt
convert("bert", num_key_value_heads="4")
"""


def find_names_for_checkers(package):
    """Return the names that a package imports under `TYPE_CHECKING`."""
    result = set()
    for node in ast.walk(ast.parse(Path(package.__file__).read_text(encoding="utf-8"))):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            result |= {item.asname or item.name for sub in node.body for item in getattr(sub, "names", ())}
    return result


@pytest.mark.parametrize("name", LAZY[1:])
def test_lazy_imports_are_visible_to_type_checkers(name):
    package = importlib.import_module(f"hf_attn_variants{name}")
    public = set(package.__all__)
    assert find_names_for_checkers(package) == public
    assert any(isinstance(value, dict) and set(value) == public for value in vars(package).values())
    assert all(getattr(package, item) is not None for item in package.__all__)


def test_package_exports_are_visible_to_type_checkers():
    assert "convert" in find_names_for_checkers(hf_attn_variants)
    assert sorted(hf_attn_variants.__all__) == sorted({*hf_attn_variants.__all__}) and hf_attn_variants.convert


@pytest.mark.parametrize("name", LAZY)
def test_public_functions_are_annotated(name):
    package = importlib.import_module(f"hf_attn_variants{name}")
    functions = [getattr(package, item) for item in package.__all__ if inspect.isfunction(getattr(package, item))]
    for function in functions:
        hints = get_type_hints(function)  # raises if a name exists only for type checkers
        assert hints.keys() == {*inspect.signature(function).parameters, "return"}, function.__name__
    assert functions


def test_no_module_is_excluded_from_mypy():
    with (ROOT / "pyproject.toml").open("rb") as file:
        settings = tomllib.load(file)["tool"]["mypy"]
    overrides = settings.pop("overrides")
    assert settings["files"] == [
        "hf_attn_variants",
        "attn_variants.py",
        "scripts",
        "examples/multiple_choice",
        "examples/superglue",
    ]
    for options in (settings, *overrides):
        assert not {"ignore_errors", "disable_error_code", "follow_imports", "exclude"} & options.keys()
    excluded = [name for item in overrides for name in item["module"] if name.startswith("hf_attn_variants")]
    assert excluded == [f"hf_attn_variants.modeling.ops.{name}" for name in ("latent_decoding", "triton_attention")]


def test_type_ignores_have_a_code_and_a_reason():
    ignores = [match for path in CHECKED for match in IGNORE.finditer(path.read_text(encoding="utf-8"))]
    assert len(ignores) <= MOST_IGNORES and all(match[1] for match in ignores)
    assert IGNORE.fullmatch("# type: ignore[assignment]  # a number by now")[1]
    assert IGNORE.match("# type: ignore")[1] is None and IGNORE.match("# type: ignore[assignment]")[1] is None


@pytest.mark.slow
def test_mypy_checks_user_code(tmp_path):
    """Check user code with mypy. It takes half a minute, because mypy reads torch and Transformers."""
    pytest.importorskip("mypy")
    (tmp_path / "user.py").write_text(USER)
    (tmp_path / "mypy.ini").write_text(f"[mypy]\nmypy_path = {ROOT}\nfollow_imports = silent\n")
    command = [sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path / "cache"), "user.py"]
    outcome = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout
    revealed = [line.split('"')[1].rpartition(".")[2] for line in outcome.splitlines() if "Revealed type" in line]
    assert revealed == ["PreTrainedModel", "ConversionReport", "int | None", "AttnVariantBertModel", "int | None"], (
        outcome
    )
    assert re.search(r'user\.py:11: error: Module has no attribute "convrt"', outcome), outcome
    assert re.search(r"user\.py:12: error: No overload variant of \"convert\"", outcome), outcome
