"""Check `run_seq2seq.main` on tiny T5 models: learning, decoding order, data sources, resumed runs and errors."""

import gzip
import json
import re
import shutil

import pytest
import torch
from fixtures.commands import run_command
from fixtures.data_files import edit_json, write_lines
from fixtures.linear_loop import log_of
from fixtures.uptraining import make_text
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, GenerationMixin

from hf_attn_variants.commands.training import seq2seq
from hf_attn_variants.conversion import convert_checkpoint
from hf_attn_variants.hub import push as hub_push
from hf_attn_variants.training.seq2seq.task import Seq2SeqFineTuning, load_seq2seq_data


@pytest.fixture
def source(tmp_path):
    return make_text(tmp_path)[0]


@pytest.fixture
def run(t5, source, tmp_path):
    def call(*more, model=t5, output_dir=tmp_path / "out", text=None):
        target = source.with_name("target.txt")
        pairs = ["--source_file", source, "--target_file", target]
        pairs += ["--validation_source_file", source, "--validation_target_file", target]
        argv = ["--model_name_or_path", model] if model is not None else []
        argv += [*(pairs if text is None else text), "--output_dir", output_dir, "--max_length", 16]
        argv += ["--per_device_train_batch_size", 16, "--per_device_eval_batch_size", 5, "--learning_rate", 1e-2]
        argv += ["--logging_steps", 1, "--max_eval_samples", 13, "--dropout_rate", 0, "--cpu", "--disable_tqdm", *more]
        return run_command(seq2seq, *argv)

    call.out = tmp_path / "out"
    return call


def read_predictions(folder, split="dev"):
    return [json.loads(line) for line in (folder / f"predictions_{split}.jsonl").read_text().splitlines()]


@pytest.mark.thorough
def test_seq2seq_training_lowers_the_loss_and_writes_all_outputs(run, t5):
    convert_checkpoint(t5, t5.parent / "gqa2", 2)
    results = run("--max_train_steps", 30, "--label_smoothing_factor", 0.1, model=t5.parent / "gqa2")
    before = run("--num_train_epochs", 0, model=t5.parent / "gqa2", output_dir=run.out.with_name("before"))
    assert results["eval_loss"] < 0.9 * before["eval_loss"] and before["steps"] == 0
    saved = json.loads((run.out / "all_results.json").read_text())
    assert saved["eval_bleu"] == results["eval_bleu"] and saved["arguments"]["label_smoothing_factor"] == 0.1
    assert (run.out / "training_curves.png").read_bytes().startswith(b"\x89PNG")
    config = json.loads((run.out / "config.json").read_text())
    assert config["num_key_value_heads"] == 2 and config["model_type"] == "attn_variant_t5"


def test_t5_has_no_length_limit_and_disabled_bars_are_not_printed(run, t5, tmp_path, capfd):
    folder = shutil.copytree(t5, tmp_path / "short")
    edit_json(folder / "tokenizer_config.json", model_max_length=10)
    run("--max_train_steps", 1, model=folder)  # sources have up to 16 tokens
    assert "it/s" not in (printed := capfd.readouterr().err) and "%|" not in printed


@pytest.mark.thorough
def test_predictions_equal_the_model_in_row_order(run, t5, source):
    results = run("--num_train_epochs", 0, "--num_beams", 1, 3, "--metrics", "bleu", "accuracy")
    rows = read_predictions(run.out)
    lines = source.read_text().splitlines()
    assert [row["source"] for row in rows] == lines[:13] and len(rows) == 13
    assert [row["references"][0] for row in rows] == source.with_name("target.txt").read_text().splitlines()[:13]
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(t5).eval(), AutoTokenizer.from_pretrained(t5)
    tokens = 0
    for row in rows:
        for beams, key in ((1, "prediction"), (3, "prediction_beam3")):
            ids = tokenizer(row["source"], return_tensors="pt").input_ids
            with torch.no_grad():
                out = model.generate(input_ids=ids, max_new_tokens=16, num_beams=beams, do_sample=False)[0, 1:]
            assert row[key] == tokenizer.decode(out, skip_special_tokens=True)
            tokens += len(out) if beams == 1 else 0
    assert results["eval_decode_tokens"] == tokens and results["eval_decode_tokens_per_second"] > 0
    assert {"eval_bleu", "eval_bleu_beam3", "eval_accuracy_beam3", "eval_decode_tokens_beam3"} <= results.keys()


