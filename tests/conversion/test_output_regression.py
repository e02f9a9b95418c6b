"""Check the regression of the output projection: least squares with much text, and no harm with little text."""

from dataclasses import replace

import pytest
import torch
from fixtures.attention_tensors import make_attention_tensors, make_head_counts

from hf_attn_variants.conversion.attention_tensors import AttentionInputs
from hf_attn_variants.conversion.calibration.fitting import compute_output_error, refit_output_projection
from hf_attn_variants.conversion.calibration.recording import compute_attention

WIDTH, HEADS, TOKENS = 48, 4, 12
COUNTS = make_head_counts(HEADS, HEADS, HEADS, WIDTH // HEADS)


def make_attention(seed, bias=True):
    biases = ("query", "key", "value", "output") if bias else ()
    return make_attention_tensors(HEADS, HEADS, WIDTH // HEADS, WIDTH, biases, seed=seed, scale=WIDTH**-0.5)


def make_inputs(batches, seed, rows=4):
    """Return calls of a self-attention in which the last token of every other example is padding."""
    generator = torch.Generator().manual_seed(seed)
    valid = torch.ones(rows, TOKENS, dtype=torch.bool)
    valid[::2, -1] = False
    states = [torch.randn(rows, TOKENS, WIDTH, generator=generator) for _ in range(batches)]
    return [AttentionInputs(item, item, None, None, valid, (WIDTH // HEADS) ** -0.5) for item in states]


def compute_outputs(tensors, inputs, noise=0.0):
    generator = torch.Generator().manual_seed(9)
    actual = [compute_attention(tensors, batch, HEADS)[0] for batch in inputs]
    return [item + noise * torch.randn(item.shape, generator=generator) for item in actual]


def draw_outputs(inputs, seed):
    """Return outputs that are unrelated to the inputs."""
    draws = (torch.Generator().manual_seed(seed + i) for i in range(len(inputs)))
    return [torch.randn(batch.states.shape, generator=draw) for batch, draw in zip(inputs, draws, strict=True)]


def refit(tensors, inputs, targets):
    return refit_output_projection(tensors, COUNTS, inputs, targets)


def compute_error(tensors, inputs, targets):
    return compute_output_error(tensors, COUNTS, inputs, targets)


def fit_least_squares(tensors, inputs, targets):
    rows = torch.cat([compute_attention(tensors, batch, HEADS)[1][batch.valid] for batch in inputs])
    outputs = compute_outputs(tensors, inputs)
    missing = torch.cat([(y - z)[batch.valid] for y, z, batch in zip(targets, outputs, inputs, strict=True)])
    change = torch.linalg.lstsq(rows.double(), missing.double()).solution.T
    return replace(tensors, output_weight=tensors.output_weight + change.float())


def with_other_output(tensors, distance):
    other = make_attention(5, tensors.output_bias is not None)
    changed = replace(tensors, output_weight=tensors.output_weight + distance * other.output_weight)
    if tensors.output_bias is None:
        return changed
    return replace(changed, output_bias=tensors.output_bias + distance * other.output_bias)


# Batches of one example are folds of the cross-validation.
@pytest.mark.parametrize("bias, batches, rows", [(True, 40, 4), (False, 40, 4), (True, 80, 1)])
def test_regression_with_much_text_equals_least_squares(bias, batches, rows):
    source = make_attention(0, bias)
    inputs = make_inputs(batches, seed=1, rows=rows)
    actual = refit(with_other_output(source, 1.0), inputs, compute_outputs(source, inputs))
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
    fits = (begun, refit(begun, inputs, targets), fit_least_squares(begun, inputs, targets))
    before, after, least_squares = (compute_error(fit, others, expected) for fit in fits)
    assert after <= before + 0.02 and least_squares > after + 0.2


def test_regression_to_unrelated_outputs_predicts_about_the_mean():
    """Check outputs unrelated to the text, for which the prediction is about their mean and not worse."""
    tensors = make_attention(0)
    inputs, others = make_inputs(3, seed=1), make_inputs(20, seed=2)
    unlike = draw_outputs(others, 50)
    assert compute_error(tensors, others, unlike) > 1.3
    assert compute_error(refit(tensors, inputs, draw_outputs(inputs, 0)), others, unlike) < 1.1


def test_regression_on_one_example_changes_nothing():
    source = make_attention(0)
    begun, inputs = with_other_output(source, 1.0), make_inputs(1, seed=1, rows=1)
    assert refit(begun, inputs, compute_outputs(source, inputs)) is begun
