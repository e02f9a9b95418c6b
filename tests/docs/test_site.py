"""Check the documentation site: API pages cover all public names, drawings match their script, the site builds."""

import importlib
import importlib.util
import re
import runpy
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

import hf_attn_variants

ROOT = Path(__file__).resolve().parents[2]
API = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs/api").glob("*.md")))
OBJECTS = re.findall(r"^::: (\S+)$", API, re.M)
PUBLIC = ("hf_attn_variants", "hf_attn_variants.conversion", "hf_attn_variants.hub", "hf_attn_variants.inspection")


def resolve(name):
    """Return the module or object that a dotted name refers to."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        module, _, attribute = name.rpartition(".")
        return getattr(importlib.import_module(module), attribute)


def test_api_pages_contain_every_public_name():
    shown = set(re.findall(r"`(\w+)`", API))
    for name in OBJECTS:
        shown |= {name.rpartition(".")[2], *getattr(resolve(name), "__all__", ())}
    for package in PUBLIC:
        missing = set(importlib.import_module(package).__all__) - shown - {"__version__"}
        assert not missing, f"docs/api lacks {missing} of {package}"
    classes = set(re.findall(r"`(AttnVariant\w+)`", API))
    assert all(hasattr(hf_attn_variants, name) for name in classes)


@pytest.mark.parametrize("module", re.findall(r"`(hf_attn_variants\.training\.\w+)` \|", API))
def test_training_modules_have_entry_points(module):
    assert {"main", "parse_args"} <= set(importlib.import_module(module).__all__)


def test_drawings_are_up_to_date():
    folder = ROOT / "docs/drawings"
    names = runpy.run_path(str(folder / "draw.py"))
    for path in sorted(folder.glob("*.svg")):
        drawing = names[path.stem]()
        text = path.read_text(encoding="utf-8")
        assert text == drawing.head + "\n".join([*drawing.under, *drawing.over]) + "\n</svg>\n", path.name
        assert ElementTree.fromstring(text).tag.endswith("svg")


@pytest.mark.slow
def test_site_builds_without_warnings(tmp_path):
    for name in ("mkdocs", "material", "mkdocstrings_handlers.python"):
        pytest.importorskip(name)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for page, name in (
        ("conversion", "conversion.conversions.convert"),
        ("hub", "hub.push.push_checkpoint"),
        ("training", "training.engine.finetune.fine_tune"),
        ("reference", "reference.talking_heads.attention_core"),
    ):
        text = (tmp_path / f"site/api/{page}/index.html").read_text(encoding="utf-8")
        assert f'id="hf_attn_variants.{name}"' in text, name
    for page in ("index.html", "tour/index.html", "notebook/minilm/index.html"):
        assert (tmp_path / "site" / page).is_file(), page
