"""Check EuroBERT and T5Gemma in the training commands after a conversion to fewer heads without remote code."""

import json

import pytest
from fixtures.commands import run_command
from fixtures.native_models import make_eurobert, save_eurobert, save_t5gemma
from fixtures.uptraining import make_text
from transformers import AutoModel, AutoModelForMaskedLM, AutoModelForSeq2SeqLM, EuroBertForMaskedLM, EuroBertModel

from hf_attn_variants import convert
from hf_attn_variants.commands.training import classify, pretrain, seq2seq, uptrain
from hf_attn_variants.commands.training import glue as glue_command
from hf_attn_variants.training.engine.models import set_dropout

pytestmark = pytest.mark.cross_product

QUICK = ["--max_train_steps", 2, "--per_device_train_batch_size", 4, "--cpu", "--disable_tqdm"]
TIMED = [*QUICK, "--max_train_steps", 12]


@pytest.fixture(scope="module")
def eurobert(tiny_bert, tmp_path_factory):
    """The folders of a EuroBERT with 4 key/value heads, and of its conversion to 2."""
    folder = tmp_path_factory.mktemp("eurobert")
    save_eurobert(folder / "source", tiny_bert)
    convert(folder / "source", 2, method="mean", output_dir=folder / "converted")
    return folder / "source", folder / "converted"


@pytest.fixture(scope="module")
def t5gemma(tmp_path_factory):
    """The folders of a T5Gemma with 4 key/value heads, and of its conversion to 2."""
    folder = tmp_path_factory.mktemp("t5gemma")
    save_t5gemma(folder / "source")
    fields = {"num_key_value_heads": 2, "encoder_num_key_value_heads": 2}
    convert(folder / "source", method="mean", output_dir=folder / "converted", **fields)
    return folder / "source", folder / "converted"


def check_is_plain(folder, auto_class, model_class):
    """Check that a folder contains a checkpoint of a Transformers class with two key/value heads, without code."""
    config = json.loads((folder / "config.json").read_text())
    assert "auto_map" not in config and not list(folder.glob("*.py")) and "talking_heads" not in config
    assert config["architectures"][0].startswith(model_class.removesuffix("Model"))
    model = auto_class.from_pretrained(folder)
    heads = [
        module.out_features // model.get_submodule(path.rpartition(".")[0]).head_dim
        for path, module in model.named_modules()
        if path.endswith("k_proj")
    ]
    assert heads and set(heads) == {2}


def test_converted_eurobert_classifies_pairs(call, eurobert, glue):
    task = ["--task_name", "stsb", "--data_dir", glue / "STS-B", "--max_length", 48]
    results, out = call(glue_command, eurobert[1], *task, *QUICK)
    assert results["steps"] == 2 and "eval_spearmanr" in results
    check_is_plain(out, AutoModel, "EuroBertForSequenceClassification")


def test_converted_eurobert_is_trained_on_labels(call, eurobert, tmp_path):
    rows = "".join(f"the {word} dog,{label}\n" for word, label in [("big", "a"), ("small", "b")] * 12)
    (tmp_path / "rows.csv").write_text(f"text,label\n{rows}")
    data = ["--train_file", tmp_path / "rows.csv", "--validation_file", tmp_path / "rows.csv", "--max_length", 16]
    results, out = call(classify, eurobert[1], *data, *QUICK)
    assert results["steps"] == 2 and "eval_accuracy" in results
    check_is_plain(out, AutoModel, "EuroBertForSequenceClassification")


@pytest.mark.parametrize("objective", ["mlm", "distill"])
def test_converted_eurobert_is_uptrained(call, eurobert, tmp_path, objective):
    text = ["--train_file", make_text(tmp_path)[0], "--objective", objective, "--teacher", eurobert[0]]
    text += ["--trainable", "attention"]
    results, out = call(uptrain, eurobert[1], *text, *TIMED)
    assert results["steps"] == 12 and results["eval_loss"] < results["initial_eval_loss"]
    check_is_plain(out, AutoModelForMaskedLM, "EuroBertForMaskedLM")


