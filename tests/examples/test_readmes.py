"""Check that the examples start from a checkout, and that the commands of their READMEs can be parsed."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import run_multiple_choice
import run_superglue

ROOT = Path(__file__).parents[2]
MODULES = {"multiple_choice": run_multiple_choice, "superglue": run_superglue}


@pytest.mark.parametrize("name", MODULES)
def test_example_script_prints_its_help(name):
    command = [sys.executable, f"examples/{name}/run_{name}.py", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert f"usage: python examples/{name}/run_{name}.py" in done.stdout and "--output_dir" in done.stdout


@pytest.mark.parametrize("name", MODULES)
def test_readme_commands_can_be_parsed(name):
    text = (ROOT / "examples" / name / "README.md").read_text(encoding="utf-8")
    commands = re.findall(rf"^python examples/{name}/run_{name}\.py (.*)$", text, re.MULTILINE)
    assert commands
    for command in commands:
        MODULES[name].parse_args(shlex.split(command))
