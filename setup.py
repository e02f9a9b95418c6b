"""Give a package index the README without links to files, and a wheel the documentation; all else is in setup.cfg.

The links of the README are relative, so they lead to the same commit's files in a clone, in a fork and on the
documentation's site. An index shows the README alone, where such a link would lead nowhere. In a wheel they lead to
the files beside the README in share/doc.
"""

import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent
TARGET = re.compile(r'(\]\(|\b(?:src|href)=")([^)"\s]+)')
LINK = re.compile(r"!?\[([^\[\]]*)\]\(([^)\s]+)\)")
DOCUMENTATION = Path("share/doc/hf_attn_variants")


def without_local_links(markdown: str) -> str:
    """Return Markdown with the text of links to files of this repository in place of the links."""

    def text_of(match: re.Match) -> str:
        path = match[2].partition("#")[0]
        is_local = not path or (ROOT / path).exists()
        return match[1] if is_local else match[0]

    return LINK.sub(text_of, markdown)


def documentation() -> list[tuple[str, list[str]]]:
    """Return the README, the pages of docs/ and every file that they link to, as `data_files`: folders and files."""
    found = {Path("README.md"), *(path.relative_to(ROOT) for path in ROOT.glob("docs/**/*.md"))}
    unread = sorted(found)
    while unread:
        page = unread.pop()
        for _, target in TARGET.findall((ROOT / page).read_text(encoding="utf-8")):
            linked = (ROOT / page.parent / target.partition("#")[0]).resolve()
            if linked.is_file() and (path := linked.relative_to(ROOT)) not in found:
                found.add(path)
                unread += [path] * (path.suffix == ".md")
    folders = sorted({path.parent for path in found})
    return [
        (str(DOCUMENTATION / folder), sorted(str(path) for path in found if path.parent == folder))
        for folder in folders
    ]


setup(
    long_description=without_local_links((ROOT / "README.md").read_text(encoding="utf-8")),
    data_files=documentation(),
)
