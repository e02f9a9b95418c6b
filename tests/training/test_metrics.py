"""Compare GLUE's metrics with hand-computed values."""

import math

import numpy as np
import pytest

from hf_attn_variants.training.glue.task import compute_glue_metrics


def test_metrics_equal_hand_computed_values():
    predictions, references = np.array([1, 1, 0, 1, 0, 1]), np.array([1, 0, 0, 1, 1, 1])
    tp, fp, fn, tn = 3, 1, 1, 1
    values = compute_glue_metrics(["accuracy", "f1", "matthews_correlation"], predictions, references)
    assert values["accuracy"] == pytest.approx(4 / 6)
    assert values["f1"] == pytest.approx(2 * tp / (2 * tp + fp + fn))
    expected = (tp * tn - fp * fn) / math.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
    assert values["matthews_correlation"] == pytest.approx(expected)
    assert values["combined_score"] == pytest.approx(np.mean([4 / 6, 0.75, expected]))


def test_correlations_equal_hand_computed_values():
    x, y = np.array([1.0, 2.0, 3.0, 10.0]), np.array([0.5, 2.5, 2.0, 4.0])
    values = compute_glue_metrics(["pearson", "spearmanr"], x, y)
    assert values["pearson"] == pytest.approx(np.corrcoef(x, y)[0, 1])
    assert values["spearmanr"] == pytest.approx(1 - 6 * 2 / (4 * 15))  # two ranks are swapped


def test_constant_predictions_have_undefined_correlations():
    assert (
        compute_glue_metrics(["matthews_correlation"], np.ones(4, int), np.array([0, 1, 0, 1]))["matthews_correlation"]
        == 0.0
    )
    assert compute_glue_metrics(["f1"], np.zeros(4, int), np.array([0, 1, 0, 1]))["f1"] == 0.0
    assert math.isnan(compute_glue_metrics(["pearson"], np.ones(4), np.arange(4.0))["pearson"])
