"""Check linear attention in sums and in chunks: outputs and gradients of the formulas, and memory."""

import pytest
import torch
from fixtures.gradients import assert_same_with_gradients, to_exact
from fixtures.kernel_modules import make_kernel_module
from fixtures.largest_tensor import LargestTensor

from hf_attn_variants.modeling.attention.mechanism_attention import (
    attend_with_kernel,
    compute_kernel_weights,
    mask_to_allowed_keys,
)
from hf_attn_variants.modeling.mechanisms.kernels import feature_kernel
from hf_attn_variants.modeling.mechanisms.kernels.kernel_table import get_kernel_class
from hf_attn_variants.reference import linear as reference_linear

pytestmark = pytest.mark.cross_product

HEADS, D, SCALING = 4, 6, 0.4
# With rfa, sums of weights may be near zero, which increases rounding errors.
TOLERANCE = {"rfa": 3e-4}
KERNELS = ("elu", "relu", "hedgehog", "favor", "rfa")
EVERY_KERNEL = pytest.mark.parametrize("name", KERNELS)


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    monkeypatch.setattr(feature_kernel, "CHUNK_LENGTH", 8)


def make_attention(name, groups=2, causal=False):
    """Return a module with a kernel whose parameters differ from their initial values."""
    return make_kernel_module(get_kernel_class(name)(9, causal, 3), HEADS, groups, D, noise=0.3)


def get_learned_parameters(module):
    return [
        getattr(module, name)
        for name in ("query_kernel_proj", "key_kernel_proj", "kernel_scale")
        if hasattr(module, name)
    ]


