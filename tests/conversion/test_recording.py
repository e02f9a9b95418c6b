"""Check the recorded attention inputs, including patterns, and `compute_attention` against the formula."""

from dataclasses import replace

import pytest
import torch
from architectures import ALBERT, BERT, T5
from fixtures.attention_tensors import make_attention_tensors
from relatives import RELATIVES
from torch import nn

from hf_attn_variants.conversion.calibration.recording import (
    AttentionInputs,
    compute_attention,
    compute_attention_weights,
    record_inputs,
)
from hf_attn_variants.conversion.checkpoint.models import ModelReader
from hf_attn_variants.conversion.conversions import resolve_method
from hf_attn_variants.conversion.plan import make_plan
from hf_attn_variants.modeling.mechanisms.patterns.pattern_table import PATTERNS, get_pattern_class

HEADS, HEAD_DIM, SIZE, BATCH, LENGTH = 4, 6, 10, 3, 7


def make_tensors(kv_heads):
    return make_attention_tensors(HEADS, kv_heads, HEAD_DIM, SIZE, ("query", "key", "value"), dtype=torch.float64)


def make_inputs(mask: str, with_bias: bool, memory_length: int) -> AttentionInputs:
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(BATCH, LENGTH, SIZE, generator=generator, dtype=torch.float64)
    memory = states
    if memory_length != LENGTH:
        memory = torch.randn(BATCH, memory_length, SIZE, generator=generator, dtype=torch.float64)
    valid, additive = torch.ones(BATCH, LENGTH, dtype=torch.bool), None
    if mask == "padding":
        additive = torch.zeros(BATCH, 1, LENGTH, memory_length, dtype=torch.float64)
        additive[1, :, :, -3:] = torch.finfo(torch.float64).min
        if memory is states:
            valid[1, -3:] = False
    bias = None
    if with_bias:
        bias = torch.randn(1, HEADS, LENGTH, memory_length, generator=generator, dtype=torch.float64)
    return AttentionInputs(states, memory, additive, bias, valid, HEAD_DIM**-0.5, is_causal=mask == "causal")


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(
    ("mask", "memory_length"),
    [("none", LENGTH), ("none", 5), ("none", 1), ("padding", LENGTH), ("padding", 5), ("causal", LENGTH)],
)
def test_compute_attention_equals_the_formula(mask, with_bias, memory_length, kv_heads):
    attention, inputs = make_tensors(kv_heads), make_inputs(mask, with_bias, memory_length)
    names = [name for name, value in vars(attention).items() if isinstance(value, torch.Tensor)]
    results = []
    for fused in (True, False):
        parts = {name: getattr(attention, name).clone().requires_grad_() for name in names}
        changed = replace(attention, **parts)
        if fused:
            output = compute_attention(changed, inputs, HEADS)[0]
        else:
            weights = compute_attention_weights(changed, inputs, HEADS)
            values = nn.functional.linear(inputs.key_value_states, parts["value_weight"], parts["value_bias"])
            values = values.unflatten(-1, (kv_heads, HEAD_DIM)).repeat_interleave(HEADS // kv_heads, dim=2)
            context = torch.einsum("bhnm,bmhd->bnhd", weights, values).flatten(2)
            output = nn.functional.linear(context, parts["output_weight"])
        output[inputs.valid].square().mean().backward()
        results.append([output[inputs.valid].detach(), *(parts[name].grad for name in names)])
    torch.testing.assert_close(*results)


OF_PATTERNS = {
    "sliding_window": {"attention_window": 4},
    "random_blocks": {"attention_block_size": 2, "num_random_blocks": 1},
    "strided": {"attention_block_size": 3, "split_attention_heads": True},
    "fixed": {"attention_block_size": 3, "num_summary_tokens": 1, "split_attention_heads": True},
    "local_blocks": {"attention_block_size": 3},
    "dilated_blocks": {"attention_block_size": 2, "attention_dilation": 2},
}
BART = next(item for item in RELATIVES if item.name == "bart")
PATTERNED = [
    (BERT, "BertModel", ""),
    (ALBERT, "AlbertModel", ""),
    (T5, "T5Model", ""),
    (T5, "T5Model", "encoder_"),
    (BART, "BartModel", "encoder_"),
]


def record_contexts(model, batch):
    """Return the inputs of the output projection of each attention module, {path: tensors of its calls}."""
    actual = {}
    for site, path, module in model.named_attention_modules():
        read = actual.setdefault(path, [])
        module.get_submodule(site.output).register_forward_pre_hook(lambda _, args, read=read: read.append(args[0]))
    with torch.no_grad():
        model.base_model(**batch)
    return actual


@pytest.mark.parametrize("is_padded", [True, False], ids=["padded", "whole"])
@pytest.mark.parametrize("pattern", OF_PATTERNS)
@pytest.mark.parametrize(("architecture", "head", "prefix"), PATTERNED)
def test_recorded_patterns_give_the_outputs_of_the_model(architecture, head, prefix, pattern, is_padded):
    """Check texts, including rows that are padded on either side."""
    fields = OF_PATTERNS[pattern] | {"attention_pattern": pattern}
    model = architecture.make_model(head, **{f"{prefix}{name}": value for name, value in fields.items()})
    generator = torch.Generator().manual_seed(0)
    mask = torch.ones(3, 9, dtype=torch.long)
    if is_padded:
        mask[0, :2], mask[1, -3:] = 0, 0
    batch = {"input_ids": torch.randint(3, 50, (3, 9), generator=generator), "attention_mask": mask}
    if model.config.is_encoder_decoder:
        batch["decoder_input_ids"] = torch.randint(3, 50, (3, 7), generator=generator)
    fewer = dict.fromkeys(model.config.get_kv_heads_fields(), 2)
    reader = ModelReader(model)
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    plan = make_plan(config, reader.entries, resolve_method("mean"), fewer)
    paths = [module.name for module in plan.reduced_modules]
    calls = record_inputs(model, paths, [batch])
    expected = record_contexts(model, batch)
    patterned = {
        path for site, path, module in model.named_attention_modules() if module.get_submodule(site.core).key_range
    }
    assert patterned and patterned <= {*paths} <= expected.keys()
    for module in plan.reduced_modules:
        tensors = module.read_tensors(reader.read)
        assert len(calls[module.name]) == len(expected[module.name])
        for inputs, context in zip(calls[module.name], expected[module.name], strict=True):
            actual = compute_attention(tensors, inputs, module.heads.query)[1]
            valid = inputs.valid[..., : context.shape[1]]
            torch.testing.assert_close(actual[valid], context[valid], atol=2e-5, rtol=2e-5)


def test_every_pattern_is_recorded_or_raises_an_error():
    assert {name for name in PATTERNS if not get_pattern_class(name).learned} == OF_PATTERNS.keys()
