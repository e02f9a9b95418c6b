"""Check `pretrain --objective clm`: the loss, causality, whole runs, decoding, resumed runs and errors."""

import json
import math

import numpy as np
import pytest
import torch
from fixtures.commands import run_command
from fixtures.linear_loop import log_of
from fixtures.uptraining import make_bert
from safetensors.torch import load_file
from transformers import (
    AlbertConfig,
    AutoModelForCausalLM,
    BartConfig,
    BertConfig,
    BertLMHeadModel,
    DistilBertConfig,
    ElectraConfig,
    ElectraForCausalLM,
    RobertaConfig,
    RobertaForCausalLM,
)

from hf_attn_variants import (
    AttnVariantBertConfig,
    AttnVariantBertLMHeadModel,
    AttnVariantElectraConfig,
    AttnVariantElectraForCausalLM,
    AttnVariantRobertaConfig,
    AttnVariantRobertaForCausalLM,
)
from hf_attn_variants.commands.training import pretrain
from hf_attn_variants.training.engine.dataloaders import IGNORED_LABEL
from hf_attn_variants.training.engine.loop import TrainingLoop
from hf_attn_variants.training.engine.optimization import compute_label_statistics, make_cross_entropy_objective
from hf_attn_variants.training.pretraining.task import CausalLMPreparer, compute_causal_logits, shuffle_positions

TINY = "hidden_size=32,num_hidden_layers=2,num_attention_heads=4,intermediate_size=64,max_position_embeddings=64"
SIZES = {"vocab_size": 60, "hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 32}
SIZES |= {"num_hidden_layers": 2, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "is_decoder": True}
WINDOW = {"attention_pattern": "sliding_window", "attention_window": 4}
MODELS = {
    "bert": (BertLMHeadModel, BertConfig, {}),
    "roberta": (RobertaForCausalLM, RobertaConfig, {}),
    "electra": (ElectraForCausalLM, ElectraConfig, {"embedding_size": 8}),
    "MQA bert": (AttnVariantBertLMHeadModel, AttnVariantBertConfig, {"num_key_value_heads": 1}),
    "GQA roberta": (AttnVariantRobertaForCausalLM, AttnVariantRobertaConfig, {"num_key_value_heads": 2}),
    "window": (AttnVariantBertLMHeadModel, AttnVariantBertConfig, WINDOW | {"num_key_value_heads": 2}),
    "elu": (AttnVariantBertLMHeadModel, AttnVariantBertConfig, {"attention_kernel": "elu"}),
    "talking electra": (AttnVariantElectraForCausalLM, AttnVariantElectraConfig, {"talking_heads": "both"}),
    "latent": (AttnVariantBertLMHeadModel, AttnVariantBertConfig, {"kv_lora_rank": 8}),
}


def load_model(name):
    model_class, config_class, fields = MODELS[name]
    torch.manual_seed(0)
    model = model_class(config_class(**SIZES, **fields)).eval()
    torch.nn.init.normal_(model.get_output_embeddings().weight, std=0.5)
    return model


@pytest.fixture
def run(text, tokenizer, tmp_path):
    def flags(*more, model=None, output_dir=tmp_path / "out", objective="clm"):
        argv = ["--objective", objective, "--output_dir", output_dir, "--max_length", 24]
        argv += ["--train_file", *sorted(text.glob("train-*.txt.gz")), "--validation_file", text / "valid.txt"]
        argv += ["--model_name_or_path", model] if model is not None else ["--tokenizer_name", tokenizer.name_or_path]
        argv += ["--per_device_train_batch_size", 8, "--max_eval_samples", 8, "--learning_rate", "5e-3", "--cpu"]
        argv += ["--logging_steps", 1, "--shuffle_buffer_size", 10, "--disable_tqdm", *more]
        return [str(item) for item in argv]

    def call(*more, **options):
        return run_command(pretrain, *flags(*more, **options))

    call.flags, call.out = flags, tmp_path / "out"
    return call


def make_scratch_flags(model_type="bert", *more):
    return ["--model_type", model_type, "--config_overrides", TINY, *more]


def make_batch(tokenizer, length=10, rows=3):
    """Return random blocks, the last one short, and the batch that they form."""
    prepare = CausalLMPreparer(tokenizer, length)
    generator = np.random.default_rng(0)
    blocks = [generator.integers(5, 60, length if i < rows - 1 else length - 4) for i in range(rows)]
    examples = [prepare(block, (0, i)) for i, block in enumerate(blocks)]
    return blocks, {name: torch.from_numpy(np.stack([e[name] for e in examples])) for name in examples[0]}


def test_each_token_is_predicted_once_from_earlier_tokens(tokenizer):
    blocks, batch = make_batch(tokenizer)
    prepare = CausalLMPreparer(tokenizer, 10)
    assert prepare.block_length == 10 and prepare.separator == tokenizer.sep_token_id
    for i, block in enumerate(blocks):
        n = len(block)
        assert batch["input_ids"][i, :n].tolist() == [tokenizer.cls_token_id, *block[:-1]]
        assert batch["labels"][i, :n].tolist() == block.tolist()
        assert batch["attention_mask"][i].tolist() == [1] * n + [0] * (10 - n)
        assert (batch["labels"][i, n:] == IGNORED_LABEL).all()
        assert (batch["input_ids"][i, n:] == tokenizer.pad_token_id).all()
    assert prepare(blocks[0][:1], (0, 0))["attention_mask"].sum() == 1


@pytest.mark.parametrize("name", MODELS)
def test_clm_loss_equals_the_formula_and_transformers(tokenizer, name):
    model, (blocks, batch) = load_model(name), make_batch(tokenizer)
    actual = make_cross_entropy_objective(compute_causal_logits).loss_sum(model, batch)
    sums = compute_label_statistics(compute_causal_logits(model, batch), batch["labels"])
    assert (
        make_cross_entropy_objective(compute_causal_logits).count(batch) == sum(map(len, blocks)) == sums[:, 2].sum()
    )
    torch.testing.assert_close(actual, sums[:, 0].sum())
    for i, block in enumerate(blocks):
        ids = torch.tensor([[tokenizer.cls_token_id, *block]])
        with torch.no_grad():
            output = model(input_ids=ids, labels=ids)  # Transformers shifts the labels
        expected = 0.0
        for place, token in enumerate(block):
            logits = output.logits[0, place].double()
            expected -= math.log(
                math.exp(logits[token] - logits.max()) / float(torch.exp(logits - logits.max()).sum())
            )
        assert sums[i, 0].item() == pytest.approx(expected, rel=1e-5)
        assert sums[i, 0].item() / len(block) == pytest.approx(output.loss.item(), rel=1e-5)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_clm_loss_does_not_depend_on_later_tokens(tokenizer, name):
    model, (_, batch) = load_model(name), make_batch(tokenizer)
    changed = {key: tensor.clone() for key, tensor in batch.items()}
    changed["input_ids"][:, 5] = (changed["input_ids"][:, 5] + 7) % 60
    before, after = compute_causal_logits(model, batch), compute_causal_logits(model, changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:2, 5:], after[:2, 5:])


