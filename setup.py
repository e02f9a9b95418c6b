"""Gives a package index the README with absolute links, and a wheel the documentation; all else is in setup.cfg.

In the repository the links are relative, so they lead to the same commit's files in a clone, in a fork and on the
documentation's site. An index shows the README alone. Of a wheel they lead to the files beside the README that it puts
into share/doc.
"""

import re
from configparser import ConfigParser
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent
TARGET = re.compile(r'(\]\(|\b(?:src|href)=")([^)"\s]+)')
PICTURES = (".png", ".svg")
DOCUMENTATION = Path("share/doc/hf_attn_variants")


def repository_url() -> str:
    """Return the repository's address, `Source` of setup.cfg's project URLs."""
    config = ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    lines = config["metadata"]["project_urls"].strip().splitlines()
    return dict(re.split(r"\s*=\s*", line, maxsplit=1) for line in lines)["Source"]


def with_absolute_links(markdown: str, url: str) -> str:
    """Return Markdown whose links to files of this repository, and to its own headings, begin with `url`."""

    def absolute(match: re.Match) -> str:
        path = match[2].partition("#")[0]
        if not path:
            return f"{match[1]}{url}{match[2]}"
        if not (ROOT / path).exists():  # an address, or code that looks like a link
            return match[0]
        return f"{match[1]}{url}/{'raw' if path.endswith(PICTURES) else 'blob'}/HEAD/{match[2]}"

    return TARGET.sub(absolute, markdown)


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
    long_description=with_absolute_links((ROOT / "README.md").read_text(encoding="utf-8"), repository_url()),
    data_files=documentation(),
)
