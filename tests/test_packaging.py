"""Check the source distribution and the wheel: their files, their metadata, and that the wheel runs."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from fixtures.glue.tiny_bert import FIXTURES, make_tiny_bert
from markdown_links import find_links

import hf_attn_variants
from hf_attn_variants.command_parser import get_package_version

ROOT = Path(__file__).resolve().parents[1]
# Tracked files that are useful only in a clone.
NOT_SHIPPED = (".ci/", ".github/", ".gitignore")
BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, f'build_{sys.argv[1]}')(sys.argv[2])"


class Built(NamedTuple):
    """The results of a build: the file names in the sdist and in the wheel, the unpacked wheel and its metadata."""

    sdist: set[str]
    wheel: set[str]
    folder: Path
    metadata: Message


@pytest.fixture(scope="module")
def repository_files():
    """The files that git tracks or would add, without caches and build outputs."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("needs git and a clone, because an unpacked sdist does not list its files")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    return {name for name in names if name and (ROOT / name).is_file()}


@pytest.fixture(scope="module")
def built(repository_files, tmp_path_factory):
    """The sdist of a copy of the repository, and the wheel that is built from this sdist."""
    folder = tmp_path_factory.mktemp("build")
    for name in repository_files:
        (folder / "clone" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, folder / "clone" / name)
    build("sdist", folder / "clone", folder)
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        sdist = {item.name.partition("/")[2] for item in archive.getmembers() if item.isfile()}
        archive.extractall(folder / "sdist", filter="data")
    build("wheel", next((folder / "sdist").iterdir()), folder)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as archive:
        wheel = set(archive.namelist())
        archive.extractall(folder / "wheel")
        metadata = message_from_bytes(archive.read(next(name for name in wheel if name.endswith("/METADATA"))))
    return Built(sdist, wheel, folder / "wheel", metadata)


def build(kind: str, source: Path, target: Path) -> None:
    command = [sys.executable, "-c", BUILD, kind, str(target)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.fixture(scope="module")
def run_wheel(built, tmp_path_factory):
    """Run `python -m hf_attn_variants` from the wheel, with dependencies in a folder not named site-packages."""
    dependencies = tmp_path_factory.mktemp("dependencies")
    for site in (Path(path) for path in sys.path if Path(path).name.endswith("-packages")):
        for entry in site.iterdir():
            code = (
                entry.name.startswith(("attn_variants", "hf_attn_variants", "__editable__")) or entry.suffix == ".pth"
            )
            if not code and not (dependencies / entry.name).is_symlink():
                (dependencies / entry.name).symlink_to(entry)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (built.folder, dependencies)))}

    def run(*argv: str) -> subprocess.CompletedProcess:
        # `-S` and the base interpreter keep Python from finding packages in other folders.
        command = [getattr(sys, "_base_executable", sys.executable), "-S", "-m", "hf_attn_variants", *argv]
        return subprocess.run(command, cwd=dependencies, env=env, capture_output=True, text=True, timeout=600)

    return run


@pytest.mark.thorough
def test_sdist_contains_the_repository(built, repository_files):
    """Check that the sdist contains all tracked files, so that tests, docs and benchmarks run from it."""
    generated_files = {"PKG-INFO", *(name for name in built.sdist if ".egg-info/" in name)}
    assert built.sdist - generated_files == {name for name in repository_files if not name.startswith(NOT_SHIPPED)}


@pytest.mark.thorough
def test_wheel_contains_only_the_package(built, repository_files):
    package = {name for name in built.wheel if ".dist-info/" not in name and ".data/" not in name}
    assert package == {name for name in repository_files if name.startswith(("hf_attn_variants/", "attn_variants.py"))}
    assert "hf_attn_variants/py.typed" in package
    assert built.metadata["License-Expression"] == "Apache-2.0"
    assert any(name.endswith("/licenses/LICENSE") for name in built.wheel)


def test_version_is_the_same_in_all_files():
    """Check all files that state the version; it is defined in `modeling/variant_names.py`."""
    version = hf_attn_variants.__version__
    assert get_package_version() == version
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    newest = re.search(r"^## (\S+) \((\S+)\)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    assert (citation["version"], citation["date-released"].isoformat()) == newest.groups() == (version, newest[2])


def test_workflows_call_existing_make_targets():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    steps = []
    for path in sorted((ROOT / ".github/workflows").glob("*.yml")):
        jobs = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]
        steps += [step["run"].split() for job in jobs.values() for step in job["steps"] if "run" in step]
    assert {words[0] for words in steps} == {"make"}
    assert (
        {words[1] for words in steps}
        == {"install", "quality", "test", "docs", "dist", "matrix", "matrix-newest"}
        <= targets
    )


