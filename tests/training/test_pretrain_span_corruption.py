"""Check span-corruption pretraining on the license text: a whole run, exact resume, and early errors."""

import pytest
from fixtures.commands import run_command
from fixtures.licence_text import write_shards
from fixtures.linear_loop import log_of
from fixtures.span_corruption import make_sentinel_tokenizer
from transformers import AutoModelForSeq2SeqLM

from hf_attn_variants import AttnVariantT5ForConditionalGeneration
from hf_attn_variants.commands.training import pretrain_t5

TINY = "d_model=32,d_kv=8,d_ff=64,num_layers=2,num_heads=4,relative_attention_num_buckets=8"


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A tokenizer, two shards and a held-out file of the license."""
    folder = write_shards(tmp_path_factory.mktemp("text"))
    make_sentinel_tokenizer(folder / "tokenizer")
    return folder


@pytest.fixture
def run(text, tmp_path):
    def call(*more, output_dir=tmp_path / "out", scratch=True):
        argv = ["--train_file", *sorted(text.glob("train-*.txt.gz")), "--validation_file", text / "valid.txt"]
        argv += ["--model_type", "t5", "--tokenizer_name", text / "tokenizer"] if scratch else []
        argv += ["--config_overrides", TINY, "--num_key_value_heads", 1] if scratch else []
        argv += ["--output_dir", output_dir, "--max_length", 32, "--per_device_train_batch_size", 8]
        argv += ["--max_eval_samples", 8, "--optim", "adafactor", "--adafactor_scale_parameter"]
        argv += ["--learning_rate", 2e-2, "--lr_scheduler_type", "constant", "--logging_steps", 1, "--cpu"]
        argv += ["--shuffle_buffer_size", 16, "--disable_tqdm", *more]
        return run_command(pretrain_t5, *argv)

    call.out = tmp_path / "out"
    return call


@pytest.mark.thorough
def test_new_t5_variant_learns_and_continues_from_its_checkpoint(run):
    results = run("--max_train_steps", 40, "--eval_steps", 20)
    log = log_of(run.out)
    losses = [record["loss"] for record in log if "loss" in record]
    assert len(losses) == 40 and sum(losses[-5:]) < 0.8 * sum(losses[:5])
    assert results["block_length"] == 34 and results["target_length"] == 8
    # Two spans mask 5 of 34 tokens, which gives 32 inputs and 8 targets. The last block of an epoch has fewer.
    assert 0.99 < results["train_tokens"] / (40 * results["train_samples"]) <= 1 and results["steps"] == 40
    assert results["train_samples"] > 300 and results["train_tflops_per_second"] > 0
    assert {"eval_perplexity", "eval_accuracy", "gate_passed", "gate_shuffled_cost"} <= results.keys()
    assert (run.out / "training_curves.png").read_bytes().startswith(b"\x89PNG")
    model = AutoModelForSeq2SeqLM.from_pretrained(run.out)
    assert isinstance(model, AttnVariantT5ForConditionalGeneration) and model.config.num_key_value_heads == 1
    folder = run.out.with_name("more")
    again = run("--num_train_epochs", 0, "--model_name_or_path", run.out, output_dir=folder, scratch=False)
    assert again["eval_loss"] == pytest.approx(results["eval_loss"], rel=1e-5) and again["steps"] == 0


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--noise_density", 1], r"--noise_density must be in \(0, 1\), got 1.0"),
        (["--mean_noise_span_length", 0.5], "--mean_noise_span_length must be at least 1"),
        (["--max_length", 512], "28 sentinels.*got 8"),
        (["--num_train_epochs", 1], "--max_train_steps"),
        (["--max_train_steps", 1, "--metric_for_best_model", "bleu"], "must be one of loss, perplexity, accuracy"),
        (["--max_train_steps", 1, "--shuffle_buffer_size", 0], "--shuffle_buffer_size must be at least 1"),
    ],
)
def test_span_corruption_rejects_invalid_flags_before_any_work(run, more, message):
    more = more if "--max_train_steps" in more or "--num_train_epochs" in more else [*more, "--max_train_steps", 1]
    with pytest.raises(ValueError, match=message):
        run(*more)
    assert not (run.out / "all_results.json").exists()


def test_encoder_with_span_corruption_raises_an_error(run, tiny_bert):
    with pytest.raises(ValueError, match=r"\(bert\)"):
        run("--max_train_steps", 1, "--model_name_or_path", tiny_bert, scratch=False)