def test_seq2seq_loss_equals_the_loss_of_transformers_labels(run, t5):
    results = run("--num_train_epochs", 0)
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(t5).eval(), AutoTokenizer.from_pretrained(t5)
    total = tokens = 0
    for row in read_predictions(run.out):
        labels = tokenizer(row["references"][0], return_tensors="pt").input_ids
        with torch.no_grad():
            loss = model(input_ids=tokenizer(row["source"], return_tensors="pt").input_ids, labels=labels).loss
        total, tokens = total + float(loss) * labels.shape[1], tokens + labels.shape[1]
    assert results["eval_loss"] == pytest.approx(total / tokens, rel=1e-5)


def load_data(*flags):
    args = seq2seq.parse_args(["m", "--output_dir", "x", "--metrics", "bleu", *map(str, flags)])
    return load_seq2seq_data(args)


def test_tables_gzip_text_and_datasets_give_equal_rows(source, tmp_path):
    target = source.with_name("target.txt")
    pairs = list(zip(source.read_text().splitlines(), target.read_text().splitlines(), strict=True))
    folder = tmp_path / "dataset"
    folder.mkdir()
    write_lines(folder / "train.jsonl", ({"pair": {"a": s, "b": t}} for s, t in pairs))
    (tmp_path / "t.csv").write_text("a,b\n" + "".join(f"{s},{t}\n" for s, t in pairs))
    for path in (source, target):
        path.with_suffix(".gz").write_bytes(gzip.compress(path.read_bytes()))
    flags = [
        ["--source_file", source, "--target_file", target],
        ["--source_file", source.with_suffix(".gz"), "--target_file", target.with_suffix(".gz")],
        ["--train_file", tmp_path / "t.csv", "--source_column", "a", "--target_column", "b"],
        ["--train_file", folder / "train.jsonl", "--source_column", "pair.a", "--target_column", "pair.b"],
        ["--dataset_name", folder, "--source_column", "pair.a", "--target_column", "pair.b"],
    ]
    for argv in flags:
        data = load_data("--source_prefix", "to b: ", *argv)
        assert data.splits.keys() == {"train"}
        assert data.splits["train"].pairs() == [("to b: " + s, t) for s, t in pairs]
    with pytest.raises(ValueError, match=r"row 1: there is no column 'source'. The columns are pair.a, pair.b"):
        load_data("--dataset_name", folder)


@pytest.mark.thorough
def test_finished_model_remembers_columns_and_prefix(run, source, tmp_path, caplog):
    pairs = zip(source.read_text().splitlines(), source.with_name("target.txt").read_text().splitlines(), strict=True)
    table = tmp_path / "t.csv"
    table.write_text("source,en,de\n" + "".join(f"x,{s},{t}\n" for s, t in pairs))
    named = ["--source_column", "en", "--target_column", "de", "--source_prefix", "to b: "]
    both = ["--train_file", table, "--validation_file", table]
    first = run("--max_train_steps", 1, *named, text=both)
    remembered = {name: first[name] for name in ("source_column", "target_column", "source_prefix")}
    assert list(remembered.values()) == ["en", "de", "to b: "]
    only = {"model": run.out, "text": both[2:]}
    with caplog.at_level("INFO", "hf_attn_variants"):
        again = run("--num_train_epochs", 0, **only, output_dir=tmp_path / "again")
    printed = "--source_column 'en' --target_column 'de' --source_prefix 'to b: '"
    assert printed in caplog.text
    assert {name: again[name] for name in remembered} == remembered
    assert again["eval_loss"] == pytest.approx(first["eval_loss"], rel=1e-5)
    # Explicit values take precedence, including an empty prefix. Parallel text uses only the prefix.
    arguments = ["--num_train_epochs", 0, "--source_column", "source", "--source_prefix", ""]
    other = run(*arguments, **only, output_dir=tmp_path / "other")
    assert (other["source_column"], other["target_column"]) == ("source", "de") and "source_prefix" not in other
    lines = ["--validation_source_file", source, "--validation_target_file", source.with_name("target.txt")]
    parallel = run("--num_train_epochs", 0, model=run.out, text=lines, output_dir=tmp_path / "parallel")
    assert parallel["source_prefix"] == "to b: " and "source_column" not in parallel


