"""The links that somebody sees who reads a page of Markdown."""

import re

CODE = re.compile(r"^ *(```|~~~).*?^ *\1|`[^`\n]+`", re.M | re.S)
LINK = re.compile(r'(?:\]\(|\b(?:src|href)=")([^)"\s]+)')


def shown_links(markdown: str) -> list[str]:
    """The targets of links and pictures, but for those in code."""
    return LINK.findall(CODE.sub("", markdown))