def test_converted_eurobert_is_pretrained_on_masked_words(call, eurobert, tmp_path):
    text = make_text(tmp_path)[0]
    results, out = call(
        pretrain, eurobert[1], "--train_file", text, "--validation_file", text, "--max_length", 16, *QUICK
    )
    assert results["steps"] == 2 and "eval_loss" in results
    check_is_plain(out, AutoModelForMaskedLM, "EuroBertForMaskedLM")


def test_new_eurobert_is_pretrained(call, eurobert, tmp_path):
    text = make_text(tmp_path)[0]
    sizes = "hidden_size=32,num_hidden_layers=1,num_attention_heads=4,intermediate_size=48,num_key_value_heads=2"
    out = tmp_path / "new"
    new = ["--model_type", "eurobert", "--tokenizer_name", eurobert[0], "--config_overrides", sizes]
    files = ["--train_file", text, "--validation_file", text, "--max_length", 16, "--output_dir", out]
    with pytest.raises(ValueError, match="`num_key_value_heads` must divide `num_attention_heads`, got 3 for 4 heads"):
        run_command(pretrain, *new[:-1], sizes[:-1] + "3", *files, *QUICK)
    run_command(pretrain, *new, *files, *QUICK)
    check_is_plain(out, AutoModelForMaskedLM, "EuroBertForMaskedLM")
    assert type(AutoModelForMaskedLM.from_pretrained(out)) is EuroBertForMaskedLM


def test_converted_t5gemma_is_trained_on_pairs(call, t5gemma, tmp_path):
    source, target = make_text(tmp_path)
    pairs = ["--source_file", source, "--target_file", target]
    pairs += ["--validation_source_file", source, "--validation_target_file", target]
    lengths = ["--max_length", 16, "--max_target_length", 16, "--max_eval_samples", 8, "--dropout_rate", 0]
    results, out = call(seq2seq, t5gemma[1], *pairs, *lengths, *TIMED, "--learning_rate", 1e-2)
    before, _ = call(seq2seq, t5gemma[1], *pairs, *lengths, *QUICK[2:], "--num_train_epochs", 0)
    assert results["steps"] == 12 and results["eval_loss"] < 0.9 * before["eval_loss"] and "eval_bleu" in results
    check_is_plain(out, AutoModelForSeq2SeqLM, "T5GemmaForConditionalGeneration")


def test_converted_t5gemma_is_distilled(call, t5gemma, tmp_path):
    source, target = make_text(tmp_path)
    pairs = ["--source_file", source, "--target_file", target, "--objective", "distill", "--teacher", t5gemma[0]]
    results, out = call(uptrain, t5gemma[1], *pairs, *TIMED)
    assert results["steps"] == 12 and results["eval_loss"] < results["initial_eval_loss"]
    check_is_plain(out, AutoModelForSeq2SeqLM, "T5GemmaForConditionalGeneration")


def test_dropout_of_t5gemma_is_set_in_its_encoder_and_decoder(t5gemma):
    config = AutoModelForSeq2SeqLM.from_pretrained(t5gemma[0]).config
    set_dropout(config, 0.25)
    parts = (config, config.encoder, config.decoder)
    assert [part.dropout_rate for part in parts] == [part.attention_dropout for part in parts] == [0.25] * 3


def test_lora_layers_of_eurobert_are_its_attention_projections():
    pytest.importorskip("peft")
    from hf_attn_variants.training.engine.trainable_parameters import add_lora

    adapted = add_lora(make_eurobert(model_class=EuroBertModel), rank=2, alpha=4)
    layers = {name.split(".")[-4] for name, _ in adapted.named_parameters() if "lora_A" in name}
    assert layers == {"q_proj", "k_proj", "v_proj", "o_proj"}
