"""Check the benchmark on chemistry models: a wheel becomes a checkpoint whose tokens are those of SMILES."""

import json
import zipfile

import pytest
import torch
from fixtures.commands import run_command
from transformers import AutoModelForMaskedLM, AutoTokenizer, BertConfig, BertForMaskedLM

from benchmarks.convert import reactions

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "C", "O", "Cl", "c", "1", "(", ")", "=", "[NH4+]", ">>", "."]
REACTIONS = ["CCO.Cl>>CCCl", "CC(=O)O>>CCO", "c1cc1.[NH4+]>>CC"]


@pytest.fixture
def wheel(tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 16}
    model = BertForMaskedLM(BertConfig(vocab_size=len(WORDS), **sizes))
    torch.save(model.state_dict(), tmp_path / "weights.bin")
    inside, _ = reactions.SOURCES["bert"]
    with zipfile.ZipFile(tmp_path / "models.whl", "w") as archive:
        archive.write(tmp_path / "weights.bin", f"{inside}/pytorch_model.bin")
        archive.writestr(f"{inside}/config.json", json.dumps(sizes | {"vocab_size": len(WORDS)}))
        archive.writestr(f"{inside}/vocab.txt", "\n".join(WORDS))
    return tmp_path / "models.whl", model


def test_model_of_a_wheel_becomes_a_smiles_checkpoint(wheel, tmp_path):
    path, model = wheel
    folder = reactions.unpack("bert", path, tmp_path / "bert")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.tokenize("c1[NH4+].Cl>>C(=O)") == ["c", "1", "[NH4+]", ".", "Cl", ">>", "C", "(", "=", "O", ")"]
    batch = tokenizer(REACTIONS, return_tensors="pt", padding=True)
    arguments = {name: batch[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        loaded = AutoModelForMaskedLM.from_pretrained(folder).eval()(**arguments).logits
        torch.testing.assert_close(loaded, model.eval()(**arguments).logits)


@pytest.mark.slow
def test_each_head_count_is_scored_once(wheel, tmp_path):
    rows = [f"{split}\t{reaction}" for split in ("train", "test") for reaction in REACTIONS * 20]
    (tmp_path / "reactions.tsv").write_text("split\trxn\n" + "\n".join(rows) + "\n", encoding="utf-8")
    flags = ["--bert", wheel[0], "--reactions", tmp_path / "reactions.tsv", "--num_key_value_heads", 4, 1]
    flags += ["--work_dir", tmp_path / "work", "--output", tmp_path / "out.json"]
    first = run_command(reactions, *flags)
    assert [row["num_key_value_heads"] for row in first] == [None, 1]  # the model has 4 heads
    assert all(0 <= row["masked_accuracy"] <= 1 for row in first) and first[1]["quality"]["measure"] == "loss"
    assert run_command(reactions, *flags) == first