@pytest.mark.parametrize("blank", [{}, {"target": ""}, {"target": " "}], ids=["none", "empty", "a space"])
@pytest.mark.parametrize("kind", ["lines", "table", "dataset"])
def test_predictions_without_targets_keep_their_rows(source, tmp_path, caplog, kind, blank):
    (tmp_path / "test.txt").write_text("one\n\ntwo\n")
    folder = tmp_path / "dataset"
    folder.mkdir()
    rows = [{"source": text, "number": i, **blank} for i, text in enumerate(["one", "", "two"])]
    write_lines(folder / "test.jsonl", rows)
    flags = {
        "lines": ["--test_source_file", tmp_path / "test.txt"],
        "table": ["--test_file", folder / "test.jsonl"],
        "dataset": ["--dataset_name", folder],
    }[kind]
    test = load_data("--num_train_epochs", 0, *flags).splits["test"]
    assert test.sources == ["one", "", "two"] and test.references is None
    assert test.keys == [{"row": 1}, {"row": 2}, {"row": 3}]
    assert bool(re.search("[Cc]olumn 'target'.*no text", caplog.text)) == (kind != "lines")


@pytest.mark.parametrize("kind", ["table", "dataset"])
def test_rows_with_a_blank_side_are_skipped_with_a_warning(tmp_path, caplog, kind):
    """Check a no-break space, which is text; tables and datasets give the same rows."""
    pairs = [("one", ""), ("\u00a0", "zwei"), ("", "drei"), ("four", "vier")]
    rows = "".join(json.dumps({"source": source, "target": target}) + "\n" for source, target in pairs)
    for name in ("train", "validation", "test"):
        (tmp_path / f"{name}.jsonl").write_text(rows)
    files = [
        part for name in ("train", "validation", "test") for part in (f"--{name}_file", tmp_path / f"{name}.jsonl")
    ]
    flags = {"table": files, "dataset": ["--dataset_name", tmp_path]}[kind]
    splits = load_data(*flags).splits
    assert all(split.pairs() == [pairs[1], pairs[3]] for split in splits.values()) and len(splits) == 3
    assert caplog.text.count("Skipping 2 of 4 rows") == 3
    # Rows for predictions have their row numbers in the file, and training rows do not.
    assert all(splits[name].keys == [{"row": 2}, {"row": 4}] for name in ("dev", "test")) and not splits["train"].keys
    assert splits["dev"].take(1).keys == [{"row": 2}]


def test_predictions_identify_rows_of_several_files(run, source, tmp_path):
    for name, texts in (("a", ["", "one"]), ("b", ["two"])):
        rows = [{"source": text, "target": "x"} for text in texts]
        write_lines(tmp_path / f"{name}.jsonl", rows)
    files = [str(tmp_path / f"{name}.jsonl") for name in ("a", "b")]
    text = ["--validation_file", *files, "--test_source_file", source.parent / "test.txt", "--num_train_epochs", 0]
    (source.parent / "test.txt").write_text("three\n\n")
    run(text=text)
    result = [(row["file"], row["row"], row["source"]) for row in read_predictions(run.out)]
    assert result == [(files[0], 2, "one"), (files[1], 1, "two")]
    assert [(row["row"], row["source"]) for row in read_predictions(run.out, "test")] == [(1, "three"), (2, "")]


@pytest.mark.parametrize("name", ["train", "validation"])
@pytest.mark.parametrize("kind", ["table", "dataset"])
def test_split_without_targets_raises_an_error(tmp_path, kind, name):
    for item in ("train", "validation"):
        target = "" if item == name else "x"
        write_lines(tmp_path / f"{item}.jsonl", [{"source": "one", "target": target}])
    files = [part for item in ("train", "validation") for part in (f"--{item}_file", tmp_path / f"{item}.jsonl")]
    flags = {"table": files, "dataset": ["--dataset_name", tmp_path]}[kind]
    with pytest.raises(ValueError, match=rf"{name}.* (row must contain text in each|is empty)"):
        load_data(*flags)


