"""Check token classification: CoNLL files, labels at first tokens, entity scores, and whole runs."""

import gzip
import re

import pytest
import torch
from fixtures.commands import run_command
from fixtures.data_files import write_lines
from safetensors.torch import load_file, save_file
from transformers import AutoModelForTokenClassification, AutoTokenizer

from hf_attn_variants.commands.training import ner
from hf_attn_variants.conversion import convert_checkpoint
from hf_attn_variants.errors import NonFiniteLossError
from hf_attn_variants.training.ner.task import load_sentences, read_conll, score_entities

NAMES, PLACES, VERBS = ("Ann", "Bob", "Tom Lee"), ("Rome", "New York"), ("visits", "likes", "left")


def iterate_sentences():
    rows = [(name, verb, place) for name in NAMES for verb in VERBS for place in PLACES]
    for name, verb, place in rows:
        words = [*name.split(), verb, *place.split(), "."]
        tags = ["B-PER", *["I-PER"] * name.count(" "), "O", "B-LOC", *["I-LOC"] * place.count(" "), "O"]
        yield list(zip(words, tags, strict=True))


def write(path, rows, has_tags=True):
    lines = ["-DOCSTART- -X- O O\n\n"]
    for row in rows:
        lines += [f"{word} NN {tag}\n" if has_tags else f"{word}\n" for word, tag in row] + ["\n"]
    text = "".join(lines).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


@pytest.fixture
def run(tiny_bert, tmp_path):
    rows = list(iterate_sentences())
    train, dev = write(tmp_path / "train.txt.gz", rows), write(tmp_path / "dev.txt", rows[::3])
    test = write(tmp_path / "test.txt", rows[1::5], has_tags=False)

    def call(*more, model=tiny_bert, out="out"):
        argv = [model, "--train_file", train, "--validation_file", dev, "--test_file", test, "--max_length", 16]
        argv += ["--output_dir", tmp_path / out, "--per_device_train_batch_size", 6, "--learning_rate", "5e-3"]
        argv += ["--cpu", "--disable_tqdm", *more]
        return run_command(ner, *argv), tmp_path / out

    return call


@pytest.mark.thorough
def test_variant_learns_to_tag_every_word(run, tiny_bert, tmp_path):
    convert_checkpoint(tiny_bert, tmp_path / "gqa", 2)
    results, out = run("--num_train_epochs", 8, model=tmp_path / "gqa")
    assert results["eval_f1"] > 0.9 and results["eval_accuracy"] > 0.9 and results["eval_samples"] == 6
    model = AutoModelForTokenClassification.from_pretrained(out)
    assert model.config.num_key_value_heads == 2
    assert sorted(model.config.label2id) == ["B-LOC", "B-PER", "I-LOC", "I-PER", "O"]
    expected = [[word for word, _ in row] for row in list(iterate_sentences())[1::5]]
    assert [words for words, _ in read_conll(out / "predictions_test.txt")] == expected
    assert len(read_conll(out / "predictions_dev.txt")) == 6 and (out / "training_curves.png").is_file()
    again, _ = run("--num_train_epochs", 0, model=out, out="again")
    assert again["eval_f1"] == results["eval_f1"] and again["eval_loss"] == pytest.approx(results["eval_loss"])


def test_truncated_words_are_tagged_o_with_a_warning(run, caplog):
    results, out = run("--max_train_steps", 1, "--max_length", 4)
    for split, count, words in (("train", 18, 54), ("validation", 6, 18)):  # two of four to six words fit
        printed = (
            rf"{split}: {count} of {count} sentences have more than --max_length 4 tokens. Their last (\d+) words"
        )
        assert re.search(printed, caplog.text) and int(re.search(printed, caplog.text)[1]) > words // 2
    tagged = read_conll(out / "predictions_dev.txt")
    assert all(set(tags[2:]) == {"O"} and len(tags) == len(words) for words, tags in tagged)
    assert 0 <= results["eval_accuracy"] < 1