def test_shuffling_keeps_the_next_token_of_each_word(tokenizer):
    _, batch = make_batch(tokenizer)
    shuffled = shuffle_positions(batch)
    for i in range(3):
        pairs = [
            sorted(zip(b["input_ids"][i].tolist(), b["labels"][i].tolist(), strict=True)) for b in (batch, shuffled)
        ]
        assert pairs[0] == pairs[1]
    assert not torch.equal(batch["input_ids"], shuffled["input_ids"])
    one = {name: tensor[:, :1] for name, tensor in batch.items()}
    assert torch.equal(shuffle_positions(one)["input_ids"], one["input_ids"])


@pytest.mark.thorough
@pytest.mark.parametrize(
    "more",
    [
        ["--num_key_value_heads", 1],
        ["--attention_pattern", "sliding_window", "--attention_window", 8],
        ["--config_overrides", f"{TINY},attention_kernel=elu"],
    ],
    ids=["MQA", "window", "elu"],
)
def test_new_clm_variant_learns_and_generates_with_a_cache(run, tokenizer, more, tmp_path):
    results = run(*make_scratch_flags(), *more, "--max_train_steps", 40, "--eval_steps", 20)
    log = log_of(run.out)
    losses = [record["loss"] for record in log if "loss" in record]
    assert len(losses) == 40 and sum(losses[-5:]) < 0.8 * sum(losses[:5])
    assert results["eval_perplexity"] == pytest.approx(math.exp(results["eval_loss"]))
    assert results["eval_predicted_tokens"] == 8 * 24 and "gate_passed" in results
    model = AutoModelForCausalLM.from_pretrained(run.out).eval()
    assert type(model) is AttnVariantBertLMHeadModel and model.config.is_decoder
    auto_map = json.loads((run.out / "config.json").read_text())["auto_map"]
    assert (run.out / f"{auto_map['AutoModelForCausalLM'].partition('.')[0]}.py").is_file()
    assert (model.generation_config.bos_token_id, model.generation_config.eos_token_id) == (
        tokenizer.cls_token_id,
        tokenizer.sep_token_id,
    )
    prompt = tokenizer(["you may", "any"], add_special_tokens=False)["input_ids"]
    for ids in prompt:
        inputs = torch.tensor([[tokenizer.cls_token_id, *ids]])
        options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
        cached, plain = (model.generate(inputs, use_cache=use, **options) for use in (True, False))
        assert cached.shape[1] == inputs.shape[1] + 12 and torch.equal(cached, plain)
    again = run("--num_train_epochs", 0, model=run.out, output_dir=tmp_path / "again")
    assert again["eval_loss"] == pytest.approx(results["eval_loss"], rel=1e-5) and again["steps"] == 0


