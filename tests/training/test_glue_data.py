"""Check GLUE's files: layouts, broken rows, submissions and tokenization."""

import pytest
from datasets import Dataset, DatasetDict
from transformers import AlbertConfig, AutoTokenizer, T5Config

from hf_attn_variants.glue_tasks import TASKS, format_prediction, get_task, parse_label
from hf_attn_variants.training.classification.data import ClassificationSplit, tokenize_split
from hf_attn_variants.training.engine.models import configure_token_types
from hf_attn_variants.training.glue.task import load_ax_diagnostics, load_glue, read_glue_tsv


def write(path, text, encoding="utf-8"):
    path.write_bytes(text.encode(encoding))
    return path


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("bom", ["", "\ufeff"])
@pytest.mark.parametrize("header", ["sentence\tlabel\n", ""])
def test_header_bom_line_ends_and_quotes_are_read(tmp_path, header, bom, newline):
    text = bom + header + '"an unclosed quote\t1\nhe said ""no"" twice\u2028so\t0\nnegative\x85space\t1\n'
    data = read_glue_tsv(write(tmp_path / "train.tsv", text.replace("\n", newline)), TASKS["sst2"])
    assert data["text1"][:] == ['"an unclosed quote', 'he said ""no"" twice\u2028so', "negative\x85space"]
    assert data["label"][:] == [1, 0, 1]


def test_cola_files_with_and_without_header_are_read(glue):
    splits = load_glue(get_task("CoLA"), str(glue / "CoLA"))
    assert list(splits) == ["train", "validation", "test"]
    assert splits["train"].data[2] == {"index": "2", "text1": 'She said "no" twice.', "label": 1}
    assert splits["test"].data.column_names == ["index", "text1"]


def test_official_layouts_are_read_by_column_name(tmp_path):
    parses = ["sentence1_binary_parse", "sentence2_binary_parse", "sentence1_parse", "sentence2_parse"]
    header = ["index", "promptID", "pairID", "genre", *parses, "sentence1", "sentence2", "label1", "gold_label"]
    row = ["0", "1", "1n", "fiction", "(", "(", "(", "(", "A.", "B.", "entailment", "neutral"]
    text = "\t".join(header) + "\n" + "\t".join(row) + "\n"
    for content in (text, text.split("\n", 1)[1]):
        row = read_glue_tsv(write(tmp_path / "train.tsv", content), TASKS["mnli"])[0]
        assert (row["text1"], row["text2"], row["label"]) == ("A.", "B.", 1)
    mrpc = "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t70\t71\tOne.\tTwo.\n"
    assert read_glue_tsv(write(tmp_path / "m.tsv", mrpc), TASKS["mrpc"])[0] == {
        "index": "0",
        "text1": "One.",
        "text2": "Two.",
        "label": 1,
    }
    test = "id\tquestion1\tquestion2\n7\tWhy?\tHow?\n"
    assert read_glue_tsv(write(tmp_path / "t.tsv", test), TASKS["qqp"], has_labels=False)[0]["index"] == "7"


def test_qqp_skips_truncated_rows_with_a_warning(tmp_path, caplog):
    text = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n0\t1\t2\tA?\tB?\t1\n1\t3\t4\tC?\nand D?\tE?\t0\n"
    assert len(read_glue_tsv(write(tmp_path / "train.tsv", text), TASKS["qqp"])) == 1
    assert "2 of 3 rows are split" in caplog.text


