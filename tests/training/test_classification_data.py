"""Check user tables as splits: detected columns, all kinds of labels, and errors that name the row."""

import json
import logging
from decimal import Decimal
from types import SimpleNamespace

import numpy as np
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value
from datasets import List as ListFeature
from fixtures.data_files import write_splits
from sklearn.utils.class_weight import compute_class_weight

from hf_attn_variants.commands.training import classify
from hf_attn_variants.training.classification import MULTI_LABEL, REGRESSION, SINGLE_LABEL
from hf_attn_variants.training.classification.data import (
    LabelScheme,
    collect_class_names,
    compute_class_weights,
    find_label_column,
    find_text_columns,
    infer_problem_type,
    load_classification_data,
    parse_label_cell,
)
from hf_attn_variants.training.engine import dataset_splits

parse_args = classify.parse_args

NO_CLASSIFIER = SimpleNamespace(architectures=["BertModel"], id2label={0: "LABEL_0", 1: "LABEL_1"}, problem_type=None)


@pytest.fixture
def load(tmp_path):
    """A function that writes files and reads train, dev and test with given flags."""

    def call(files, *flags, config=NO_CLASSIFIER):
        argv = ["model", "--output_dir", "out", *write_splits(tmp_path, files), *map(str, flags)]
        return load_classification_data(parse_args(argv), config)

    return call


def get_columns(split):
    return {name: split.data[name][:] for name in split.data.column_names if name not in ("file", "line")}


# Kinds of labels


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        (["good", "bad", "good"], (SINGLE_LABEL, ("bad", "good"))),
        (["1", "0", "1"], (SINGLE_LABEL, ("0", "1"))),
        (["10", "-3", "9", "100", "9"], (SINGLE_LABEL, ("-3", "9", "10", "100"))),
        (["01", "10", "02"], (SINGLE_LABEL, ("01", "02", "10"))),
        (["01", "1"], (SINGLE_LABEL, ("01", "1"))),
        (["B", "a", "ä", "A"], (SINGLE_LABEL, ("A", "B", "a", "ä"))),
        (["True", "False"], (SINGLE_LABEL, ("False", "True"))),
        (["nan", "inf", "none"], (SINGLE_LABEL, ("inf", "nan", "none"))),
        (["4.5", "3", "1e-1"], (REGRESSION, None)),
        (["-.5", "2."], (REGRESSION, None)),
        ([("a", "b"), (), ("c",)], (MULTI_LABEL, ("a", "b", "c"))),
        ([("10",), ("9", "2")], (MULTI_LABEL, ("2", "9", "10"))),
        ([("1", "0"), ("0",), ("1",)], (MULTI_LABEL, ("0", "1"))),
        ([("yes", "no"), ("no", "yes")], (MULTI_LABEL, ("no", "yes"))),
    ],
)
def test_problem_type_is_detected_from_labels(cells, expected):
    kind, names = expected
    assert infer_problem_type(cells, str) == kind
    if names is not None:
        assert collect_class_names(cells) == names


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        (["1", "2", "good"], "row 2.*'good'.*'1'"),
        (["0.5", "nan"], "row 1.*'nan'"),
        (["1,5", "2"], "row 0.*'1,5'.*'2'"),
        (["0", "1.0", "0"], r"row 1.*'1\.0'.*--prob"),
        (["a", None], "^row 1: The row has no label"),
        ([("a",), "b"], "row 1.*'b'.*row 0"),
        (["['a', 'b']", "['c']"], "row 0.*--label_separator"),
        ([f"text {i}" for i in range(201)], "row 0.*201.*'text 0'"),
        ([str(i) for i in range(201)] * 2, "201.*402.*'0'"),
    ],
)
def test_ambiguous_labels_raise_an_error(cells, message):
    with pytest.raises(ValueError, match=message):
        infer_problem_type(cells, lambda row: f"row {row}")


@pytest.mark.parametrize("flags", [(), ("--problem_type", MULTI_LABEL), ("--labels", "0", "1")])
@pytest.mark.parametrize(
    "two", [("[1, 0]", "[0, 1]"), ("[0.0, 1.0]", "[1.0, 0.0]"), ("[true, false]", "[false, true]")]
)
def test_indicator_lists_are_not_label_names(load, two, flags):
    rows = "".join(f'{{"text": "a", "label": {label}}}\n' for label in two)
    with pytest.raises(ValueError, match=r"row 1.*seems to contain"):
        load({"train.jsonl": rows, "dev.jsonl": rows}, *flags)


