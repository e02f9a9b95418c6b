"""Check that the numbers on the page of the GPU runs agree with the reports."""

import json
import re
from pathlib import Path

import pytest
import torch

from benchmarks.quality_tables import LAUNCHES
from hf_attn_variants.modeling.ops.latent_decoding import choose_launch_settings

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "benchmarks/gpu/README.md").read_text(encoding="utf-8")
REPORTS = {
    path.stem: json.loads(path.read_text(encoding="utf-8"))
    for path in (ROOT / "benchmarks/gpu/results").glob("*.json")
}


@pytest.mark.parametrize(
    "part, word",
    [(part, "") for part in ("parity", "kernel_truth", "kernel_truth_before", "training_loop")]
    + [("latent_kernel", "truth"), ("long_texts", "FlexAttention")],
)
def test_all_correctness_cells_passed(part, word):
    cells = [cell for name, cell in REPORTS[part]["cells"].items() if word in name]
    assert cells and all(cell["status"] == "done" and cell["met"] for cell in cells)


@pytest.mark.parametrize("part", sorted(set(REPORTS) - {name for name in REPORTS if name.endswith("_before")}))
def test_gpu_page_states_the_completed_share_of_each_part(part):
    report = REPORTS[part]
    (row,) = [line for line in PAGE.splitlines() if line.startswith(f"| `{part}`")]
    assert f"{len(report['cells'])} of {report['cells_in_all']}" in row


def test_recorded_launches_of_the_latent_kernel_are_current():
    for width, launch in LAUNCHES.items():
        latent = torch.empty(1, 1, 1, width, device="meta")
        assert ", ".join(map(str, choose_launch_settings(latent, latent))) == launch


def test_ratios_agree_with_the_tables():
    steps = REPORTS["training_steps"]["cells"]
    (bert, t5) = (steps[f"{kind}, bfloat16"]["rows"] for kind in ("bert", "t5"))
    ratios = {
        t5["upstream"]["milliseconds"] / t5["MHA"]["milliseconds"]: r"trains ([\d.]+) times as fast",
        bert["talking heads"]["milliseconds"]
        / bert["MHA"]["milliseconds"]: r"talking heads takes ([\d.]+) times as long",
    }
    for ratio, text in ratios.items():
        (printed,) = re.findall(text, PAGE)
        assert float(printed) == pytest.approx(ratio, abs=0.005)


def test_errors_and_targets_agree_with_the_reports():
    largest = {}
    for part in ("kernel_truth", "kernel_truth_before"):
        for name, cell in REPORTS[part]["cells"].items():
            dtype = name.split(", ")[-1]
            largest[dtype] = max(largest.get(dtype, 0), *cell["errors"].values())
    printed = re.search(r"float32 within ([\d.e-]+), bfloat16 within ([\d.e-]+), float16 within ([\d.e-]+) \|", PAGE)
    for number_said, dtype in zip(printed.groups(), ("float32", "bfloat16", "float16"), strict=True):
        assert largest[dtype] <= float(number_said) < 1.1 * largest[dtype]
    ratios = [cell["ratios"].items() for cell in REPORTS["kernel_speed"]["cells"].values()]
    fused, formula = (
        sorted(value for row in ratios for name, value in row if name.endswith(peer)) for peer in ("sdpa", "compiled")
    )
    times = r"([\d.]+)–([\d.]+) times the"
    printed = re.search(rf"not met: {times} time, {times} speed \(512 tokens in training: ([\d.]+)\)", PAGE)
    low, high, slowest_but_one, fastest, slowest = printed.groups()
    assert [float(low), float(high)] == [pytest.approx(fused[at], abs=0.05) for at in (0, -1)]
    expected = [pytest.approx(1 / formula[at], abs=0.05) for at in (-1, -2, 0)]
    assert [float(number) for number in (slowest, slowest_but_one, fastest)] == expected
