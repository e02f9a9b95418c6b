"""Tables of questions with choices: columns by name, what answers are, any number of choices, what is refused."""

import gzip
import json
import logging

import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value
from datasets import List as ListFeature
from transformers import AutoTokenizer

from hf_attn_variants.commands.multiple_choice import parse_args
from hf_attn_variants.training.engine import hub_datasets
from hf_attn_variants.training.multiple_choice.answers import answer_format_of, place_of, shown_answer
from hf_attn_variants.training.multiple_choice.choices import ChoiceSplit, tokenize_choices, word_choice
from hf_attn_variants.training.multiple_choice.data import load_choice_data


@pytest.fixture
def load(tmp_path):
    """Writes files by name and reads those that are called train, dev and test, with these flags."""

    def call(files, *flags):
        argv = ["model", "--output_dir", "out"]
        for name, text in files.items():
            rows = text if isinstance(text, str) else "".join(json.dumps(row) + "\n" for row in text)
            content = rows.encode()
            (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
        for flag, start in (("train_file", "train"), ("validation_file", "dev"), ("test_file", "test")):
            if found := [str(tmp_path / name) for name in files if name.startswith(start)]:
                argv += [f"--{flag}", *found]
        return load_choice_data(parse_args([*argv, *map(str, flags)]))

    return call


def rows_of(split):
    return {name: split.data[name][:] for name in ("text1", "text2", "label") if name in split.data.column_names}


# Data sets that are known


def test_race_is_known_by_its_columns(load):
    rows = [
        {"article": "It rains.", "question": "It is _ .", "options": ["wet", "dry"], "answer": "A", "example_id": "1"},
        {"article": "It rains.", "question": "What falls?", "options": ["rain", "snow"], "answer": "B", "x": "2"},
    ]
    found = load({"train.jsonl.gz": rows, "test.jsonl": [{k: v for k, v in rows[0].items() if k != "answer"}]})
    assert rows_of(found.splits["train"]) == {
        "text1": ["It rains.", "It rains."],
        "text2": [["It is wet .", "It is dry ."], ["What falls? rain", "What falls? snow"]],
        "label": [0, 1],
    }
    assert found.answer_format == "letter" and "label" not in rows_of(found.splits["test"])
    with pytest.raises(
        ValueError, match=r"row 1, column 'answer': the answer '0' is to be a letter \(--answer_format l"
    ):
        load({"train.jsonl": [{**rows[0], "answer": 0}]})


def test_swag_is_known_by_its_columns(load):
    header = ",video-id,startphrase,sent1,sent2,gold-source,ending0,ending1,ending2,ending3,label\n"
    rows = "0,v,A man. He,A man.,He,gold,runs.,sits.,eats.,sleeps.,1\n1,v,s,A dog.,It,gold,a.,b.,c.,d.,2\n"
    found = load({"train.csv": header + rows, "dev.csv": header + rows})
    assert rows_of(found.splits["validation"]) == {
        "text1": ["A man.", "A dog."],
        "text2": [["He runs.", "He sits.", "He eats.", "He sleeps."], ["It a.", "It b.", "It c.", "It d."]],
        "label": [1, 2],
    }
    # Only by what SWAG is: of other tables these could count from 1 as well.
    other = (header + rows).replace("sent1", "context").replace("sent2", "question")
    with pytest.raises(ValueError, match=r"answer '1' of 4 choices may be a number that counts from 0 or .* from 1"):
        load({"train.csv": other})


def test_the_hubs_swag_has_names_of_its_answers_and_none_of_the_test_rows(monkeypatch):
    texts = {name: Value("string") for name in ("sent1", "sent2", *(f"ending{i}" for i in range(4)))}
    features = Features({**texts, "label": ClassLabel(names=["0", "1", "2", "3"])})
    row = {name: name for name in texts}
    splits = {"train": [{**row, "label": 3}], "validation": [{**row, "label": 0}], "test": [{**row, "label": -1}]}
    hub = DatasetDict({name: Dataset.from_list(rows, features=features) for name, rows in splits.items()})
    monkeypatch.setattr(hub_datasets, "load_dataset", lambda name, config: hub)
    found = load_choice_data(parse_args(["m", "--output_dir", "o", "--dataset_name", "swag"])).splits
    assert found["train"].data["label"][:] == [3] and found["validation"].data["label"][:] == [0]
    assert "label" not in found["test"].data.column_names and len(found["test"]) == 1


def test_nested_choices_are_found(monkeypatch):
    features = Features(
        {
            "question": Value("string"),
            "choices": {"text": ListFeature(Value("string")), "label": ListFeature(Value("string"))},
            "answerKey": Value("string"),
        }
    )
    row = {"question": "Why?", "choices": {"text": ["so", "not"], "label": ["A", "B"]}, "answerKey": "B"}
    hub = DatasetDict({"train": Dataset.from_list([row], features=features)})
    monkeypatch.setattr(hub_datasets, "load_dataset", lambda name, config: hub)
    found = load_choice_data(parse_args(["m", "--output_dir", "o", "--dataset_name", "arc"]))
    assert rows_of(found.splits["train"]) == {"text1": ["Why?"], "text2": [["so", "not"]], "label": [1]}


# A user's own columns


def test_columns_may_have_any_name_and_rows_any_number_of_choices(load):
    text = "about\tasked\tone\ttwo\tthree\tright\nA cat.\tWho?\tcat\tdog\t\t2\nA dog.\tWho?\tcat\tdog\thorse\t3\n"
    flags = "--context_column", "about", "--question_column", "asked", "--choices_columns", "one", "two", "three"
    found = load({"train.tsv": text}, *flags, "--answer_column", "right")
    assert rows_of(found.splits["train"]) == {
        "text1": ["A cat.", "A dog."],
        "text2": [["Who? cat", "Who? dog"], ["Who? cat", "Who? dog", "Who? horse"]],
        "label": [1, 2],
    }
    assert found.answer_format == "from_1" and found.splits["train"].most_choices == 3


def test_a_list_in_a_csv_is_json_and_a_question_alone_will_do(load):
    text = 'question,choices,answer\nWho?,"[""a cat"", ""a dog""]",a dog\n'
    found = load({"train.csv": text})
    assert rows_of(found.splits["train"]) == {"text1": ["Who?"], "text2": [["a cat", "a dog"]], "label": [1]}
    assert found.answer_format == "text"
    with pytest.raises(
        ValueError, match=r"line 2, row 1: column 'choices' holds no list of choices but \"\['a', 'b'\]\""
    ):
        load({"train.csv": "question,choices,answer\nWho?,\"['a', 'b']\",a\n"})


def test_columns_are_numbered_or_lettered(load):
    text = "Passage,Option B,Option A,Option C,Answer\nA cat.,dog,cat,horse,C\n"
    found = load({"train.csv": text})
    assert rows_of(found.splits["train"]) == {"text1": ["A cat."], "text2": [["cat", "dog", "horse"]], "label": [2]}
    ten = ",".join(f"choice{i}" for i in range(1, 12))
    values = ",".join(f"t{i}" for i in range(1, 12))
    found = load({"train.csv": f"context,{ten},label\nx,{values},11\n"})
    assert found.splits["train"].data["label"][:] == [10]


def test_a_choice_takes_the_place_of_a_blank():
    assert word_choice("It is ___ .", "wet", "___") == "It is wet ." and word_choice("It is ___ .", "wet") == (
        "It is ___ . wet"
    )
    assert word_choice(None, "wet", "_") == word_choice("", "wet", "_") == "wet"


# What answers are


@pytest.mark.parametrize(
    ("answers", "count", "expected"),
    [
        (["A", "b", "D"], 4, ("letter", [0, 1, 3])),
        (["0", "2"], 3, ("from_0", [0, 2])),
        (["1", "3"], 3, ("from_1", [0, 2])),
        (["t1", "t0"], 3, ("text", [1, 0])),
    ],
)
def test_what_answers_are_is_seen_from_all_of_them(answers, count, expected):
    choices = [[f"t{i}" for i in range(count)]] * len(answers)
    found = answer_format_of(answers, choices, str)
    places = [place_of(answer, row, found) for answer, row in zip(answers, choices, strict=True)]
    assert (found, places) == expected
    shown = [str(shown_answer(place, choices[0], found)).lower() for place in places]
    assert shown == [answer.lower() for answer in answers]


def test_two_readings_that_agree_are_one():
    assert answer_format_of(["B", "A"], [["A", "B"]] * 2, str) == "letter"


@pytest.mark.parametrize(
    ("answers", "choices", "message"),
    [
        (["1", "2"], [list("xyz")] * 2, r"^0: the answer '1' of 3 choices may be a number that counts from 0 or a "
         r"number that counts from 1 \(choice 1 or 0, counted from 0\), and so may all 2 answers: say .* \(from_0"),
        (["2", "1"], [["1", "2", "3"]] * 2, "may be a number that counts from 0 or"),
        (["A", "B"], [["B", "A"]] * 2, "^0: the answer 'A' of 2 choices may be a letter or the text of a choice"),
        (["A", "E"], [list("wxyz")] * 2, "^1: the answer 'E' names none of its row's 4 choices: it is neither a "
         "letter from A to D, a number from 0 to 3 or from 1 to 4, nor the text of a choice"),
        (["A", "B", "0"], [list("xyz")] * 3, "^2: the answer '0' is a number that counts from 0, and 2 of 3 answers"),
        (["x"], [["x", "x"]], "^0: the answer 'x' is the text of 2 choices of its row"),
        (["0", "3"], [list("xyz")] * 2, "counts from"),
    ],
)  # fmt: skip
def test_answers_that_may_be_read_in_two_ways_or_none_are_refused(answers, choices, message):
    with pytest.raises(ValueError, match=message):
        answer_format_of(answers, choices, str)


def test_the_training_rows_decide_for_all(load):
    def rows(*labels):
        return [{"context": "c", "choices": ["x", "y", "z"], "label": label} for label in labels]

    found = load({"train.jsonl": rows(0, 1), "dev.jsonl": rows(1, 2), "test.jsonl": rows(-1, -1)})
    assert found.splits["validation"].data["label"][:] == [1, 2] and found.answer_format == "from_0"
    assert "label" not in found.splits["test"].data.column_names
    with pytest.raises(
        ValueError, match=r"dev.jsonl, line 1, row 1, column 'label': the answer '3' is to be a number that co"
    ):
        load({"train.jsonl": rows(0, 1), "dev.jsonl": rows(3)})
    given = load({"train.jsonl": rows(1, 2)}, "--answer_format", "from_1")
    assert given.splits["train"].data["label"][:] == [0, 1]


# What is refused


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answer": None}, "column 'answer': there is no answer"),
        ({"answer": -1}, "the answer '-1' names none of its row's 2 choices"),
        ({"answer": ["A"]}, r"a list of answers, \['A'\], where one choice is right"),
        ({"choices": ["x"]}, "row 1: 1 choices; there must be at least 2"),
        ({"choices": ["x", " "]}, "row 1: choice 2 of 2 is blank"),
        ({"choices": ["x", 3]}, "row 1: choice 2 is no text but 3"),
        ({"choices": "x or y"}, "holds no list of choices but 'x or y'"),
        ({"context": 5}, "column 'context' holds no text but 5; another is named with --context_column"),
    ],
)
def test_a_bad_row_is_named(load, change, message):
    row = {"context": "c", "choices": ["x", "y"], "answer": "A"}
    with pytest.raises(ValueError, match=f"train.jsonl, (line 1, )?row 1.*{message}|{message}") as caught:
        load({"train.jsonl": [{**row, **change}, row]})
    assert "train.jsonl" in str(caught.value)


