"""`attend` by fused kernels against the plain formula: values and gradients, for every mask that is recorded."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from hf_attn_variants.conversion.calibration.recording import AttentionInputs, attend, attention_weights
from hf_attn_variants.conversion.projections import AttentionTensors

HEADS, HEAD_DIM, SIZE, BATCH, LENGTH = 4, 6, 10, 3, 7


def tensors(kv_heads: int) -> AttentionTensors:
    generator = torch.Generator().manual_seed(0)
    rows = {"query": HEADS, "key": kv_heads, "value": kv_heads}
    parts = {}
    for role, heads in rows.items():
        parts[f"{role}_weight"] = torch.randn(heads * HEAD_DIM, SIZE, generator=generator, dtype=torch.float64)
        parts[f"{role}_bias"] = torch.randn(heads * HEAD_DIM, generator=generator, dtype=torch.float64)
    output = torch.randn(SIZE, HEADS * HEAD_DIM, generator=generator, dtype=torch.float64)
    return AttentionTensors(**parts, output_weight=output)


def recorded(mask: str, with_bias: bool, memory_length: int) -> AttentionInputs:
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
def test_fused_attention_is_the_plain_formula(mask, with_bias, memory_length, kv_heads):
    attention, inputs = tensors(kv_heads), recorded(mask, with_bias, memory_length)
    names = [name for name, value in vars(attention).items() if isinstance(value, torch.Tensor)]
    results = []
    for fused in (True, False):
        parts = {name: getattr(attention, name).clone().requires_grad_() for name in names}
        given = replace(attention, **parts)
        if fused:
            output = attend(given, inputs, HEADS)[0]
        else:
            weights = attention_weights(given, inputs, HEADS)
            values = nn.functional.linear(inputs.memory, parts["value_weight"], parts["value_bias"])
            values = values.unflatten(-1, (kv_heads, HEAD_DIM)).repeat_interleave(HEADS // kv_heads, dim=2)
            context = torch.einsum("bhnm,bmhd->bnhd", weights, values).flatten(2)
            output = nn.functional.linear(context, parts["output_weight"])
        output[inputs.valid].square().mean().backward()
        results.append([output[inputs.valid].detach(), *(parts[name].grad for name in names)])
    torch.testing.assert_close(*results)