def test_up_to_two_hundred_labels_are_classes():
    assert infer_problem_type([f"intent {i}" for i in range(200)] * 2, str) == SINGLE_LABEL


@pytest.mark.parametrize(
    ("value", "separator", "expected"),
    [
        (" a b ", None, "a b"),
        ("a; b;c", ";", ("a", "b", "c")),
        ("a  b", " ", ("a", "b")),
        ("New York\tParis", "\t", ("New York", "Paris")),
        ("New York\u00a0Paris Rome", "\u00a0", ("New York", "Paris Rome")),
        (" ", ";", ()),
        ("", None, None),
        (None, None, None),
        ([], None, ()),
        ([1, "b", True], None, ("1", "b", "True")),
        (3, None, "3"),
        (0.5, None, "0.5"),
        (Decimal("1.50"), None, "1.50"),
        (False, None, "False"),
    ],
)
def test_label_cell_is_parsed(value, separator, expected):
    assert parse_label_cell(value, separator, "here") == expected


@pytest.mark.parametrize(
    ("value", "separator", "message"),
    [
        ("a;;b", ";", ".*'a', '', 'b'"),
        ("a;b;a", ";", ".*'a' twice"),
        ([1, 0, 0], None, r".*\['1', '0', '0'\] seems to contain"),
        ([True, True], None, ".* Provide label names"),
        ([0.0, 0.0, 1.0], None, ".* Provide label names"),
        (["1", "1", "2"], None, ".*'1' twice"),
        (["a", ["b"]], None, r".*got \['b'\]"),
        (["a", None], None, ".*got None"),
        ({"x": 1}, None, ".*got {'x': 1}"),
        (float("nan"), None, ".*finite number, got nan"),
        (float("inf"), None, ".*finite number, got inf"),
        ("\ud800", None, ".*got an incomplete surrogate pair"),
    ],
)
def test_invalid_label_cell_raises_an_error(value, separator, message):
    with pytest.raises(ValueError, match=f"^here: {message}"):
        parse_label_cell(value, separator, "here")


@pytest.mark.parametrize(
    ("kind", "cell", "message"),
    [
        (SINGLE_LABEL, "c", "row 0.*'a', 'b', got 'c'"),
        (SINGLE_LABEL, ("a",), "row 0.*list.*single_label_classification"),
        (SINGLE_LABEL, None, "row 0.*no label"),
        (MULTI_LABEL, ("a", "c"), "row 0.*'a', 'b', got 'c'"),
        (MULTI_LABEL, "a", "row 0.*'a'.*--label_separator"),
        (REGRESSION, "a", "row 0.*'a'"),
        (REGRESSION, "1e999", "row 0.*'1e999'"),
        (REGRESSION, "1_0", "row 0.*'1_0'"),
        (REGRESSION, ("1",), "row 0.*list.*regression"),
    ],
)
def test_label_of_another_type_error_names_the_row(kind, cell, message):
    scheme = LabelScheme(kind, () if kind == REGRESSION else ("a", "b"))
    with pytest.raises(ValueError, match=message):
        scheme.encode([cell], lambda row: f"row {row}")


def test_labels_are_mapped_to_ids():
    assert LabelScheme(SINGLE_LABEL, ("a", "b")).encode(["b", "a"], str) == [1, 0]
    assert LabelScheme(MULTI_LABEL, ("a", "b")).encode([("b",), (), ("b", "a")], str) == [[0, 1], [0, 0], [1, 1]]
    assert LabelScheme(REGRESSION, ()).encode(["-1", "2.5"], str) == [-1.0, 2.5]


def test_class_weights_equal_scikit_learn_or_are_given():
    scheme, values = LabelScheme(SINGLE_LABEL, ("a", "b", "c")), [0, 1, 1, 2, 2, 2, 2]
    expected = compute_class_weight("balanced", classes=np.arange(3), y=values).tolist()
    assert compute_class_weights("balanced", scheme, values) == pytest.approx(expected)
    assert compute_class_weights({"c": 3}, scheme, values) == [1.0, 1.0, 3.0]
    assert compute_class_weights(None, scheme, values) is None
    several = LabelScheme(MULTI_LABEL, ("a", "b"))
    assert compute_class_weights("balanced", several, [[1, 0], [0, 1], [0, 1], [0, 1]]) == pytest.approx([3, 1 / 3])
    for value, label_scheme, rows, message in (
        ({"d": 1}, scheme, values, "unknown label 'd'. Use only 'a', 'b', 'c'"),
        ("balanced", scheme, [0, 1], "no training row has the label 'c'"),
        ("balanced", several, [[1, 0], [1, 1]], "every training row has the label 'a'"),
    ):
        with pytest.raises(ValueError, match=message):
            compute_class_weights(value, label_scheme, rows)


