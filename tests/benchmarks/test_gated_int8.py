"""Check the benchmark of int8 quality with attention extensions: texts, outliers, and runs that are not repeated."""

import json

import pytest
import torch
from fixtures.commands import run_command
from transformers import AutoModel, AutoTokenizer

from benchmarks.train import gated_int8


@pytest.fixture
def data_dir(tmp_path):
    """A folder with two rows of each file."""
    pairs = "".join(f"a cat {i}\ta dog {i}\t{i}.0\n" for i in range(2))
    for name in (gated_int8.TRAIN, gated_int8.DEV):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"sentence1\tsentence2\tscore\n{pairs}")
    (tmp_path / gated_int8.MNLI).parent.mkdir()
    rows = "0\ta cat 1\ta house\tneutral\n1\ta house\t \tneutral\n"
    (tmp_path / gated_int8.MNLI).write_text(f"index\tsentence1\tsentence2\tgold_label\n{rows}")
    return tmp_path


def test_training_texts_are_the_different_sentences_in_a_fixed_order(data_dir):
    texts = gated_int8.list_training_texts(data_dir)
    assert sorted(texts) == ["a cat 0", "a cat 1", "a dog 0", "a dog 1", "a house"]
    assert texts == gated_int8.list_training_texts(data_dir)


@torch.no_grad()
def test_outliers_are_those_of_the_feed_forward_modules_and_layers(tiny_bert):
    model, tokenizer = AutoModel.from_pretrained(tiny_bert).eval(), AutoTokenizer.from_pretrained(tiny_bert)
    texts = ["the cat", "a big dog sees the small house"]
    measured = gated_int8.measure_outliers(model, tokenizer, texts)
    layers, kurtoses, norms = [], [], []
    for module in [part for layer in model.encoder.layer for part in (layer.output.dense, layer)]:
        layers.append(module.register_forward_hook(lambda _, inputs, output: outputs.append(output)))
    for text in texts:
        outputs = []
        model(**tokenizer(text, return_tensors="pt"))
        values = [output[0] if isinstance(output, tuple) else output for output in outputs]
        kurtoses.append([((x - x.mean()) ** 4).mean() / x.var(correction=0) ** 2 for x in values])
        norms.append([x.abs().max() for x in values])
    assert len(layers) == 2 * model.config.num_hidden_layers
    assert measured["kurtosis"] == pytest.approx(torch.tensor(kurtoses).mean().item(), rel=1e-4)
    assert measured["infinity_norm"] == pytest.approx(torch.tensor(norms).mean(0).max().item(), rel=1e-5)


def test_measured_models_are_not_measured_again(tiny_bert, data_dir, tmp_path, monkeypatch):
    measured = []

    def measure(folder, data_dir):
        measured.append(folder.name)
        engines = dict.fromkeys(gated_int8.ENGINES, 0.5)
        return {"kurtosis": 3.0, "infinity_norm": 1.0, "spearman": engines, "distance": engines}

    results = {"steps": 1, "initial_eval_embedding_cosine": 0.1, "eval_embedding_cosine": 0.2}
    monkeypatch.setattr(gated_int8, "measure", measure)
    monkeypatch.setattr(gated_int8, "run_script", lambda command, folder: None)
    monkeypatch.setattr(gated_int8, "check_arguments", lambda folder, parse_args, flags: results)
    monkeypatch.setattr(gated_int8, "convert_checkpoint", lambda *args, **fields: None)
    output = tmp_path / "report.json"
    flags = ["--model", str(tiny_bert), "--data_dir", str(data_dir), "--work_dir", str(tmp_path / "work")]
    flags += ["--output", str(output), "--seeds", "0"]
    run_command(gated_int8, *flags, "--extensions", "output gates")
    rows = run_command(gated_int8, *flags)
    assert len(measured) == 5 and measured.count("output-gates-0") == 1
    assert [row["extension"] for row in rows][:2] == [gated_int8.ORIGINAL, "output gates"]
    clipped = next(row for row in rows if row["extension"] == "clipped softmax")
    assert "--clipping_ratio 0.5" in clipped["command"] and str(tmp_path) not in clipped["command"]
    assert json.loads(output.read_text())["runs"] == rows and output.with_suffix(".png").is_file()
