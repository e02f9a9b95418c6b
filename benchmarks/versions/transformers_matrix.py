"""Check that repositories with remote code have the same outputs under every supported version of Transformers.

The package saves tiny repositories of every architecture and variant under the oldest and the newest version, with
inputs, logits and tokens. Each version loads the repositories with the code inside them, in a process that cannot
import this package, and compares the logits. For models that generate text, it also compares

- the logits of steps with a cache, with those of one pass,
- the length of the cache, with the number of tokens,
- the tokens of greedy search and of two beams, with and without a cache, with the saved tokens.

Each version is installed with its requirements in a separate folder, and uses the Python and torch that run this
script. Repositories that an earlier release archived (`--keep NAME`) are loaded too.

The script needs a package index and takes about forty minutes on one core.

Example:
    python -m benchmarks.versions.transformers_matrix
    python -m benchmarks.versions.transformers_matrix --versions 5.15.1 5.24.0
    python -m benchmarks.versions.transformers_matrix --newest --check --output_dir build/matrix
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

from packaging.version import Version

from hf_attn_variants.command_parser import get_package_version
from hf_attn_variants.files import atomic_write
from hf_attn_variants.modeling.variant_names import NEWEST_TESTED

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
KEPT = FOLDER / "repositories"
OLDEST = (5, 15)
# The tolerance is relative to the largest logit. It allows for another order of float32 sums.
TOLERANCE = 1e-5
# The expected cache lengths after each piece of a text (`PIECES` in `matrix_worker.py`).
CACHE_LENGTHS = [3, 4, 5, 6, 7, 8, 9]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        epilog="example:" + __doc__.split("Example:")[1],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--versions", nargs="+", help="versions (default: the last release of each minor since 5.15)")
    parser.add_argument(
        "--newest", action="store_true", help="use the newest tested version, the newest release and pre-release"
    )
    parser.add_argument("--work_dir", type=Path, default=ROOT / "build/matrix", help="folder that later runs reuse")
    parser.add_argument(
        "--keep", metavar="NAME", help="archive the current repositories with latents and hybrids as NAME"
    )
    parser.add_argument("--check", action="store_true", help="exit with status 1 if any outputs differ")
    parser.add_argument("--output_dir", type=Path, default=FOLDER / "results")
    return parser.parse_args()


def main(args: argparse.Namespace) -> dict[str, Any]:
    """Fill the matrix, write it after each version, and return it."""
    versions = args.versions or (get_newest_versions() if args.newest else list_published_versions())
    args.work_dir.mkdir(parents=True, exist_ok=True)
    folders = {}
    for version in dict.fromkeys((versions[0], versions[-1])):
        name = f"{get_package_version()}, transformers {version}"
        folders[name] = args.work_dir / f"saved-{version}"
        shutil.rmtree(folders[name], ignore_errors=True)
        saved = run_under(version, "save", folders[name], args.work_dir)
        print(f"saved {len(saved['repositories'])} repositories under {version}", flush=True)
    if args.keep:
        keep(folders[name], args.keep)
    folders |= unpack_kept_repositories(args.work_dir)
    results: dict[str, Any] = {"python": platform.python_version(), "package": get_package_version(), "rows": []}
    args.output_dir.mkdir(parents=True, exist_ok=True)
    for version in versions:
        for name, folder in folders.items():
            loaded = run_under(version, "load", folder, args.work_dir)
            results["torch"] = loaded["torch"]
            rows = [{"saved_by": name, "loaded_with": loaded["transformers"]} | row for row in loaded["rows"]]
            results["rows"] += rows
            print(f"{version}: {name}: {sum(map(is_same, rows))} of {len(rows)} the same", flush=True)
        atomic_write(args.output_dir / "transformers_matrix.json", json.dumps(results, indent=1) + "\n")
    return results


def is_same(row: dict[str, Any]) -> bool:
    """Return whether a repository has the saved outputs, also with a cache, and causes no warnings."""
    if "error" in row or "warnings" in row:
        return False
    differences = (row["largest_difference"], row.get("steps_difference", 0.0))
    if not all(difference <= TOLERANCE * max(1.0, row["largest_logit"]) for difference in differences):
        return False
    lengths = row.get("cache_lengths", CACHE_LENGTHS)
    return lengths == CACHE_LENGTHS and all(row.get(f"same_{name}", True) for name in ("greedy", "tokens"))


def format_table(results: dict[str, Any]) -> str:
    """Return the Markdown table of docs/compatibility.md: the repositories that agree, for each pair of versions."""
    savers = list(dict.fromkeys(row["saved_by"] for row in results["rows"]))
    lines = ["| loaded with transformers | " + " | ".join(f"saved by {name}" for name in savers) + " |"]
    lines.append("|" + " --- |" * (len(savers) + 1))
    for version in dict.fromkeys(row["loaded_with"] for row in results["rows"]):
        cells = []
        for name in savers:
            rows = [row for row in results["rows"] if (row["loaded_with"], row["saved_by"]) == (version, name)]
            cells.append(f"{sum(map(is_same, rows))} of {len(rows)} the same")
        lines.append(f"| {version} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def list_published_versions() -> list[str]:
    """Return the last release of each minor version in the package index, the oldest first."""
    releases = [release for release in _list_versions() if OLDEST <= release.release[:2] < (6, 0)]
    return [
        str(max(release for release in releases if release.release[:2] == minor)) for minor in _list_minors(releases)
    ]


def get_newest_versions() -> list[str]:
    """Return the last release of the newest tested minor version, the newest release, and the newest pre-release."""
    final, newest = _list_versions(), _list_versions("--pre")
    run = [release for release in final if release.release[:2] <= tuple(map(int, NEWEST_TESTED.split(".")))]
    return list(dict.fromkeys(str(max(release)) for release in (run, final, newest)))


def _list_minors(versions: list[Version]) -> list[tuple[int, ...]]:
    return sorted({version.release[:2] for version in versions})


def _list_versions(*options: str) -> list[Version]:
    command = [sys.executable, "-m", "pip", "index", "versions", "transformers", *options]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    [line] = [line for line in listed.splitlines() if line.startswith("Available versions:")]
    return [Version(text.strip()) for text in line.partition(":")[2].split(",")]


def install_version(version: str, work_dir: Path) -> Path:
    """Return the folder with a version of Transformers and its requirements, and install them the first time."""
    folder = work_dir / f"transformers-{version}"
    if not folder.is_dir():
        print(f"installing transformers {version} ...", flush=True)
        stage = work_dir / f".{folder.name}"
        shutil.rmtree(stage, ignore_errors=True)
        pip = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--target",
            str(stage),
        ]
        subprocess.run([*pip, f"transformers=={version}"], check=True)
        stage.rename(folder)
    return folder


def run_under(version: str, action: str, folder: Path, work_dir: Path) -> dict[str, Any]:
    """Save repositories to a folder or load them from it, in a separate process with a version of Transformers."""
    path = [install_version(version, work_dir), *([ROOT, ROOT / "tests"] if action == "save" else [])]
    home = work_dir / "home"
    shutil.rmtree(home, ignore_errors=True)
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path)), "HF_HOME": str(home)}
    done = subprocess.run(
        [sys.executable, str(FOLDER / "matrix_worker.py"), action, str(folder)],
        cwd=work_dir,
        env=variables | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise SystemExit(f"transformers {version}, {action}:\n{done.stderr[-3000:]}")
    result = json.loads(done.stdout.splitlines()[-1])
    if Version(result["transformers"]) != Version(version):
        raise SystemExit(f"Expected transformers {version}, got {result['transformers']}")
    return result


def keep(folder: Path, name: str) -> None:
    """Archive the repositories of all architectures with latents and with hybrids under a name."""
    KEPT.mkdir(exist_ok=True)
    with tarfile.open(KEPT / f"{name}.tar.xz", "w:xz", preset=9) as archive:
        paths = [path for variant in ("latent", "hybrid") for path in folder.glob(f"*-{variant}/*")]
        for path in sorted(paths, key=lambda path: (path.suffix, path.name, path)):
            archive.add(path, path.relative_to(folder))  # equal code files are adjacent, so that they compress well


def unpack_kept_repositories(work_dir: Path) -> dict[str, Path]:
    """Unpack the archived repositories, and return their folders by the name of the archive."""
    folders = {}
    for path in sorted(KEPT.glob("*.tar.xz")):
        name = path.name.removesuffix(".tar.xz")
        folders[f"{name}, kept"] = folder = work_dir / f"kept-{name}"
        shutil.rmtree(folder, ignore_errors=True)
        with tarfile.open(path) as archive:
            archive.extractall(folder, filter="data")
    return folders


if __name__ == "__main__":
    args = parse_args()
    matrix = main(args)
    print(format_table(matrix))
    sys.exit(int(args.check and not all(map(is_same, matrix["rows"]))))
