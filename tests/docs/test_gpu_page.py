"""The page of the GPU runs says what their reports say."""

import json
import re
from pathlib import Path

import pytest
import torch

from hf_attn_variants.modeling.ops.latent_decoding import launch_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/results_gpu.md").read_text(encoding="utf-8")
REPORTS = {
    path.stem: json.loads(path.read_text(encoding="utf-8"))
    for path in (ROOT / "benchmarks/gpu/results").glob("*.json")
}
MIB = 2**20


def table_after(heading, number_of_table=0):
    """Return the rows of a table below a heading, each a list of cells; the headers are left out."""
    lines = PAGE.split(f"\n## {heading}\n")[1].splitlines()
    starts = [index for index, line in enumerate(lines) if line.startswith("|") and not lines[index - 1]]
    start = starts[number_of_table]
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            return rows
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def number(cell):
    return float(cell.strip("*").replace(",", ""))


@pytest.mark.parametrize(
    "part, word",
    [(part, "") for part in ("parity", "kernel_truth", "kernel_truth_before", "training_loop")]
    + [("latent_kernel", "truth"), ("long_texts", "FlexAttention")],
)
def test_no_cell_of_correctness_failed(part, word):
    cells = [cell for name, cell in REPORTS[part]["cells"].items() if word in name]
    assert cells and all(cell["status"] == "done" and cell["met"] for cell in cells)


@pytest.mark.parametrize("part", sorted(set(REPORTS) - {name for name in REPORTS if name.endswith("_before")}))
def test_the_page_says_how_much_of_a_part_was_run(part):
    report = REPORTS[part]
    (row,) = [line for line in PAGE.splitlines() if line.startswith(f"| `{part}`")]
    assert f"{len(report['cells'])} of {report['cells_in_all']}" in row


def test_the_table_of_training_is_the_report():
    names = {"transformers": "upstream", "ours, multi-head": "MHA"}
    cells = REPORTS["training_steps"]["cells"]
    for name, *figures in table_after("Training"):
        of_bert, of_t5 = (cells[f"{kind}, bfloat16"]["rows"][names.get(name, name)] for kind in ("bert", "t5"))
        found = [value for row in (of_bert, of_t5) for value in (row["milliseconds"], row["tokens_per_second"])]
        assert [number(figure) for figure in figures] == [pytest.approx(value, rel=1e-3, abs=0.05) for value in found]


def test_the_table_of_talking_heads_is_the_report():
    cells, length = REPORTS["kernel_speed"]["cells"], None
    for tokens, mode, *figures in table_after("Talking heads"):
        length = length if not tokens else int(number(tokens))
        found = [cells[f"{length}, plain"][mode][peer] for peer in ("sdpa", "triton", "compiled", "naive")]
        assert [number(figure) for figure in figures] == [pytest.approx(value, rel=5e-3, abs=0.006) for value in found]


def test_the_table_of_decoding_is_the_report():
    cell = REPORTS["decoding"]["cells"]["t5-base, batch 64"]
    for (name, *figures), row in zip(table_after("Decoding"), cell["rows"], strict=True):
        found = [row["tokens_per_second"], row["step_milliseconds"], row["cross_attention_milliseconds"]]
        found.append(row["cache_bytes"] / MIB)
        assert [number(figure) for figure in figures] == [
            pytest.approx(value, rel=1e-3, abs=0.5) for value in found
        ], name


def test_the_table_of_static_caches_is_what_was_printed():
    lines = (ROOT / "benchmarks/gpu/results/decoding_static_cache.txt").read_text(encoding="utf-8").splitlines()
    printed = r"([\d.]+) tokens/s +([\d.]+)x .* step +([\d.]+) ms .* cache +([\d.]+) MiB"
    rows = table_after("Decoding", number_of_table=1)
    for (_, *figures), line in zip(rows, lines, strict=True):
        found = [float(value) for value in re.search(printed, line).groups()]
        assert [number(figure) for figure in figures] == [pytest.approx(value, abs=0.5) for value in found]
        assert number(figures[1]) == pytest.approx(found[1], abs=0.005)


def test_the_table_of_one_latent_is_the_report():
    wide = [32, 16, 4, 2, 264]
    launches = {1024: wide, 768: wide, 512: [32, 16, 4, 3, 264], 192: [64, 16, 4, 2, 528]}
    names = ["multi-head, fused", "latent, fused", "latent, two products"]
    cells = REPORTS["latent_kernel"]["cells"]
    for name, sizes, reading, *figures in table_after("One latent for all heads"):
        width = int(number(sizes.split(" x ")[-1]))
        cell = cells["times, " + name.removesuffix(" of 192").lower().replace("whisper base", "whisper-base")]
        found = [cell["microseconds"][each] for each in (*names, str(launches[width]))]
        assert number(reading) == pytest.approx(cell["reading_microseconds"], abs=0.5)
        assert [number(figure) for figure in figures] == [pytest.approx(value, abs=0.5) for value in found]
        latent = torch.empty(1, 1, 1, width, device="meta")
        assert list(launch_of(latent, latent)) == launches[width]  # today's


def test_the_table_of_long_texts_is_the_report():
    cells, length = REPORTS["long_texts"]["cells"], None
    for tokens, mode, *figures in table_after("Long texts"):
        length = length if not tokens else int(number(tokens))
        row = cells[f"attention, {length}"][mode]
        found = [row[peer] for peer in ("sdpa", "window", "window in blocks")]
        assert [number(figure) for figure in figures] == [pytest.approx(value, rel=5e-3) for value in found]


def test_ratios_follow_from_the_tables():
    steps = REPORTS["training_steps"]["cells"]
    (bert, t5) = (steps[f"{kind}, bfloat16"]["rows"] for kind in ("bert", "t5"))
    ratios = {
        t5["upstream"]["milliseconds"] / t5["MHA"]["milliseconds"]: r"its steps ([\d.]+) times as fast",
        bert["talking heads"]["milliseconds"] / bert["MHA"]["milliseconds"]: r"cost BERT ([\d.]+) times",
    }
    for ratio, text in ratios.items():
        (said,) = re.findall(text, PAGE)
        assert float(said) == pytest.approx(ratio, abs=0.005)


def test_errors_and_goals_follow_from_the_reports():
    largest = {}
    for part in ("kernel_truth", "kernel_truth_before"):
        for name, cell in REPORTS[part]["cells"].items():
            dtype = name.split(", ")[-1]
            largest[dtype] = max(largest.get(dtype, 0), *cell["errors"].values())
    said = re.search(r"float32 within ([\d.e-]+), bfloat16 within ([\d.e-]+), float16 within ([\d.e-]+) \|", PAGE)
    for number_said, dtype in zip(said.groups(), ("float32", "bfloat16", "float16"), strict=True):
        assert largest[dtype] <= float(number_said) < 1.1 * largest[dtype]
    ratios = [cell["ratios"].items() for cell in REPORTS["kernel_speed"]["cells"].values()]
    fused, formula = (
        sorted(value for row in ratios for name, value in row if name.endswith(peer)) for peer in ("sdpa", "compiled")
    )
    times = r"([\d.]+) to ([\d.]+) times"
    said = re.search(rf"\*\*not met\*\*: {times}; {times} \(512 tokens in training: ([\d.]+)\)", PAGE)
    low, high, slowest_but_one, fastest, slowest = said.groups()
    assert [float(low), float(high)] == [pytest.approx(fused[at], abs=0.05) for at in (0, -1)]
    expected = [pytest.approx(1 / formula[at], abs=0.05) for at in (-1, -2, 0)]
    assert [float(number) for number in (slowest, slowest_but_one, fastest)] == expected
