"""Extract the links that a reader of a Markdown page sees."""

import re

CODE = re.compile(r"^ *(```|~~~).*?^ *\1|`[^`\n]+`", re.M | re.S)
LINK = re.compile(r'(?:\]\(|\b(?:src|href)=")([^)"\s]+)')


def find_links(markdown: str) -> list[str]:
    """Return the targets of links and pictures outside of code."""
    return LINK.findall(CODE.sub("", markdown))
