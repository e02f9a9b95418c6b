"""Check SuperGLUE's official files and the Hub's rows as texts, its metrics, and its submissions."""

import json

import numpy as np
import pytest
import superglue_data
from datasets import Dataset, DatasetDict
from fixtures.data_files import write_lines
from fixtures.superglue import make_hub_rows, make_official_rows, write_superglue
from sklearn.metrics import f1_score
from superglue_scores import choose_candidates, compute_superglue_metrics, format_submission
from superglue_tasks import TASKS, SuperGlueSettings, get_superglue_task

from hf_attn_variants.text_files import read_table_rows


def read(tmp_path, task, rows, has_labels=True):
    path = tmp_path / "rows.jsonl"
    write_lines(path, rows)
    placed = [(record.place, record.values) for record in read_table_rows(path)]
    return superglue_data.make_examples(get_superglue_task(task), placed, has_labels)


def load(task, data_dir):
    settings = SuperGlueSettings(model_name_or_path="m", output_dir="o", task_name=task, data_dir=data_dir)
    return superglue_data.load_examples(settings, get_superglue_task(task))


# Examples that are read


@pytest.mark.parametrize(
    ("task", "texts"),
    [
        ("boolq", (("A cat sees a house.", "is it a cat"),)),
        ("cb", (("The cat is in the house.", "a cat"),)),
        ("rte", (("The cat is in the house.", "a house"),)),
        (
            "copa",
            (
                ("A man sees it.", "What was the cause of this? It is a house."),
                ("A man sees it.", "What was the cause of this? It is a cat."),
            ),
        ),
        (
            "multirc",
            (
                ("A cat sees a house and a man.", "What does it see? cat"),
                ("A cat sees a house and a man.", "What does it see? house"),
            ),
        ),
        (
            "record",
            tuple(
                ("A cat sees a house and a man. The cat is big", f"It is a {name} .")
                for name in ("cat", "house", "man")
            ),
        ),
        ("wic", (("The * house * of a cat.", "A man in a * house *"),)),
        ("wsc", (("The * cat man * sees a house, and # it # is big.",),)),
    ],
)
def test_row_becomes_the_expected_texts(tmp_path, task, texts):
    assert read(tmp_path, task, make_official_rows(task, 1))[0].texts == texts


@pytest.mark.parametrize("task", TASKS)
def test_hub_rows_equal_the_official_rows(tmp_path, monkeypatch, task):
    official = load(task, write_superglue(tmp_path / "official", task))
    rows = Dataset.from_list(make_hub_rows(task))
    hub = DatasetDict({"train": rows, "validation": rows.select(range(2)), "test": rows})
    monkeypatch.setattr(superglue_data, "load_dataset", lambda name, config, split: hub[split])
    result = load(task, None)
    assert result["train"] == official["train"] and result["test"] == official["test"]
    assert official["test"][0].labels is None and official["train"][0].labels is not None


@pytest.mark.parametrize(
    ("index", "text", "expected"),
    [
        (0, "It", "# It # sees a * dog * and it is big."),
        (5, "it", "It sees a * dog * and # it # is big."),
        (4, "It.", "It sees a * dog * and # it # is big."),
        (9, "it", "It sees a * dog * and # it # is big."),
    ],
)
def test_span_nearest_to_its_index_is_marked(tmp_path, index, text, expected):
    target = {"span1_index": 3, "span1_text": "dog", "span2_index": index, "span2_text": text}
    row = {"text": "It sees a dog and it is big.", "target": target, "idx": 0, "label": True}
    assert read(tmp_path, "wsc", [row])[0].texts == ((expected,),)


@pytest.mark.parametrize(
    ("task", "change", "message"),
    [
        ("boolq", {"label": "maybe"}, "label must be one of False, True, got 'maybe'"),
        ("boolq", {"label": None}, "got None"),
        ("cb", {"label": True}, "got True"),
        ("rte", {"label": 2}, "got 2"),
        ("copa", {"question": "why"}, "KeyError: 'why'"),
        ("wic", {"end2": 99}, "start2 11 and end2 99"),
        ("wsc", {"target": None}, "TypeError"),
        ("wsc", {"text": "nothing of it"}, "'cat man'"),
        ("record", {"qas": [{"query": "no place", "answers": [{"text": "a"}], "idx": 0}]}, "@placeholder"),
    ],
)
def test_invalid_data_error_names_the_row(tmp_path, task, change, message):
    rows = make_official_rows(task, 1)
    with pytest.raises(ValueError, match=rf"rows\.jsonl, line 1, row 1.*{message}"):
        read(tmp_path, task, [{**rows[0], **change}])


# Metrics, compared with separate formulas


def make_scores(labels, count):
    """Return logits whose largest value is at each label."""
    return np.eye(count)[np.asarray(labels)] + np.random.default_rng(0).normal(0, 0.1, (len(labels), count))


def test_cb_score_is_the_mean_of_accuracy_and_macro_f1(tmp_path):
    task, examples = get_superglue_task("cb"), read(tmp_path, "cb", make_official_rows("cb", 9))
    true, printed = [example.labels[0] for example in examples], [0, 1, 1, 0, 0, 2, 0, 1, 2]
    f1 = []
    for label in range(3):
        hits = sum(t == s == label for t, s in zip(true, printed, strict=True))
        f1.append(2 * hits / (true.count(label) + printed.count(label)))
    result = compute_superglue_metrics(task, examples, make_scores(printed, 3))
    accuracy = np.mean(np.equal(true, printed))
    assert result["accuracy"] == pytest.approx(accuracy) and result["f1_macro"] == pytest.approx(np.mean(f1))
    assert result["f1_macro"] == pytest.approx(f1_score(true, printed, average="macro"))
    assert result["combined_score"] == pytest.approx((accuracy + np.mean(f1)) / 2)


