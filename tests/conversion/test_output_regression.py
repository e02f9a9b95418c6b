"""Check the regression of the output projection: least squares with much text, and no harm with little text."""

import pytest
import torch

from hf_attn_variants.conversion.attention_tensors import AttentionInputs, AttentionTensors, HeadCounts
from hf_attn_variants.conversion.calibration.fitting import compute_output_error, refit_output_projection
from hf_attn_variants.conversion.calibration.recording import compute_attention

WIDTH, HEADS, TOKENS = 48, 4, 12


def make_attention(seed, bias=True):
    generator = torch.Generator().manual_seed(seed)
    roles = ("query", "key", "value", "output")
    tensors = {f"{role}_weight": torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5 for role in roles}
    if bias:
        tensors |= {f"{role}_bias": torch.randn(WIDTH, generator=generator) for role in roles}
    return AttentionTensors(**tensors)


def make_inputs(batches, seed, rows=4):
    """Return calls of a self-attention in which the last token of every other example is padding."""
    generator = torch.Generator().manual_seed(seed)
    valid = torch.ones(rows, TOKENS, dtype=torch.bool)
    valid[::2, -1] = False
    states = [torch.randn(rows, TOKENS, WIDTH, generator=generator) for _ in range(batches)]
    return [AttentionInputs(item, item, None, None, valid, (WIDTH // HEADS) ** -0.5) for item in states]


def make_head_counts():
    return HeadCounts(HEADS, (HEADS, HEADS), (HEADS, HEADS), HEADS, WIDTH // HEADS)


def compute_outputs(tensors, inputs, noise=0.0):
    generator = torch.Generator().manual_seed(9)
    actual = [compute_attention(tensors, batch, HEADS)[0] for batch in inputs]
    return [item + noise * torch.randn(item.shape, generator=generator) for item in actual]


def with_other_output(tensors, distance):
    other = make_attention(5, tensors.output_bias is not None)
    changed = {"output_weight": tensors.output_weight + distance * other.output_weight}
    if tensors.output_bias is not None:
        changed["output_bias"] = tensors.output_bias + distance * other.output_bias
    return AttentionTensors(**{**vars(tensors), **changed})


@pytest.mark.parametrize("bias", [True, False])
def test_regression_with_much_text_equals_least_squares(bias):
    source = make_attention(0, bias)
    inputs = make_inputs(40, seed=1)
    actual = refit_output_projection(
        with_other_output(source, 1.0), make_head_counts(), inputs, compute_outputs(source, inputs)
    )
    torch.testing.assert_close(actual.output_weight, source.output_weight, atol=2e-3, rtol=0)
    if bias:
        torch.testing.assert_close(actual.output_bias, source.output_bias, atol=2e-3, rtol=0)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("distance", [0.0, 0.1, 1.0])
def test_regression_with_little_noisy_text_increases_no_error(bias, distance):
    """Check 47 tokens for 49 unknowns, for which plain least squares has a much larger error on other text."""
    source = make_attention(0, bias)
    begun = with_other_output(source, distance)
    inputs, others = make_inputs(1, seed=1), make_inputs(20, seed=2)
    targets = compute_outputs(source, inputs, noise=0.3)
    expected = compute_outputs(source, others)
    before = compute_output_error(begun, make_head_counts(), others, expected)
    after = compute_output_error(
        refit_output_projection(begun, make_head_counts(), inputs, targets), make_head_counts(), others, expected
    )
    assert after <= before + 0.02
    assert (
        compute_output_error(_fit_least_squares(begun, inputs, targets), make_head_counts(), others, expected)
        > after + 0.2
    )


def test_regression_to_unrelated_outputs_predicts_about_the_mean():
    """Check outputs unrelated to the text, for which the prediction is about their mean and not worse."""
    tensors = make_attention(0)
    inputs, others = make_inputs(3, seed=1), make_inputs(20, seed=2)
    noise = [
        torch.randn(batch.states.shape, generator=torch.Generator().manual_seed(i)) for i, batch in enumerate(inputs)
    ]
    unlike = [
        torch.randn(batch.states.shape, generator=torch.Generator().manual_seed(50 + i))
        for i, batch in enumerate(others)
    ]
    assert compute_output_error(tensors, make_head_counts(), others, unlike) > 1.3
    assert (
        compute_output_error(
            refit_output_projection(tensors, make_head_counts(), inputs, noise), make_head_counts(), others, unlike
        )
        < 1.1
    )


def test_regression_on_one_example_changes_nothing():
    source = make_attention(0)
    begun, inputs = with_other_output(source, 1.0), make_inputs(1, seed=1, rows=1)
    assert refit_output_projection(begun, make_head_counts(), inputs, compute_outputs(source, inputs)) is begun


def test_batches_of_one_example_are_cross_validation_folds():
    source = make_attention(0)
    inputs = make_inputs(80, seed=1, rows=1)
    actual = refit_output_projection(
        with_other_output(source, 1.0), make_head_counts(), inputs, compute_outputs(source, inputs)
    )
    torch.testing.assert_close(actual.output_weight, source.output_weight, atol=2e-3, rtol=0)


def _fit_least_squares(tensors, inputs, targets):
    rows = torch.cat([compute_attention(tensors, batch, HEADS)[1][batch.valid] for batch in inputs])
    missing = torch.cat(
        [
            (target - compute_attention(tensors, batch, HEADS)[0])[batch.valid]
            for batch, target in zip(inputs, targets, strict=True)
        ]
    )
    change = torch.linalg.lstsq(rows.double(), missing.double()).solution.T
    return AttentionTensors(**{**vars(tensors), "output_weight": tensors.output_weight + change.float()})
