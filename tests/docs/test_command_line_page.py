"""The page of the command line contains the current help of each command."""

import runpy
from pathlib import Path

from hf_attn_variants import cli

ROOT = Path(__file__).resolve().parents[2]


def words(text):
    # Versions of Python break the lines of a help at other places.
    return "".join(text.split())


def test_the_page_of_the_command_line_is_up_to_date():
    page = runpy.run_path(str(ROOT / "docs/command_line_page.py"))
    assert page["GUIDES"].keys() == cli.COMMANDS.keys()
    text = page["PAGE"].read_text(encoding="utf-8")
    assert words(text) == words(page["page_text"]()), "run `make fields`"
    assert str(ROOT) not in text
