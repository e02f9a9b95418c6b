"""Check that every link of a Markdown file to another file or heading has a target."""

import re
from functools import cache
from pathlib import Path

import pytest
from markdown_links import CODE, find_links

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "benchmarks/**/*.md", "model_cards/*.md")
    for path in ROOT.glob(pattern)
)


@cache
def get_anchors(path):
    """Return the anchors of a page's headings, as GitHub makes them."""
    # Code blocks are removed, because "# " starts a comment there. Inline code can be part of a heading.
    text = CODE.sub(lambda code: "" if "\n" in code[0] else code[0], path.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_have_targets(page):
    broken = []
    for target in find_links(page.read_text(encoding="utf-8")):
        name, _, anchor = target.partition("#")
        if re.match(r"\w+:", target):
            continue  # another site
        end = (page.parent / name).resolve() if name else page
        if not end.exists() or (anchor and end.suffix == ".md" and anchor not in get_anchors(end)):
            broken.append(target)
    assert not broken


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/design_notes.md", "docs/plugins.md"])
def test_python_files_in_pages_exist(page):
    files = [path.as_posix() for path in ROOT.glob("*/**/*.py") if ".venv" not in path.parts]
    names = re.findall(r"`([\w./-]+\.py)`", (ROOT / page).read_text(encoding="utf-8"))
    assert [name for name in names if not any(file.endswith(f"/{name}") for file in files)] == []
