"""Compare the kernels' formulas with each other, with a softmax, and with sums that are written out."""

import pytest
import torch

from hf_attn_variants.modeling.mechanisms.kernels.attention_kernel import draw_vectors
from hf_attn_variants.reference.linear import (
    elu_features,
    favor_features,
    hedgehog_features,
    kernel_attention,
    kernel_attention_recurrent,
    rfa_features,
)

DOUBLE = torch.float64


def draw_unit_vectors(*shape):
    return torch.nn.functional.normalize(torch.randn(*shape, dtype=DOUBLE), dim=-1)


def test_elu_features_equal_torch():
    x = torch.randn(5, 7, dtype=DOUBLE)
    torch.testing.assert_close(elu_features(x), torch.nn.functional.elu(x) + 1)


def test_hedgehog_features_are_weights_of_both_signs():
    x, W = torch.randn(2, 3, 5, 4, dtype=DOUBLE), torch.randn(3, 4, 6, dtype=DOUBLE)
    phi = hedgehog_features(x, W)
    torch.testing.assert_close(phi.sum(-1), torch.ones(2, 3, 5, dtype=DOUBLE))
    # The ratio exp(y) / exp(-y) = exp(2 y) does not depend on the common denominator.
    torch.testing.assert_close((phi[..., :6] / phi[..., 6:]).log() / 2, torch.einsum("bhnk,hkr->bhnr", x, W))


@pytest.mark.parametrize(
    "features, expected", [(favor_features, 1.0), (rfa_features, 1 / torch.e)], ids=["favor", "rfa"]
)
def test_random_features_have_the_exponential_as_mean(features, expected):
    """Check unit vectors: exp(x y) and exp(x y - 1)."""
    torch.manual_seed(0)
    x, y = draw_unit_vectors(6, 8), draw_unit_vectors(6, 8)
    W = draw_vectors(400_000, 8, 0, are_orthogonal=False).double()
    actual = features(x, W) @ features(y, W).T
    torch.testing.assert_close(actual, (x @ y.T).exp() * expected, rtol=0.02, atol=0)


def test_orthogonal_vectors_have_a_smaller_error():
    """Check theorem 2 of arXiv 2009.14794: the mean squared error is smaller than for independent vectors."""
    torch.manual_seed(0)
    x, y = draw_unit_vectors(16, 8), draw_unit_vectors(16, 8)
    errors = []
    for are_orthogonal in (False, True):
        samples = [draw_vectors(8, 8, seed, are_orthogonal).double() for seed in range(400)]
        estimates = torch.stack([favor_features(x, W) @ favor_features(y, W).T for W in samples])
        errors.append((estimates - (x @ y.T).exp()).square().mean())
    assert errors[1] < 0.9 * errors[0]


def test_stabilizers_do_not_change_the_weights():
    torch.manual_seed(0)
    x, y, V = torch.randn(1, 2, 5, 4), torch.randn(1, 2, 6, 4), torch.randn(1, 2, 6, 3)
    W = torch.randn(7, 4)
    plain = kernel_attention(favor_features(x, W), favor_features(y, W), V)
    shifted = [favor_features(x, W, stabilizer=torch.randn(1, 2, 5, 1)), favor_features(y, W, stabilizer=3.0)]
    torch.testing.assert_close(kernel_attention(*shifted, V), plain)


def test_kernel_weights_equal_a_hand_computation():
    """Check two keys with features 1 and 3; a causal query attends only to the first."""
    phi_q, phi_k = torch.tensor([2.0, 5.0]).view(1, 1, 2, 1), torch.tensor([1.0, 3.0]).view(1, 1, 2, 1)
    V = torch.tensor([4.0, 8.0]).view(1, 1, 2, 1)
    output, weights = kernel_attention(phi_q, phi_k, V, causal=True)
    assert weights.flatten().tolist() == [1, 0, 0.25, 0.75] and output.flatten().tolist() == [4, 7]
    nothing, _ = kernel_attention(phi_q, phi_k, V, padding=torch.tensor([[False, False]]))
    assert nothing.flatten().tolist() == [0, 0]


def test_recurrence_equals_causal_attention():
    torch.manual_seed(0)
    phi_q, phi_k = torch.rand(2, 2, 3, 9, 5, dtype=DOUBLE)
    V = torch.randn(2, 3, 9, 4, dtype=DOUBLE)
    S, z = torch.zeros(2, 3, 5, 4, dtype=DOUBLE), torch.zeros(2, 3, 5, dtype=DOUBLE)
    first, S, z = kernel_attention_recurrent(phi_q[:, :, :6], phi_k[:, :, :6], V[:, :, :6], S, z)
    last, _, _ = kernel_attention_recurrent(phi_q[:, :, 6:], phi_k[:, :, 6:], V[:, :, 6:], S, z)
    full_output, _ = kernel_attention(phi_q, phi_k, V, causal=True)
    torch.testing.assert_close(torch.cat([first, last], 2), full_output)
    torch.testing.assert_close(kernel_attention(phi_q[:, :, 6:], phi_k, V, causal=True)[0], last)
