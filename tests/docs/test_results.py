"""Check that tables and numbers of the Markdown files agree with the reports of benchmarks/."""

import re
from pathlib import Path

import pytest

from benchmarks import quality_tables, result_tables

ROOT = Path(__file__).resolve().parents[2]


def test_tables_agree_with_the_reports():
    assert result_tables.main(["--check"]) == 0


@pytest.mark.parametrize(
    "page, wrong",
    [("train/README.md", ("| 2 | 2.379 |", "| 2 | 2.378 |")), ("long/README.md", ("| 4.99× |", "| 5.99× |"))],
)
def test_wrong_digit_is_detected(page, wrong, monkeypatch, tmp_path, capsys):
    text = (ROOT / "benchmarks" / page).read_text(encoding="utf-8")
    assert text.count(wrong[0]) == 1
    changed = tmp_path / "page.md"
    changed.write_text(text.replace(*wrong), encoding="utf-8")
    monkeypatch.setattr(result_tables, "ROOT", tmp_path)
    monkeypatch.setattr(result_tables, "list_documents", lambda: [changed])
    monkeypatch.setattr(
        result_tables, "TABLES", {name: result_tables.TABLES[name] for name in result_tables.find_table_names(text)}
    )
    assert result_tables.main(["--check"]) == 1
    assert "page.md differs from the reports" in capsys.readouterr().out
    assert result_tables.main([]) == 0 and changed.read_text(encoding="utf-8") == text


def test_unclosed_table_block_removes_no_text():
    text = "<!-- generated: albert -->\n\nText.\n\n<!-- generated: squad -->\n<!-- end -->\n"
    assert result_tables.find_table_names(text) == ["squad"] and "Text." in result_tables.fill_tables(text)


def test_each_table_is_in_only_one_file():
    names = [
        name
        for path in result_tables.list_documents()
        for name in result_tables.find_table_names(path.read_text(encoding="utf-8"))
    ]
    assert sorted(names) == sorted(result_tables.TABLES)


def test_sweep_figures_agree_with_the_results():
    sweeps, results = (
        (ROOT / f"benchmarks/train/{name}.md").read_text(encoding="utf-8") for name in ("sweeps", "README")
    )
    figures = set(re.findall(r"\d+\.\d+ \(\d+\.\d+–\d+\.\d+\)", sweeps))
    assert len(figures) >= 6 and not {figure for figure in figures if figure not in results}


def test_text_lengths_that_fit_agree_with_the_report():
    rows = quality_tables.load("largest_batch_t5-small")["rows"].values()
    upstream, shared, latents, ctranslate2 = (row["largest_batch"] for row in rows)
    page = (ROOT / "docs/results.md").read_text(encoding="utf-8")
    assert f"can process {upstream} texts per batch" in page
    assert f"is {shared} texts with `share_memory`, {latents} with latents, and {ctranslate2} with CTranslate2" in page
    assert shared > ctranslate2 > upstream  # README.md states this without numbers
