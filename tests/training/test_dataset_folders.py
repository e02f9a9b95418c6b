"""Check that a local folder as `--dataset_name` gives the same rows as its files as `--train_file`."""

import bz2
import lzma
import zipfile

import pytest
from datasets import ClassLabel, Dataset, Features, Sequence, Value
from fixtures.data_files import write_lines
from transformers import BertConfig

from hf_attn_variants.commands.training import classify, ner, seq2seq
from hf_attn_variants.training.classification.data import load_classification_data
from hf_attn_variants.training.ner.task import load_sentences
from hf_attn_variants.training.pretraining import TextSettings
from hf_attn_variants.training.pretraining.text_stream import open_text_splits
from hf_attn_variants.training.seq2seq.task import load_seq2seq_data

parse_args = classify.parse_args

OUT = ("m", "--output_dir", "o")
WORDS = ("--problem_type", "single_label_classification")
COLUMNS = ("--source_column", "text", "--target_column", "label")
TEXTS = ["None", '"We go', "NA", "1.0", "7"]


def write(folder, name, rows, separator=","):
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("".join(separator.join(row) + "\n" for row in rows))


@pytest.mark.parametrize("names", [("train.csv", "dev.csv"), ("train/a.csv", "validation/b.csv")])
def test_dataset_folder_gives_the_same_classes(tmp_path, names):
    rows = [["text", "label"], *zip(["a", "b", "None", "d"], ["01", "1", "02", "2"], strict=True)]
    for name in names:
        write(tmp_path, name, rows)
    data = load_classification_data(parse_args([*OUT, "--dataset_name", str(tmp_path)]), BertConfig())
    assert sorted(data.scheme.names) == ["01", "02", "1", "2"] and set(data.splits) == {"train", "validation"}
    assert data.splits["train"].data["text1"][:] == ["a", "b", "None", "d"]
    write(tmp_path, names[0], [*rows, ["e", "1", "surplus"]])
    with pytest.raises(ValueError, match=r"line 6, row 5: .* 2 cells .* got 3"):
        load_classification_data(parse_args([*OUT, "--dataset_name", str(tmp_path)]), BertConfig())


def test_dataset_folder_gives_the_same_text_pairs(tmp_path):
    write(tmp_path, "train.tsv", [["source", "target"], *([text, text] for text in TEXTS)], "\t")
    data = load_seq2seq_data(seq2seq.parse_args([*OUT, "--metrics", "chrf", "--dataset_name", str(tmp_path)]))
    assert data.splits["train"].pairs() == [(text, text) for text in TEXTS]


@pytest.mark.parametrize("name", ["train.tsv", "train.txt"])
def test_dataset_folder_gives_the_same_pretraining_text(tmp_path, name):
    write(tmp_path, name, [[text] for text in (["text"] if name.endswith("tsv") else []) + TEXTS])
    [source] = open_text_splits(TextSettings(dataset_name=str(tmp_path))).train
    assert [text for _, text in source.read_articles()] == TEXTS
    assert list(source.read_articles(3)) == [(3, "1.0"), (4, "7")]


def write_features(folder, label):
    columns = f"  - {{name: text, dtype: string}}\n  - {{name: label, dtype: {label}}}\n"
    (folder / "README.md").write_text(f"---\ndataset_info:\n  features:\n{columns}---\n")


def test_declared_columns_of_a_dataset_folder_are_read_as_text(tmp_path):
    texts = ["a", "None", '"b', "c"]
    write(tmp_path, "train.tsv", [["text", "label"], *zip(texts, ["01", "1", "NA", "1"], strict=True)], "\t")
    write_features(tmp_path, "string")
    data = load_classification_data(parse_args([*OUT, "--dataset_name", str(tmp_path), *WORDS]), BertConfig())
    assert data.splits["train"].data["text1"][:] == texts and data.scheme.names == ("01", "1", "NA")


def test_declared_class_names_of_a_dataset_folder_are_used(tmp_path):
    argv = [*OUT, "--dataset_name", str(tmp_path)]
    write_features(tmp_path, "{class_label: {names: {'0': bad, '1': good, '2': fair}}}")
    write(tmp_path, "train.csv", [["text", "label"], ["None", "1"], ["b", " 0"], ["c", "good"]])
    write(tmp_path, "test.csv", [["text", "label"], ["a", "-1"], ["b", "-1"]])
    data = load_classification_data(parse_args(argv), BertConfig())
    assert data.scheme.names == ("bad", "good", "fair") and data.splits["train"].data["label"][:] == [1, 0, 1]
    assert "label" not in data.splits["test"].data.column_names
    write(tmp_path, "train.csv", [["text", "label"], ["a", "1"], ["b", "3"]])
    with pytest.raises(ValueError, match=r"line 3, row 2, column 'label': .* 'fair', got '3'"):
        load_classification_data(parse_args(argv), BertConfig())


