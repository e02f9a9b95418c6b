"""Check tables of questions with choices: columns, answer formats, numbers of choices, and errors."""

import json
from types import SimpleNamespace

import pytest
from choice_data import ChoiceRow, find_answer_format, find_choice, format_answer, load_choice_data
from choice_models import ChoiceHead
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value
from datasets import List as ListFeature
from fixtures.data_files import write_splits
from run_multiple_choice import parse_args
from transformers import AutoTokenizer

from hf_attn_variants.text_files import TableRow
from hf_attn_variants.training.classification.data import ClassificationSplit
from hf_attn_variants.training.engine import dataset_splits


@pytest.fixture
def load(tmp_path):
    """A function that writes files and reads train, dev and test with given flags."""

    def call(files, *flags):
        argv = ["model", "--output_dir", "out", *write_splits(tmp_path, files), *map(str, flags)]
        splits, columns = load_choice_data(parse_args(argv))
        return SimpleNamespace(splits=splits, **columns)

    return call


def get_rows(split):
    return {name: split.data[name][:] for name in ("text1", "text2", "label") if name in split.data.column_names}


# Known datasets


def test_race_format_is_detected_by_its_columns(load):
    rows = [
        {"article": "It rains.", "question": "It is _ .", "options": ["wet", "dry"], "answer": "A", "example_id": "1"},
        {"article": "It rains.", "question": "What falls?", "options": ["rain", "snow"], "answer": "B", "x": "2"},
    ]
    result = load({"train.jsonl.gz": rows, "test.jsonl": [{k: v for k, v in rows[0].items() if k != "answer"}]})
    assert get_rows(result.splits["train"]) == {
        "text1": ["It rains.", "It rains."],
        "text2": [["It is wet .", "It is dry ."], ["What falls? rain", "What falls? snow"]],
        "label": [0, 1],
    }
    assert result.answer_format == "letter" and "label" not in get_rows(result.splits["test"])


def test_swag_format_is_detected_by_its_columns(load):
    header = ",video-id,startphrase,sent1,sent2,gold-source,ending0,ending1,ending2,ending3,label\n"
    rows = "0,v,A man. He,A man.,He,gold,runs.,sits.,eats.,sleeps.,1\n1,v,s,A dog.,It,gold,a.,b.,c.,d.,2\n"
    result = load({"train.csv": header + rows, "dev.csv": header + rows})
    assert get_rows(result.splits["validation"]) == {
        "text1": ["A man.", "A dog."],
        "text2": [["He runs.", "He sits.", "He eats.", "He sleeps."], ["It a.", "It b.", "It c.", "It d."]],
        "label": [1, 2],
    }
    # The labels start at 0 because the table is SWAG. In other tables, they could also start at 1.
    other = (header + rows).replace("sent1", "context").replace("sent2", "question")
    with pytest.raises(ValueError, match=r"--answer_format.*\(1, 2\) match from_0 and"):
        load({"train.csv": other})


def test_hub_swag_has_label_names_and_unlabeled_test_rows(monkeypatch):
    texts = {name: Value("string") for name in ("sent1", "sent2", *(f"ending{i}" for i in range(4)))}
    features = Features({**texts, "label": ClassLabel(names=["0", "1", "2", "3"])})
    row = {name: name for name in texts}
    splits = {"train": [{**row, "label": 3}], "validation": [{**row, "label": 0}], "test": [{**row, "label": -1}]}
    hub = DatasetDict({name: Dataset.from_list(rows, features=features) for name, rows in splits.items()})
    monkeypatch.setattr(dataset_splits, "load_dataset", lambda name, config: hub)
    result, _ = load_choice_data(parse_args(["m", "--output_dir", "o", "--dataset_name", "swag"]))
    assert result["train"].data["label"][:] == [3] and result["validation"].data["label"][:] == [0]
    assert "label" not in result["test"].data.column_names and len(result["test"]) == 1


def test_nested_choices_are_read(monkeypatch):
    features = Features(
        {
            "question": Value("string"),
            "choices": {"text": ListFeature(Value("string")), "label": ListFeature(Value("string"))},
            "answerKey": Value("string"),
        }
    )
    row = {"question": "Why?", "choices": {"text": ["so", "not"], "label": ["A", "B"]}, "answerKey": "B"}
    hub = DatasetDict({"train": Dataset.from_list([row], features=features)})
    monkeypatch.setattr(dataset_splits, "load_dataset", lambda name, config: hub)
    result, _ = load_choice_data(parse_args(["m", "--output_dir", "o", "--dataset_name", "arc"]))
    assert get_rows(result["train"]) == {"text1": ["Why?"], "text2": [["so", "not"]], "label": [1]}