# Detected columns


@pytest.mark.parametrize(
    ("columns", "texts", "label"),
    [
        ("text label", ("text",), "label"),
        ("id Sentence Stars", ("Sentence",), "Stars"),
        ("sentence2 sentence1 gold label", ("sentence1", "sentence2"), "label"),
        ("premise hypothesis score", ("premise", "hypothesis"), "score"),
        ("question sentence label", ("question", "sentence"), "label"),
        ("text label score", ("text",), "label"),
        ("TEXT text label", ("text",), "label"),
    ],
)
def test_common_column_names_are_detected(columns, texts, label):
    record = dict.fromkeys(columns.split(), "x")
    assert find_text_columns(record, "t.csv, row 1") == texts
    assert find_label_column(record, "t.csv, row 1", texts) == label


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ("a b", r"t\.csv.*row 1"),
        ("text review label", "columns are text, review, label"),
        ("text sentence1 sentence2", "texts may be in sentence1 and sentence2 or text"),
        ("text kind", r"t\.csv.*row 1"),
        ("text class topic", "class or topic.*--label_column"),
        ("Text TEXT label", "common name for texts"),
    ],
)
def test_unknown_column_names_must_be_given(columns, message):
    record = dict.fromkeys(columns.split(), "x")
    with pytest.raises(ValueError, match=message):
        find_label_column(record, "t.csv, row 1", find_text_columns(record, "t.csv, row 1"))


# Files


def test_all_file_formats_give_the_same_rows(load):
    rows = [('a, "b"\nc', "yes"), ("d", "no"), ("é\u2028", "yes")]
    csv = '\ufefftext,label\r\n"a, ""b""\nc", yes\r\nd,no\r\né\u2028,yes\r\n'
    lines = [{"label": label, "text": text} for text, label in rows]
    listed = json.dumps([{"text": text, "label": label} for text, label in rows])
    for files in (
        {"train.csv": csv},
        {"train.csv.gz": csv},
        {"train.jsonl": lines},
        {"train.json": listed},
        {"train.jsonl.gz": lines},
    ):
        result = load(files)
        assert get_columns(result.splits["train"]) == {
            "text1": [text for text, _ in rows],
            "index": [1, 2, 3],
            "label": [1, 0, 1],
        }
        assert result.scheme == LabelScheme(SINGLE_LABEL, ("no", "yes")) and result.text_columns == ("text",)
    tabs = load({"train.tsv": 'text\tlabel\na "b\t0\nc\t1\n'})
    assert get_columns(tabs.splits["train"])["text1"] == ['a "b', "c"]


def test_several_files_form_one_split_and_errors_name_the_file(load):
    files = {"train1.csv": "text,label\na,x\nb,y\n", "train2.jsonl": '{"text": "c", "label": "x"}\n'}
    train = load(files).splits["train"]
    assert train.data["index"][:] == [1, 2, 1] and train.describe_row(2).endswith("train2.jsonl, line 1, row 1")
    files["train2.jsonl"] += '{"text": "d", "label": null}\n'
    with pytest.raises(ValueError, match=r"train2.jsonl, line 2, row 2, column 'label'.*no label"):
        load(files)


@pytest.mark.parametrize("second", ["text,topic\nc,good\n", "text\nc\n"])
def test_second_file_without_the_label_column_is_named(load, second):
    files = {"train1.csv": "text,label\na,good\nb,bad\n", "train2.csv": second, "dev.csv": "text,label\na,good\n"}
    with pytest.raises(ValueError, match=r"train2.csv, line 1, the header: .*no column 'label'"):
        load(files)


@pytest.mark.parametrize("second", ["text_pair", "Text_Pair "])
def test_second_texts_that_the_first_row_lacks_raise_an_error(load, second):
    rows = [{"text": "b", "label": 2}, {"text": "a", second: "q", "label": 1}, {"text": "c", "label": 1}]
    lines = [json.dumps(row) + "\n" for row in rows]
    for files in ({"train.jsonl": "".join(lines)}, {"train1.jsonl": lines[0] + lines[2], "train2.jsonl": lines[1]}):
        with pytest.raises(ValueError, match=rf"line \d, row \d: column '{second}' contains text in this row"):
            load(files)
        assert load(files, "--text_columns", "text").splits["train"].data["text1"][0] == "b"
    table = {"train.csv": f"text,{second}\na,x\nb,y\n"}
    assert load(table, "--label_column", second).text_columns == ("text",)