@pytest.mark.parametrize("kind", ["table", "dataset"])
def test_test_rows_with_partial_targets_raise_an_error(tmp_path, kind):
    (tmp_path / "test.jsonl").write_text('{"source": "one", "target": null}\n{"source": "two", "target": "zwei"}\n')
    flags = {"table": ["--test_file", tmp_path / "test.jsonl"], "dataset": ["--dataset_name", tmp_path]}[kind]
    with pytest.raises(ValueError, match="row 2: column 'target'"):
        load_data("--num_train_epochs", 0, *flags)


@pytest.mark.thorough
def test_test_split_without_targets_is_predicted(run, source):
    unscored = source.with_name("test.txt")
    unscored.write_text("\n" + source.read_text())
    results = run("--max_train_steps", 1, "--test_source_file", unscored)
    rows = read_predictions(run.out, "test")
    assert [row["source"] for row in rows] == ["", *source.read_text().splitlines()]
    assert [row["row"] for row in rows] == list(range(1, 66))
    assert results["test_samples"] == 65 and set(rows[0]) == {"row", "source", "prediction"}
    assert "test_bleu" not in results and results["test_decode_tokens"] > 0
    text = ["--test_source_file", source, "--test_target_file", source.with_name("target.txt")]
    scored = run("--num_train_epochs", 0, model=run.out, output_dir=run.out.with_name("scored"), text=text)
    assert "test_bleu" in scored and "eval_loss" not in scored


def test_test_split_is_decoded_after_the_dev_scores(run, source, monkeypatch):
    written = []

    def decode(decoder, split, num_beams=1):
        if split == "test":
            written.append({path.name for path in run.out.iterdir()})
            assert "eval_bleu" in json.loads((run.out / "all_results.json").read_text())
        return decode_all(decoder, split, num_beams)

    def fail_to_push(*place):
        assert "test_bleu" in json.loads((run.out / "all_results.json").read_text())
        raise OSError("no network")

    decode_all = Seq2SeqFineTuning.decode
    monkeypatch.setattr(Seq2SeqFineTuning, "decode", decode)
    monkeypatch.setattr(hub_push, "check_hub_access", lambda *place: None)
    monkeypatch.setattr(hub_push, "push_trained_model", fail_to_push)
    test = ["--test_source_file", source, "--test_target_file", source.with_name("target.txt")]
    with pytest.raises(OSError, match="no network"):
        run("--num_train_epochs", 0, "--push_to_hub", *test)
    assert written and {"predictions_dev.jsonl", "training_curves.png", "model.safetensors"} <= written[0]
    assert "predictions_test.jsonl" not in written[0] and read_predictions(run.out, "test")


def test_test_split_is_skipped_on_request(run, source):
    results = run("--num_train_epochs", 0, "--skip_predict", "--test_source_file", source)
    assert "test_samples" not in results and not (run.out / "predictions_test.jsonl").exists()
    with pytest.raises(ValueError, match="neither a dev nor a test split"):
        run("--num_train_epochs", 0, "--skip_predict", text=["--test_source_file", source], output_dir=run.out / "b")


@pytest.mark.parametrize("more", [[], ["--eval_loss_only"]])
def test_last_evaluation_is_computed_once(run, monkeypatch, more):
    done = []

    def loss(evaluator):
        done.append("loss")
        return compute_loss(evaluator)

    def decode(decoder, data, num_beams=1):
        done.append(num_beams)
        return decode_all(decoder, data, num_beams)

    compute_loss, decode_all = Seq2SeqFineTuning.compute_loss, Seq2SeqFineTuning.decode
    monkeypatch.setattr(Seq2SeqFineTuning, "compute_loss", loss)
    monkeypatch.setattr(Seq2SeqFineTuning, "decode", decode)
    results = run("--max_train_steps", 2, "--num_beams", 1, 3, *more)
    assert done == ["loss", 1, 3] and {"eval_loss", "eval_bleu", "eval_bleu_beam3"} <= results.keys()
    assert {"prediction", "prediction_beam3"} <= read_predictions(run.out)[0].keys()
    done.clear()
    again = run("--num_train_epochs", 0, "--num_beams", 1, 3, model=run.out, output_dir=run.out.with_name("again"))
    assert done == ["loss", 1, 3] and again["eval_bleu_beam3"] == results["eval_bleu_beam3"]


