"""Check GLUE and SQuAD as text-to-text tasks: T5's wording, and generated texts as predictions."""

import numpy as np
import pytest
from fixtures.squad import write_questions

from hf_attn_variants.commands.training import seq2seq
from hf_attn_variants.glue_tasks import TASKS
from hf_attn_variants.training.seq2seq import TEXT_TASKS
from hf_attn_variants.training.seq2seq.task import (
    format_glue_example,
    format_glue_label,
    load_text_task,
    parse_glue_predictions,
)

parse_args = seq2seq.parse_args


@pytest.mark.parametrize(
    ("name", "texts", "expected"),
    [
        # The examples of appendix D of arXiv:1910.10683, shortened.
        ("cola", ["John made Bill master."], "cola sentence: John made Bill master."),
        ("sst2", ["it confirms fincher 's status"], "sst2 sentence: it confirms fincher 's status"),
        ("rte", ["A smaller", "Doctors"], "rte sentence1: A smaller sentence2: Doctors"),
        ("mnli", ["yeah", "The St. Louis Cardinals"], "mnli hypothesis: The St. Louis Cardinals premise: yeah"),
        ("mrpc", ["We acted", "I believe"], "mrpc sentence1: We acted sentence2: I believe"),
        ("qnli", ["Where?", "There."], "qnli question: Where? sentence: There."),
        ("qqp", ["What?", "Which?"], "qqp question1: What? question2: Which?"),
        ("stsb", ["Representatives", "An Ethiopian"], "stsb sentence1: Representatives sentence2: An Ethiopian"),
    ],
)
def test_sources_are_worded_like_t5(name, texts, expected):
    assert format_glue_example(TASKS[name], texts) == expected


def test_labels_become_words_and_scores_are_rounded():
    assert format_glue_label(TASKS["cola"], 0) == "unacceptable"
    assert format_glue_label(TASKS["mnli"], 2) == "contradiction"
    scores = {3.25: "3.2", 0: "0.0", 5.0: "5.0", 2.57: "2.6", 0.3: "0.4"}  # in floating point, 0.3 / 0.2 < 1.5
    assert [format_glue_label(TASKS["stsb"], score) for score in scores] == [*scores.values()]


def test_generated_texts_other_than_labels_count_as_wrong():
    labels = np.array([0, 1, 2, 1])
    result = parse_glue_predictions(TASKS["mnli"], ["entailment", " neutral", "contra", ""], labels)
    assert (result == labels).tolist() == [True, True, False, False]
    scores = parse_glue_predictions(TASKS["stsb"], ["3.2", "many", "nan", " 1 "], np.zeros(4))
    assert scores.tolist() == [3.2, -1.0, -1.0, 1.0]


def parse_arguments(*argv):
    return parse_args(["m", "--output_dir", "out", *map(str, argv)])


def test_glue_task_is_read_and_scored_as_text(glue):
    data = load_text_task(
        parse_arguments("--task_name", "stsb", "--data_dir", glue / "STS-B", "--source_prefix", "x ")
    )
    dev = data.splits["dev"]
    assert set(data.splits) == {"train", "dev", "test"} and data.splits["test"].references is None
    assert all(source.startswith("x stsb sentence1: ") and " sentence2: " in source for source in dev.sources)
    scores = data.score([row[0] for row in dev.references], dev.references)
    # The scores in the texts are rounded, and the true scores are not.
    assert set(scores) == {*data.metric_names} and 0.99 < scores["pearson"] <= 1
    assert data.main_metric == "combined_score"
    first = dev.take(4)
    assert data.score([row[0] for row in first.references], first.references)["pearson"] > 0.99


def test_squad_is_read_and_scored_as_text(tmp_path):
    file = write_questions(tmp_path / "dev.json")
    data = load_text_task(parse_arguments("--task_name", "squad", "--train_file", file, "--validation_file", file))
    dev = data.splits["dev"]
    assert dev.sources[0].startswith("question: Where did Mary go? context: Mary went to the red house.")
    assert dev.references[0] == ("the red house",)
    scores = data.score(["red house", "Bob", "dog", "wales", "20 miles"], dev.references)
    assert scores == pytest.approx({"exact_match": 60.0, "f1": 100 * (3 + 2 / 3) / 5})
    assert data.score(["北京大学。"], [("北京大学的学生",)])["f1"] == pytest.approx(100 * 8 / 11)


def test_text_to_text_evaluation_needs_no_training_split(tmp_path, glue):
    (tmp_path / "dev.tsv").write_text((glue / "CoLA/dev.tsv").read_text())
    flags = ["--task_name", "cola", "--data_dir", tmp_path]
    assert set(load_text_task(parse_arguments(*flags, "--num_train_epochs", 0)).splits) == {"dev"}
    with pytest.raises(OSError, match=r"train\.tsv"):
        load_text_task(parse_arguments(*flags, "--num_train_epochs", 0, "--max_train_steps", 1))
    file = write_questions(tmp_path / "dev.json")
    flags = ["--task_name", "squad", "--train_file", tmp_path / "none", "--validation_file", file]
    assert set(load_text_task(parse_arguments(*flags, "--num_train_epochs", 0)).splits) == {"dev"}


def test_invalid_tasks_and_files_raise_an_error(tmp_path):
    with pytest.raises(ValueError, match="got 'sst3'"):
        load_text_task(parse_arguments("--task_name", "sst3"))
    with pytest.raises(ValueError, match=r"--train_file.*--task_name.*2"):
        load_text_task(parse_arguments("--task_name", "stsb", "--train_file", "a", "b"))
    file = write_questions(tmp_path / "dev.json", version_2=True)
    with pytest.raises(ValueError, match="2 questions have no answer"):
        load_text_task(parse_arguments("--task_name", "squad", "--validation_file", file))
    assert "squad" in TEXT_TASKS and "mnli" in TEXT_TASKS and "ax" not in TEXT_TASKS
