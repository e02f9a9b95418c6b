"""Check that the page of the command line contains the current help of each command."""

import runpy
import subprocess
import sys
from pathlib import Path

from hf_attn_variants import cli

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "docs/command_line_page.py"


def join_words(text):
    # Python versions break the lines of help texts at different places.
    return "".join(text.split())


def test_command_line_page_is_up_to_date():
    page = runpy.run_path(str(SCRIPT))
    assert page["GUIDES"].keys() == cli.COMMANDS.keys()
    # Other tests change defaults that the help shows. A new process has the original defaults.
    command = [sys.executable, "-c", f"import runpy; print(runpy.run_path({str(SCRIPT)!r})['page_text']())"]
    generated = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    text = page["PAGE"].read_text(encoding="utf-8")
    assert join_words(text) == join_words(generated), "run `make fields`"
    assert str(ROOT) not in text