@pytest.mark.parametrize("model_type", ["roberta", "electra"])
def test_relatives_of_bert_train_as_decoders(run, model_type):
    results = run(*make_scratch_flags(model_type), "--max_train_steps", 2)
    model = AutoModelForCausalLM.from_pretrained(run.out)
    assert type(model).__name__ == {"roberta": "RobertaForCausalLM", "electra": "ElectraForCausalLM"}[model_type]
    assert model.config.is_decoder and math.isfinite(results["eval_loss"])


def test_encoder_checkpoint_continues_as_a_decoder(run, tiny_bert, tmp_path, caplog):
    encoder = make_bert(tmp_path / "bert", tiny_bert)
    with caplog.at_level("INFO", logger="hf_attn_variants"):
        run("--max_train_steps", 2, "--learning_rate", 0, model=encoder)
    assert "(bert) was an encoder. It is converted to a decoder" in caplog.text
    weights, encoder_weights = (load_file(folder / "model.safetensors") for folder in (run.out, encoder))
    assert weights.keys() == encoder_weights.keys()
    assert all(torch.equal(weights[name], encoder_weights[name]) for name in encoder_weights)
    assert json.loads((run.out / "config.json").read_text())["is_decoder"]
    with pytest.raises(ValueError, match=r"is a decoder .*--objective clm"):
        run("--max_train_steps", 2, model=run.out, objective="mlm", output_dir=tmp_path / "mlm")


def test_resumed_clm_run_is_bitwise_equal(run, tmp_path):
    flags = [*make_scratch_flags("bert", "--num_key_value_heads", 2), "--max_train_steps", 7]
    flags += ["--checkpointing_steps", 4]
    complete_run = run(*flags)
    checkpoint = ["--resume_from_checkpoint", run.out / "checkpoint-4"]
    resumed = run(*flags, *checkpoint, output_dir=tmp_path / "resumed")
    assert resumed["train_loss"] == complete_run["train_loss"] and resumed["eval_loss"] == complete_run["eval_loss"]
    weights = [(folder / "model.safetensors").read_bytes() for folder in (run.out, tmp_path / "resumed")]
    assert weights[0] == weights[1]
    with pytest.raises(ValueError, match="objective was clm and is now mlm"):
        run(*flags, *checkpoint, objective="mlm", output_dir=tmp_path / "masked")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (make_scratch_flags("albert"), r"\(albert\) does not support causal"),
        (["--model_type", "bert", "--config_overrides", f"{TINY},attention_kernel=linformer"], "linformer"),
    ],
)  # fmt: skip
def test_models_that_cannot_be_causal_raise_before_writing(run, more, message, monkeypatch):
    monkeypatch.setattr(TrainingLoop, "_run_optimizer_step", None)
    with pytest.raises(ValueError, match=message):
        run(*more, "--max_train_steps", 1)
    assert not run.out.exists()


def test_checkpoint_without_a_causal_class_raises_an_error(run, tiny_bert, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(TrainingLoop, "_run_optimizer_step", None)
    size = len(tokenizer)
    configs = {
        "albert": (AlbertConfig(vocab_size=size), r"\(albert\)"),
        "distilbert": (DistilBertConfig(vocab_size=size), r"\(distilbert\)"),
        "bart": (BartConfig(vocab_size=size), r"\(bart\).*--objective"),
    }
    for name, (config, message) in configs.items():
        config.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
        with pytest.raises(ValueError, match=message):
            run("--max_train_steps", 1, model=tmp_path / name)