def test_multirc_scores_answers_and_whole_questions(tmp_path):
    task, examples = get_superglue_task("multirc"), read(tmp_path, "multirc", make_official_rows("multirc", 6))
    true = [label for example in examples for label in example.labels]
    printed = np.random.default_rng(1).integers(0, 2, len(true)).tolist()
    printed[: len(examples[0].labels)] = examples[0].labels  # all answers of one question are right
    result = compute_superglue_metrics(task, examples, make_scores(printed, 2))
    hits = sum(t and s for t, s in zip(true, printed, strict=True))
    precision, recall = hits / sum(printed), hits / sum(true)
    assert result["f1a"] == pytest.approx(2 * precision * recall / (precision + recall))
    rows, num_correct_questions = iter(printed), 0
    for example in examples:
        num_correct_questions += [next(rows) for _ in example.labels] == list(example.labels)
    assert 0 < num_correct_questions < len(examples)
    assert result["exact_match"] == pytest.approx(num_correct_questions / len(examples))
    assert result["combined_score"] == pytest.approx((result["f1a"] + result["exact_match"]) / 2)


def test_record_scores_the_likeliest_candidate_against_the_best_answer(tmp_path):
    passage = {"text": "The New York Times and New York and Bob", "entities": []}
    names = ("The New York Times", "New York", "Bob")
    for name in names:
        start = passage["text"].rindex(name)
        passage["entities"].append({"start": start, "end": start + len(name) - 1})
    answers = [[{"text": "New York"}], [{"text": "Bob"}, {"text": "New York"}], [{"text": "Bob"}]]
    queries = [{"query": "@placeholder is", "answers": item, "idx": i} for i, item in enumerate(answers)]
    examples = read(tmp_path, "record", [{"passage": passage, "qas": queries, "idx": 0}])
    likely = [[2.0, 1, 0], [0, 3, 1], [0, 1, 0.5]]  # predictions: the paper, the town, the town
    scores = np.array([[0.3, 0.3 + item] for row in likely for item in row])
    assert choose_candidates(examples, scores) == ["The New York Times", "New York", "New York"]
    result = compute_superglue_metrics(get_superglue_task("record"), examples, scores)
    # Without the article, the first prediction has three words, two of which are right: precision 2/3, recall 1.
    assert result["f1"] == pytest.approx((0.8 + 1 + 0) / 3) and result["exact_match"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("task", ["boolq", "rte", "wic", "wsc"])
def test_other_tasks_are_scored_by_accuracy(tmp_path, task):
    examples = read(tmp_path, task, make_official_rows(task))
    printed = [0, 1, 1, 1, 0, 0, 1, 0]
    expected = np.mean([example.labels[0] == item for example, item in zip(examples, printed, strict=True)])
    assert compute_superglue_metrics(get_superglue_task(task), examples, make_scores(printed, 2)) == {
        "accuracy": expected
    }


# Submissions


@pytest.mark.parametrize(
    ("task", "printed", "expected"),
    [
        ("boolq", [1, 0], [{"idx": 0, "label": "true"}, {"idx": 1, "label": "false"}]),
        ("cb", [2, 1], [{"idx": 0, "label": "neutral"}, {"idx": 1, "label": "contradiction"}]),
        ("copa", [1, 0], [{"idx": 0, "label": 1}, {"idx": 1, "label": 0}]),
        ("rte", [1, 0], [{"idx": 0, "label": "not_entailment"}, {"idx": 1, "label": "entailment"}]),
        ("wic", [0, 1], [{"idx": 0, "label": "false"}, {"idx": 1, "label": "true"}]),
        ("wsc", [0, 1], [{"idx": 0, "label": "False"}, {"idx": 1, "label": "True"}]),
        (
            "multirc",
            [1, 0, 0, 1, 1, 0, 1],
            [
                {"idx": 0, "passage": {"questions": [{"idx": 0, "answers": [
                    {"idx": 0, "label": 1}, {"idx": 1, "label": 0}]}]}},
                {"idx": 1, "passage": {"questions": [
                    {"idx": 100, "answers": [{"idx": 10, "label": 0}, {"idx": 11, "label": 1}]},
                    {"idx": 101, "answers": [
                        {"idx": 10, "label": 1}, {"idx": 11, "label": 0}, {"idx": 12, "label": 1}]},
                ]}},
            ],
        ),
        (
            "record",
            [0, 1, 0, 1, 0, 0, 0, 0, 1],
            [{"idx": 0, "label": "house"}, {"idx": 10, "label": "dog"}, {"idx": 11, "label": "man"}],
        ),
    ],
)  # fmt: skip
def test_submission_has_the_official_format(tmp_path, task, printed, expected):
    rows = [row for row in make_official_rows(task, 2)]
    examples = read(tmp_path, task, rows, has_labels=False) if task != "record" else read(tmp_path, task, rows)
    count = len(get_superglue_task(task).labels)
    text = format_submission(get_superglue_task(task), examples, np.eye(count)[printed])
    assert [json.loads(line) for line in text.splitlines()] == expected and text.endswith("\n")