def make_call(n, m, groups=2):
    """Return queries, keys and values that require gradients, and masks with padding on no side or on each side."""
    torch.manual_seed(1)
    leaves = [torch.randn(3, heads, length, D) for heads, length in ((HEADS, n), (groups, m), (groups, m))]
    places = torch.arange(m)
    padding = torch.stack([places < m, places < m // 2, places >= m - 4])
    return [leaf.requires_grad_() for leaf in leaves], padding


def compute_by_formula(module, states, padding, causal=False):
    """Return the outputs [b, n, h, d], the weights and the leaf tensors, in double precision."""
    exact = to_exact([*states, *get_learned_parameters(module)])
    (Q, K, V), parameters = exact[:3], exact[3:]
    name = module.kernel.name
    if name in ("elu", "relu"):
        phi_q, phi_k = map(getattr(reference_linear, f"{name}_features"), (Q, K))
    elif name == "hedgehog":
        phi_q, phi_k = (reference_linear.hedgehog_features(x, W) for x, W in zip((Q, K), parameters, strict=True))
    elif name == "favor":
        phi_q, phi_k = (
            reference_linear.favor_features(x * SCALING**0.5, module.kernel_vectors.double()) for x in (Q, K)
        )
    else:
        scale = parameters[0][:, None]
        by_head = scale.repeat_interleave(HEADS // len(scale), 0)
        phi_q, phi_k = (
            reference_linear.rfa_features(x, module.kernel_vectors.double(), s) for x, s in ((Q, by_head), (K, scale))
        )
    least = 1e-2 if name == "rfa" else 0.0
    output, weights = reference_linear.kernel_attention(phi_q, phi_k, V, causal=causal, padding=padding, min_sum=least)
    return output.transpose(1, 2), weights, exact


def assert_equals_the_formula(module, leaves, padding):
    """Compare outputs, gradients and weights with the formula, and return the outputs."""
    expected, weights, exact = compute_by_formula(module, leaves, padding, module.kernel.is_causal)
    mask, atol = padding[:, None, None], TOLERANCE.get(module.kernel.name, 1e-5)
    actual, _ = attend_with_kernel(module, *leaves, mask, SCALING)
    trained = [*leaves, *get_learned_parameters(module)]
    assert_same_with_gradients(actual, expected, trained, exact, atol, gradient_atol=3 * atol)
    actual_weights = compute_kernel_weights(module, *leaves[:2], mask, SCALING)
    torch.testing.assert_close(actual_weights.double(), weights, atol=atol, rtol=0)
    return actual


@EVERY_KERNEL
@pytest.mark.parametrize("n, m, groups", [(41, 41, 4), (5, 23, 2), (17, 17, 1)])
def test_linear_attention_in_sums_equals_the_formula(name, n, m, groups):
    module = make_attention(name, groups)
    leaves, padding = make_call(n, m, groups)
    actual = assert_equals_the_formula(module, leaves, padding)
    mask = padding[:, None, None]
    added = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    assert attend_with_kernel(module, *leaves, added, SCALING)[0].equal(actual)


@EVERY_KERNEL
@pytest.mark.parametrize("n, groups", [(41, 2), (8, 4), (3, 1)])
def test_linear_attention_in_chunks_equals_the_formula(name, n, groups):
    assert_equals_the_formula(make_attention(name, groups, causal=True), *make_call(n, n, groups))


@EVERY_KERNEL
def test_linear_attention_state_continues_from_its_last_token(name):
    """Check chunks, single steps and the whole text, padded on the left."""
    module = make_attention(name, causal=True)
    (query, key, value), _ = make_call(30, 30)
    padding = torch.arange(30) >= torch.tensor([0, 3, 14])[:, None]
    expected, _, _ = compute_by_formula(module, (query, key, value), padding, causal=True)
    state, outputs, sizes = None, [], set()
    for begin, end in ((0, 11), (11, 27), (27, 28), (28, 29), (29, 30)):
        mask = padding[:, None, None, :end]  # covers all tokens so far, as in a decoder
        call = (states[:, :, begin:end] for states in (query, key, value))
        output, state = attend_with_kernel(module, *call, mask, SCALING, state)
        outputs.append(output)
        sizes.add(sum(item.numel() for item in state if item is not None))
    torch.testing.assert_close(torch.cat(outputs, 1).double(), expected, atol=TOLERANCE.get(name, 1e-5), rtol=0)
    assert len(sizes) == 1


def test_long_texts_equal_the_recurrence_to_five_digits():
    module = make_attention("elu", HEADS, causal=True)
    torch.manual_seed(0)
    states = [torch.randn(1, HEADS, 2000, D) for _ in range(3)]
    phi_q, phi_k = (reference_linear.elu_features(item) for item in states[:2])
    S, z = torch.zeros(1, HEADS, D, D), torch.zeros(1, HEADS, D)
    expected, _, _ = reference_linear.kernel_attention_recurrent(phi_q, phi_k, states[2], S, z)
    actual, _ = attend_with_kernel(module, *states, None, SCALING)
    torch.testing.assert_close(actual, expected.transpose(1, 2), atol=1e-5, rtol=0)


@EVERY_KERNEL
def test_beams_share_kernel_sums(name):
    module = make_attention(name)
    (query, key, value), padding = make_call(2, 23)
    query = torch.randn(6, HEADS, 2, D)
    mask = padding[:, None, None]
    actual, state = attend_with_kernel(module, query, key, value, mask, SCALING)
    repeated = [item.repeat_interleave(2, 0) for item in (key, value, mask)]
    expected, _ = attend_with_kernel(module, query, *repeated, SCALING)
    torch.testing.assert_close(actual, expected)
    assert attend_with_kernel(module, query, key, value, repeated[2], SCALING)[0].equal(actual)
    assert module.kernel.attend_to_state(module, query, state, SCALING).equal(actual)
    weights = [
        compute_kernel_weights(module, query, keys, mask, SCALING) for keys in (key, repeated[0]) for mask in (None,)
    ]
    torch.testing.assert_close(*weights)


@EVERY_KERNEL
def test_large_logits_stay_finite_in_half_precision(name):
    """Check FAVOR features, which would overflow float32 or all be zero without a stabilizer."""
    module = make_attention(name, HEADS)
    (query, key, value), padding = make_call(9, 9, HEADS)
    states = (query * 12, key * 12, value)
    expected, _, _ = compute_by_formula(module, states, padding)
    actual, _ = attend_with_kernel(module, *states, padding[:, None, None], SCALING)
    torch.testing.assert_close(actual.double(), expected, atol=1e-3, rtol=0)
    halves = [item.detach().bfloat16() for item in (query, key, value)]
    exact, _ = attend_with_kernel(module, *(item.float() for item in halves), None, SCALING)
    half, state = attend_with_kernel(module, *halves, None, SCALING)
    assert half.dtype == torch.bfloat16 and state.sums.dtype == torch.float32
    torch.testing.assert_close(half.float(), exact, atol=1e-2, rtol=1e-2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        again, _ = attend_with_kernel(module, *halves, None, SCALING)
    assert again.equal(half)


@EVERY_KERNEL
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
def test_linear_attention_allocates_no_quadratic_tensor(name, causal):
    module = make_attention(name, causal=causal)
    sizes = []
    for n in (256, 512):
        leaves, padding = make_call(n, n)
        with LargestTensor() as largest:
            attend_with_kernel(module, *leaves, padding[:, None, None], SCALING)[0].sum().backward()
        sizes.append(largest.numel)
    assert sizes[1] <= 2 * sizes[0] < 256 * 256 * HEADS


@pytest.mark.thorough
@EVERY_KERNEL
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
def test_linear_attention_can_be_compiled(name, causal):
    module = make_attention(name, causal=causal)
    leaves, _ = make_call(20, 20)

    def attend(*states):
        return attend_with_kernel(module, *states, None, SCALING)[0]

    torch.testing.assert_close(torch.compile(attend, backend="aot_eager", fullgraph=True)(*leaves), attend(*leaves))


def test_query_dependent_masks_with_kernels_raise_an_error():
    key = torch.randn(2, 1, 5, D)
    assert mask_to_allowed_keys(torch.ones(2, 1, 1, 5).bool().expand(2, 1, 5, 5), key).shape == (2, 1, 5, 1)
    with pytest.raises(ValueError, match="`attention_kernel`"):
        mask_to_allowed_keys(torch.ones(2, 1, 5, 5).bool(), key)
