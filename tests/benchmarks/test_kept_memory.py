"""Check benchmarks with both allocator settings: processes, page faults, merged reports, claims, and repeated runs."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import kept_memory, machine, measure_again, page_faults, speed_claims, speed_tables
from benchmarks.page_faults import FIXED_SETTINGS, Usage, UsageRecorder

ROOT = Path(__file__).resolve().parents[2]
ENCODE = ["--tiny", "--batch_size", "1", "--length", "4", "--rounds", "1", "--threads", "1"]
ON_GLIBC = pytest.mark.skipif(os.confstr("CS_GNU_LIBC_VERSION") is None, reason="needs glibc")
FEW = {"seconds": 1.0, "minor_faults": 10, "system_seconds": 0.0, "few_faults": True}
MANY = FEW | {"minor_faults": 10**6, "few_faults": False}


def run(script, *arguments, **more):
    env = {name: value for name, value in os.environ.items() if name not in FIXED_SETTINGS} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", f"benchmarks.speed.{script}", *map(str, arguments)]
    return subprocess.run(command, env=env | more, capture_output=True, text=True, timeout=300)


@pytest.mark.thorough
@ON_GLIBC
def test_script_writes_one_report_with_both_allocator_settings(tmp_path):
    # The process with the default setting does not inherit the allocator settings of the caller.
    ended = run("encode", *ENCODE, "--run_name", "encode_x", "--output_dir", tmp_path, **FIXED_SETTINGS)
    assert ended.returncode == 0, ended.stderr
    (path,) = tmp_path.iterdir()
    report = json.loads(path.read_text(encoding="utf-8"))
    assert report["memory"]["glibc"]["variables"] == {} and report["memory"]["kept"]["variables"] == FIXED_SETTINGS
    for item in (report, report["kept"]):
        assert all(row["usage"]["minor_faults"] >= 0 and row["usage"]["system_seconds"] >= 0 for row in item["rows"])
    assert {setting["figures"] for setting in report["memory"].values()} == {len(report["rows"])}
    assert "page faults" in ended.stdout and "claimed: " in ended.stdout
    assert kept_memory.is_recorded(report)
    assert len(list(speed_claims.iterate_claims(path.stem, report))) == len(report["rows"]) - 1


def test_only_page_faults_of_the_watched_part_count():
    with UsageRecorder() as recorder:
        block = np.ones(2**24)  # glibc does not reuse 128 MiB; huge pages may have 2 MiB
    assert recorder.usage.minor_faults >= 64 and recorder.usage.seconds > 0
    with UsageRecorder() as again:
        block += 1
    assert again.usage.minor_faults < recorder.usage.minor_faults / 2


def test_few_faults_take_at_most_one_percent_of_the_time():
    few = {"faults_a_second": 2500, "or_in_all": 16}
    assert page_faults.has_few_faults(2500, 1.0, few) and not page_faults.has_few_faults(2501, 1.0, few)
    assert page_faults.has_few_faults(16, 1e-4, few) and not page_faults.has_few_faults(17, 1e-4, few)
    assert page_faults.has_few_faults(None, 1.0, few) is None


def test_transparent_huge_pages_lower_the_bound_of_few_faults(monkeypatch, tmp_path):
    monkeypatch.setattr(page_faults, "HUGE_PAGES", tmp_path / "enabled")
    assert page_faults.get_fault_limits()["faults_a_second"] == 2500
    (tmp_path / "enabled").write_text("[always] madvise never\n")
    assert page_faults.get_fault_limits()["faults_a_second"] == 25


def test_figure_has_the_medians_of_its_repeats():
    result = page_faults.summarize_usages([Usage(1.0, 5, 0.1), Usage(3.0, 10**6, 0.3), Usage(2.0, 7, 0.2)])
    assert {name: result[name] for name in ("seconds", "minor_faults", "system_seconds")} == {
        "seconds": 2.0,
        "minor_faults": 7,
        "system_seconds": 0.2,
    }
    assert result["few_faults"] and not page_faults.summarize_usages([Usage(2.0, 10**6, 0.2)])["few_faults"]
    assert page_faults.summarize_usages([Usage(1.0, None, None)])["few_faults"] is None


def test_fixed_allocator_setting_needs_both_variables_or_a_preload(monkeypatch):
    for name in (*FIXED_SETTINGS, "LD_PRELOAD"):
        monkeypatch.delenv(name, raising=False)
    assert page_faults.get_allocator_setting() == "glibc"
    first, second = FIXED_SETTINGS
    monkeypatch.setenv(first, FIXED_SETTINGS[first])
    assert page_faults.get_allocator_setting() == "glibc"
    monkeypatch.setenv(second, FIXED_SETTINGS[second])
    assert page_faults.get_allocator_setting() == "kept"
    assert page_faults.describe_memory()["kept"]["variables"] == FIXED_SETTINGS
    monkeypatch.delenv(first)
    monkeypatch.setenv("LD_PRELOAD", "libjemalloc.so.2")
    assert page_faults.describe_memory()["kept"]["allocator"] == "jemalloc"


def test_smaller_ratio_is_claimed_and_differing_ratios_are_shown():
    make_claim = kept_memory.make_claim
    assert make_claim(6.25, 2.11) == (2.11, "2.11×, default 6.25×")
    assert make_claim(1.50, 2.00) == (1.50, "1.50×, fixed 2.00×")
    assert make_claim(1.10, 1.00) == (1.00, "1.00×")  # only differences of more than 10% are shown
    assert make_claim(1.111, 1.00) == (1.00, "1.00×, default 1.11×")
    assert make_claim(1.08, 1.20, is_cost=True) == (1.20, "1.20×, default 1.08×")  # the larger cost is claimed
    assert make_claim(6.25, None) == (None, "6.25×, no claim")


def make_reports(kept_usage):
    """Return the reports of two processes: Transformers takes 600 and 200 ms, ours 100."""
    targets = [{"what": "speed", "least": 3, "measured": 6.0, "met": True}]

    def row(base, usage):
        of = {"length": 8, "usage": {"forward": {"sdpa": usage, "window": FEW}, "training": {}}}
        return of | {"forward": {"sdpa": base, "window": 100.0}, "training": {}}

    glibc = {"memory": {"glibc": {"allocator": "glibc"}}, "layers": [], "attention": [row(600.0, MANY)]}
    fixed = {"memory": {"kept": {"allocator": "glibc"}}, "layers": [], "attention": [row(200.0, kept_usage)]}
    return glibc | {"targets": targets}, fixed | {"targets": [targets[0] | {"measured": 2.0, "met": False}]}


def test_reports_of_both_settings_are_merged():
    report = kept_memory.merge_reports(*make_reports(FEW))
    assert report["memory"]["glibc"] == {"allocator": "glibc", "figures": 2, "with_many_faults": 1}
    assert report["memory"]["kept"] == {"allocator": "glibc", "figures": 2, "with_many_faults": 0, "is_kept": True}
    assert report["attention"][0]["forward"]["sdpa"] == 600.0
    assert report["kept"]["attention"][0]["forward"]["sdpa"] == 200.0 and "memory" not in report["kept"]
    assert report["targets"] == [{"what": "speed", "least": 3, "measured": 2.0, "met": False}]
    (line,) = speed_claims.iterate_claims("sliding_window_cpu", report)
    assert (line.glibc, line.fixed, line.claim.text) == (6.0, 2.0, "2.00×, default 6.00×")


def test_run_with_many_faults_gives_no_claim():
    report = kept_memory.merge_reports(*make_reports(MANY))
    assert report["memory"]["kept"]["is_kept"] is False
    (line,) = speed_claims.iterate_claims("sliding_window_cpu", report)
    assert line.fixed is None and line.claim == (None, "6.00×, no claim") and line.text().endswith("no claim")
    nowhere = kept_memory.merge_reports(make_reports(FEW)[0], None)
    assert "not_run" in nowhere["memory"]["kept"]
    (line,) = speed_claims.iterate_claims("sliding_window_cpu", nowhere)
    assert line.claim.ratio is None


def test_speed_table_shows_the_claimed_ratio():
    report = kept_memory.merge_reports(*make_reports(FEW))
    ((row, fixed_row),) = speed_tables.pair_rows(report, "attention")
    assert (
        speed_tables.format_ratio(row, fixed_row, speed_tables.make_time_ratio("forward", "sdpa", "window"))
        == "2.00×, default 6.00×"
    )
    ((row, fixed_row),) = speed_tables.pair_rows(make_reports(FEW)[0] | {"memory": "not recorded"}, "attention")
    assert (
        speed_tables.format_ratio(row, fixed_row, speed_tables.make_time_ratio("forward", "sdpa", "window")) == "6.00×"
    )


def test_report_describes_the_machine_without_its_name():
    result = machine.describe_machine("cpu")
    assert result["cpu"] and result["cores"] == os.cpu_count() and result["memory_gib"] > 0.1
    assert os.uname().nodename not in json.dumps(result) and str(Path.home()) not in json.dumps(result)
    info = machine.read_cpu_info()
    assert ("avx512f" in result["instructions"]) == ("avx512f" in info.get("flags", "").split())


def test_every_speed_report_can_be_measured_again():
    jobs = measure_again.list_jobs(measure_again.parse_args([]))
    of_speed = speed_claims.is_of_speed
    assert {job.name for job in jobs} >= set(filter(of_speed, measure_again.report_paths()))
    assert all(importlib.util.find_spec(f"benchmarks.{job.script}") and 0 < job.seconds < 3600 for job in jobs)