def test_generation_uses_mixed_precision(run, t5, monkeypatch):
    def generate(model, **inputs):
        seen.append(torch.is_autocast_enabled("cpu"))
        return generate_plain(model, **inputs)

    seen, generate_plain = [], GenerationMixin.generate
    monkeypatch.setattr(GenerationMixin, "generate", generate)
    run("--num_train_epochs", 0, "--mixed_precision", "bf16")
    assert seen and all(seen)


def test_model_without_cache_support_decodes_without_a_cache(run, t5, tmp_path):
    fields = {"talking_heads": "both", "talking_heads_dynamic": ["x2l", "m2l", "x2w", "m2w"]}
    convert_checkpoint(t5, tmp_path / "dynamic", **fields)
    results = run("--max_train_steps", 1, model=tmp_path / "dynamic")
    assert results["eval_decode_tokens"] > 0 and "eval_bleu" in results


def test_new_model_is_the_requested_variant(run, t5):
    scratch = ["--model_type", "t5", "--tokenizer_name", t5, "--num_key_value_heads", 1, "--max_train_steps", 2]
    fields = "d_model=32,d_kv=8,d_ff=48,num_layers=2,num_heads=4"
    others = ["--position_embedding_type", "sinusoidal", "--score_function", "additive"]
    results = run(*scratch, *others, "--config_overrides", fields, model=None)
    model = AutoModelForSeq2SeqLM.from_pretrained(run.out)
    assert type(model).__name__ == "AttnVariantT5ForConditionalGeneration" and model.config.num_key_value_heads == 1
    assert model.decoder.block[1].layer[0].SelfAttention.k.weight.shape == (8, 32)
    assert (model.config.position_embedding_type, model.config.score_function) == ("sinusoidal", "additive")
    tokenizer = AutoTokenizer.from_pretrained(t5)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config.decoder_start_token_id == tokenizer.pad_token_id
    assert results["num_parameters"] == model.num_parameters()


def test_glue_task_trains_text_to_text(run, glue):
    text = ["--task_name", "cola", "--data_dir", glue / "CoLA"]
    results = run("--max_train_steps", 2, "--eval_loss_only", text=text)
    assert "eval_matthews_correlation" in results and results["task_name"] == "cola"
    log = log_of(run.out)
    evaluations = [record for record in log if "eval_loss" in record]
    assert evaluations and all("eval_matthews_correlation" not in record for record in evaluations)
    rows = read_predictions(run.out)
    assert {row["references"][0] for row in rows} <= {"acceptable", "unacceptable"}
    assert [row["index"] for row in rows] == [str(i) for i in range(len(rows))]


def test_resumed_seq2seq_run_has_equal_losses(run, tmp_path):
    flags = ["--max_train_steps", 6, "--checkpointing_steps", 4, "--dropout_rate", 0.1, "--group_by_length"]
    complete_run = run(*flags)
    resumed = run(*flags, "--resume_from_checkpoint", run.out / "checkpoint-4", output_dir=tmp_path / "resumed")
    assert resumed["train_loss"] == complete_run["train_loss"] and resumed["eval_loss"] == complete_run["eval_loss"]
    with pytest.raises(ValueError, match=r"label_smoothing_factor was 0.0 and is now 0.5"):
        run(*flags, "--resume_from_checkpoint", run.out / "checkpoint-4", "--label_smoothing_factor", 0.5,
            output_dir=tmp_path / "other")  # fmt: skip


