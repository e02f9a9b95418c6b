"""Compare the attention functions with the formulas of the papers: outputs and gradients."""

import itertools

import pytest
import torch

from hf_attn_variants.modeling.ops.memory_efficient_attention import talking_heads_attention
from hf_attn_variants.modeling.ops.softmax_attention import MATMUL_BATCH_SIZE, attention_with_weights, fused_attention
from hf_attn_variants.reference.talking_heads import attention_core

pytestmark = pytest.mark.cross_product

BATCH, QUERIES, KEYS, DIM = 2, 5, 7, 4
# (h_k, k, h, h_v): query, key/value, softmax and value heads.
HEAD_COUNTS = [(4, 4, 4, 4), (4, 2, 4, 4), (4, 1, 4, 4)]
TALKING_HEAD_COUNTS = [*HEAD_COUNTS, (4, 4, 6, 2), (4, 2, 3, 6), (6, 3, 2, 9)]
DYNAMIC = ("x2l", "m2l", "x2w", "m2w")


def make_random_inputs(h_k, k, h_v, dtype=torch.float64, queries=QUERIES, batch=BATCH):
    value_heads = h_v if k == h_k else k
    shapes = [(batch, h_k, queries, DIM), (batch, k, KEYS, DIM), (batch, value_heads, KEYS, DIM)]
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def make_masks(queries=QUERIES, batch=BATCH):
    """Return the boolean masks and position biases that models pass, as a dictionary."""
    padding = (torch.arange(KEYS) < torch.tensor([KEYS, 3]).repeat(batch // 2)[:, None])[:, None, None]
    per_query = torch.rand(batch, 1, queries, KEYS) > 0.4
    per_query[..., 0] = True
    fully_masked = per_query.clone()
    fully_masked[1, :, -1] = False
    return {"none": None, "padding": padding, "per_query": per_query, "fully_masked": fully_masked}


def to_additive(mask, dtype=torch.float64):
    return None if mask is None else torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, -torch.inf)


def assert_same_with_gradients(module, expected, inputs, atol):
    weight = torch.randn(module.shape, dtype=module.dtype)
    torch.testing.assert_close(module, expected, atol=atol, rtol=0)
    for gradient, expected_gradient in zip(
        torch.autograd.grad((module * weight).sum(), inputs),
        torch.autograd.grad((expected * weight).sum(), inputs),
        strict=True,
    ):
        assert gradient.abs().max() > 0
        torch.testing.assert_close(gradient, expected_gradient, atol=atol, rtol=0)


@pytest.mark.parametrize(
    "heads, projections",
    [(heads, "plain") for heads in HEAD_COUNTS]
    + [(heads, projections) for heads in TALKING_HEAD_COUNTS for projections in ("static", "dynamic")],
    ids=str,
)
@pytest.mark.parametrize("mask_name", ["none", "padding", "per_query", "fully_masked"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_eager_attention_equals_the_formula(heads, mask_name, bias, projections):
    h_k, k, h, h_v = heads
    torch.manual_seed(0)
    inputs = make_random_inputs(h_k, k, h_v)
    mask = make_masks()[mask_name]
    position_bias = torch.randn(1, h, QUERIES, KEYS, dtype=torch.float64, requires_grad=True) if bias else None
    mixes = {}
    if projections != "plain":
        mixes = {"P_l": torch.randn(h_k, h, dtype=torch.float64), "P_w": torch.randn(h, h_v, dtype=torch.float64)}
    if projections == "dynamic":
        for name in DYNAMIC:
            length, shape = QUERIES if name[0] == "x" else KEYS, (h_k, h) if name[2] == "l" else (h, h_v)
            mixes[name] = torch.randn(BATCH, length, *shape, dtype=torch.float64)
    for parameter in mixes.values():
        parameter.requires_grad_()

    output, weights = attention_with_weights(
        *inputs,
        mask,
        position_bias,
        scaling=0.3,
        logits_proj=mixes.get("P_l"),
        weights_proj=mixes.get("P_w"),
        **{name: mixes.get(name) for name in DYNAMIC},
    )
    expected, expected_weights = attention_core(
        *inputs, scale=0.3, bias=position_bias, mask=to_additive(mask), **mixes
    )

    torch.testing.assert_close(weights, expected_weights, atol=1e-10, rtol=0)
    trained = [*inputs, *mixes.values()] + ([position_bias] if bias else [])
    assert_same_with_gradients(output, expected.transpose(1, 2), trained, atol=1e-10)


@pytest.mark.parametrize("heads", HEAD_COUNTS, ids=str)
@pytest.mark.parametrize("mask_name", ["none", "padding", "per_query", "fully_masked"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("queries, batch", [(QUERIES, BATCH), (1, BATCH), (1, MATMUL_BATCH_SIZE)])
def test_fused_attention_equals_the_formula(heads, mask_name, bias, queries, batch):
    h_k, k, h, h_v = heads
    torch.manual_seed(0)
    inputs = make_random_inputs(h_k, k, h_v, torch.float32, queries, batch)
    mask = make_masks(queries, batch)[mask_name]
    position_bias = torch.randn(1, h, queries, KEYS, requires_grad=True) if bias else None

    output = fused_attention(*inputs, mask, position_bias, scaling=0.3)
    expected, _ = attention_core(*inputs, scale=0.3, bias=position_bias, mask=to_additive(mask, torch.float32))

    trained = inputs + ([position_bias] if bias else [])
    assert_same_with_gradients(output, expected.transpose(1, 2), trained, atol=1e-5)


@pytest.mark.parametrize("heads", HEAD_COUNTS, ids=str)
@pytest.mark.parametrize("batch", [BATCH, MATMUL_BATCH_SIZE])
def test_fused_attention_accepts_a_float_mask_per_head_for_one_query(heads, batch):
    h_k, k, _, h_v = heads
    torch.manual_seed(0)
    inputs = make_random_inputs(h_k, k, h_v, torch.float32, queries=1, batch=batch)
    mask = torch.randn(batch, h_k, 1, KEYS)
    expected, _ = attention_core(*inputs, scale=0.5, mask=mask)
    torch.testing.assert_close(
        fused_attention(*inputs, mask, scaling=0.5), expected.transpose(1, 2), atol=1e-6, rtol=0
    )


def test_float32_projections_mix_heads_of_half_precision():
    query, key, value = (torch.randn(1, 4, 5, 8, dtype=torch.float16) for _ in range(3))
    mixes = {"logits_proj": torch.eye(4), "weights_proj": torch.eye(4)}
    output, weights = attention_with_weights(query, key, value, scaling=0.5, **mixes)
    assert output.dtype == weights.dtype == torch.float16
    plain, _ = attention_with_weights(query, key, value, scaling=0.5)
    torch.testing.assert_close(output, plain)


@pytest.mark.parametrize("function", [attention_with_weights, fused_attention])
@pytest.mark.parametrize("k", [4, 2, 1])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_causal_attention_sees_no_later_key(function, k, bias):
    """Check causal attention, also with more keys than queries, as in a static cache that is partly empty."""
    torch.manual_seed(0)
    query, key, value = make_random_inputs(4, k, 4, torch.float32)
    position_bias = torch.randn(1, 4, QUERIES, KEYS) if bias else None
    allowed = torch.ones(QUERIES, KEYS, dtype=torch.bool).tril()
    expected, _ = attention_core(
        query, key, value, scale=0.5, bias=position_bias, mask=to_additive(allowed[None, None], torch.float32)
    )
    output = function(query, key, value, None, position_bias, scaling=0.5, is_causal=True)
    output = output[0] if isinstance(output, tuple) else output
    torch.testing.assert_close(output, expected.transpose(1, 2), atol=1e-5, rtol=0)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("additive", [False, True])
def test_mask_and_is_causal_are_combined(additive, bias):
    query, key, value = (torch.randn(2, 4, 6, 8) for _ in range(3))
    allowed = torch.ones(2, 1, 1, 6, dtype=torch.bool)
    allowed[0, ..., 0] = False  # the first query has no allowed key
    mask = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min) if additive else allowed
    position_bias = torch.randn(1, 4, 6, 6) if bias else None
    both = allowed & torch.ones(6, 6, dtype=torch.bool).tril()
    expected = attention_with_weights(query, key, value, both, position_bias, scaling=0.3)[0]
    for function in (fused_attention, lambda *call, **options: attention_with_weights(*call, **options)[0]):
        actual = function(query, key, value, mask, position_bias, scaling=0.3, is_causal=True)
        torch.testing.assert_close(actual[0, 1:], expected[0, 1:])
        torch.testing.assert_close(actual[1], expected[1])


@pytest.mark.parametrize("kind", ["boolean", "infinite", "finite"])
def test_fully_masked_query_gives_zeros_or_uniform_weights(kind):
    """Check zeros for boolean masks and -inf, as in SDPA, and uniform weights for Transformers' finite minima."""
    query, key, value = make_random_inputs(4, 2, 4, torch.float32)
    mask = torch.zeros(BATCH, 1, QUERIES, KEYS, dtype=torch.bool)
    mask[0] = True
    if kind != "boolean":
        lowest = -torch.inf if kind == "infinite" else torch.finfo(torch.float32).min
        mask = torch.zeros(mask.shape).masked_fill(~mask, lowest)
    output, weights = attention_with_weights(query, key, value, mask, scaling=0.5)
    if kind == "finite":
        torch.testing.assert_close(weights[1], torch.full_like(weights[1], 1 / KEYS))
    else:
        assert output[1].eq(0).all()
    output.sum().backward()
    assert all(tensor.grad.isfinite().all() for tensor in (query, key, value))
    none = query[:, :, :0]
    assert attention_with_weights(query, none, none, mask[..., :0], scaling=0.5)[0].eq(0).all()


@pytest.mark.parametrize("function", [attention_with_weights, fused_attention, talking_heads_attention])
def test_integer_masks_raise_an_error(function):
    query, key, value = make_random_inputs(4, 2, 4, torch.float32)
    mask = torch.ones(BATCH, 1, QUERIES, KEYS, dtype=torch.long)
    with pytest.raises(ValueError, match=r"torch\.int64"):
        function(query, key, value, mask, scaling=0.5)


@pytest.mark.parametrize("k, dtype", list(itertools.product([4, 2, 1], [torch.bfloat16, torch.float16])))
def test_half_precision_attention_is_within_rounding_of_float32(k, dtype):
    torch.manual_seed(0)
    inputs = make_random_inputs(4, k, 4, torch.float64)
    exact, _ = attention_core(*inputs, scale=0.5)
    projection = torch.eye(4, dtype=dtype)
    half = [tensor.detach().to(dtype) for tensor in inputs]
    output, _ = attention_with_weights(*half, scaling=0.5, logits_proj=projection, weights_proj=projection)
    tolerance = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(output.double(), exact.transpose(1, 2), atol=tolerance, rtol=tolerance)
    fused = fused_attention(*half, scaling=0.5)
    torch.testing.assert_close(fused.double(), exact.transpose(1, 2), atol=tolerance, rtol=tolerance)


def test_attention_dropout_keeps_the_mean_of_weights():
    query, key, value = make_random_inputs(4, 2, 4, torch.float32)
    _, undropped = attention_with_weights(query, key, value, scaling=0.5)
    samples = [attention_with_weights(query, key, value, scaling=0.5, dropout=0.25)[1] for _ in range(400)]
    share = torch.stack([weights.eq(0).float().mean() for weights in samples]).mean()
    assert abs(share - 0.25) < 0.02
    torch.testing.assert_close(torch.stack(samples).mean(0), undropped, atol=0.06, rtol=0)
