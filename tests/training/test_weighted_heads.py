"""Check weighted key and value heads (`uptrain --multi_head_model`): exact start, gradients, merging and resuming."""

import json
import shutil

import pytest
import torch
from fixtures.commands import run_command
from fixtures.elsewhere import WITHOUT_PACKAGE, run_elsewhere
from fixtures.linear_loop import log_without_times
from fixtures.processes import run_and_check, run_script
from fixtures.uptraining import make_text
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForMaskedLM, AutoModelForSeq2SeqLM, ModernBertConfig, ModernBertModel

from hf_attn_variants.commands.training import uptrain
from hf_attn_variants.conversion import convert, convert_checkpoint
from hf_attn_variants.training.engine.loop import TrainingLoop
from hf_attn_variants.training.engine.optimization import get_no_decay_parameter_names
from hf_attn_variants.training.engine.weighted_heads import (
    WeightedHeadsLinear,
    add_weighted_heads,
    merge_weighted_heads,
)
from hf_attn_variants.training.uptraining.task import Uptraining

IDS = torch.tensor([[5, 9, 7, 11, 6], [8, 5, 5, 10, 12]])
LOAD_ELSEWHERE = (
    WITHOUT_PACKAGE
    + """
import torch, transformers
model = transformers.AutoModelForMaskedLM.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
ids, expected = torch.load(sys.argv[2])
torch.testing.assert_close(model.base_model(ids).last_hidden_state, expected, atol=1e-5, rtol=0)
"""
)


@pytest.fixture(scope="module")
def grouped_bert(bert):
    convert_checkpoint(bert, bert.parent / "gqa", 2)
    return bert.parent / "gqa"


@pytest.fixture
def flags(bert, grouped_bert, tmp_path):
    source, target = make_text(tmp_path)

    def make(*more, model=grouped_bert, multi_head_model=bert, steps=4, output_dir=tmp_path / "out"):
        is_t5 = model.parent.name.startswith("t5")
        text = ["--source_file", source, "--target_file", target] if is_t5 else ["--train_file", source]
        argv = ["--model_name_or_path", model, "--multi_head_model", multi_head_model, "--teacher", multi_head_model]
        argv += ["--objective", "distill", *text, "--max_train_steps", steps, "--cpu", "--disable_tqdm"]
        argv += ["--per_device_train_batch_size", 8, "--logging_steps", 1, "--output_dir", output_dir, *more]
        return [str(part) for part in argv]

    return make


def train(argv):
    return run_command(uptrain, *argv)


def shapes(tensors):
    return {name: tensor.shape for name, tensor in tensors.items()}


def test_weighted_heads_start_as_the_mean_of_their_group(bert, grouped_bert):
    model, grouped = (AutoModel.from_pretrained(grouped_bert).eval() for _ in range(2))
    add_weighted_heads(model, AutoModel.from_pretrained(bert))
    outputs, expected = (item(IDS).last_hidden_state for item in (model, grouped))
    torch.testing.assert_close(outputs, expected, atol=1e-5, rtol=0)
    layers = [module for module in model.modules() if isinstance(module, WeightedHeadsLinear)]
    assert [layer.weight.shape for layer in layers] == 2 * model.config.num_hidden_layers * [(32, 32)]
    names = {name for name, _ in model.named_parameters() if name.endswith("_head_weights")}
    assert len(names) == len(layers) and names <= get_no_decay_parameter_names(model)
    # The gradient of a head weight is the dot product of its head and the gradient of the grouped head.
    outputs.square().sum().backward()
    expected.square().sum().backward()
    layer, linear = (item.encoder.layer[0].attention.self.value for item in (model, grouped))
    gradients = [
        (heads.detach().view(4, -1) * grouped_heads.grad.view(2, -1).repeat_interleave(2, 0)).sum(1)
        for heads, grouped_heads in ((layer.weight, linear.weight), (layer.bias, linear.bias))
    ]
    torch.testing.assert_close(layer.value_head_weights.grad, sum(gradients), atol=1e-4, rtol=1e-4)
    assert layer.weight.grad.any() and layer.bias.grad.any()