def test_scores_count_whole_entities():
    references = [["B-PER", "I-PER", "O", "B-LOC"]]
    result = score_entities([["B-PER", "O", "O", "B-LOC"]], references)
    assert result == pytest.approx({"precision": 0.5, "recall": 0.5, "f1": 0.5, "accuracy": 0.75})
    assert score_entities([["O"] * 4], references)["f1"] == 0.0


def test_dataset_gives_the_same_sentences_as_files(tmp_path):
    rows = [{"tokens": [w for w, _ in row], "ner_tags": [t for _, t in row]} for row in iterate_sentences()]
    for split in ("train", "validation"):
        write_lines(tmp_path / f"{split}.jsonl", rows)
    settings = ner.parse_args(["m", "--output_dir", "o", "--dataset_name", str(tmp_path)])
    result = load_sentences(settings)
    assert result.keys() == {"train", "validation"}
    assert result["train"] == [(row["tokens"], row["ner_tags"]) for row in rows]


def write_dataset(folder, rows, splits=("train", "validation")):
    for split in splits:
        write_lines(folder / f"{split}.jsonl", rows)
    return load_sentences(ner.parse_args(["m", "--output_dir", "o", "--dataset_name", str(folder)]))


@pytest.mark.parametrize(("tags", "known"), [(["O", "O"], []), (["O", "B-X"], ["O", "B-X"])])
def test_test_tags_of_a_dataset_are_known_or_all_o(tmp_path, tags, known):
    rows = [{"tokens": ["a", "b"], "ner_tags": tags}]
    result = write_dataset(tmp_path, rows, ("train", "validation", "test"))
    assert result["test"] == [(["a", "b"], known)] and result["train"] == [(["a", "b"], tags)]


@pytest.mark.parametrize(
    ("text", "tags"), [("Ann B-PER\nleft O\n", ["B-PER", "O"]), ("Ann O\nleft O\n", []), ("Ann B-PER\nleft\n", [])]
)
def test_test_file_may_have_tags(tmp_path, caplog, text, tags):
    (tmp_path / "t.txt").write_text(text)
    with caplog.at_level("INFO", "hf_attn_variants"):
        assert read_conll(str(tmp_path / "t.txt"), needs_tags=False) == [(["Ann", "left"], tags)]
    assert ("tagged but not scored" in caplog.text) == (not tags)
    assert any(record.levelname == "WARNING" for record in caplog.records) == ("B-PER" in text and not tags)


def test_tagged_test_sentences_are_scored(run, tmp_path, capsys):
    scored = write(tmp_path / "scored.txt", list(iterate_sentences())[::3])
    results, _ = run("--max_train_steps", 3, "--test_file", scored)
    assert {name: results[f"test_{name}"] for name in ("f1", "accuracy")} == {
        name: results[f"eval_{name}"] for name in ("f1", "accuracy")
    }
    assert results["test_loss"] == pytest.approx(results["eval_loss"]) and results["test_samples"] == 6
    assert "\ntest (6 sentences): precision " in capsys.readouterr().out
    (tmp_path / "other.txt").write_text("Ann B-DOG\n")
    with pytest.raises(ValueError, match=r"test tags.*B-LOC, B-PER.*'B-DOG' for 'Ann'"):
        run("--max_train_steps", 3, "--test_file", tmp_path / "other.txt", out="other")


def test_evaluated_tagger_keeps_its_tags(run, tmp_path, caplog):
    """Check that other tags raise an error: outputs are not renamed, and no new head is made."""
    _, out = run("--max_train_steps", 2)
    rows = list(iterate_sentences())
    for text in ("Ann B-ABC\nleft O\nRome B-LOC\n", "Ann B-PER\nleft B-ORG\n"):
        (tmp_path / "odd.txt").write_text(text)
        printed = "dev tags.*B-LOC, B-PER.*'B-(ABC|ORG)'"
        with pytest.raises(ValueError, match=printed):
            run("--num_train_epochs", 0, "--validation_file", tmp_path / "odd.txt", model=out, out="odd")
    few = write(tmp_path / "few.txt", [row for row in rows if len(row) == 4])
    _, again = run("--num_train_epochs", 0, "--validation_file", few, model=out, out="again")
    names = [AutoModelForTokenClassification.from_pretrained(folder).config.id2label for folder in (out, again)]
    assert names[0] == names[1]