def test_package_description_has_no_broken_links(built):
    """Check that the description has no relative links, which a package index cannot resolve."""
    assert built.metadata.get_all("Project-URL") is None
    description = built.metadata.get_payload(decode=True).decode()
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    addresses = [item for item in find_links(readme) if re.match(r"https?://", item)]
    assert find_links(description) == addresses and len(addresses) > 2
    assert "`quantize`" in description and "[`quantize`]" not in description


def test_files_contain_no_placeholder_addresses():
    names = ("setup.cfg", "CITATION.cff", "README.md", "CONTRIBUTING.md", "docs/*.md", "model_cards/*.md")
    files = [path for name in names for path in ROOT.glob(name)] + [*(ROOT / "hf_attn_variants").rglob("*.py")]
    named = [path.name for path in files if "github.com/hf-attn-variants" in path.read_text(encoding="utf-8")]
    assert not named and len(files) > 100


@pytest.mark.parametrize("has_package", [True, False])
def test_quickstart_uses_the_environment_of_the_package(tmp_path, has_package):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho $0 $1 >> {tmp_path}/calls\n[ $1 != -c ] || exit {int(not has_package)}\n")
    python.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    shutil.copy(python, venv / "bin/python")
    (venv / ".installed").write_text(", constraints.txt\n")
    command = ["make", "quickstart", f"PYTHON={python}", f"VENV={venv}"]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    assert (tmp_path / "calls").read_text().splitlines()[
        -1
    ] == f"{python if has_package else venv / 'bin/python'} scripts/quickstart.py"


@pytest.mark.thorough
def test_wheel_contains_the_pages_and_their_link_targets(built, run_wheel):
    """Check that a user of the wheel can read the pages that `--help` names."""
    [data] = built.folder.glob("*.data/data")
    top = data / "share/doc/hf_attn_variants"
    pages = [path.relative_to(top) for path in top.rglob("*.md")]
    repository = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    assert {*pages} >= {path.relative_to(ROOT) for path in repository}
    for page in pages:
        assert (top / page).read_bytes() == (ROOT / page).read_bytes()
        for target in find_links((top / page).read_text(encoding="utf-8")):
            path = target.partition("#")[0]
            assert "://" in target or not path or (top / page.parent / path).exists(), f"{page}: {target}"
    installed = shutil.copytree(data, built.folder, dirs_exist_ok=True) / "share/doc/hf_attn_variants/README.md"
    assert f"documentation:\n  {installed}\n" in run_wheel("--help").stdout


def test_messages_name_subcommands_instead_of_scripts():
    """Check that messages name subcommands, because the wheel contains no scripts."""
    # A parser prints the name of the script that calls it. Another test checks modeling/.
    package = (ROOT / "hf_attn_variants").rglob("*.py")
    paths = [path for path in package if path.name != "command_parser.py" and "modeling" not in path.parts]
    for path in paths:
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
        docstrings = {id(n.body[0].value) for n in nodes if isinstance(n, documented) and ast.get_docstring(n)}
        texts = [n for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]
        named = [n.value for n in texts if "scripts/" in n.value and id(n) not in docstrings]
        assert not named, f"{path.name}: {named}"


@pytest.mark.thorough
def test_wheel_runs_as_a_module(run_wheel):
    done = run_wheel("--version")
    assert (done.returncode, done.stdout) == (0, f"hf_attn_variants {hf_attn_variants.__version__}\n"), done.stderr


@pytest.mark.slow
def test_glue_runs_with_dependencies_outside_site_packages(run_wheel, tmp_path):
    """Check that no table is hashed with dill, which would try to pickle pyarrow as user code."""
    model = make_tiny_bert(tmp_path / "tiny")
    argv = ["--model_name_or_path", str(model), "--task_name", "stsb", "--data_dir", str(FIXTURES / "STS-B")]
    argv += ["--output_dir", str(tmp_path / "out"), "--max_train_steps", "1", "--max_length", "48", "--cpu"]
    done = run_wheel("glue", *argv)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Pickl" not in done.stderr and (tmp_path / "out/all_results.json").is_file()