def test_resumed_seq2seq_run_keeps_the_best_weights(run):
    flags = ["--max_train_steps", 4, "--checkpointing_steps", 2, "--metric_for_best_model", "bleu"]
    run(*flags, "--num_beams", 1, 2)
    flags += ["--resume_from_checkpoint", run.out / "checkpoint-2", "--num_beams"]
    run(*flags, 1, 3)  # the second number is only used in the last evaluation
    for more, message in (
        ([3, 1], "num_beams was 1 and is now 3"),
        ([1, "--length_penalty", 2], "length_penalty was 1.0 and is now 2.0"),
        ([1, "--no_repeat_ngram_size", 2], "no_repeat_ngram_size was None and is now 2"),
        ([1, "--max_eval_samples", 12], "hash of the dev data was"),
    ):
        with pytest.raises(ValueError, match=message):
            run(*flags, *more)


def test_best_weights_by_bleu_are_kept(run):
    results = run("--max_train_steps", 9, "--eval_steps", 3, "--metric_for_best_model", "bleu")
    log = log_of(run.out)
    scores = {record["step"]: record["eval_bleu"] for record in log if "eval_bleu" in record}
    assert results["eval_bleu"] == max(scores.values()) == scores[results["best_step"]]


def test_truncated_rows_are_counted(run, caplog):
    run("--num_train_epochs", 0, "--max_length", 6)
    assert "dev: " in caplog.text and "sources have more than --max_length 6 tokens and are truncated" in caplog.text
    assert "targets have more than --max_target_length 6 tokens" in caplog.text


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--num_beams", 1, 1], "--num_beams must be distinct numbers"),
        (["--num_beams", 0], "--num_beams must be distinct numbers of at least 1"),
        (["--metrics", "meteor"], "'meteor'"),
        (["--label_smoothing_factor", 1], r"--label_smoothing_factor must be in \[0, 1\)"),
        (["--max_target_length", 1], r"--max_target_length must be at least 2 \(1 special tokens\)"),
        (["--dataset_name", "x"], "--dataset_name"),
        (["--task_name", "cola"], "got parallel text .* and --task_name"),
        (["--metric_for_best_model", "chrf"], "--metric_for_best_model must be one of loss, bleu, got 'chrf'"),
        (["--eval_loss_only", "--metric_for_best_model", "bleu"], "must be one of loss"),
        (["--num_key_value_heads", 2], "--num_key_value_heads is only supported for a model from scratch"),
    ],
)
def test_seq2seq_rejects_invalid_flags_before_any_work(run, more, message):
    with pytest.raises(ValueError, match=message):
        run(*more)
    assert not (run.out / "all_results.json").exists()


def test_invalid_seq2seq_text_raises_an_error(run, source, tiny_bert, tmp_path):
    short, empty = tmp_path / "short.txt", tmp_path / "empty.txt"
    short.write_text("one\n")
    empty.write_text("")
    cases = [
        (["--source_file", source, "--target_file", short], "must have the same number of lines, got 64 and 1"),
        (["--source_file", empty, "--target_file", empty], "empty.txt are empty"),
        (["--source_file", source], "--source_file.*--target_file"),
        (["--validation_source_file", source, "--validation_target_file", source], "no training split"),
        ([], "one source of text.*got none"),
    ]
    for text, message in cases:
        with pytest.raises(ValueError, match=message):
            run(text=text)
    with pytest.raises(OSError, match="none"):
        run(text=["--source_file", tmp_path / "none", "--target_file", source])
    with pytest.raises(ValueError, match=r"encoder-decoder.*got bert"):
        run(model=tiny_bert)
    with pytest.raises(ValueError, match="--eval_steps requires dev rows"):
        run("--eval_steps", 2, text=["--source_file", source, "--target_file", source])


def test_tokenizer_without_an_end_token_raises_an_error(run, t5, tmp_path):
    folder = shutil.copytree(t5, tmp_path / "endless")
    edit_json(folder / "tokenizer.json", post_processor=None)
    scratch = ["--model_type", "t5", "--tokenizer_name", folder, "--max_train_steps", 2]
    for model, more in ((folder, []), (None, scratch), (t5, ["--tokenizer_name", folder])):
        with pytest.raises(ValueError, match=r"endless does not end texts with '</s>'.*--tokenizer_name"):
            run(*more, model=model)
    edit_json(folder / "tokenizer_config.json", eos_token=None)
    with pytest.raises(ValueError, match=r"has no end-of-sequence token"):
        run(model=folder)