def test_evaluation_without_a_trained_head_raises_an_error(run):
    with pytest.raises(
        ValueError, match=r"--num_train_epochs 0 requires a model that tags words, .* was saved as Bert"
    ):
        run("--num_train_epochs", 0)


def test_nonfinite_outputs_raise_an_error(run, tmp_path):
    """Check sentences without tags, which have no loss that could show the fault."""
    _, out = run("--max_train_steps", 1)
    tokenizer = AutoTokenizer.from_pretrained(out)
    ann, left = (tokenizer(word, add_special_tokens=False).input_ids for word in ("Ann", "left"))
    weights = load_file(out / "model.safetensors")
    weights["bert.embeddings.word_embeddings.weight"][sorted({*left} - {*ann})] = torch.inf
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    (tmp_path / "dev.txt").write_text("Ann B-PER\n")
    (tmp_path / "plain.txt").write_text("Ann\n\nAnn\nleft\n")
    flags = "--validation_file", tmp_path / "dev.txt", "--test_file", tmp_path / "plain.txt"
    with pytest.raises(NonFiniteLossError, match="are NaN or infinite for 1 of 2 rows in test"):
        run("--num_train_epochs", 0, *flags, model=out, out="again")


def test_resume_with_other_tags_raises_an_error(run, tmp_path):
    flags = ["--max_train_steps", 2, "--checkpointing_steps", 1]
    for name in ("B-AAA", "B-ZZZ"):
        (tmp_path / f"{name}.txt").write_text(f"Ann {name}\nleft O\n")
    run(*flags, "--validation_file", tmp_path / "B-ZZZ.txt")
    with pytest.raises(
        ValueError, match=r"resume exactly from .*: tags of the model was .*B-ZZZ.* and is now .*B-AAA"
    ):
        run(*flags, "--validation_file", tmp_path / "B-AAA.txt", "--resume_from_checkpoint", "latest")


def test_tag_without_training_examples_gives_a_warning(run, tmp_path, caplog):
    (tmp_path / "odd.txt").write_text("Ann B-PRE\nleft O\n\nBob B-PRE\n")
    run("--max_train_steps", 1, "--validation_file", tmp_path / "odd.txt")
    printed = "No training sentence contains the tag 'B-PRE', which the dev set assigns to 'Ann' (Ann left)"
    assert caplog.text.count("No training sentence") == 1 and printed in caplog.text


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"tokens": ["a", "b"], "ner_tags": ["O"]}, "'a b'"),
        ({"tokens": ["a"], "ner_tags": [3]}, "names for its numbers"),
        ({"tokens": [""][:0], "ner_tags": [""][:0]}, "."),
        ({"tokens": ["a", 5], "ner_tags": ["O", "O"]}, r"row 1: Column 'tokens' .*'a', 5"),
        ({"tokens": ["a", None], "ner_tags": ["O", "O"]}, "row 1: Column 'tokens' .*None"),
        ({"tokens": ["\ud83d"], "ner_tags": ["O"]}, "row 1: Column 'tokens' .*ud83d"),
        ({"tokens": "ab", "ner_tags": "OO"}, "row 1: Column 'tokens' .*'ab'"),
        ({"tokens": ["a", "b"], "ner_tags": "OO"}, "row 1: Column 'ner_tags' .*'OO'"),
        ({"tokens": ["a"], "tags": ["O"]}, r"no column 'ner_tags'.*are tokens, tags\."),
    ],
)
def test_invalid_ner_dataset_raises_an_error(tmp_path, row, message):
    with pytest.raises((OSError, ValueError), match=message):
        write_dataset(tmp_path, [row])


