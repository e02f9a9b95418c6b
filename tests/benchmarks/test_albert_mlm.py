"""The small ALBERT's benchmark: its vocabulary, and all of its commands on a few articles, run in this process."""

import gzip
import importlib
import json
from pathlib import Path

import pytest
from transformers import AutoModelForMaskedLM, AutoTokenizer

from hf_attn_variants.conversion import command as conversion_command
from hf_attn_variants.training import pretrain_mlm

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("albert_mlm")


@pytest.fixture
def text(tmp_path):
    articles = (ROOT / "LICENSE").read_text().split("\n\n")[:16]
    for name, part in (("train-0", articles[:12]), ("valid", articles[12:])):
        (tmp_path / f"{name}.txt.gz").write_bytes(gzip.compress("\n\n".join(part).encode()))
    return tmp_path


def test_rare_characters_do_not_fill_the_vocabulary(benchmark, shared_data, tmp_path):
    shard = tmp_path / "text.txt"
    shard.write_text("\n\n".join(f"the attention of heads {chr(0x4E00 + i)} and queries" for i in range(500)))
    benchmark.make_vocabulary(str(shared_data / "tokenizers/albert"), shard, tmp_path / "tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    assert len(tokenizer) <= benchmark.VOCABULARY_SIZE
    ids = tokenizer("the Heads 一", add_special_tokens=False)["input_ids"]
    assert ids.count(tokenizer.unk_token_id) == 1 and ids[-1] == tokenizer.unk_token_id


def test_commands_fit_together_and_finished_ones_are_not_repeated(benchmark, shared_data, text, monkeypatch, capsys):
    mains = {"pretrain_mlm.py": pretrain_mlm, "convert_checkpoint.py": conversion_command}
    ran = []

    def run(command, folder, done="all_results.json"):
        if (folder / done).is_file():
            return
        script = mains[Path(command[1]).name]
        script.main(script.parse_args(command[2:]))
        ran.append(folder.name)

    monkeypatch.setattr(benchmark, "_run", run)
    monkeypatch.setattr(benchmark, "TRAINING", benchmark.TRAINING.replace("--num_warmup_steps 200", ""))
    flags = ["--data_dir", str(text), "--tokenizer", str(shared_data / "tokenizers/albert"), "--max_train_steps", "2"]
    flags += ["--work_dir", str(text / "work"), "--output", str(text / "result.json"), "--methods", "first"]
    result = benchmark.main(benchmark.parse_args(flags))
    assert ran == ["multi-head", *(f"first-{k}{end}" for k in (4, 2, 1) for end in ("", "-eval"))]
    assert json.loads((text / "result.json").read_text()) == result
    assert [(row["method"], row["num_key_value_heads"]) for row in result["rows"]] == [
        ("multi-head", 8),
        *(("first", k) for k in (4, 2, 1)),
    ]
    assert len({row["eval_masked_tokens"] for row in result["rows"]}) == 1
    assert len({row["eval_loss"] for row in result["rows"]}) == 4
    assert "gate_passed" in result["rows"][0] and len(result["commands"]) == 7
    assert result["commands"][1].startswith(
        "python scripts/convert_checkpoint.py --model_name_or_path WORK_FOLDER/multi-"
    )
    assert AutoModelForMaskedLM.from_pretrained(text / "work/first-2").config.num_key_value_heads == 2
    assert f"| first |  | {result['rows'][1]['eval_loss']:.3f} |" in capsys.readouterr().out

    assert benchmark.main(benchmark.parse_args(flags))["rows"] == result["rows"] and len(ran) == 7
