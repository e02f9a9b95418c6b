"""Check the benchmarks of small models from scratch: their vocabulary, and their commands on a few articles."""

import gzip
import json
from pathlib import Path

import pytest
from fixtures.commands import run_command
from transformers import AutoModelForMaskedLM, AutoModelForSeq2SeqLM, AutoTokenizer

from benchmarks.train import albert_mlm, small_pretraining, t5_span_corruption
from hf_attn_variants.commands import convert as conversion_command
from hf_attn_variants.commands.training import pretrain as pretrain_mlm
from hf_attn_variants.commands.training import pretrain_t5 as pretrain_span_corruption

ROOT = Path(__file__).resolve().parents[2]
MAINS = {
    "pretrain_mlm.py": pretrain_mlm,
    "pretrain_span_corruption.py": pretrain_span_corruption,
    "convert_checkpoint.py": conversion_command,
}


@pytest.fixture
def ran(monkeypatch):
    """The folders of the scripts that ran; they run in this process."""
    folders = []

    def run(command, folder, done="all_results.json"):
        if not (folder / done).is_file():
            script = MAINS[Path(command[1]).name]
            run_command(script, *command[2:])
            folders.append(folder.name)

    for script in (albert_mlm, t5_span_corruption):
        monkeypatch.setattr(script, "run_script", run)
    return folders


@pytest.fixture
def text(tmp_path):
    articles = (ROOT / "LICENSE").read_text().split("\n\n")[:16]
    for name, part in (("train-0", articles[:12]), ("valid", articles[12:])):
        (tmp_path / f"{name}.txt.gz").write_bytes(gzip.compress("\n\n".join(part).encode()))
    return tmp_path


def test_vocabulary_is_not_filled_with_rare_characters(shared_data, tmp_path):
    shard = tmp_path / "text.txt"
    shard.write_text("\n\n".join(f"the attention of heads {chr(0x4E00 + i)} and queries" for i in range(500)))
    small_pretraining.make_vocabulary(str(shared_data / "tokenizers/albert"), shard, tmp_path / "tokenizer", 100)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    assert len(tokenizer) <= 100
    ids = tokenizer("the Heads 一", add_special_tokens=False)["input_ids"]
    assert ids.count(tokenizer.unk_token_id) == 1 and ids[-1] == tokenizer.unk_token_id


@pytest.mark.thorough
def test_albert_commands_run_once_in_sequence(shared_data, text, ran, monkeypatch, capsys):
    monkeypatch.setattr(albert_mlm, "TRAINING", albert_mlm.TRAINING.replace("--num_warmup_steps 200", ""))
    flags = ["--data_dir", str(text), "--tokenizer", str(shared_data / "tokenizers/albert"), "--max_train_steps", "2"]
    flags += ["--work_dir", str(text / "work"), "--output", str(text / "result.json"), "--methods", "first"]
    result = run_command(albert_mlm, *flags)
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

    assert run_command(albert_mlm, *flags)["rows"] == result["rows"] and len(ran) == 7


@pytest.mark.slow
def test_t5_parts_add_rows_per_optimizer_and_attention(shared_data, text, ran, monkeypatch, capsys):
    monkeypatch.setattr(t5_span_corruption, "TRAINING", t5_span_corruption.TRAINING.replace("500", "1"))
    for name, flags in list(t5_span_corruption.OPTIMIZERS.items()):
        monkeypatch.setitem(
            t5_span_corruption.OPTIMIZERS, name, flags.replace("--num_warmup_steps 500", "--num_warmup_steps 1")
        )
    flags = ["--data_dir", str(text), "--tokenizer", str(shared_data / "tokenizers/t5"), "--max_train_steps", "2"]
    flags += ["--work_dir", str(text / "work"), "--output", str(text / "result.json")]
    rows = run_command(t5_span_corruption, *flags, "--optimizers", "AdamW, 1e-3", "--attentions", "MHA")
    assert [(row["optimizer"], row["attention"]) for row in rows] == [("AdamW, 1e-3", "MHA")]
    rows = run_command(t5_span_corruption, *flags)
    kinds = [
        ("AdamW, 1e-3", "MHA"),
        *((name, "MHA") for name in t5_span_corruption.OPTIMIZERS if name != "AdamW, 1e-3"),
    ]
    kinds += [(t5_span_corruption.SCALED, name) for name in ("MQA", "talking heads")]
    assert [(row["optimizer"], row["attention"]) for row in rows] == kinds and len(ran) == len(kinds)
    assert len({row["eval_loss"] for row in rows}) == len(kinds)
    assert all(list(row["dev_loss_by_step"]) == ["1", "2"] and not row["gate_passed"] for row in rows)
    # After one step, a model is worse than a prediction by the word frequencies of the text.
    frequencies = json.loads((text / "result.json").read_text())["loss_of_frequencies_alone"]
    assert 1 < frequencies < min(row["dev_loss_by_step"]["1"] for row in rows)
    assert (text / "result.png").read_bytes().startswith(b"\x89PNG")
    assert f"| AdamW, 1e-3 | MHA | {rows[0]['eval_loss']:.3f} |" in capsys.readouterr().out
    model = AutoModelForSeq2SeqLM.from_pretrained(text / "work" / ran[-2])
    assert model.config.num_key_value_heads == 1 and model.config.vocab_size == t5_span_corruption.VOCABULARY_SIZE
