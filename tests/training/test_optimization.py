"""Check optimizers and schedules."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, T5Config, T5ForConditionalGeneration

from hf_attn_variants.training.engine.optimization import (
    create_optimizer,
    create_scheduler,
    get_no_decay_parameter_names,
    make_parameter_groups,
)
from hf_attn_variants.training.engine.settings import OptimizationSettings

SETTINGS = OptimizationSettings(learning_rate=1e-2, weight_decay=0.5, warmup_ratio=0.25)


class TalkingHeadsSettings(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Linear(4, 4)
        self.logits_proj = nn.Parameter(torch.eye(2))
        self.weights_proj = nn.Parameter(torch.eye(2))
        self.x2l_proj = nn.Parameter(torch.ones(4, 4))


def test_parameters_without_decay_are_known():
    bert = BertForSequenceClassification(
        BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
    )
    assert get_no_decay_parameter_names(bert) == {
        name for name, _ in bert.named_parameters() if name.endswith("bias") or "LayerNorm" in name
    }
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=9, d_model=8, num_layers=1, d_ff=8, num_heads=2, d_kv=4))
    exempt = get_no_decay_parameter_names(t5)
    assert "encoder.final_layer_norm.weight" in exempt
    assert not any("relative_attention_bias" in name for name in exempt)
    assert get_no_decay_parameter_names(nn.Sequential(TalkingHeadsSettings())) == {
        "0.query.bias",
        "0.logits_proj",
        "0.weights_proj",
    }


def test_weight_decay_does_not_apply_to_identity_projections():
    model = TalkingHeadsSettings()
    before = model.query.weight.detach().clone()
    optimizer = create_optimizer(model, SETTINGS)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    torch.testing.assert_close(model.query.weight.detach(), before * (1 - 1e-2 * 0.5))
    assert torch.equal(model.logits_proj, torch.eye(2))


def step_on_ones(model, optimizer, scheduler):
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    scheduler.step()


def make_adafactor(**changed):
    flags = {"optim": "adafactor", "adafactor_scale_parameter": False, "adafactor_relative_step": False}
    model, args = TalkingHeadsSettings(), replace(SETTINGS, **flags | {"weight_decay": 0.0} | changed)
    optimizer = create_optimizer(model, args)
    return model, optimizer, create_scheduler(optimizer, args, total_steps=8)


def test_adafactor_uses_the_learning_rate_and_schedule():
    # With a gradient of ones, the first update is one everywhere, so the step equals the learning rate.
    model, optimizer, scheduler = make_adafactor(warmup_ratio=0.0)
    before = model.query.weight.detach().clone()
    step_on_ones(model, optimizer, scheduler)
    torch.testing.assert_close(model.query.weight.detach(), before - 1e-2)
    assert scheduler.get_last_lr()[0] == pytest.approx(1e-2 * 7 / 8)
    state = optimizer.state[model.query.weight]
    assert sum(value.numel() for value in state.values() if torch.is_tensor(value)) < model.query.weight.numel()


def test_adafactor_scales_steps_by_each_parameter():
    model, optimizer, scheduler = make_adafactor(warmup_ratio=0.0, adafactor_scale_parameter=True)
    model.x2l_proj.data.fill_(3.0)
    step_on_ones(model, optimizer, scheduler)
    torch.testing.assert_close(model.x2l_proj.detach(), torch.full((4, 4), 3.0 - 3.0 * 1e-2))


def test_adafactor_relative_steps_replace_the_schedule():
    model, optimizer, scheduler = make_adafactor(adafactor_relative_step=True, warmup_ratio=0.0)
    rates = []
    for _ in range(3):
        step_on_ones(model, optimizer, scheduler)
        rates.append(scheduler.get_last_lr()[0])
    assert rates == pytest.approx([1e-6, 2e-6, 3e-6])


def test_schedule_is_needed_only_for_training():
    optimizer = create_optimizer(TalkingHeadsSettings(), SETTINGS)
    settings = {**vars(SETTINGS), "lr_scheduler_type": "polynomial", "warmup_ratio": 0.0}
    assert create_scheduler(optimizer, OptimizationSettings(**settings), total_steps=0).get_last_lr()[0] == 1e-2
    with pytest.raises(ValueError, match=r"--num_warmup_steps.*polynomial"):
        create_scheduler(optimizer, OptimizationSettings(**settings | {"num_warmup_steps": 8}), total_steps=8)


def test_parameter_groups_contain_each_trainable_parameter_once():
    model = TalkingHeadsSettings()
    model.x2l_proj.requires_grad_(False)
    grouped = [id(parameter) for group in make_parameter_groups(model, 0.1) for parameter in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters() if p.requires_grad)


def get_rates_of_eight_steps(optimizer, **changed):
    scheduler = create_scheduler(optimizer, replace(SETTINGS, **changed), total_steps=8)
    rates = []
    for _ in range(8):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize(
    ("kind", "settings", "expected"),
    [
        ("cosine", {}, [0.5 * (1 + math.cos(math.pi * i / 6)) for i in range(6)]),
        ("cosine", {"num_cycles": 1}, [0.5 * (1 + math.cos(2 * math.pi * i / 6)) for i in range(6)]),
        ("inverse_sqrt", {}, [math.sqrt(2 / step) for step in range(2, 8)]),
        # Two steps at the peak, and then a cosine over four steps.
        ("warmup_stable_decay", {"num_decay_steps": 4}, [1, 1, 1, 0.5 * (1 + math.sqrt(0.5)), 0.5, 0.5 - 0.125**0.5]),
        ("warmup_stable_decay", {"num_decay_steps": 4, "decay_type": "linear"}, [1, 1, 1, 0.75, 0.5, 0.25]),
    ],
)
def test_schedules_equal_their_formulas_after_the_warmup(kind, settings, expected):
    optimizer = create_optimizer(TalkingHeadsSettings(), SETTINGS)
    rates = get_rates_of_eight_steps(optimizer, lr_scheduler_type=kind, lr_scheduler_kwargs=settings)
    assert rates == pytest.approx([0.0, 5e-3, *(1e-2 * part for part in expected)])


def test_warmup_ratio_is_limited():
    optimizer = create_optimizer(TalkingHeadsSettings(), SETTINGS)
    rates = get_rates_of_eight_steps(optimizer)
    assert rates[:3] == [0.0, 5e-3, 1e-2] and rates[3:] == sorted(rates[3:], reverse=True)
    with pytest.raises(ValueError, match="at most 8"):
        create_scheduler(optimizer, replace(SETTINGS, warmup_ratio=0.0, num_warmup_steps=9), total_steps=8)
    with pytest.raises(ValueError, match="is not valid for linear"):
        create_scheduler(optimizer, replace(SETTINGS, lr_scheduler_kwargs={"x": 1}), total_steps=8)


def test_run_without_steps_has_no_warmup():
    from hf_attn_variants.training.engine.settings import get_warmup_steps

    assert get_warmup_steps(replace(SETTINGS, warmup_ratio=0.0, num_warmup_steps=9), total_steps=0) == 0