@pytest.mark.parametrize(
    ("task", "text", "message"),
    [
        ("sst2", "", "is empty"),
        ("sst2", "sentence\tlabel\n", "is empty"),
        ("sst2", "sentence\tstars\ngood\t1\n", "line 1.*column label"),
        ("sst2", "sentence\tlabel\ngood\t1\nbad\n", "line 3.*2 columns.*got 1"),
        ("sst2", "sentence\tlabel\ngood\t1\na\tb\t0\n", "line 3.*got 3"),
        ("sst2", "sentence\tlabel\ngood\t2\n", "line 2: The label must be .* got '2'"),
        ("sst2", "good\t1\nbad\t-1\n", "line 2: The label must be .* got '-1'"),
        ("mnli", "index\tsentence1\tsentence2\tgold_label\n0\ta\tb\t-\n", "line 2: The label must be .* got '-'"),
        (
            "stsb",
            "sentence1\tsentence2\tscore\na\tb\t5.2\n",
            "line 2: The label must be a score from 0 to 5, got '5.2'",
        ),
        ("stsb", "sentence1\tsentence2\tscore\na\tb\tnan\n", "line 2: The label must be .* got 'nan'"),
        ("rte", "a\tb\tentailment\n", "line 1.*no column"),
        ("sst2", "sentence,label\ngood,1\n", "line 1.*separated by tabs.*attn-variants classify"),
    ],
)
def test_glue_errors_name_file_and_row(tmp_path, task, text, message):
    path = write(tmp_path / "train.tsv", text)
    with pytest.raises(ValueError, match=message) as caught:
        read_glue_tsv(path, TASKS[task])
    assert str(path) in str(caught.value)


def test_invalid_utf8_error_names_the_row(tmp_path):
    path = tmp_path / "train.tsv"
    path.write_bytes(b"sentence\tlabel\nfine\t1\ncaf\xe9\t0\n")
    with pytest.raises(ValueError, match=r"line 3.*UTF-8"):
        read_glue_tsv(path, TASKS["sst2"])


def test_mnli_may_lack_files_but_not_the_matched_dev_set(tmp_path, glue):
    for name in ("train", "dev_matched"):
        (tmp_path / f"{name}.tsv").write_text((glue / f"MNLI/{name}.tsv").read_text())
    assert list(load_glue(get_task("mnli"), str(tmp_path))) == ["train", "validation_matched"]
    assert load_ax_diagnostics(str(tmp_path)) is None and len(load_ax_diagnostics(str(glue / "MNLI"))) == 2
    (tmp_path / "dev_matched.tsv").unlink()
    with pytest.raises(OSError, match=r"dev_matched\.tsv"):
        load_glue(get_task("mnli"), str(tmp_path))


def test_evaluation_needs_no_training_split(tmp_path, glue, monkeypatch):
    (tmp_path / "dev.tsv").write_text((glue / "CoLA/dev.tsv").read_text())
    with pytest.raises(OSError, match=r"train\.tsv"):
        load_glue(get_task("cola"), str(tmp_path))
    assert list(load_glue(get_task("cola"), str(tmp_path), with_train=False)) == ["validation"]
    (tmp_path / "train.tsv").write_text("no CoLA\n")
    assert list(load_glue(get_task("cola"), str(tmp_path), with_train=False)) == ["validation"]
    rows = Dataset.from_dict({"sentence": ["a"], "label": [1], "idx": [0]})
    hub = DatasetDict({"train": rows, "validation": rows})
    monkeypatch.setattr("hf_attn_variants.training.engine.dataset_splits.load_dataset", lambda name, task: hub)
    assert list(load_glue(get_task("cola"), with_train=False)) == ["validation"]


def test_single_files_take_precedence_over_the_folder(tmp_path, glue):
    (tmp_path / "small.tsv").write_text("a\t1\t\tOne row.\n")
    splits = load_glue(get_task("cola"), str(glue / "CoLA"), {"train_file": str(tmp_path / "small.tsv")})
    assert len(splits["train"]) == 1 and len(splits["validation"]) == 4


def test_hub_columns_are_mapped_to_the_official_columns(monkeypatch):
    rows = {"sentence1": ["a"], "sentence2": ["b"], "label": [2], "idx": [5]}
    hub = DatasetDict(
        {
            name: Dataset.from_dict(rows)
            for name in ("train", "validation_matched", "validation_mismatched", "test_matched", "test_mismatched")
        }
    )
    monkeypatch.setattr("hf_attn_variants.training.engine.dataset_splits.load_dataset", lambda name, task: hub)
    splits = load_glue(get_task("mnli"))
    assert splits["train"].data[0] == {"text1": "a", "text2": "b", "label": 2, "index": 5}
    assert splits["test_matched"].data.column_names == ["text1", "text2", "index"]


