"""Check the comparison of two commits: alternating pairs of times, and whether the outputs are equal."""

import pytest
from fixtures.commands import run_command

from benchmarks.versions import side_by_side


def test_pairs_of_times_alternate(capsys):
    calls = []

    def worker(name, seconds, digest):
        def ask(task):
            if task is None:
                return ["decoding", "pass"]
            calls.append(name)
            return {"seconds": seconds, "digest": digest if task == "pass" else "same"}

        return ask

    rows = side_by_side.compare(worker("old", 2.0, "a"), worker("new", 1.0, "b"), 3)["rows"]
    assert [row["ratio"] for row in rows.values()] == [0.5, 0.5]
    assert [row["equal"] for row in rows.values()] == [True, False]
    assert rows["pass"]["seconds"] == [(2.0, 1.0)] * 3
    assert calls == ["new", "old", "old", "new"] * 4
    assert "DIFFER" in capsys.readouterr().out


@pytest.mark.slow
def test_commit_compared_with_itself_gives_equal_outputs():
    report = run_command(side_by_side, "--before", "HEAD", "--rounds", "2", "--size", "small")
    assert all(row["equal"] for row in report["rows"].values())