def test_tags_that_differ_only_in_case_stay_distinct(tiny_bert, tmp_path):
    lines = "Ann B-PER\nand O\nbob B-per\n\n" * 6
    (tmp_path / "t.txt").write_text(lines)
    argv = ["--train_file", tmp_path / "t.txt", "--validation_file", tmp_path / "t.txt", "--max_train_steps", 1]
    argv += ["--max_length", 12, "--cpu", "--disable_tqdm"]
    for model, out in ((tiny_bert, "one"), (tmp_path / "one", "two")):
        run_command(ner, model, *argv, "--output_dir", tmp_path / out)
    names = [AutoModelForTokenClassification.from_pretrained(tmp_path / out).config.id2label for out in ("one", "two")]
    assert names[0] == names[1] and sorted(names[0].values()) == ["B-PER", "B-per", "O"]


def test_overwriting_removes_old_predictions(run, tiny_bert, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/predictions_other.txt").write_text("a O\n")
    _, out = run("--max_train_steps", 1, "--overwrite_output_dir")
    assert not (out / "predictions_other.txt").exists() and (out / "predictions_test.txt").exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("Rome", r"bad\.txt.*line 2.*'Rome'"),
        ("Rome NN LOC", "line 2.*'Rome NN LOC'"),
        ("Rome B-", "line 2.*'Rome B-'"),
    ],
)
def test_invalid_conll_line_error_names_the_line(tmp_path, line, message):
    (tmp_path / "bad.txt").write_text(f"Ann B-PER\n{line}\n")
    with pytest.raises(ValueError, match=message):
        read_conll(tmp_path / "bad.txt")


@pytest.mark.parametrize("separator", [" ", "\t"])
def test_column_with_word_numbers_raises_an_error(tmp_path, separator):
    path = tmp_path / "t.txt"
    rows = ["1 Ann B-PER", "2 left O", "", "1 Bob B-PER"]
    path.write_text("\n".join(rows).replace(" ", separator))
    with pytest.raises(ValueError, match=r"t\.txt: .*the first column numbers the words.*Remove this column"):
        read_conll(path)
    path.write_text("\n".join([*rows, "", "7 wins O"]))
    assert [words for words, _ in read_conll(path)] == [["1", "2"], ["1"], ["7"]]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--train_file.*--validation_file.*--dataset_name"),
        (["--dataset_name", "c", "--test_file", "t"], "or --dataset_name"),
        (["--train_file", "a"], "--train_file.*--validation_file"),
        (["--train_file", "a", "--validation_file", "b", "--dataset_name", "c"], "or --dataset_name"),
        (
            ["--dataset_name", "c", "--metric_for_best_model", "bleu"],
            "must be one of loss, precision, recall, f1, accuracy",
        ),
    ],
)
def test_ner_rejects_invalid_flags(flags, message):
    with pytest.raises(ValueError, match=message):
        ner.parse_args(["m", "--output_dir", "o", *flags])


def test_dataset_without_words_error_names_the_columns(tmp_path):
    for split in ("train", "validation"):
        (tmp_path / f"{split}.txt").write_text("a\n")
    with pytest.raises(ValueError, match=r"\(train\): there is no column 'tokens'. The columns are text\."):
        load_sentences(ner.parse_args(["m", "--output_dir", "o", "--dataset_name", str(tmp_path)]))


def test_invalid_words_of_a_test_split_raise_an_error_before_training(tmp_path):
    write_lines(tmp_path / "test.jsonl", [{"tokens": "Ann left"}])
    with pytest.raises(ValueError, match=r"test\.jsonl, line 1, row 1: Column 'tokens' .*'Ann left'"):
        write_dataset(tmp_path, [{"tokens": ["Ann"], "ner_tags": ["O"]}])
