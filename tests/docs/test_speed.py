"""Check figures of speed: reports have allocator settings, and figures without recorded page faults are marked."""

import json
import re
from pathlib import Path

import pytest

from benchmarks import kept_memory, result_tables, speed_claims, speed_tables

ROOT = Path(__file__).resolve().parents[2]
REPORTS = {path.stem: path for path in (ROOT / "benchmarks").glob("*/results/*.json") if path.parts[-3] != "gpu"}
PAGES = (ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks").glob("*/*.md"))
# GPU runs do not use the allocator of glibc. test_gpu_page.py checks their page.
DOCUMENTS = {str(path.relative_to(ROOT)): path for path in PAGES if path.parent.name != "gpu"}
IS_TIME = re.compile(r"seconds|_ms$|speedup|tokens_per_second")
# The forms in which pages give a speed ratio.
IS_RATIO = re.compile(
    r"\d(\.\d+)?(×|x\b)|times Longformer's|"
    r"\d(\.\d+)? times (the speed|as fast|full attention's|the fused)"
)
# The reports of sections that give ratios without a link to them, by document and heading.
BERTS = ("encode_minilm_cpu", "encode_bert-base_cpu")
LONG = ("decode_t5-small_latents_cpu", "decode_t5-small_latents_cpu_long")
SIZES = ("decode_t5-multi30k_cpu", "decode_t5-large-attention_cpu")
BEAMS = ("decode_t5-small_latents_cpu_beams4", "decode_opus-mt_cpu_beams4", "decode_t5-small_cpu_beams4")
LINEAR = ("sliding_window_cpu", "linear_attention_cpu")
MIXED = ("onnx_latency", "talking_heads_cpu_layers")
ALONE = ("hybrid_attention_cpu", "decoder_state_cpu", "talking_heads_cpu_plain")
SERVED = tuple(f"serving_t5-small_{kind}_batch{size}" for kind in ("cpu", "amx") for size in (1, 4))
WITHOUT_LINKS = {
    ("README.md", "hf_attn_variants"): SERVED,
    ("docs/which.md", "Decoders"): (*LONG, *SERVED),
    ("docs/which.md", "Encoders"): (*BERTS, *LINEAR),
    ("docs/which.md", "Research"): ALONE,
    ("docs/results.md", "Decoding"): (*LONG, *SIZES, *BEAMS, "decode_t5-small_cpu"),
    ("docs/results.md", "Encoders and ONNX Runtime"): (*BERTS, *MIXED),
    ("docs/results.md", "Long texts"): LINEAR,
    ("docs/results.md", "Training from scratch"): MIXED,
    ("docs/sparse.md", "Implementation"): ("sliding_window_cpu",),
    ("docs/share_memory.md", "Sharing memory between beams"): SERVED,
    ("docs/serving.md", "Recommendations for CPUs"): SERVED,
    ("docs/sparse.md", "Long inputs"): ("encode_minilm_window_cpu", "encode_bert-base_window_cpu"),
    ("docs/linear.md", "Kernels in some layers"): ("linear_attention_models_cpu",),
    ("benchmarks/long/README.md", "Benchmarks of long texts and linear attention"): LINEAR,
    ("benchmarks/long/README.md", "Linear attention"): LINEAR,
    ("benchmarks/speed/README.md", "Latents and cached encoder outputs"): LONG,
    ("benchmarks/speed/README.md", "Marian"): BEAMS,
    ("benchmarks/speed/talking_heads.md", "Attention"): ALONE,
    ("benchmarks/speed/talking_heads.md", "Whole layers"): MIXED,
}
# Sections whose ratios show the effect of page faults or come from a GPU.
NO_CLAIMS = ("Allocator settings", "On a GPU")
# Quality reports with a column of seconds that a section shows.
SHOWN_SECONDS = ("long_inputs", "long_questions", "kernel_conversion", "conversion_memory")


def read(name):
    """Return a report, or an empty one if it does not exist."""
    return json.loads(REPORTS[name].read_text(encoding="utf-8")) if name in REPORTS else {}


def has_time(value):
    if isinstance(value, dict):
        return any(IS_TIME.search(name) or has_time(item) for name, item in value.items())
    return isinstance(value, list) and any(map(has_time, value))


def find_reports_without_setting(reports, is_of_speed):
    """Return the names of reports with times that lack the allocator setting."""
    timed = {name: report for name, report in reports.items() if is_of_speed(name) or has_time(report)}
    return [name for name, report in timed.items() if not records_memory_setting(report, is_of_speed(name))]


def records_memory_setting(report, is_of_speed):
    memory = report.get("memory")
    if memory == "not recorded":
        return True
    return isinstance(memory, dict) and (memory.keys() == {"glibc", "kept"} if is_of_speed else bool(memory))


def test_every_speed_report_states_its_allocator_setting():
    reports = {name: read(name) for name in REPORTS}
    assert not find_reports_without_setting(reports, speed_claims.is_of_speed), (
        'each needs "memory": as kept_memory.run writes it, or "not recorded"'
    )
    both = {"memory": {"glibc": {}, "kept": {}}}
    one = {"memory": {"glibc": {}}, "seconds": 1}
    wrong = {"decode_a": {}, "decode_b": one, "decode_c": both, "other": one, "training": {"rows": [{"seconds": 1}]}}
    assert find_reports_without_setting(wrong, speed_claims.is_of_speed) == ["decode_a", "decode_b", "training"]


def iterate_sections(text):
    """Yield each heading and the text up to the next heading of any level; code blocks have no headings."""
    heading, lines, in_code = "", [], False
    for line in text.splitlines():
        in_code ^= line.startswith("```")
        if line.startswith("#") and not in_code:
            yield heading, "\n".join(lines)
            heading, lines = line.lstrip("# "), []
        else:
            lines.append(line)
    yield heading, "\n".join(lines)


def find_section_reports(document, heading, text):
    """Return the speed reports of a section: those that it links to, those of its tables, and those named above."""
    of_speed, tables = speed_claims.is_of_speed, speed_tables.TABLES
    linked = {name for name in re.findall(r"results/([\w.-]+)\.json", text) if of_speed(name) or name in SHOWN_SECONDS}
    for name in result_tables.find_table_names(text):
        linked |= {report for report in tables[name].names if of_speed(report)} if name in tables else set()
    return linked | set(WITHOUT_LINKS.get((document, heading), ()))


def iterate_faults(document, text, is_recorded):
    """Yield the faults in the marks of a document."""
    marks = (kept_memory.UNRECORDED_NOTE, kept_memory.SHORT_UNRECORDED_NOTE)
    for heading, part in iterate_sections(text):
        names, is_marked = find_section_reports(document, heading, part), any(mark in part for mark in marks)
        unrecorded = sorted(name for name in names if not is_recorded(read(name)))
        if unrecorded and not is_marked:
            yield f"{document}, {heading!r}: no mark, and these say not recorded: {', '.join(unrecorded)}"
        if names and not unrecorded and is_marked:
            yield f"{document}, {heading!r}: marked, though all its reports were made both ways"
        if not names and heading not in NO_CLAIMS and IS_RATIO.search(part):
            yield f"{document}, {heading!r}: a ratio of speed from nowhere: {IS_RATIO.search(part)[0]!r}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_figures_without_page_fault_records_are_marked(document):
    text = DOCUMENTS[document].read_text(encoding="utf-8")
    assert not list(iterate_faults(document, text, kept_memory.is_recorded))


def test_missing_marks_stale_marks_and_unknown_ratios_are_detected():
    mark = kept_memory.UNRECORDED_NOTE
    link = "[JSON](../benchmarks/long/results/sliding_window_cpu.json)"
    text = f"# One\n{link} 3x\n# Two\n{link} {mark}\n# Three\n4 times the speed\n"
    result = [fault.split(": ")[1].split(",")[0] for fault in iterate_faults("a.md", text, lambda report: False)]
    assert result == ["no mark", "a ratio of speed from nowhere"]
    result = [fault.split(": ")[1].split(",")[0] for fault in iterate_faults("a.md", text, lambda report: True)]
    assert result == ["marked", "a ratio of speed from nowhere"]


def test_reports_name_neither_the_machine_nor_folders():
    for path in REPORTS.values():
        if not path.name.startswith(("triton", "transformers_matrix")):
            assert not re.search(r'"hostname|"node"|/home/|/root/|/tmp/|/work/', path.read_text(encoding="utf-8")), (
                path
            )
