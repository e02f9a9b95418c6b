"""Make the archives of tests/golden with the current code: repositories, conversions and unfinished trainings.

tests/golden/test_golden.py checks that every later version loads them with the same outputs, and resumes the trainings
with the same bits. Therefore the archives are made only once. Do not make them again if a test fails. Each training is
a complete run, and the archive contains its checkpoint of step 3 and its last weights.

The script takes a minute on one core. It uses one thread, like the tests. Trainings end with the same bits only if
torch, the CPU and the number of threads are the same. Otherwise, the weights are similar.

Example:
    python -m benchmarks.versions.golden_artefacts --output_dir build/golden
"""

import argparse
import os
import shutil
import sys
from contextlib import chdir
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The limit is below the maximum size of a file in this repository.
MOST_BYTES = 1_400_000


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        epilog="example:" + __doc__.split("Example:")[1],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--parts", nargs="+", choices=["models", "trainings"], default=["models", "trainings"])
    parser.add_argument("--output_dir", type=Path, required=True, help="the folder for the archives")
    parser.add_argument("--work_dir", type=Path, default=ROOT / "build/golden", help="folder for temporary files")
    return parser.parse_args()


def main(args: argparse.Namespace) -> None:
    """Make the archives of the selected parts.

    Raises:
        ValueError: if an archive has more than `MOST_BYTES` bytes.
    """
    from fixtures.golden import pack

    for part in args.parts:
        folder = (args.work_dir / part).resolve()
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        {"models": make_models, "trainings": make_trainings}[part](folder)
        archive = args.output_dir / f"{part}.tar.xz"
        args.output_dir.mkdir(parents=True, exist_ok=True)
        pack(folder, archive)
        print(f"{archive}: {archive.stat().st_size} bytes")
        if archive.stat().st_size > MOST_BYTES:
            raise ValueError(f"{archive} has {archive.stat().st_size} bytes, but at most {MOST_BYTES} are allowed")


def make_models(folder: Path) -> None:
    """Make the repositories and the converted folders, which share their code files."""
    from fixtures.golden_conversions import save_converted
    from fixtures.golden_repositories import save_repositories

    (folder / "converted").mkdir()
    sources = folder.with_name("sources")
    shutil.rmtree(sources, ignore_errors=True)
    sources.mkdir()
    with chdir(sources):
        save_converted(folder / "converted")
    save_repositories(folder / "repositories")


def make_trainings(folder: Path) -> None:
    """Run the trainings, and save their checkpoints and weights."""
    from fixtures.golden_trainings import save_trainings

    save_trainings(folder)


def prepare_process() -> None:
    """Set up this process like the tests: import paths, no network, one thread, and only errors in the log."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


if __name__ == "__main__":
    args = parse_args()
    prepare_process()
    main(args)
