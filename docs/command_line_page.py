"""Write docs/command_line.md, the page with the `--help` of each command: `python docs/command_line_page.py`.

`tests/docs/test_command_line_page.py` checks that the page is up to date.
"""

import io
import os
from contextlib import redirect_stdout
from pathlib import Path
from unittest import mock

from hf_attn_variants import cli

PAGE = Path(__file__).resolve().parent / "command_line.md"
ROOT = PAGE.parents[1]
# argparse reads the width from the environment.
ENVIRONMENT = {"COLUMNS": "100", "NO_COLOR": "1"}
# The guide to each command: its title and address.
GUIDES = {
    "inspect": ("What a conversion would save", "hub.md#what-a-conversion-would-save"),
    "benchmark": ("Latent attention", "latents.md"),
    "frontier": ("Which rank", "latents.md#which-rank"),
    "convert": ("Conversion", "conversion.md"),
    "uptrain": ("Uptraining", "uptraining.md"),
    "pretrain": ("Pretraining", "training.md#pretraining"),
    "pretrain-t5": ("Pretraining", "training.md#pretraining"),
    "classify": ("A table of your own", "training.md#a-table-of-your-own"),
    "glue": ("Training", "training.md"),
    "average": ("Sweeps and experiments", "experiments.md"),
    "squad": ("Other tasks", "training.md#other-tasks"),
    "seq2seq": ("Other tasks", "training.md#other-tasks"),
    "ner": ("Other tasks", "training.md#other-tasks"),
    "sweep": ("Sweeps and experiments", "experiments.md"),
    "visualize": ("Talking heads", "talking_heads.md"),
    "export": ("Export", "export.md"),
    "push": ("Sharing on the Hub", "hub.md"),
    "refresh": ("Update the remote code", "hub.md#update-the-remote-code"),
}
INTRODUCTION = """<!-- generated -->
# Command line

The command `attn-variants` runs all tasks of this package in a shell. This page contains the `--help` of each command.
Use it to look up a flag.

```
attn-variants inspect google-t5/t5-small --batch_size 32
```

A misspelled flag causes an error that suggests a similar flag. See [troubleshooting](troubleshooting.md) for common
messages.
"""


def page_text() -> str:
    """Return the page."""
    sections = [INTRODUCTION]
    sections += [f"## {name}\n\n{_guide(name)}```text\n{help_of(name)}\n```\n" for name in cli.COMMANDS]
    return "\n".join(sections)


def help_of(command: str) -> str:
    """Return the help of a command, in lines of at most 100 characters."""
    printed = io.StringIO()
    with mock.patch.dict(os.environ, ENVIRONMENT), redirect_stdout(printed):
        try:
            cli.main([command, "--help"])
        except SystemExit:  # argparse exits after the help
            pass
    return printed.getvalue().replace(f"{ROOT}/", "").strip()


def _guide(command: str) -> str:
    title, address = GUIDES[command]
    return f"Guide: [{title}]({address})\n\n"


if __name__ == "__main__":
    PAGE.write_text(page_text(), encoding="utf-8")