def test_fused_projections_are_weighted_and_merged():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "initializer_range": 0.3}
    original = ModernBertModel(ModernBertConfig(**sizes, vocab_size=50, attention_bias=True, pad_token_id=0)).eval()
    model, grouped = (convert(original, num_key_value_heads=2, method="mean").eval() for _ in range(2))
    add_weighted_heads(model, original)
    outputs, expected = (item(IDS).last_hidden_state for item in (model, grouped))
    torch.testing.assert_close(outputs, expected, atol=1e-5, rtol=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("_head_weights"):
                parameter.normal_()
    outputs = model(IDS).last_hidden_state
    assert not torch.allclose(outputs, expected, atol=1e-2)
    merged = merge_weighted_heads(model)
    torch.testing.assert_close(merged(IDS).last_hidden_state, outputs, atol=1e-5, rtol=0)
    assert shapes(merged.state_dict()) == shapes(grouped.state_dict())


def test_saved_model_has_the_outputs_of_the_trained_one_without_the_package(
    flags, grouped_bert, tmp_path, monkeypatch
):
    trained, after_training = {}, Uptraining.after_training

    def keep_outputs(self, loop, model):
        layers = [module for module in self.student.modules() if isinstance(module, WeightedHeadsLinear)]
        trained["weights"] = torch.stack([layer.key_head_weights for layer in layers if "key" in layer.heads])
        with torch.no_grad():
            trained["outputs"] = self.student.eval().base_model(IDS).last_hidden_state
        return after_training(self, loop, model)

    monkeypatch.setattr(Uptraining, "after_training", keep_outputs)
    results = train(flags("--learning_rate", "1e-2", steps=20))
    assert results["eval_loss"] < results["initial_eval_loss"]
    assert not torch.isclose(trained["weights"], torch.tensor(0.5)).any()
    saved, before = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", grouped_bert))
    assert shapes(saved) == shapes(before)
    model = AutoModelForMaskedLM.from_pretrained(tmp_path / "out").eval()
    assert results["num_parameters"] == model.num_parameters()
    torch.testing.assert_close(model.base_model(IDS).last_hidden_state, trained["outputs"], atol=1e-5, rtol=0)
    torch.save((IDS, trained["outputs"]), tmp_path / "expected.pt")
    run_elsewhere("-c", LOAD_ELSEWHERE, tmp_path / "out", tmp_path / "expected.pt", cwd=tmp_path)


def test_all_attention_modules_of_an_encoder_decoder_are_weighted(flags, t5):
    grouped = t5.parent / "gqa"
    convert_checkpoint(t5, grouped, 1, encoder_num_key_value_heads=2)
    results = train(flags("--learning_rate", "1e-2", model=grouped, multi_head_model=t5, steps=10))
    assert results["eval_loss"] < results["initial_eval_loss"]
    model = AutoModelForSeq2SeqLM.from_pretrained(grouped)
    add_weighted_heads(model, AutoModelForSeq2SeqLM.from_pretrained(t5))
    heads = [module.heads for module in model.modules() if isinstance(module, WeightedHeadsLinear)]
    assert heads == 2 * [{"key": (4, 2)}, {"value": (4, 2)}] + 4 * [{"key": (4, 1)}, {"value": (4, 1)}]


@pytest.mark.thorough
def test_resumed_training_of_weighted_heads_is_bitwise_equal(flags, tmp_path):
    more = ["--checkpointing_steps", 4, "--eval_steps", 3, "--metric_for_best_model", "loss"]
    train(flags(*more, steps=10, output_dir=tmp_path / "whole"))
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    shutil.rmtree(tmp_path / "again/checkpoint-8")
    more += ["--resume_from_checkpoint", "latest"]
    train(flags(*more, steps=10, output_dir=tmp_path / "again"))
    assert log_without_times(tmp_path / "whole") == log_without_times(tmp_path / "again")
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "again")]
    assert weights[0] == weights[1]


@pytest.mark.thorough
def test_weighted_heads_in_two_processes_equal_one_with_a_double_batch(flags, tmp_path):
    one = train(flags(steps=3, output_dir=tmp_path / "one"))
    argv = flags("--per_device_train_batch_size", 4, steps=3, output_dir=tmp_path / "two")
    run_and_check(2, run_script, "uptrain", argv)
    two = json.loads((tmp_path / "two/all_results.json").read_text())
    for name in ("initial_eval_loss", "eval_loss", "train_loss", "num_parameters"):
        assert two[name] == pytest.approx(one[name], rel=1e-4)


def test_weighted_heads_errors_are_raised_before_training(flags, bert, grouped_bert, tmp_path, monkeypatch):
    monkeypatch.setattr(TrainingLoop, "_run_optimizer_step", None)
    pytest.importorskip("peft")
    with pytest.raises(ValueError, match="--multi_head_model must not be combined with --trainable lora"):
        train(flags("--trainable", "lora"))
    with pytest.raises(ValueError, match="must have more key/value heads than the trained model"):
        train(flags(model=bert))
    convert_checkpoint(bert, tmp_path / "first", 2, method="first")
    message = r"`encoder\.layer\.0\.attention\.self\.key` is not the mean of its heads\. Convert .* --method mean"
    with pytest.raises(ValueError, match=message):
        train(flags(model=tmp_path / "first"))
    with pytest.raises(ValueError, match="is not the mean of its heads"):
        train(flags(model=bert, multi_head_model=grouped_bert))
    model = AutoModel.from_pretrained(grouped_bert)
    with pytest.raises(ValueError, match=r"must have the attention module `encoder\.layer\.1\.attention`"):
        add_weighted_heads(model, AutoModel.from_pretrained(bert, num_hidden_layers=1))
