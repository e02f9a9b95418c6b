"""Check labels that are formatted numbers, and labels that are different in each row."""

import pytest

from hf_attn_variants.training.classification import REGRESSION, SINGLE_LABEL
from hf_attn_variants.training.classification.data import infer_problem_type


def infer_kind(labels):
    return infer_problem_type(labels, lambda i: f"row {i + 1}")


@pytest.mark.parametrize(
    "labels",
    [
        ["1,234.50", "2,500.25", "999.00"],
        ["$1.50", "$2.25", "$1.50"],
        ["1 234.5", "2 345.5", "7.5"],
        ["1\u202f234,5", "2\u00a0345,5", "7,5"],
        ["1.234,50", "12.345,00"],
        ["-€5", "€ 7,20", "US$3"],
        ["5 EUR", "USD 7.50", "Rs. 10"],
        ["50%", "12.5 %"],
        ["1'234.50", "1\u2019000.00"],
        ["(1.50)", "\u22122.25"],
        ["12,34,567.00", "1,00,000.00"],
        ["£1,234", "£7"],
        ["0.5/5", "1.0/5", "4.5/5"],
        ["7/10", "8/10", "10/10"],
        ["5 kg", "5.5kg", "12 KG"],
    ],
)
def test_formatted_numbers_are_parsed(labels):
    with pytest.raises(ValueError, match=r"1234\.5"):
        infer_kind(labels * 2)


@pytest.mark.parametrize(
    "labels",
    [
        [f"id {i}" for i in range(40)],
        [str(i) for i in range(40)],
        ["a", *(f"text {i}" for i in range(19))],
        ["1234", "2500", "1000", "12345"],
        ["2021-01-02", *(f"2021-02-{i}" for i in range(10, 20))],
    ],
)
def test_unique_labels_raise_an_error(labels):
    with pytest.raises(ValueError, match=r"different labels in .*--problem_type regression"):
        infer_kind(labels)


@pytest.mark.parametrize(
    "labels",
    [
        ["pos", "neg"],
        ["01", "1", "02", "2"],
        ["0", "1", "2"],
        ["1", "2", "3", "4", "5"],
        ["v1.2.3", "1.2.4", "1.10.0"] * 2,
        ["cat", "dog", "bird", "fish"],
        ["3rd", "1st", "4a"],
        [f"class {i}" for i in range(10)] * 2,
        ["10", "20"] * 5,
        ["$", "%", "5 stars"] * 4,
        ["1/2", "1/4", "3/4"] * 2,
        ["5/5", "4/5"] * 2,
        ["grade3", "level-1", "topic_12", "covid19", "3-4"] * 2,
        ["1 star", "2 stars", "3 stars", "3d", "4k"] * 2,
    ],
)
def test_formatted_numbers_can_be_classes(labels):
    assert infer_kind(labels) == SINGLE_LABEL


def test_formatted_numbers_can_be_regression_targets():
    assert infer_kind(["1.5", "1000", "-2e3"]) == REGRESSION


def test_whole_numbers_with_an_exponent_are_ambiguous():
    with pytest.raises(ValueError, match="'1e0' is written with a decimal point or an exponent"):
        infer_kind(["1e0", "1e1", "1e2"] * 2)