def test_pairs_nested_columns_and_unusual_names_are_read(load):
    rows = '{"t": {"left": "a", "right": "b"}, "y z": 0.5}\n{"t": {"left": "c", "right": "d"}, "y z": 3}\n'
    result = load({"train.jsonl": rows}, "--text_columns", "t.left", "t.right", "--label_column", "y z")
    assert get_columns(result.splits["train"]) == {
        "text1": ["a", "c"],
        "text2": ["b", "d"],
        "index": [1, 2],
        "label": [0.5, 3.0],
    }
    assert result.scheme.problem_type == REGRESSION


def test_decimal_comma_raises_an_error(load):
    table = {"train.csv": "text;label\na, b;2,5\nc;1,0\n"}
    with pytest.raises(ValueError, match=r"train.csv, line 2, row 1.*'2,5'"):
        load(table)
    assert load(table, "--problem_type", SINGLE_LABEL).scheme.names == ("1,0", "2,5")
    assert load(table, "--label_separator", ",").scheme.names == ("0", "1", "2", "5")


def test_multilabel_cells_and_lists_are_read(load):
    flags = "--label_separator", ";"
    cells = load({"train.csv": "text,labels\na,x;y\nb,\nc,z; x\n"}, *flags)
    rows = [{"text": "a", "labels": ["x", "y"]}, {"text": "b", "labels": []}, {"text": "c", "labels": ["z", "x"]}]
    lists = load({"train.jsonl": rows})
    for result in (cells, lists):
        assert result.scheme == LabelScheme(MULTI_LABEL, ("x", "y", "z"))
        assert result.splits["train"].data["label"][:] == [[1, 1, 0], [0, 0, 0], [1, 0, 1]]


TRAIN = "text,label\na,x\nb,y\n"


@pytest.mark.parametrize(
    ("dev", "message"),
    [
        ("text,label\na,x\nb,z\n", "dev.csv, line 3, row 2, column 'label'.*'x', 'y', got 'z'"),
        ("text,label\na,x\nb,\n", "dev.csv, line 3, row 2, column 'label'.*no label.*--label_separator"),
        (
            "text,labl\na,x\n",
            r"dev.csv, line 1, the header: there is no column 'label'. .* text, labl. Did you mean 'labl'",
        ),
        (
            "txt,label\na,x\n",
            r"dev.csv, line 1, the header: there is no column 'text'. .* txt, label. Did you mean 'txt'",
        ),
        ("text,label\na,x\nb\n", r"dev.csv, line 3, row 2: .* 2 cells .* got 1"),
        ("text,label\na,x,1\n", r"dev.csv, line 2, row 1: .* got 3"),
        ('text,label\n"a,x\n', r"dev.csv, line 2, row 1: A quote begins in this row"),
        ("text,label,label\na,x,y\n", r"dev.csv, line 1, the header: two columns have the name 'label'"),
        ("text,label\n", r"dev.csv must contain at least one row"),
        ("", r"dev.csv must contain at least one row"),
    ],
)
def test_table_error_names_the_row(load, dev, message):
    with pytest.raises(ValueError, match=message):
        load({"train.csv": TRAIN, "dev.csv": dev})


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": 5, "label": "x"}, "train.jsonl, line 2, row 2: Column 'text' contains 5 instead of text"),
        ({"text": None, "label": "x"}, "row 2: Column 'text' contains None instead of text"),
        ({"text": "\ud800", "label": "x"}, "row 2: Column 'text' contains an incomplete surrogate pair"),
        ({"label": "x"}, "row 2: there is no column 'text'. The columns are label"),
        ({"text": "b", "label": float("nan")}, "row 2, column 'label'.*got nan"),
        ({"text": "b", "label": {"x": 1}}, "row 2.*column 'label'"),
        ({"text": "b"}, "row 2, column 'label'.*no label"),
    ],
)
def test_json_object_error_names_the_row(load, row, message):
    rows = [{"text": "a", "label": "x"}, row, {"text": "c", "label": "y"}]
    with pytest.raises(ValueError, match=message):
        load({"train.jsonl": rows})


def test_blank_texts_are_kept_with_a_warning(load, caplog):
    result = load({"train.csv": "text,label\n,x\nb,y\n \t,y\n"})
    assert result.splits["train"].data["text1"][:] == ["", "b", " \t"]
    assert "train: 2 of 3 rows have a blank text" in caplog.text
    assert "train.csv, line 2, row 1" in caplog.text


