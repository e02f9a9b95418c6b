"""Check the uptraining of encoders and of classification encoder-decoders on lines; other models need targets."""

import pytest
import torch
from fixtures.commands import run_command
from fixtures.uptraining import make_t5, make_text
from transformers import (
    AutoTokenizer,
    BartConfig,
    BartForQuestionAnswering,
    BartForSequenceClassification,
    BartModel,
    T5Config,
    T5EncoderModel,
)

from hf_attn_variants import convert
from hf_attn_variants.commands.training import uptrain

SIZES = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
SIZES |= {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "max_position_embeddings": 64, "init_std": 0.3}
TOKENS = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0, "bos_token_id": None}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(make_t5(tmp_path_factory.mktemp("t5")))


@pytest.fixture
def run(tokenizer, tmp_path):
    def save(model):
        model.save_pretrained(tmp_path / "model")
        tokenizer.save_pretrained(tmp_path / "model")

    def call(*more, teacher=True):
        argv = ["--model_name_or_path", tmp_path / ("gqa" if teacher else "model"), "--output_dir", tmp_path / "out"]
        argv += ["--teacher", tmp_path / "model", "--objective", "distill", "--max_train_steps", 20]
        argv += ["--per_device_train_batch_size", 8, "--cpu", "--disable_tqdm", "--overwrite_output_dir", *more]
        return run_command(uptrain, *argv)

    call.save, call.folder = save, tmp_path
    call.source, call.target = make_text(tmp_path)
    return call


@pytest.mark.thorough
@pytest.mark.parametrize("head", [BartForSequenceClassification, BartForQuestionAnswering])
def test_classification_encoder_decoder_is_distilled_on_lines(run, tokenizer, head):
    torch.manual_seed(0)
    run.save(head(BartConfig(vocab_size=len(tokenizer), **SIZES, **TOKENS)))
    convert(run.folder / "model", 2, method="mean", output_dir=run.folder / "gqa")
    results = run("--train_file", run.source, "--logits_weight", 1)
    assert results["eval_loss"] < 0.9 * results["initial_eval_loss"]
    terms = {
        f"{side}_{kind}_error" for side in ("encoder", "decoder") for kind in ("hidden_states", "attention_outputs")
    }
    assert {f"eval_{term}" for term in (*terms, "logits_divergence")} <= results.keys()
    with pytest.raises(ValueError, match="--source_file and --target_file require"):
        run("--train_file", run.source, "--source_file", run.source)
    with pytest.raises(ValueError, match="--predict_with_generate requires"):
        run("--train_file", run.source, "--predict_with_generate")


def test_encoder_decoder_without_a_head_is_distilled_on_pairs(run, tokenizer):
    torch.manual_seed(0)
    run.save(BartModel(BartConfig(vocab_size=len(tokenizer), **SIZES, **TOKENS)))
    convert(run.folder / "model", 2, method="mean", output_dir=run.folder / "gqa")
    pairs = ["--source_file", run.source, "--target_file", run.target]
    results = run(*pairs)
    assert results["eval_loss"] < 0.9 * results["initial_eval_loss"] and "eval_logits_divergence" not in results
    with pytest.raises(ValueError, match="--logits_weight"):
        run(*pairs, "--logits_weight", 1)


def test_encoder_with_an_encoder_decoder_configuration_uses_lines(run, tokenizer):
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4, "initializer_factor": 1.0}
    model = T5EncoderModel(T5Config(vocab_size=len(tokenizer), **sizes))
    model.config.is_encoder_decoder = True  # like the configuration of a complete T5
    run.save(model)
    convert(run.folder / "model", encoder_num_key_value_heads=2, method="mean", output_dir=run.folder / "gqa")
    results = run("--train_file", run.source)
    assert results["eval_loss"] < results["initial_eval_loss"]