def test_answers_of_some_test_rows_are_not_dropped(load):
    row = {"context": "c", "choices": ["x", "y"]}
    known = [row | {"answer": answer} for answer in "AB"]
    with pytest.raises(ValueError, match=r"test.jsonl, line 1, row 1: .*'answer', and .*row 2 has it"):
        load({"train.jsonl": known, "dev.jsonl": known, "test.jsonl": [row, *known]})
    with pytest.raises(ValueError, match=r"test.jsonl, line 1, row 1: .*'answer', and .*row 2 has it"):
        load({"test.jsonl": [row, *known]}, "--num_train_epochs", 0)
    named = {"label": "c", "choices": ["x", "y"]}  # a context may be called as answers are
    found = load({"test.jsonl": [named, named]}, "--num_train_epochs", 0, "--context_column", "label")
    assert rows_of(found.splits["test"])["text1"] == ["c", "c"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"context": "c", "answer": "A"},
            "no columns are called as choices often are; its columns are context, answer",
        ),
        ({"choices": ["x", "y"], "answer": "A"}, "no column is called as contexts or questions often are"),
        ({"context": "c", "choices": ["x", "y"]}, "no column is called as answers often are; .*--answer_column"),
        (
            {"context": "c", "passage": "p", "choices": ["x", "y"], "answer": "A"},
            "the context may be in context or passage",
        ),
        (
            {"context": "c", "choices": ["x", "y"], "options": ["x", "y"], "answer": "A"},
            "the choices may be in options or choices",
        ),
        (
            {"context": "c", "choice1": "x", "choice3": "y", "answer": "A"},
            "no columns are called as choices often are",
        ),
        (
            {"context": "c", "choice0": "x", "choice1": "y", "answer": 0, "label": 0},
            "the answer may be in answer or la",
        ),
    ],
)
def test_columns_that_are_not_found_are_asked_for(load, row, message):
    with pytest.raises(ValueError, match=message):
        load({"train.jsonl": [row]})