# Custom columns


def test_column_names_and_choice_counts_are_free(load):
    text = "about\tasked\tone\ttwo\tthree\tright\nA cat.\tWho?\tcat\tdog\t\t2\nA dog.\tWho?\tcat\tdog\thorse\t3\n"
    flags = "--context_column", "about", "--question_column", "asked", "--choices_columns", "one", "two", "three"
    result = load({"train.tsv": text}, *flags, "--answer_column", "right")
    assert get_rows(result.splits["train"]) == {
        "text1": ["A cat.", "A dog."],
        "text2": [["Who? cat", "Who? dog"], ["Who? cat", "Who? dog", "Who? horse"]],
        "label": [1, 2],
    }
    assert result.answer_format == "from_1"


def test_csv_lists_are_json_and_contexts_are_optional(load):
    text = 'question,choices,answer\nWho?,"[""a cat"", ""a dog""]",a dog\n'
    result = load({"train.csv": text})
    assert get_rows(result.splits["train"]) == {"text1": ["Who?"], "text2": [["a cat", "a dog"]], "label": [1]}
    assert result.answer_format == "text"
    with pytest.raises(ValueError, match=r"line 2, row 1: choices must contain .* 2 choices.* \"\['a', 'b'\]\""):
        load({"train.csv": "question,choices,answer\nWho?,\"['a', 'b']\",a\n"})


def test_context_that_the_first_row_lacks_raises_an_error(load):
    row = {"question": "Who?", "choices": ["a", "b"], "answer": "a"}
    rows = [json.dumps(row), json.dumps(row | {"context": "A cat."})]
    with pytest.raises(ValueError, match="line 2, row 2: column 'context' contains text in this row, but not"):
        load({"train.jsonl": "\n".join(rows)})


def test_numbered_columns_are_choices(load):
    ten = ",".join(f"choice{i}" for i in range(1, 12))
    values = ",".join(f"t{i}" for i in range(1, 12))
    result = load({"train.csv": f"context,{ten},label\nx,{values},11\n"})
    assert result.splits["train"].data["label"][:] == [10]


# Formats of answers


def make_rows(answers, choices):
    pairs = enumerate(zip(answers, choices, strict=True))
    return [
        ChoiceRow(TableRow(f"row {i}", {}, "f", None, "f", i), None, None, texts, answer)
        for i, (answer, texts) in pairs
    ]


@pytest.mark.parametrize(
    ("answers", "count", "expected"),
    [
        (["A", "b", "D"], 4, ("letter", [0, 1, 3])),
        (["0", "2"], 3, ("from_0", [0, 2])),
        (["1", "3"], 3, ("from_1", [0, 2])),
        (["t1", "t0"], 3, ("text", [1, 0])),
    ],
)
def test_answer_format_is_detected_from_all_rows(answers, count, expected):
    choices = [[f"t{i}" for i in range(count)]] * len(answers)
    result = find_answer_format(make_rows(answers, choices))
    places = [find_choice(answer, row, result) for answer, row in zip(answers, choices, strict=True)]
    assert (result, places) == expected
    shown = [str(format_answer(place, choices[0], result)).lower() for place in places]
    assert shown == [answer.lower() for answer in answers]


@pytest.mark.parametrize(
    ("answers", "choices", "message"),
    [
        (["1", "2"], [list("xyz")] * 2, "match from_0 and from_1 of"),
        (["2", "1"], [["1", "2", "3"]] * 2, "match from_0 and from_1 and text of"),
        (["A", "B"], [["B", "A"]] * 2, "match letter and text of"),
        (["A", "E"], [list("wxyz")] * 2, "match none of"),
        (["A", "B", "0"], [list("xyz")] * 3, "match none of"),
        (["x"], [["x", "x"]], "match none of"),
        (["0", "3"], [list("xyz")] * 2, "match none of"),
    ],
)  # fmt: skip
def test_ambiguous_or_unknown_answer_formats_raise_an_error(answers, choices, message):
    with pytest.raises(ValueError, match=f"^row 0: --answer_format.*{message}"):
        find_answer_format(make_rows(answers, choices))


