"""The measurement of denormals, small: both ways of computing, in the JSON it promises."""

import importlib
import json
from pathlib import Path

import torch

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


def test_both_ways_are_timed(monkeypatch, tmp_path, minilm):
    monkeypatch.syspath_prepend(str(FOLDER))
    denormals = importlib.import_module("denormals")
    threads = torch.get_num_threads()
    for way, flushes in (("as they are", False), ("flushed", torch.set_flush_denormal(False))):
        with denormals.WAYS[way]():
            assert bool(torch.full((), torch.finfo(torch.float32).tiny) / 2 == 0) == flushes
    answers = [{"text": "a", "answer_start": 0}]
    questions = [{"id": str(i), "question": f"what is {i} ?", "answers": answers} for i in range(400)]
    data = {"version": "1.1", "data": [{"title": "t", "paragraphs": [{"context": "a b c d", "qas": questions}]}]}
    (tmp_path / "train.json").write_text(json.dumps(data))
    flags = [
        "--model_name_or_path",
        minilm,
        "--train_file",
        tmp_path / "train.json",
        "--output",
        tmp_path / "o.json",
    ]
    flags += ["--turns", 1, "--steps", 1, "--batch_size", 2, "--max_length", 16]
    denormals.main(denormals.parse_args([str(flag) for flag in flags]))
    torch.set_num_threads(threads)
    found = json.loads((tmp_path / "o.json").read_text())
    assert [row["what"] for row in found["runs"]] == ["training step", "forward pass"]
    for row in found["runs"]:
        assert row["seconds"].keys() == {"as they are", "flushed"} and min(row["seconds"].values()) > 0
    assert str(tmp_path) not in json.dumps(found)
