"""Compare scores of classification and regression with scikit-learn, and check undefined scores and the loss."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn.metrics import precision_recall_fscore_support, roc_auc_score
from torch.nn import functional
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from hf_attn_variants.training.classification import METRICS_BY_PROBLEM, MULTI_LABEL, REGRESSION, SINGLE_LABEL, task
from hf_attn_variants.training.classification.data import LabelScheme
from hf_attn_variants.training.classification.task import (
    ClassificationOutput,
    compute_classification_metrics,
    compute_metric_details,
    make_classification_objective,
    plot_confusion_matrix,
    reorder_labels_for_model,
    shorten_class_name,
)
from hf_attn_variants.training.engine.models import LabelMap
from hf_attn_variants.training.engine.settings import is_greater_better


def make_output(kind, classes, rows=60, seed=0):
    generator = np.random.default_rng(seed)
    names = tuple(f"class {i}" for i in range(classes)) if kind != REGRESSION else ()
    logits = generator.normal(size=(rows, max(classes, 1)))
    if kind == SINGLE_LABEL:
        labels = np.where(generator.random(rows) < 0.5, logits.argmax(-1), generator.integers(classes, size=rows))
    elif kind == MULTI_LABEL:
        labels = ((logits + generator.normal(size=logits.shape)) > 0).astype(float)
    else:
        labels = logits[:, 0] + generator.normal(size=rows)
    scheme = LabelScheme(kind, names)
    return scheme, ClassificationOutput(scheme, logits.astype(np.float32), 0.5), labels


@pytest.mark.parametrize("classes", [2, 5])
def test_single_label_scores_equal_scikit_learn(classes):
    scheme, result, labels = make_output(SINGLE_LABEL, classes)
    values = compute_classification_metrics(scheme, result, labels)
    details = compute_metric_details(scheme, result, labels)
    assert tuple(values) == METRICS_BY_PROBLEM[SINGLE_LABEL]
    assert values["accuracy"] == values["f1_micro"] == pytest.approx((result.predicted_labels == labels).mean())
    precision, recall, f1, support = precision_recall_fscore_support(labels, result.predicted_labels, zero_division=0)
    assert values["f1_macro"] == pytest.approx(f1.mean())
    rows = details["per_class"].values()
    for name, expected in (("precision", precision), ("recall", recall), ("f1", f1), ("support", support)):
        assert [row[name] for row in rows] == pytest.approx(expected.tolist())
    shares = result.probabilities[:, 1] if classes == 2 else result.probabilities
    assert values["roc_auc"] == pytest.approx(roc_auc_score(labels, shares, multi_class="ovr"))
    matrix = np.array(details["confusion_matrix"])
    assert matrix.sum() == len(labels) and matrix.trace() == (result.predicted_labels == labels).sum()
    assert matrix.sum(1).tolist() == support.tolist()
    assert matrix.sum(0).tolist() == [row["predicted"] for row in rows] and "undefined" not in details


def test_multilabel_scores_equal_scikit_learn():
    scheme, result, labels = make_output(MULTI_LABEL, 4)
    values = compute_classification_metrics(scheme, result, labels)
    details = compute_metric_details(scheme, result, labels)
    assert values.keys() == set(METRICS_BY_PROBLEM[MULTI_LABEL]) and "confusion_matrix" not in details
    assert values["accuracy"] == pytest.approx((result.predicted_labels == labels).all(1).mean())
    right, printed, true = (result.predicted_labels * labels).sum(), result.predicted_labels.sum(), labels.sum()
    assert values["f1_micro"] == pytest.approx(2 * right / (printed + true))
    precision, recall, f1, _ = precision_recall_fscore_support(labels, result.predicted_labels, zero_division=0)
    assert values["f1_macro"] == pytest.approx(f1.mean())
    assert [row["precision"] for row in details["per_class"].values()] == pytest.approx(precision.tolist())
    assert [row["recall"] for row in details["per_class"].values()] == pytest.approx(recall.tolist())
    assert values["roc_auc"] == pytest.approx(roc_auc_score(labels, result.probabilities))
    many = ClassificationOutput(scheme, np.log(result.probabilities / (1 - result.probabilities)), 0.2)
    assert many.predicted_labels.sum() == (result.probabilities > 0.2).sum() > printed


def test_single_optional_label_is_scored_as_a_binary_label():
    """Check one label, whose column scikit-learn would score as two averaged classes."""
    labels = [[float(i < 8)] for i in range(40)]
    for chosen, f1 in (([0] * 40, 0.0), ([1] * 10 + [0] * 30, 2 * 8 / 18)):
        values, details = compute_scores(MULTI_LABEL, ("spam",), [[4.0 * one - 2] for one in chosen], labels)
        assert values["f1_micro"] == values["f1_macro"] == pytest.approx(f1)
        assert values["accuracy"] == pytest.approx(
            np.mean([one == label for one, [label] in zip(chosen, labels, strict=True)])
        )
        spam = details["per_class"]["spam"]
        assert (spam["support"], spam["predicted"]) == (8, sum(chosen)) and spam["recall"] == min(sum(chosen), 8) / 8


def test_regression_scores_equal_reference_values():
    scheme, result, labels = make_output(REGRESSION, 0)
    values = compute_classification_metrics(scheme, result, labels)
    assert tuple(values) == METRICS_BY_PROBLEM[REGRESSION]
    assert values["rmse"] == pytest.approx(math.sqrt(((result.predicted_labels - labels) ** 2).mean()))
    assert values["mae"] == pytest.approx(np.abs(result.predicted_labels - labels).mean())
    assert values["pearson"] == pytest.approx(np.corrcoef(result.predicted_labels, labels)[0, 1])
    ranks = [np.argsort(np.argsort(item)) for item in (result.predicted_labels, labels)]
    assert values["spearmanr"] == pytest.approx(np.corrcoef(*ranks)[0, 1])


def test_metrics_to_minimize_are_known():
    falling = "loss loss_mm perplexity mean_perplexity ppl wer WER cer ter mer wil mse rmse mae mase mape smape "
    falling += "brier_score cer_score cross_entropy retrieval_error error_rate head_distance"
    assert not any(map(is_greater_better, falling.split()))
    assert all(map(is_greater_better, "pearson f1 accuracy bleu score meteor exact_match character per".split()))


def compute_scores(kind, names, logits, labels):
    scheme = LabelScheme(kind, names)
    result = ClassificationOutput(scheme, np.array(logits, dtype=np.float32), 0.5)
    return compute_classification_metrics(scheme, result, np.array(labels)), compute_metric_details(
        scheme, result, np.array(labels)
    )


def test_undefined_score_has_a_reason():
    values, details = compute_scores(SINGLE_LABEL, ("a", "b"), [[1, 0], [0, 1]], [0, 0])
    assert math.isnan(values["roc_auc"]) and values["accuracy"] == 0.5
    assert details["undefined"]["roc_auc"] == "all 2 rows have 'a' and no row has 'b': it is not defined"
    assert math.isnan(details["per_class"]["b"]["recall"]) and details["per_class"]["b"]["precision"] == 0.0
    values, details = compute_scores(SINGLE_LABEL, ("a", "b", "c"), [[2, 1, 0], [1, 2, 0]], [0, 1])
    assert values["roc_auc"] == 1.0 and math.isnan(details["per_class"]["c"]["f1"])
    assert details["undefined"]["roc_auc"] == "no row has 'c': it is the mean over the other 2"
    values, details = compute_scores(MULTI_LABEL, ("a", "b"), [[1, -1], [-1, -1]], [[1.0, 0.0], [0.0, 0.0]])
    assert values["roc_auc"] == 1.0 and details["undefined"]["roc_auc"].startswith("no row has 'b'")
    values, details = compute_scores(REGRESSION, (), [[1.0], [1.0]], [0.5, 1.5])
    assert math.isnan(values["pearson"]) and details["undefined"]["pearson"] == "all predictions are the same"
    values, _ = compute_scores(REGRESSION, (), [[1.0]], [0.5])
    assert math.isnan(values["spearmanr"]) and values["mae"] == 0.5


# The loss


@pytest.fixture(scope="module")
def batch(tiny_bert):
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert)
    return dict(tokenizer(["a man", "a dog sees a cat", "a cat", "the red mat"], padding=True, return_tensors="pt"))


@pytest.mark.parametrize(
    ("kind", "labels", "outputs"),
    [
        (SINGLE_LABEL, torch.tensor([0, 2, 1, 2]), 3),
        (MULTI_LABEL, torch.tensor([[0, 1, 1], [0, 0, 0], [1, 1, 1], [0, 1, 0.0]]), 3),
        (MULTI_LABEL, torch.tensor([[0.0], [1], [1], [0]]), 1),
        (REGRESSION, torch.tensor([0.5, -1, 2, 4]), 1),
    ],
)
def test_classification_loss_equals_transformers(tiny_bert, batch, kind, labels, outputs):
    torch.manual_seed(0)
    options = {"num_labels": outputs, "problem_type": kind}
    model = AutoModelForSequenceClassification.from_pretrained(tiny_bert, **options).eval()
    upstream = model(**batch, labels=labels).loss
    objective = make_classification_objective()
    labelled_batch = {**batch, "labels": labels}
    assert torch.allclose(objective.loss_sum(model, labelled_batch) / objective.count(labelled_batch), upstream)


def test_weighted_loss_equals_torch():
    logits, ids = torch.randn(5, 3), torch.tensor([0, 1, 2, 2, 0])
    weights = torch.tensor([1.0, 2.0, 0.5])

    def model(**_):
        return SimpleNamespace(logits=logits)

    loss = make_classification_objective(weights).loss_sum(model, {"labels": ids})
    assert torch.allclose(loss, functional.cross_entropy(logits, ids, weight=weights) * weights[ids].sum())
    several = torch.nn.functional.one_hot(ids, 3).float()
    loss = make_classification_objective(weights).loss_sum(model, {"labels": several})
    expected = functional.binary_cross_entropy_with_logits(logits, several, pos_weight=weights)
    assert torch.allclose(loss, 5 * expected)


def test_labels_follow_the_order_of_the_outputs():
    order = LabelMap((2, 0, 1))  # output 0 is the task's class 2
    assert reorder_labels_for_model(np.array([2, 0, 1]), order).tolist() == [0, 1, 2]
    assert reorder_labels_for_model(np.array([[10.0, 11, 12]]), order).tolist() == [[12, 10, 11]]
    assert reorder_labels_for_model(np.array([0.5, 3]), LabelMap((0,))).tolist() == [0.5, 3]


# The plot of the confusion matrix


@pytest.mark.thorough
@pytest.mark.parametrize("count", [2, 30, 50])
def test_confusion_matrix_is_plotted_with_any_names(tmp_path, count, caplog, recwarn):
    names = ["$x_{", "two\nlines", "ünï\x07code", "中文", "", "a" * 300, r"\frac", *map(str, range(count))][:count]
    matrix = np.random.default_rng(0).integers(20_000, size=(count, count)).tolist()
    plot_confusion_matrix(matrix, names, tmp_path / "c.png", "be$rt_{, dev: 9 rows")
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG") and not caplog.text
    assert not [str(item.message) for item in recwarn if "Glyph" in str(item.message)]


def test_long_names_are_shortened_to_one_line():
    assert shorten_class_name(" two\n\tlines\x07 ") == "two lines"
    assert shorten_class_name("a" * 300) == "a" * 23 + "…" and shorten_class_name("$x_{") == "$x_{"


def test_confusion_matrix_has_counts_and_labels(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(task, "save_plot", lambda path, draw, **options: figures.append(draw()))
    plot_confusion_matrix([[3, 1], [0, 12]], ["no$", "yes"], tmp_path / "c.png", "t")
    axes = figures[0].axes[0]
    # Cells with a count of 0 have no text, and rows are the true classes.
    assert {(text.get_position(), text.get_text()) for text in axes.texts} == {
        ((0, 0), "3"),
        ((1, 0), "1"),
        ((1, 1), "12"),
    }
    assert [label.get_text() for label in axes.get_yticklabels()] == ["no$", "yes"]
    assert axes.get_ylabel() == "true"