def test_single_class_raises_an_error(load):
    with pytest.raises(ValueError, match=r"train.csv, line 2, row 1, column 'label'.*label 'x'"):
        load({"train.csv": "text,label\na,x\nb,x\n"})
    with pytest.raises(ValueError, match="training row has a label"):
        load({"train.csv": "text,label\na,\nb,\n"}, "--label_separator", ";")


def test_labels_that_differ_in_case_alone_are_kept_apart(load):
    data = load({"train.csv": "text,label\na,Good\nb,good\nc,bad\n"})
    assert data.scheme.names == ("Good", "bad", "good")


def test_given_problem_type_is_used(load):
    words = load({"train.csv": "text,label\na,1\nb,many\n"}, "--problem_type", SINGLE_LABEL)
    assert words.scheme.names == ("1", "many")
    stars = load({"train.csv": "text,label\na,1\nb,5\n"}, "--problem_type", REGRESSION)
    assert stars.splits["train"].data["label"][:] == [1.0, 5.0] and stars.scheme.names == ()
    points = load({"train.csv": "text,label\na,10.0\nb,9.0\n"}, "--problem_type", SINGLE_LABEL)
    assert points.scheme.names == ("9.0", "10.0")
    with pytest.raises(ValueError, match=r"row 1.*'x'"):
        load({"train.csv": TRAIN}, "--problem_type", MULTI_LABEL)


def test_label_names_may_be_reordered_and_extended(load, caplog):
    result = load({"train.csv": TRAIN, "dev.csv": "text,label\na,z\n"}, "--labels", "z", "y", "x")
    assert result.scheme.names == ("z", "y", "x") and result.splits["train"].data["label"][:] == [2, 1]
    assert result.splits["validation"].data["label"][:] == [0]
    assert "No training row has any of the labels 'z'" in caplog.text
    with pytest.raises(ValueError, match=r"train.csv, line 3, row 2, column 'label'.*'x', 'z', got 'y'"):
        load({"train.csv": TRAIN}, "--labels", "x", "z")


@pytest.mark.parametrize(
    ("test", "labels"),
    [
        ("text\na\nb\n", None),
        ("text,label\na,\nb,\n", None),
        ("text,label\na,-1\nb,-1\n", None),
        ("text,label\na,y\nb,x\n", [1, 0]),
    ],
)
def test_test_table_may_have_labels(load, test, labels):
    result = load({"train.csv": TRAIN, "test.csv": test}).splits["test"]
    assert len(result) == 2 and (result.data["label"][:] if "label" in result.data.column_names else None) == labels


def test_partly_labeled_test_table_raises_an_error(load):
    with pytest.raises(ValueError, match=r"test.csv, line 3, row 2, column 'label'.*no label"):
        load({"train.csv": TRAIN, "test.csv": "text,label\na,x\nb,\n"})
    minus_one = {"train.csv": "text,label\na,-1\nb,1\n", "test.csv": "text,label\na,-1\nb,-1\n"}
    assert load(minus_one).splits["test"].data["label"][:] == [0, 0]


def test_detected_settings_are_printed(load, caplog):
    with caplog.at_level(logging.INFO, "hf_attn_variants"):
        load({"train.csv": TRAIN})
        load({"train.csv": "text,label\na,0.5\nb,-1\n"})
    assert "train: 2 rows with labels 'x' 1, 'y' 1 (single_label_classification)" in caplog.text
    assert "train: 2 rows with labels from -1 to 0.5 (regression)" in caplog.text


# Labels of a saved model


def make_classifier_config(names, kind=None):
    return SimpleNamespace(
        architectures=["AttnVariantBertForSequenceClassification"], id2label=dict(enumerate(names)), problem_type=kind
    )


def test_evaluation_uses_the_labels_of_the_model(load):
    only = "--num_train_epochs", 0
    rows = {"dev.csv": "text,label\na,b\nc,a\n"}
    assert load(rows, *only, config=make_classifier_config(["b", "a"])).splits["validation"].data["label"][:] == [0, 1]
    numbers = {"dev.csv": "text,label\na,1\nc,0\n"}
    assert load(numbers, *only, config=make_classifier_config(["LABEL_0", "LABEL_1"])).scheme.names == ("0", "1")
    result = load(numbers, *only, config=make_classifier_config(["score"], REGRESSION))
    assert result.splits["validation"].data["label"][:] == [1.0, 0.0]
    alone = load({"test.csv": "text,other\na,b\n"}, *only, config=make_classifier_config(["b", "a"]))
    assert alone.label_column is None and list(alone.splits) == ["test"]
    for config, message in (
        (make_classifier_config(["x", "y"]), "dev.csv, line 2, row 1, column 'label'.*'x', 'y', got 'b'"),
        (make_classifier_config(["x", "y"], REGRESSION), "single output for regression, got 2"),
    ):
        with pytest.raises(ValueError, match=message):
            load(rows, *only, config=config)


