"""Check the notebooks of docs/: the committed outputs are complete, and running them gives the same scores."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "docs").glob("**/*.ipynb"))
LARGEST = 200_000  # bytes, pictures included


def list_outputs(notebook):
    return [output for cell in notebook["cells"] for output in cell.get("outputs", ())]


def parse_scores(notebook):
    """Return the rows of the tables in a notebook: {name: [numbers]}."""
    texts = ["".join(output.get("data", {}).get("text/markdown", "")) for output in list_outputs(notebook)]
    rows = [line.strip("| ").split(" | ") for text in texts for line in text.splitlines()[2:]]
    return {name: [float(number) for number in numbers] for name, *numbers in rows}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook_is_committed_with_its_outputs(path):
    content = path.read_text(encoding="utf-8")
    notebook = json.loads(content)
    assert len(content) < LARGEST
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1)), "run all cells in order"
    assert {output["output_type"] for output in list_outputs(notebook)} <= {"display_data", "execute_result", "stream"}
    assert not [output for output in list_outputs(notebook) if output.get("name") == "stderr"]
    assert any("image/png" in output.get("data", {}) for output in list_outputs(notebook))
    shown = json.dumps([output for output in list_outputs(notebook) if "image/png" not in output.get("data", {})])
    assert not re.search(r"/(home|root|tmp|work|usr)/", shown), "the output contains a local path"


def test_notebook_outputs_agree_with_the_text():
    notebook = json.loads((ROOT / "docs/notebook/minilm.ipynb").read_text(encoding="utf-8"))
    scores = parse_scores(notebook)
    multi_head, mean, calibrated = (scores[name] for name in scores)
    assert multi_head[1] == 1.0 and multi_head[0] > calibrated[0] > mean[0] and calibrated[1] > mean[1]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook_runs_with_the_same_scores(path, minilm, monkeypatch):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    committed = nbformat.read(path, as_version=4)
    notebook = nbformat.read(path, as_version=4)
    options = {"timeout": 600, "kernel_name": "python3", "resources": {"metadata": {"path": str(path.parent)}}}
    nbclient.NotebookClient(notebook, **options).execute()
    expected, result = parse_scores(committed), parse_scores(notebook)
    assert result.keys() == expected.keys() and expected
    for name in expected:
        assert result[name] == pytest.approx(expected[name], abs=0.005), name