def test_training_rows_determine_the_answer_format(load):
    def rows(*labels):
        return [{"context": "c", "choices": ["x", "y", "z"], "label": label} for label in labels]

    result = load({"train.jsonl": rows(0, 1), "dev.jsonl": rows(1, 2), "test.jsonl": rows(-1, -1)})
    assert result.splits["validation"].data["label"][:] == [1, 2] and result.answer_format == "from_0"
    assert "label" not in result.splits["test"].data.column_names
    with pytest.raises(ValueError, match=r"dev.jsonl, line 1, row 1.*3 choices.*'3'"):
        load({"train.jsonl": rows(0, 1), "dev.jsonl": rows(3)})
    from_one = load({"train.jsonl": rows(1, 2)}, "--answer_format", "from_1")
    assert from_one.splits["train"].data["label"][:] == [0, 1]


# Errors


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answer": None}, "must match one of the 2 choices"),
        ({"answer": -1}, "--answer_format"),
        ({"answer": ["A"]}, "--answer_format"),
        ({"choices": ["x"]}, "choices must contain at least 2 choices"),
        ({"choices": ["x", " "]}, "choices must contain at least 2 choices"),
        ({"choices": ["x", 3]}, "choices must contain at least 2 choices"),
        ({"choices": "x or y"}, "choices must contain at least 2 choices"),
        ({"context": 5}, "Column 'context'"),
    ],
)
def test_invalid_row_error_names_the_row(load, change, message):
    row = {"context": "c", "choices": ["x", "y"], "answer": "A"}
    with pytest.raises(ValueError, match=f"train.jsonl, (line 1, )?row 1.*{message}|{message}") as caught:
        load({"train.jsonl": [{**row, **change}, row]})
    assert "train.jsonl" in str(caught.value)


def test_partly_labeled_test_rows_raise_an_error(load):
    row = {"context": "c", "choices": ["x", "y"]}
    known = [row | {"answer": answer} for answer in "AB"]
    with pytest.raises(ValueError, match=r"test.jsonl, line 1, row 1: .*'answer', but .*row 2 has one"):
        load({"train.jsonl": known, "dev.jsonl": known, "test.jsonl": [row, *known]})
    named = {"label": "c", "choices": ["x", "y"]}  # the context may have a column name of answers
    result = load({"test.jsonl": [named, named]}, "--num_train_epochs", 0, "--context_column", "label")
    assert get_rows(result.splits["test"])["text1"] == ["c", "c"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"context": "c", "answer": "A"}, "--choices_columns.*got the columns context, answer"),
        ({"choices": ["x", "y"], "answer": "A"}, "--context_column.*--question_column"),
        ({"context": "c", "choices": ["x", "y"]}, "--answer_column"),
        (
            {"context": "c", "passage": "p", "choices": ["x", "y"], "answer": "A"},
            "--context_column.*context and passage",
        ),
        ({"context": "c", "choices": ["x", "y"], "options": ["x", "y"], "answer": "A"}, "--choices_columns"),
        ({"context": "c", "choice1": "x", "choice3": "y", "answer": "A"}, "--choices_columns"),
        (
            {"context": "c", "choice0": "x", "choice1": "y", "answer": 0, "label": 0},
            "--answer_column.*answer and label",
        ),
    ],
)
def test_missing_columns_error_names_the_flag(load, row, message):
    with pytest.raises(ValueError, match=message):
        load({"train.jsonl": [row]})


def test_choices_with_equal_tokens_are_counted(tiny_bert, caplog):
    choice_model = ChoiceHead.__new__(ChoiceHead)
    choice_model.tokenizer = AutoTokenizer.from_pretrained(tiny_bert)
    choice_model.settings = SimpleNamespace(max_length=6)
    rows = {"text1": ["a", "a"], "text2": [["cat dog mat", "cat dog house"], ["cat", "dog"]]}
    data = Dataset.from_dict({**rows, "index": [1, 2], "file": ["t.csv"] * 2})
    result = choice_model.tokenize(ClassificationSplit("train", data))
    assert "train: 1 of 2 questions contain choices with the same tokens. The first one is t.csv, row 1" in caplog.text
    assert result["length"][:] == [12, 10] and [len(ids) for ids in result[1]["input_ids"]] == [5, 5]


def test_dataset_folder_gives_the_same_rows_as_its_files(tmp_path):
    rows = "question,choice1,choice2,choice3,choice4,answer\nlegs?,two,NA,null,None,A\n"
    for split in ("train", "validation"):
        (tmp_path / f"{split}.csv").write_text(rows)
    result, _ = load_choice_data(parse_args(["m", "--output_dir", "o", "--dataset_name", str(tmp_path)]))
    assert result["train"].data["choices"][:] == [["two", "NA", "null", "None"]]