@pytest.mark.parametrize("name", ["train.csv.bz2", "train.tsv.xz", "train.zip"])
def test_unsupported_compression_in_a_dataset_folder_raises_an_error(tmp_path, name):
    table = b"text,label\na,01\nb,1\n"
    if name == "train.zip":
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            archive.writestr("train.csv", table)
    else:
        (tmp_path / name).write_bytes((lzma if name.endswith(".xz") else bz2).compress(table))
    with pytest.raises(ValueError, match=rf"{name}: A table in a folder must be one of .*\.csv.* with gzip"):
        load_classification_data(parse_args([*OUT, "--dataset_name", str(tmp_path)]), BertConfig())
    with pytest.raises(ValueError, match=name):
        open_text_splits(TextSettings(dataset_name=str(tmp_path)))


def test_files_of_different_types_in_a_split_raise_an_error(tmp_path):
    rows = [["text", "label"], ["a", "x"], ["b", "y"]]
    for name in ("train/a.csv", "train/b.csv", "validation/a.csv"):
        write(tmp_path, name, rows)
    write(tmp_path, "train/notes.txt", [["collected in May"]])
    argv = [*OUT, "--dataset_name", str(tmp_path)]
    assert len(load_classification_data(parse_args(argv), BertConfig()).splits["train"]) == 4
    write_lines(tmp_path / "train/c.jsonl", [{"text": "c", "label": "x"}])
    with pytest.raises(ValueError, match=r"c\.jsonl would be omitted from the split 'train'"):
        load_classification_data(parse_args(argv), BertConfig())
    card = "---\nconfigs:\n- config_name: default\n  data_files:\n  - {split: train, path: train/*.csv}\n---\n"
    (tmp_path / "README.md").write_text(card)
    assert len(load_seq2seq_data(seq2seq.parse_args([*argv, "--metrics", "chrf", *COLUMNS])).splits["train"]) == 4


@pytest.mark.parametrize("separator", [";", "\\t", "|"])
def test_declared_separator_of_a_dataset_folder_is_detected(tmp_path, separator):
    card = f'---\nconfigs:\n- config_name: default\n  data_files: train.csv\n  sep: "{separator}"\n---\n'
    (tmp_path / "README.md").write_text(card)
    rows = [["text", "label"], ["a, b", "01"], ["None", "1"]]
    write(tmp_path, "train.csv", rows, separator.replace("\\t", "\t"))
    data = load_classification_data(parse_args([*OUT, "--dataset_name", str(tmp_path)]), BertConfig())
    assert data.splits["train"].data["text1"][:] == ["a, b", "None"] and data.scheme.names == ("01", "1")


def test_options_in_a_dataset_readme_are_used(tmp_path):
    write(tmp_path, "train.csv", [["a", "1"], ["b", "2"]])
    card = "---\nconfigs:\n- config_name: default\n  data_files: train.csv\n  names: [text, label]\n---\n"
    (tmp_path / "README.md").write_text(card)
    data = load_classification_data(parse_args([*OUT, "--dataset_name", str(tmp_path)]), BertConfig())
    assert data.splits["train"].data["text1"][:] == ["a", "b"]


@pytest.mark.parametrize("tag", ["U-PER", "L-ORG", "B_PER", "NOUN", "b-per", ""])
@pytest.mark.parametrize("kind", ["json", "parquet"])
def test_dataset_folder_gives_the_same_tags(tmp_path, tag, kind):
    rows = {"tokens": [["Ann", "met", "Bob"]], "ner_tags": [["B-PER", "O", tag]]}
    for split in ("train", "validation"):
        if kind == "json":
            row = {name: value[0] for name, value in rows.items()}
            write_lines(tmp_path / f"{split}.jsonl", [row])
        else:
            features = Features(
                {
                    "tokens": Sequence(Value("string")),
                    "ner_tags": Sequence(ClassLabel(names=["O", "B-PER", tag or "?"])),
                }
            )
            numbered = rows | {"ner_tags": [[1, 0, 2]]}
            Dataset.from_dict(numbered, features=features).to_parquet(tmp_path / f"{split}.parquet")
    with pytest.raises(ValueError, match=r"\(train\).*'Bob'"):
        load_sentences(ner.parse_args([*OUT, "--dataset_name", str(tmp_path)]))
