"""Check dropout of talking-heads weights: it drops single weights, the same ones in both passes."""

import pytest
import torch
from fixtures.talking_heads_calls import BACKENDS, B, get_device, make_inputs
from torch.utils.checkpoint import checkpoint

from hf_attn_variants.modeling.ops.memory_efficient_attention import talking_heads_attention

pytestmark = pytest.mark.usefixtures("small_blocks")


@pytest.mark.parametrize("backend", BACKENDS)
def test_talking_heads_dropout_drops_single_weights(backend):
    device, dropout = get_device(backend), 0.25
    query, key, _, _, logits_proj, weights_proj = make_inputs(n=6, m=80, device=device)
    # With identity matrices as values, the outputs are the weights.
    value = torch.eye(80, device=device).expand(B, 4, 80, 80)
    call = {"scaling": 1.0, "logits_proj": logits_proj, "weights_proj": weights_proj, "backend": backend}
    weights = talking_heads_attention(query, key, value, **call)  # [b, n, h_v, m]
    dropped = talking_heads_attention(query, key, value, dropout=dropout, **call)
    is_kept = dropped != 0
    assert abs(is_kept.float().mean() - (1 - dropout)) < 0.03
    torch.testing.assert_close(dropped[is_kept], weights[is_kept] / (1 - dropout), rtol=1e-4, atol=1e-6)
    for first, second in (
        (is_kept[0], is_kept[1]),
        (is_kept[:, :3], is_kept[:, 3:]),
        (is_kept[:, :, 0], is_kept[:, :, 1]),
    ):
        assert abs((first == second).float().mean() - (dropout**2 + (1 - dropout) ** 2)) < 0.06
    again = talking_heads_attention(query, key, value, dropout=dropout, **call) != 0
    assert (again != is_kept).any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_talking_heads_dropout_is_the_same_in_both_passes(backend):
    inputs = make_inputs("all different", device=get_device(backend))
    query, key, value, _, logits_proj, weights_proj = inputs

    def attend(value, weights_proj):
        torch.manual_seed(3)
        return talking_heads_attention(
            query, key, value, scaling=1.0, dropout=0.4, logits_proj=logits_proj, weights_proj=weights_proj,
            backend=backend,
        )  # fmt: skip

    output = attend(value, weights_proj)
    direction = torch.randn_like(output)
    output.backward(direction)
    # With a fixed dropout mask, the output is linear in V and in P_w.
    for moved, change in (
        (attend(value + 1, weights_proj), value.grad.sum()),
        (attend(value, weights_proj + 1), weights_proj.grad.sum()),
    ):
        torch.testing.assert_close(((moved - output) * direction).sum(), change, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("batches", [1, B])
def test_talking_heads_dropout_does_not_depend_on_the_number_of_threads(set_threads, batches):
    query, key, value, _, logits_proj, weights_proj = make_inputs(n=12, dtype=torch.float64)
    value = value[:batches].detach().requires_grad_()
    set_threads(3)
    output = talking_heads_attention(
        query[:batches], key[:batches], value, scaling=1.0, dropout=0.5, logits_proj=logits_proj,
        weights_proj=weights_proj,
    )  # fmt: skip
    set_threads(1)
    d_output = torch.randn_like(output)
    output.backward(d_output)
    # With a fixed dropout mask, the output is linear in the values.
    torch.testing.assert_close((value.grad * value).sum(), (d_output * output).sum())


def test_gradient_checkpointing_repeats_the_dropout():
    inputs = make_inputs()
    query, key, value, _, logits_proj, weights_proj = inputs

    def attend(*states):
        return talking_heads_attention(
            *states, scaling=1.0, dropout=0.5, logits_proj=logits_proj, weights_proj=weights_proj
        )

    gradients = []
    for run in (attend, lambda *states: checkpoint(attend, *states, use_reentrant=False)):
        torch.manual_seed(5)
        run(query, key, value).square().sum().backward()
        gradients.append([t.grad.clone() for t in inputs if t is not None])
        for tensor in inputs:
            if tensor is not None:
                tensor.grad = None
    torch.testing.assert_close(*gradients, atol=0, rtol=0)
