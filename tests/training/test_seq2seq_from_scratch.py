"""Check `seq2seq --model_type`: a new T5, BART and Marian, plain and as a variant, learns its pairs."""

import math

import pytest
import torch
from fixtures.commands import run_command
from fixtures.uptraining import make_text
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from hf_attn_variants.commands.training import seq2seq

BART = "d_model=32,encoder_layers=1,decoder_layers=1,encoder_attention_heads=4,decoder_attention_heads=4"
BART += ",encoder_ffn_dim=64,decoder_ffn_dim=64,max_position_embeddings=32"
SIZES = {"t5": "d_model=32,d_kv=8,d_ff=64,num_layers=1,num_heads=4", "bart": BART, "marian": BART}


@pytest.fixture
def run(t5, tmp_path):
    source = make_text(tmp_path)[0]
    target = source.with_name("target.txt")

    def call(model_type, *more, overrides=""):
        argv = ["--model_type", model_type, "--tokenizer_name", t5, "--output_dir", tmp_path / "out"]
        argv += ["--config_overrides", SIZES[model_type] + overrides, "--source_file", source, "--target_file", target]
        argv += ["--validation_source_file", source, "--validation_target_file", target, "--max_length", 16]
        argv += ["--learning_rate", 1e-2, "--dropout_rate", 0, "--cpu", "--disable_tqdm", *more]
        return run_command(seq2seq, *argv)

    call.out, call.source = tmp_path / "out", source
    return call


@pytest.mark.thorough
@pytest.mark.parametrize("variant", [[], ["--num_key_value_heads", 1]], ids=["plain", "MQA"])
@pytest.mark.parametrize("model_type", SIZES)
def test_new_seq2seq_model_learns_and_uses_the_start_of_its_architecture(run, t5, model_type, variant):
    results = run(model_type, *variant, "--max_train_steps", 60, "--num_beams", 1, 2)
    assert results["eval_loss"] < 0.7 * math.log(45)  # log(45) is the loss of a uniform prediction
    assert {"eval_bleu", "eval_bleu_beam2"} <= results.keys() and results["eval_bleu"] > 0
    model, read = AutoModelForSeq2SeqLM.from_pretrained(run.out).eval(), AutoTokenizer.from_pretrained(t5)
    config, end, padding = model.config, read.eos_token_id, read.pad_token_id
    assert config.model_type == (f"attn_variant_{model_type}" if variant else model_type)
    start = end if model_type == "bart" else padding
    assert (config.vocab_size, config.eos_token_id, config.pad_token_id) == (len(read), end, padding)
    assert config.decoder_start_token_id == model.generation_config.decoder_start_token_id == start
    assert model.generation_config.forced_eos_token_id == (None if model_type == "t5" else end)
    inputs = read(run.source.read_text().splitlines()[:4], padding=True, return_tensors="pt")
    written = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert (written[:, 0] == start).all()
    uncached = model.generate(**inputs, max_new_tokens=12, do_sample=False, use_cache=False)
    assert torch.equal(written, uncached)


def test_overrides_take_precedence(run):
    run("marian", "--max_train_steps", 1, overrides=",decoder_start_token_id=2,scale_embedding=true")
    config = AutoModelForSeq2SeqLM.from_pretrained(run.out).config
    assert (config.decoder_start_token_id, config.scale_embedding) == (2, True)
