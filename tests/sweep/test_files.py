"""Check the files in `sweeps/` for two CPU cores on tiny data: every run trains, and the table has all metrics."""

import gzip
import json
import re
from pathlib import Path

import pytest
from fixtures.glue.tiny_bert import make_tiny_bert
from fixtures.span_corruption import make_sentinel_tokenizer
from fixtures.tiny_t5 import make_lines_of_words
from fixtures.uptraining import make_t5
from transformers import T5Config, T5ForConditionalGeneration

from hf_attn_variants import cli
from hf_attn_variants.sweep import runner

FILES = sorted((Path(__file__).resolve().parents[2] / "sweeps").glob("*.yaml"))
LOCAL = [path for path in FILES if not path.stem.endswith("_cluster")]
# In the sweeps, `alpha` is at most 0.1, which is at most two of 20 pretraining steps.
VALUES = {"STEPS": 2, "PRETRAINING_STEPS": 20, "EVAL_SAMPLES": 64}


@pytest.fixture(scope="module")
def values(tmp_path_factory):
    """The values of the variables, with a tiny corpus, tokenizers and a T5 with eight heads."""
    folder = tmp_path_factory.mktemp("data")
    names = ("wikipedia/train-0.txt", "wikipedia/valid.txt")
    names += tuple(f"multi30k/{part}.{end}" for part in ("train", "val", "test_2016_flickr") for end in ("en", "de"))
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        lines = make_lines_of_words(600 if "train-" in name else 64)
        (folder / f"{name}.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    make_t5(folder / "t5")
    sizes = {"d_model": 32, "d_kv": 4, "d_ff": 64, "num_layers": 1, "num_heads": 8, "decoder_start_token_id": 0}
    vocabulary = json.loads((folder / "t5/config.json").read_text())["vocab_size"]
    T5ForConditionalGeneration(T5Config(vocab_size=vocabulary, **sizes)).save_pretrained(folder / "t5")
    tokenizers = {"pretrain": make_tiny_bert(folder / "bert"), "seq2seq": folder / "t5"}
    tokenizers["pretrain-t5"] = make_sentinel_tokenizer(folder / "characters")
    return VALUES | {"DATA": folder, "MODEL": folder / "t5"}, tokenizers


@pytest.mark.thorough
@pytest.mark.parametrize("path", LOCAL, ids=lambda path: path.stem)
def test_every_local_sweep_file_runs(path, values, tmp_path, monkeypatch):
    """Run in this process, because importing a program takes longer than two steps."""

    def call(words, log):
        assert words[1:3] == ["-m", "attn_variants"]
        return cli.main(words[3:])

    monkeypatch.setattr(runner, "_run_command", call)
    monkeypatch.setattr(runner, "_read_last_error", lambda log: "see what is printed")
    assert len(LOCAL) == 9
    text = re.sub(r"^seeds: .*$", "seeds: [0]", path.read_text(), flags=re.M)
    text = re.sub(r"num_warmup_steps: \d+", "num_warmup_steps: 0", text)
    (tmp_path / "file.yaml").write_text(text)
    command = re.search(r"^command: (\S+)", text, re.M)[1]
    variables = values[0] | {"TOKENIZER": values[1].get(command)}
    variables = [f"{name}={value}" for name, value in variables.items() if f"${{{name}}}" in text]
    argv = ["sweep", str(tmp_path / "file.yaml"), "--output_dir", str(tmp_path / "out"), "--disable_tqdm"]
    assert cli.main([*argv, "--set", *variables]) == 0
    result = json.loads((tmp_path / "out/sweep_results.json").read_text())
    assert all(item["runs"].keys() == {"0"} for item in result["contestants"])
    assert all(name in item["spread"] for item in result["contestants"] for name in result["metrics"])
    assert (tmp_path / "out/sweep_results.png").read_bytes().startswith(b"\x89PNG")