# Data from the `datasets` library


@pytest.fixture
def load_source(monkeypatch):
    def call(splits, *flags, config=NO_CLASSIFIER):
        monkeypatch.setattr(dataset_splits, "load_dataset", lambda name, config: DatasetDict(splits))
        argv = ["model", "--output_dir", "out", "--dataset_name", "me/data", *flags]
        return load_classification_data(parse_args(argv), config)

    return call


def test_class_names_come_from_the_dataset(load_source):
    features = Features({"text": Value("string"), "label": ClassLabel(names=["world", "sports"])})
    rows = Dataset.from_dict({"text": ["a", "b"], "label": [0, 1]}, features=features)
    hidden = Dataset.from_dict({"text": ["c", "d"], "label": [-1, -1]}, features=features)
    result = load_source({"train": rows, "validation": rows, "test": hidden})
    assert result.scheme == LabelScheme(SINGLE_LABEL, ("world", "sports"))
    assert result.splits["train"].data["label"][:] == [0, 1] and "label" not in result.splits["test"].data.column_names
    several = Features({"text": Value("string"), "label": ListFeature(ClassLabel(names=["joy", "anger"]))})
    many = Dataset.from_dict({"text": ["a", "b"], "label": [[1], [0, 1]]}, features=several)
    result = load_source({"train": many, "dev": many}, "--validation_split_name", "dev")
    assert result.scheme == LabelScheme(MULTI_LABEL, ("joy", "anger"))
    assert list(result.splits) == ["train", "validation"]
    assert result.splits["validation"].data["label"][:] == [[0, 1], [1, 1]]


def test_dataset_ids_are_used_if_the_model_names_no_class(load_source):
    features = Features({"text": Value("string"), "label": ClassLabel(names=["neg", "pos"])})
    rows = Dataset.from_dict({"text": ["a", "b"], "label": [1, 0]}, features=features)
    only = ("--num_train_epochs", "0")
    result = load_source({"validation": rows}, *only, config=make_classifier_config(["LABEL_0", "LABEL_1"]))
    assert result.scheme.names == ("neg", "pos") and result.splits["validation"].data["label"][:] == [1, 0]
    with pytest.raises(ValueError, match="'0', '1', '2', got 'pos'"):
        load_source({"validation": rows}, *only, config=make_classifier_config(["LABEL_0", "LABEL_1", "LABEL_2"]))
    result = load_source({"validation": rows}, *only, config=make_classifier_config(["pos", "neg"]))
    assert result.splits["validation"].data["label"][:] == [0, 1]


def test_invalid_dataset_raises_an_error(load_source):
    rows = Dataset.from_dict({"text": ["a", None], "label": [0.5, 1.5]})
    with pytest.raises(ValueError, match=r"me/data \(train\), row 2: Column 'text' contains None instead of text"):
        load_source({"train": rows})
    good = Dataset.from_dict({"text": ["a", "b"], "label": ["x", "y"]})
    bad = Dataset.from_dict({"text": ["a", None], "label": ["x", "y"]})
    with pytest.raises(ValueError, match=r"me/data \(train\), row 2"):
        load_source({"train": bad, "validation": good, "test": good})
    with pytest.raises(ValueError, match=r"--train_split_name must be a non-empty split, got 'train'. .* are all"):
        load_source({"all": rows})
    with pytest.raises(ValueError, match=r"no rows to read.*--validation_split_name"):
        load_source({"train": rows}, "--num_train_epochs", "0")


def test_unavailable_dataset_raises_an_os_error(monkeypatch):
    def fail(name, config):
        raise RuntimeError("no network")

    monkeypatch.setattr(dataset_splits, "load_dataset", fail)
    flags = ["model", "--output_dir", "out", "--dataset_name", "nowhere/none"]
    with pytest.raises(OSError, match=r"nowhere/none could not be loaded \(RuntimeError: no network\)"):
        load_classification_data(parse_args(flags), NO_CLASSIFIER)
