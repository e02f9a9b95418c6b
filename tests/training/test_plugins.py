"""Check plugins: the example is trained from an empty folder, loaded without the package, and wrong plugins fail."""

import shutil
import sys
from pathlib import Path

import pytest
import torch
from fixtures.elsewhere import WITHOUT_PACKAGE, run_elsewhere
from fixtures.plugins import restored_tables
from security.test_remote_code import find_violations
from transformers import AutoConfig, AutoModelForMaskedLM

from hf_attn_variants import AttnVariantBertConfig, AttnVariantBertForMaskedLM, cli, load_plugin
from hf_attn_variants.modeling.mechanisms.score_table import SCORE_FUNCTIONS

__all__ = ["restored_tables"]

pytestmark = pytest.mark.usefixtures("restored_tables")
ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/my_attention.py"
TINY = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32, "vocab_size": 50}
NEW_CLASS = "from hf_attn_variants import ScoreFunction, register_score\n@register_score\nclass New(ScoreFunction):\n"
LOAD = f"""{WITHOUT_PACKAGE}
import torch
from transformers import AutoModelForMaskedLM

model = AutoModelForMaskedLM.from_pretrained("saved", trust_remote_code=True).eval()
torch.save(model(torch.arange(8)[None]).logits, "logits.pt")
model.save_pretrained("saved-again")
"""


def write_plugin(folder, text, name="new_score"):
    path = folder / f"{name}.py"
    path.write_text(text)
    return path


def test_example_is_short():
    assert len(EXAMPLE.read_text().splitlines()) <= 40


def test_cosine_score_equals_its_formula():
    module = load_plugin(EXAMPLE)
    score = module.CosineScore(4, 2, 8, torch.empty(0))
    score.scale.data = torch.arange(1.0, 5.0)[:, None, None]
    query, key = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 5, 8)
    keys = key[:, [0, 0, 1, 1]]
    cosines = torch.nn.functional.cosine_similarity(query[..., None, :], keys[:, :, None], dim=-1)
    torch.testing.assert_close(score(query, key), torch.arange(1.0, 5.0)[:, None, None] * cosines)


@pytest.mark.parametrize("field", [{"score_function": "cosine"}, {"attention_kernel": "square"}], ids=str)
def test_saved_model_loads_without_package(field, tmp_path):
    load_plugin(EXAMPLE)
    torch.manual_seed(0)
    model = AttnVariantBertForMaskedLM(AttnVariantBertConfig(**TINY, **field, num_key_value_heads=2)).eval()
    model.save_pretrained(tmp_path / "saved")
    run_elsewhere("-c", LOAD, cwd=tmp_path)
    torch.testing.assert_close(torch.load(tmp_path / "logits.pt"), model(torch.arange(8)[None]).logits)
    again = {path.name: path.read_text() for path in (tmp_path / "saved-again").glob("*.py")}
    assert again == {path.name: path.read_text() for path in (tmp_path / "saved").glob("*.py")}
    assert [violation for text in again.values() for violation in find_violations(text)] == []
    other = "SquareKernel" if "score_function" in field else "CosineScore"
    assert "my_attention.py" in again and other not in again["my_attention.py"]


@pytest.mark.thorough
def test_new_user_trains_the_example_from_an_empty_folder(tiny_bert, tmp_path):
    shutil.copy(EXAMPLE, tmp_path)
    (tmp_path / "text.txt").write_text((ROOT / "LICENSE").read_text())
    command = f"""pretrain --plugin my_attention.py --score_function cosine --model_type bert
        --tokenizer_name {tiny_bert} --config_overrides hidden_size=16,num_hidden_layers=2,num_attention_heads=4
        --train_file text.txt --validation_file text.txt --max_length 16 --max_eval_samples 8 --max_train_steps 2
        --cpu --output_dir saved"""
    run_elsewhere("-m", "attn_variants", *command.split(), cwd=tmp_path, has_package=True)
    run_elsewhere("-c", LOAD, cwd=tmp_path)
    load_plugin(tmp_path / "my_attention.py")
    model = AutoModelForMaskedLM.from_pretrained(tmp_path / "saved").eval()
    torch.testing.assert_close(torch.load(tmp_path / "logits.pt"), model(torch.arange(8)[None]).logits)


def test_model_of_a_plugin_that_is_not_loaded_raises(tmp_path):
    load_plugin(EXAMPLE)
    AttnVariantBertConfig(**TINY, score_function="cosine").save_pretrained(tmp_path)
    SCORE_FUNCTIONS.remove("cosine")
    with pytest.raises(ValueError, match=r"must be one of additive, got 'cosine'.* load the plugin first"):
        AutoConfig.from_pretrained(tmp_path)


def test_file_that_does_not_exist_raises(capsys):
    assert cli.main(["inspect", "somewhere", "--plugin", "nowhere.py"]) == 2
    assert "error: The plugin 'nowhere.py' does not exist. Set --plugin to a Python file." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f'{NEW_CLASS}    name = "additive"\n', r"existing values of `score_function` \(additive\), got 'additive'"),
        ("def f():\n    import math, numpy\n", "must not open files, and it can only import torch, .* in line 1"),
        ("import numpy\n", "must not open files, and it can only import torch, .* in line 1"),
        ("def f():\n    return open('x')\n", "must not open files, .* in line 1"),
        ("from hf_attn_variants import convert\n", "must only import names .* got `convert`"),
    ],
)
def test_wrong_plugin_raises(text, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        load_plugin(write_plugin(tmp_path, text))
    assert "new_score" not in sys.modules


@pytest.mark.parametrize("name", ["attn_variants_ops", "my-attention", "torch"])
def test_wrong_file_name_raises(name, tmp_path):
    with pytest.raises(ValueError, match="Rename the file"):
        load_plugin(write_plugin(tmp_path, "", name))


def test_class_in_the_program_raises(monkeypatch):
    from hf_attn_variants import ScoreFunction, register_score

    new = type("New", (ScoreFunction,), {"name": "new", "__module__": "__main__"})
    with pytest.raises(ValueError, match="Move the class to a Python file of its own"):
        register_score(new)


def test_plugin_is_loaded_only_once(tmp_path):
    path = write_plugin(tmp_path, f'{NEW_CLASS}    name = "new"\n')
    assert load_plugin(path) is load_plugin(str(path)) and SCORE_FUNCTIONS.count("new") == 1
