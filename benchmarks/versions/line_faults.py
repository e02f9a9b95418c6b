"""Record which single-line faults in the package are caught by the tests, and compare the record with an earlier one.

The script works in copies of the repository. It runs the default tests once with branch coverage, to learn which tests
execute which lines. Then it inserts one fault at a time into a copy, and runs tests that execute the faulty line. A
fault is identified by its function and the text of its line, so that it can be found after the code has moved.

The interpreter needs `coverage` and `pytest-cov` in addition to the requirements of the tests.

Example:
    python -m benchmarks.versions.line_faults --folder build/faults
    python -m benchmarks.versions.line_faults --compare benchmarks/versions/results/line_faults.json
"""

import argparse
import json
import multiprocessing
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from benchmarks.versions.line_mutations import FOLDERS, PACKAGE, Fault, choose_faults, make_line_index

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "benchmarks/versions/results/line_faults.json"
MOST_TESTS, MOST_SECONDS, ROUNDS, TIMEOUT = 40, 40.0, 3, 120
PRELOADED = ["pytest", "torch", "transformers", "datasets", "transformers.models.t5.modeling_t5"]
QUICK = ["-q", "-n", "0", "--tb=no", "-rfE", "-p", "no:cov"]


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help=f"the file of the record (default: {RECORD.relative_to(ROOT)})")
    parser.add_argument("--compare", type=Path, help="an earlier record; its faults are tried again")
    parser.add_argument("--folder", type=Path, help="folder for copies and coverage, from which a later run resumes")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="number of parallel copies")
    parser.add_argument("--count", type=int, default=100, help="number of faults")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def run_pytest_process(copy: Path, arguments: list[str]) -> None:
    """Run pytest in a copy of the repository and exit with its status. The process is forked after the imports."""
    import pytest

    os.setsid()
    log = os.open(f"{copy}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(copy)
    os.environ |= {"PYTHONPATH": str(copy), "COVERAGE_FILE": str(copy.parents[1] / "coverage.sqlite")}
    sys.path[:] = [str(copy), *(entry for entry in sys.path if not Path(entry, PACKAGE).is_dir())]
    for name in [name for name in sys.modules if name.split(".")[0] == "benchmarks"]:
        del sys.modules[name]
    sys.exit(pytest.main(["-p", "no:cacheprovider", f"--basetemp={copy}_tmp", *arguments]))


def run_pytest(copy: Path, arguments: list[str], timeout: float | None = None) -> tuple[int | None, str]:
    """Run pytest in a copy of the repository. Return its exit status (None after a timeout) and its output."""
    process = multiprocessing.get_context("forkserver").Process(target=run_pytest_process, args=(copy, arguments))
    process.start()
    process.join(timeout)
    status = process.exitcode
    if status is None:
        os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()
    return status, Path(f"{copy}.log").read_text(encoding="utf-8", errors="replace")


class Measurement:
    """Copies of the repository, and the coverage and durations of its tests."""

    def __init__(self, folder: Path, processes: int) -> None:
        self.first, self.pristine = folder / "copies/0", folder / "pristine"
        ignored = shutil.ignore_patterns(".git", ".venv*", "build", "*.egg-info", ".*_cache")
        if not self.first.exists():
            subprocess.run(["git", "clone", "--quiet", str(ROOT), str(self.first)], check=True)
            shutil.copytree(ROOT, self.first, ignore=ignored, dirs_exist_ok=True)
            if (ROOT.parent / "shared").is_dir():
                (folder / "copies/shared").symlink_to(ROOT.parent / "shared")
        report, times = folder / "coverage.json", folder / "tests.xml"
        if not report.exists():
            options = [f"--cov={PACKAGE}", "--cov-branch", "--cov-context=test", f"--cov-report=json:{report}"]
            options += [f"--numprocesses={processes}", f"--junitxml={times}", "--override-ini=junit_family=xunit1"]
            print(run_pytest(self.first, options)[1][-2000:], flush=True)
        import coverage  # type: ignore[import-not-found]  # required only here

        self.data = coverage.CoverageData(str(folder / "coverage.sqlite"))
        self.data.read()
        self.seconds = {}  # the durations of the tests that passed
        for case in xml.etree.ElementTree.parse(times).iter("testcase"):
            if case.get("file") and not len(case):
                self.seconds[f"{case.get('file')}::{case.get('name')}"] = float(case.get("time", 0))
        self.branches = measure_branch_coverage(json.loads(report.read_text(encoding="utf-8"))["files"])
        if not self.pristine.exists():
            shutil.copytree(self.first / PACKAGE, self.pristine / PACKAGE)
        self.index = make_line_index(self.pristine)
        self.copies: queue.Queue[Path] = queue.Queue()
        for number in range(processes):
            copy = folder / f"copies/{number}"
            if not copy.exists():
                shutil.copytree(self.first, copy, symlinks=True)
            shutil.copytree(self.pristine, copy, dirs_exist_ok=True)  # remove faults of interrupted runs
            self.copies.put(copy)

    def batches(self, file: str, line: int, excluded: set[str], earlier: str | None) -> tuple[int, list[list[str]]]:
        """Return the number of tests that execute a line, and batches of tests to run.

        If no test executes the line, the batches contain the tests of the matching folder. The first batches contain
        the fastest tests of each file. If `earlier`, the test that caught the fault before, is one of the tests, it is
        the only test of the first batch.
        """
        contexts = self.data.contexts_by_lineno(str(self.first / file)).get(line, [])
        names = {context.rsplit("|", 1)[0] for context in contexts} & self.seconds.keys()
        covering = len(names)
        matching = f"tests/{file.split('/')[1]}/"
        names = (names or {name for name in self.seconds if name.startswith(matching)}) - excluded
        ranks: Counter[str] = Counter()
        ordered = []
        for name in sorted(names, key=lambda name: (self.seconds[name], name)):
            test_file = name.split("::")[0]
            ordered.append((ranks[test_file], not name.startswith(matching), self.seconds[name], name))
            ranks[test_file] += 1
        batches: list[list[str]] = [[]]
        for *_, name in sorted(ordered, key=lambda row: (row[-1] != earlier, row)):
            total = sum(self.seconds[test] for test in batches[-1]) + self.seconds[name]
            if batches[-1] and (earlier in batches[-1] or len(batches[-1]) == MOST_TESTS or total > MOST_SECONDS):
                batches.append([])
            batches[-1].append(name)
        by_file = [sorted(batch, key=lambda name: name.split("::")[0]) for batch in batches[:ROUNDS] if batch]
        return covering, by_file

    def run(self, fault: Fault, excluded: set[str]) -> Fault:
        """Return whether the tests catch a fault, which test catches it, and how many tests execute the line."""
        places = self.index.get((fault["function"], fault["line"]), [])
        if len(places) != 1:
            return {"caught": None, "by": "line is gone"}
        file, number, statement = places[0]
        covering, batches = self.batches(file, statement, excluded, fault.get("earlier"))
        result = {"covering_tests": covering, "caught": False, "by": None}
        copy = self.copies.get()
        try:
            path = copy / file
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            lines[number - 1] = lines[number - 1].replace(fault["line"], fault["fault"])
            path.write_text("".join(lines), encoding="utf-8")
            for batch in batches:
                status, output = run_pytest(copy, [*QUICK, "-x", *batch], TIMEOUT)
                if status != 0:
                    named = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", output, re.M)
                    last = (output.strip().splitlines() or [""])[-1]
                    reason = f"timeout of {TIMEOUT} s" if status is None else named[1] if named else last
                    return result | {"caught": True, "by": reason}
            return result
        finally:
            self.restore(copy, {file})

    def restore(self, copy: Path, files: set[str]) -> None:
        """Restore files of a copy and return the copy to the queue."""
        for file in files:
            shutil.copy2(self.pristine / file, copy / file)  # copy2 keeps the time, so the cached bytecode fits
        self.copies.put(copy)

    def unrelated(self, faults: list[Fault]) -> set[str]:
        """Return the tests that also fail without the faults, because they read the source files or are flaky."""
        names = {fault["by"] for fault in faults if fault["by"] in self.seconds}
        files = {self.index[fault["function"], fault["line"]][0][0] for fault in faults if fault["by"] in names}
        copy = self.copies.get()
        for file in files:
            with open(copy / file, "a", encoding="utf-8") as stream:
                stream.write("# a comment\n")
        output = run_pytest(copy, [*QUICK, *sorted(names)])[1] if names else ""
        self.restore(copy, files)
        return {name for name in names if re.search(rf"^(FAILED|ERROR) {re.escape(name)}( - |$)", output, re.M)}


def measure_branch_coverage(files: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return the numbers of branches and statements in each folder of the package, and the percentages covered."""
    totals: dict[str, Counter[str]] = defaultdict(Counter)
    for name, file in files.items():
        inside = Path(name).relative_to(PACKAGE).parts
        totals[inside[0] if len(inside) > 1 else "."].update(file["summary"])
    coverage_by_folder = {}
    for folder, total in sorted(totals.items()):
        row: dict[str, float] = {"branches": total["num_branches"], "covered_branches": total["covered_branches"]}
        row |= {"statements": total["num_statements"], "covered_statements": total["covered_lines"]}
        row["branch_percent"] = round(100 * row["covered_branches"] / max(row["branches"], 1), 2)
        row["statement_percent"] = round(100 * row["covered_statements"] / max(row["statements"], 1), 2)
        coverage_by_folder[folder] = row
    return coverage_by_folder


def format_summary(record: dict[str, Any]) -> str:
    """Return a table with one line per folder, and the faults that no test catches."""
    lines = [f"{'folder':<14}{'faults':>8}{'caught':>8}{'gone':>8}{'branch coverage':>17}"]
    for folder in FOLDERS:
        rows = [row["caught"] for row in record["faults"] if row["file"].split("/")[1] == folder]
        percent = record["branch_coverage"].get(folder, {}).get("branch_percent", 0)
        lines.append(f"{folder:<14}{len(rows):>8}{rows.count(True):>8}{rows.count(None):>8}{percent:>15.1f} %")
    missed = [row for row in record["faults"] if row["caught"] is False]
    return "\n".join([*lines, "Not caught:", *map(describe, missed)])


def describe(row: Fault) -> str:
    """Return one line that describes a fault."""
    return f"  {row['file']}, {row['function']}: {row['line']}  ->  {row['fault']}  ({row['kind']})"


def list_losses(earlier: dict[str, Any], record: dict[str, Any]) -> list[str]:
    """Return the faults that only earlier tests caught, and the folders that lost more than a point of coverage."""
    messages = [describe(row) for row in record["faults"] if row.get("earlier") and row["caught"] is False]
    for folder, row in earlier["branch_coverage"].items():
        row_now = record["branch_coverage"].get(folder)
        if row_now and row_now["branch_percent"] < row["branch_percent"] - 1:
            messages.append(f"  {folder}: branch coverage {row['branch_percent']} % → {row_now['branch_percent']} %")
    return messages


def main(args: argparse.Namespace) -> int:
    """Try the faults, then write the record and print a summary. Return 1 if the comparison finds losses."""
    folder = (args.folder or Path(tempfile.mkdtemp(prefix="line_faults_"))).resolve()
    (folder / "copies").mkdir(parents=True, exist_ok=True)
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    os.environ |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_MODULES_CACHE": str(folder / "modules")}
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    output = args.output or (folder / "line_faults.json" if args.compare else RECORD)
    print(f"Copies and coverage are in {folder}. The record is {output}", flush=True)
    measurement = Measurement(folder, args.processes)
    earlier = json.loads(args.compare.read_text(encoding="utf-8")) if args.compare else None
    if earlier:
        identity = ("file", "function", "line", "fault", "kind")
        faults = [{name: row[name] for name in identity} | {"earlier": row["by"]} for row in earlier["faults"]]
    else:
        faults = choose_faults(measurement.pristine, args.count, args.seed)
    commit = subprocess.run(["git", "-C", str(measurement.first), "rev-parse", "HEAD"], stdout=subprocess.PIPE)
    record = {"commit": commit.stdout.decode().strip(), "seed": args.seed, "branch_coverage": measurement.branches}
    record["faults"] = faults
    if output.exists():  # reuse the results of an interrupted run
        done = {tuple(row.values())[:5]: row for row in json.loads(output.read_text(encoding="utf-8"))["faults"]}
        for row in faults:
            row |= done.get(tuple(row.values())[:5], {})
    excluded: set[str] = set()
    todo = [row for row in faults if "caught" not in row]
    while todo:
        with ThreadPoolExecutor(args.processes) as pool:
            futures = {pool.submit(measurement.run, row, excluded): row for row in todo}
            for future in as_completed(futures):
                row = futures[future]
                row |= future.result()
                print(f"{row['by'] or 'NOT CAUGHT'}\n{describe(row)}", flush=True)
                output.with_suffix(".tmp").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
                output.with_suffix(".tmp").replace(output)
        unrelated = measurement.unrelated(faults) - excluded
        excluded |= unrelated
        todo = [row for row in faults if row["by"] in unrelated]
    print(format_summary(record))
    messages = list_losses(earlier, record) if earlier else []
    print("\n".join(["Lost since the earlier record:", *(messages or ["  nothing"])]) if earlier else "")
    return 1 if messages else 0


if __name__ == "__main__":
    sys.exit(main(parse_args()))