def test_a_blank_question_is_counted(load, caplog):
    row = {"context": "c", "question": " ", "choices": ["x", "y"], "answer": "A"}
    load({"train.jsonl": [row, {**row, "question": "q"}]})
    assert "train: 1 of 2 rows have a blank context or question, which is read as it is; the first is" in caplog.text


def test_choices_that_are_the_same_to_the_model_are_counted(tiny_bert, caplog):
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert)
    rows = {"text1": ["a", "a"], "text2": [["cat dog mat", "cat dog house"], ["cat", "dog"]]}
    data = Dataset.from_dict({**rows, "index": [1, 2], "file": ["t.csv"] * 2})
    with caplog.at_level(logging.INFO, "hf_attn_variants"):
        found = tokenize_choices(ChoiceSplit("train", data), tokenizer, 6)
    assert "train: 1 of 2 questions have choices that are the same tokens to the model" in caplog.text
    assert "the first is t.csv, row 1" in caplog.text and "1 of 2 questions have a choice that fills" in caplog.text
    assert found["length"][:] == [12, 10] and [len(ids) for ids in found[1]["input_ids"]] == [5, 5]


# Flags


FILES = ("--train_file", "a.csv", "--validation_file", "b.csv")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "give --train_file .* or --dataset_name$"),
        ((*FILES, "--choices_columns", "a", "a"), "--choices_columns must be different columns, got a, a"),
        (
            (*FILES, "--choices_columns", "a", "b", "--context_column", "b"),
            "--context_column b is --choices_columns as w",
        ),
        ((*FILES, "--question_column", "a", "--answer_column", "a"), "--answer_column a is --question_column as well"),
        ((*FILES, "--question_blank", " "), "--question_blank must not be blank"),
        ((*FILES, "--metric_for_best_model", "f1"), "'f1': there are loss, accuracy"),
        ((*FILES[:2], "--early_stopping_patience", "2"), "--early_stopping_patience needs dev rows"),
    ],
)
def test_bad_flags_are_refused(flags, message):
    with pytest.raises(ValueError, match=message):
        parse_args(["m", "--output_dir", "o", *flags])


@pytest.mark.parametrize(
    ("flag", "advice"),
    [
        ("--max_seq_length", "--max_length"),
        ("--pad_to_max_length", "--pad_to_multiple_of N"),
        ("--do_train", "a run trains, unless --num_train_epochs is 0"),
        ("--preprocessing_num_workers", "not needed: rows are made into tokens by one process, many at a time"),
        ("--per_gpu_eval_batch_size", "--per_device_eval_batch_size"),
    ],
)
def test_flags_of_run_swag_say_what_to_give(flag, advice, capsys):
    with pytest.raises(SystemExit):
        parse_args(["m", "--output_dir", "o", *FILES, f"{flag}=8"])
    assert f"error: there is no {flag}: {'use ' * advice.startswith('--')}{advice}" in capsys.readouterr().err
