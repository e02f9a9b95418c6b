"""Compare the formulas of scores and positions with each other, with hand computations and with torch."""

import math

import pytest
import torch

from hf_attn_variants.reference.heads import dot_product_attention
from hf_attn_variants.reference.scores import (
    additive_attention,
    additive_scores,
    bahdanau_context,
    dot_scores,
    general_scores,
    luong_output,
    sinusoidal_positions,
)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def draw(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def test_additive_score_equals_a_hand_computation():
    Q, K = torch.tensor([[[1.0, 2.0]]]), torch.tensor([[[3.0, -1.0]]])
    W, U, v = torch.tensor([[0.5, 0.0], [0.0, 1.0]]), torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.tensor([2.0, -1.0])
    expected = 2 * math.tanh(0.5 - 1.0) - math.tanh(2.0 + 3.0)
    assert additive_scores(Q, K, W, U, v).item() == pytest.approx(expected)


def test_small_additive_scores_do_not_depend_on_the_query():
    """Check small scores, for which tanh is linear: each query adds a constant, which the softmax removes."""
    Q, K, W, U, v = draw(2, 3, 4), draw(2, 5, 4), draw(4, 4) * 1e-4, draw(4, 4) * 1e-4, draw(4)
    scores = additive_scores(Q, K, W, U, v)
    torch.testing.assert_close(scores, ((Q @ W.T) @ v)[:, :, None] + ((K @ U.T) @ v)[:, None], atol=1e-9, rtol=0)


def test_general_scores_equal_dot_products_of_projected_queries():
    Q, K, W, P_q, X = draw(2, 3, 4), draw(2, 5, 6), draw(4, 6), draw(7, 4), draw(2, 3, 7)
    torch.testing.assert_close(general_scores(Q, K, W), dot_scores(Q @ W, K))
    torch.testing.assert_close(general_scores(X @ P_q, K, W), dot_scores(X @ (P_q @ W), K))
    torch.testing.assert_close(dot_scores(Q, K[..., :4])[1, 2, 3], Q[1, 2] @ K[1, 3, :4])


def test_additive_attention_of_one_head_equals_its_scores():
    Q, K, V = draw(2, 1, 3, 4), draw(2, 1, 5, 4), draw(2, 1, 5, 4)
    W, U, v = draw(1, 4, 4), draw(1, 4, 4), draw(1, 4)
    mask = torch.zeros(2, 1, 3, 5, dtype=torch.float64)
    mask[1, :, :, 3:] = -torch.inf
    weights = torch.softmax(additive_scores(Q[:, 0], K[:, 0], W[0], U[0], v[0]) + mask[:, 0], -1)
    torch.testing.assert_close(additive_attention(Q, K, V, W, U, v, mask=mask)[:, 0], weights @ V[:, 0])


def test_additive_attention_of_grouped_heads_equals_repeated_heads():
    Q, K, V = draw(2, 4, 3, 5), draw(2, 2, 6, 5), draw(2, 2, 6, 5)
    W, U, v = draw(4, 5, 5), draw(2, 5, 5), draw(4, 5)
    K4, V4, U4 = (T.repeat_interleave(2, dim=dim) for T, dim in ((K, 1), (V, 1), (U, 0)))
    torch.testing.assert_close(additive_attention(Q, K, V, W, U, v), additive_attention(Q, K4, V4, W, U4, v))


def test_bahdanau_context_equals_additive_attention_of_the_previous_state():
    s, H, W, U, v = draw(2, 3), draw(2, 5, 4), draw(6, 3), draw(6, 4), draw(6)
    context, alpha = bahdanau_context(s, H, W, U, v)
    torch.testing.assert_close(alpha, torch.softmax(additive_scores(s[:, None], H, W, U, v)[:, 0], -1))
    torch.testing.assert_close(context[1], sum(alpha[1, j] * H[1, j] for j in range(5)))


def test_luong_output_combines_context_and_current_state():
    h, H, W_c = draw(2, 4), draw(2, 5, 4), draw(3, 8)
    output, weights = luong_output(h, H, torch.eye(4, dtype=torch.float64), W_c)
    for row in range(2):  # with the identity, scores are dot products
        context = dot_product_attention(h[row], H[row], H[row])
        torch.testing.assert_close(context, weights[row] @ H[row])
        torch.testing.assert_close(output[row], torch.tanh(W_c[:, :4] @ context + W_c[:, 4:] @ h[row]))


def test_shifted_sinusoids_are_a_rotation():
    """Check that PE(pos + k) is a linear function of PE(pos), the reason why the paper chose sinusoids."""
    PE = sinusoidal_positions(20, 6)
    for i in range(3):
        angle = 5 / 10000 ** (2 * i / 6)
        sine, cosine = PE[:, 2 * i], PE[:, 2 * i + 1]
        torch.testing.assert_close(PE[5:, 2 * i], sine[:-5] * math.cos(angle) + cosine[:-5] * math.sin(angle))
    assert PE[0].tolist() == [0, 1, 0, 1, 0, 1]