def test_missing_hub_column_error_names_the_local_option(monkeypatch):
    rows = Dataset.from_dict({"text": ["a"], "label": [1], "idx": [0]})
    hub = DatasetDict({"train": rows, "validation": rows})
    monkeypatch.setattr("hf_attn_variants.training.engine.dataset_splits.load_dataset", lambda name, task: hub)
    with pytest.raises(ValueError, match=r"no column sentence in .*'text'.* --data_dir"):
        load_glue(get_task("cola"), with_train=False)


def test_unreachable_hub_error_names_the_local_option(monkeypatch):
    def fail(*_):
        raise ConnectionError("offline")

    monkeypatch.setattr("hf_attn_variants.training.engine.dataset_splits.load_dataset", fail)
    with pytest.raises(OSError, match="--data_dir"):
        load_glue(get_task("rte"))


def test_tokenized_pairs_are_truncated_to_max_length(glue, tiny_bert):
    split = load_glue(get_task("stsb"), str(glue / "STS-B"))["train"]
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert)
    data = tokenize_split(split, tokenizer, max_length=12)
    assert set(data.column_names) == {"input_ids", "token_type_ids", "attention_mask", "label", "length"}
    assert max(data["length"]) == 12 and data["length"][0] == len(data[0]["input_ids"])
    assert sum(data[0]["token_type_ids"]) > 0


def test_pairs_have_token_types_if_the_model_uses_them(glue, tiny_bert):
    split = load_glue(get_task("stsb"), str(glue / "STS-B"))["train"]
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert)
    tokenizer.model_input_names = ["input_ids", "attention_mask"]  # as for ALBERT
    configure_token_types(tokenizer, T5Config())
    assert "token_type_ids" not in tokenize_split(split, tokenizer, max_length=12).column_names
    configure_token_types(tokenizer, AlbertConfig())
    assert sum(tokenize_split(split, tokenizer, max_length=12)[0]["token_type_ids"]) > 0
    configure_token_types(tokenizer, T5Config())
    assert "token_type_ids" not in tokenize_split(split, tokenizer, max_length=12).column_names


def test_token_types_are_kept_when_the_tokenizer_is_saved(shared_data, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(shared_data / "tokenizers/albert")
    assert "token_type_ids" not in tokenizer("a text", "another")
    configure_token_types(tokenizer, AlbertConfig())
    tokenizer.save_pretrained(tmp_path)
    assert sum(AutoTokenizer.from_pretrained(tmp_path)("a text", "another")["token_type_ids"]) > 0


def test_labels_and_submissions_have_the_official_format():
    assert parse_label(TASKS["qnli"], "not_entailment") == parse_label(TASKS["qnli"], "1") == 1
    assert format_prediction(TASKS["qnli"], 1) == "not_entailment"
    assert format_prediction(TASKS["mrpc"], 1) == "1"
    assert [format_prediction(TASKS["stsb"], value) for value in (-0.3, 2.34567, 7.0)] == ["0.000", "2.346", "5.000"]
    names = "CoLA SST-2 MRPC STS-B QQP MNLI-m MNLI-mm QNLI RTE WNLI AX"
    actual = {t.get_submission_file(s) for t in TASKS.values() for s in t.test_splits}
    assert actual == {f"{name}.tsv" for name in names.split()}


def test_first_returns_all_rows_without_a_count(glue):
    split = ClassificationSplit("train", read_glue_tsv(glue / "CoLA/train.tsv", TASKS["cola"]))
    assert len(split.take(None)) == len(split.take(99)) == 12 and len(split.take(3)) == 3
