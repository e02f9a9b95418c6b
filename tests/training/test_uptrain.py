"""Check `uptrain.main` on tiny converted models: recovered quality, trainable parts, resumed runs and errors."""

import json
import math
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from fixtures.commands import run_command
from fixtures.data_files import write_lines
from fixtures.linear_loop import log_of, log_without_times
from fixtures.processes import run_and_check, run_script
from fixtures.uptraining import WORDS, make_text
from safetensors.torch import load_file, save_file
from transformers import (
    AlbertConfig,
    AlbertModel,
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BartConfig,
    BartForConditionalGeneration,
)

from hf_attn_variants.commands.training import uptrain
from hf_attn_variants.conversion import convert_checkpoint
from hf_attn_variants.errors import NonFiniteLossError
from hf_attn_variants.hub import generate_model_card
from hf_attn_variants.inspection import sentence_embeddings
from hf_attn_variants.text_files import read_lines
from hf_attn_variants.training.engine.loop import TrainingLoop
from hf_attn_variants.training.uptraining.objective import UptrainingObjective
from hf_attn_variants.training.uptraining.task import split_off_held_out_rows

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A folder with source.txt and target.txt."""
    return make_text(tmp_path_factory.mktemp("text"))[0]


@pytest.fixture(scope="module")
def grouped_bert(bert):
    convert_checkpoint(bert, bert.parent / "mqa", 1)
    return bert.parent / "mqa"


@pytest.fixture(scope="module")
def grouped_t5(t5):
    convert_checkpoint(t5, t5.parent / "mqa", 1)
    return t5.parent / "mqa"


def save_with_tokenizer(model, tokenizer_folder, folder):
    model.save_pretrained(folder)
    for path in tokenizer_folder.glob("*token*"):
        shutil.copy(path, folder)


@pytest.fixture
def run(grouped_bert, bert, source, tmp_path):
    def call(objective="distill", *more, model=grouped_bert, teacher=bert, steps=4, output_dir=tmp_path / "out"):
        return run_command(
            uptrain, *flags(objective, *more, model=model, teacher=teacher, steps=steps, output_dir=output_dir)
        )

    def flags(objective, *more, model, teacher, steps, output_dir):
        pairs = ["--source_file", source, "--target_file", source.with_name("target.txt")]
        is_t5 = Path(model).parent.name.startswith("t5")
        text = pairs if is_t5 else [] if "--train_file" in more else ["--train_file", source]
        argv = ["--model_name_or_path", model, "--objective", objective, *text, "--output_dir", output_dir]
        argv += ["--teacher", teacher] if teacher is not None else []
        argv += ["--max_train_steps", steps] if steps is not None else []
        argv += ["--per_device_train_batch_size", 8, "--logging_steps", 1, "--cpu", "--disable_tqdm", *more]
        return [str(part) for part in argv]

    call.flags, call.out = flags, tmp_path / "out"
    call.model, call.teacher = grouped_bert, bert
    return call


def test_clipped_softmax_is_trained_from_the_softmax(run, bert, grouped_bert, tmp_path):
    convert_checkpoint(bert, tmp_path / "clipped", None, clipped_softmax=[-0.1, 1.0], output_gate="head")
    results = run("mlm", "--clipping_ratio", 0.5, model=tmp_path / "clipped", teacher=None)
    assert math.isfinite(results["eval_loss"])
    model = AutoModelForMaskedLM.from_pretrained(run.out)
    assert model.config.clipped_softmax == [-0.1, 1.0]
    assert all(layer.attention.self.output_gate.weight.any() for layer in model.bert.encoder.layer)
    with pytest.raises(ValueError, match="--clipping_ratio requires a model with `clipped_softmax`"):
        run("mlm", "--clipping_ratio", 0.5, model=grouped_bert, teacher=None, output_dir=tmp_path / "other")


def test_distillation_recovers_the_embeddings_of_the_teacher(run, bert, grouped_bert, source):
    results = run(steps=60, objective="distill")
    assert results["eval_loss"] < 0.5 * results["initial_eval_loss"]
    assert results["eval_embedding_cosine"] > results["initial_eval_embedding_cosine"]
    log = log_of(run.out)
    assert [r["step"] for r in log if "eval_loss" in r] == [0, 12, 24, 36, 48, 60]
    parts = [results[f"initial_eval_encoder_{kind}_error"] for kind in ("hidden_states", "attention_outputs")]
    assert log[0]["eval_loss"] == results["initial_eval_loss"] == pytest.approx(sum(parts), rel=1e-6)
    assert (run.out / "training_curves.png").read_bytes().startswith(b"\x89PNG")
    saved = json.loads((run.out / "all_results.json").read_text())
    assert saved["eval_loss"] == results["eval_loss"] and saved["arguments"]["teacher"] == str(bert)
    # The saved model has the scores of the last evaluation.
    held_out = split_off_held_out_rows(read_lines([source]))[1]
    tokenizer = AutoTokenizer.from_pretrained(run.out)
    embeddings = [
        sentence_embeddings(AutoModel.from_pretrained(folder), tokenizer, held_out) for folder in (run.out, bert)
    ]
    cosine = torch.nn.functional.cosine_similarity(*embeddings).mean().item()
    assert cosine == pytest.approx(results["eval_embedding_cosine"], abs=1e-5)
    config = json.loads((run.out / "config.json").read_text())
    assert config["num_key_value_heads"] == 1 and config["hidden_dropout_prob"] == 0.1
    assert load_file(run.out / "model.safetensors").keys() == load_file(grouped_bert / "model.safetensors").keys()


@pytest.mark.parametrize(
    ("objective", "more"),
    [("distill", ["--logits_weight", 1, "--temperature", 2]), ("embedding", []), ("mlm", []), ("seq2seq", [])],
)
def test_student_equal_to_its_teacher_has_zero_loss(run, bert, t5, objective, more):
    model = t5 if objective == "seq2seq" else bert
    results = run(objective, "--num_train_epochs", 0, *more, model=model, teacher=model, steps=None)
    terms = {key: results[key] for key in results if key.startswith("eval_") and key.endswith(("error", "divergence"))}
    assert all(abs(value) < 1e-9 for value in terms.values()) and results["steps"] == 0
    assert len(terms) == {"distill": 3, "embedding": 0, "mlm": 3, "seq2seq": 5}[objective]
    has_task = objective in ("mlm", "seq2seq")
    assert results["eval_loss"] == pytest.approx(results["eval_cross_entropy"] if has_task else 0, abs=1e-6)
    if objective in ("distill", "embedding"):
        assert results["eval_embedding_cosine"] == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("trainable", ["all", "lora"])
def test_pooler_is_kept_without_a_place_in_the_language_model(run, grouped_bert, tmp_path, trainable):
    # bert-base-uncased has a pooler; without it, a classifier would start with a random pooler.
    with_pooler = shutil.copytree(grouped_bert, tmp_path / "with-pooler")
    pooler = {"bert.pooler.dense.weight": torch.randn(32, 32), "bert.pooler.dense.bias": torch.randn(32)}
    # Integer tensors, such as the positions in old checkpoints, must keep their type.
    pooler["bert.old.numbers"] = torch.arange(64)
    tensors = load_file(with_pooler / "model.safetensors") | pooler
    save_file(tensors, with_pooler / "model.safetensors", metadata={"format": "pt"})
    run("distill", "--trainable", trainable, model=with_pooler, steps=1)
    saved = load_file(run.out / "model.safetensors")
    assert saved.keys() == tensors.keys()
    assert all(saved[name].equal(tensor) and saved[name].dtype == tensor.dtype for name, tensor in pooler.items())
    classifier, report = AutoModelForSequenceClassification.from_pretrained(run.out, output_loading_info=True)
    assert set(report["missing_keys"]) == {"classifier.weight", "classifier.bias"}
    assert classifier.base_model.pooler.dense.weight.equal(pooler["bert.pooler.dense.weight"])


@pytest.mark.parametrize("trainable", ["attention", "all", "lora"])
def test_only_trainable_parameters_change(run, grouped_bert, trainable):
    if trainable == "lora":
        pytest.importorskip("peft")
    results = run("distill", "--trainable", trainable, "--lora_rank", 4, steps=20)
    before, after = (load_file(folder / "model.safetensors") for folder in (grouped_bert, run.out))
    assert before.keys() == after.keys()
    assert results["num_parameters"] == AutoModelForMaskedLM.from_pretrained(run.out).num_parameters()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    attention = {name for name in before if ".attention." in name}
    unused = {name for name in before if name.startswith("cls.") and "embeddings" not in name}
    expected = {
        "attention": attention,
        "lora": {name for name in attention if name.endswith("weight") and "LayerNorm" not in name},
        "all": before.keys() - unused,
    }[trainable]
    assert moved == expected and results["eval_loss"] < results["initial_eval_loss"]
    counted = sum(before[name].numel() for name in expected)
    assert trainable == "lora" or results["num_trainable_parameters"] == counted
    assert (run.out / "modeling_attn_variant_bert.py").is_file()


@pytest.mark.thorough
@pytest.mark.parametrize(("objective", "trainable"), [("distill", "all"), ("mlm", "attention"), ("distill", "lora")])
def test_resumed_uptraining_is_bitwise_equal(run, tmp_path, objective, trainable):
    if trainable == "lora":
        pytest.importorskip("peft")
    more = ["--checkpointing_steps", 4, "--eval_steps", 3, "--dropout_rate", 0.1, "--trainable", trainable]
    more += ["--metric_for_best_model", "loss"]
    run(objective, *more, steps=10, output_dir=tmp_path / "whole")  # an epoch of 8 steps, and new masks
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    shutil.rmtree(tmp_path / "again/checkpoint-8")
    results = run(objective, *more, "--resume_from_checkpoint", "latest", steps=10, output_dir=tmp_path / "again")
    logs = [log_without_times(tmp_path / name) for name in ("whole", "again")]
    assert logs[0] == logs[1] and results["initial_eval_loss"] == logs[0][0]["eval_loss"]
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "again")]
    assert weights[0] == weights[1]
    more += ["--hidden_states_weight", 2, "--resume_from_checkpoint", "latest"]
    with pytest.raises(ValueError, match=r"weights of the terms was .* and is "):
        run(objective, *more, steps=10, output_dir=tmp_path / "again")


def test_masked_lm_uptrains_with_and_without_a_teacher(run, bert):
    alone = run("mlm", "--trainable", "all", "--learning_rate", "1e-2", teacher=None, steps=40)
    assert alone["eval_loss"] == alone["eval_cross_entropy"] < 0.8 * alone["initial_eval_loss"]
    taught = run("mlm", "--overwrite_output_dir", steps=4)
    parts = ["cross_entropy", "encoder_hidden_states_error", "encoder_attention_outputs_error", "logits_divergence"]
    assert taught["eval_loss"] == pytest.approx(sum(taught[f"eval_{name}"] for name in parts), rel=1e-6)
    assert type(AutoModelForMaskedLM.from_pretrained(run.out)).__name__ == "AttnVariantBertForMaskedLM"


def test_only_embeddings_can_be_distilled(run):
    results = run("embedding", steps=40)
    assert results["eval_embedding_cosine"] > results["initial_eval_embedding_cosine"]
    assert results["eval_loss"] == pytest.approx(1 - results["eval_embedding_cosine"], abs=1e-6)


def test_teacher_with_fewer_positions_encodes_pieces(run, bert, grouped_t5, tmp_path):
    longer = tmp_path / "longer"
    window = {"attention_pattern": "sliding_window", "attention_window": 8}
    convert_checkpoint(bert, longer, max_position_embeddings=256, **window)
    for more, message in (([], "64.*--max_length.*200"), ([65], "64.*65")):
        pieces = ["--teacher_max_length", *more] if more else []
        with pytest.raises(ValueError, match=message):
            run("embedding", "--max_length", 200, *pieces, model=longer)
    with pytest.raises(ValueError, match="--teacher_max_length"):
        run("distill", "--teacher_max_length", 8, model=grouped_t5, teacher=grouped_t5)
    text = tmp_path / "long.txt"
    text.write_text("".join(" ".join(WORDS[i % 7 :] * 5) + "\n" for i in range(24)))
    more = ["--train_file", text, "--max_length", 200, "--teacher_max_length", 32, "--hidden_states_weight", 1]
    results = run("embedding", *more, "--learning_rate", 3e-3, model=longer, steps=20)
    assert results["eval_loss"] < 0.8 * results["initial_eval_loss"]


def write_pairs(source, path):
    columns = [side.read_text().splitlines() for side in (source, source.with_name("target.txt"))]
    write_lines(path, ({"question": a, "text": b} for a, b in zip(*columns, strict=True)))
    return path


def test_encoder_uptrains_on_lines_and_table_columns(run, source, tmp_path):
    table = write_pairs(source, tmp_path / "rows.jsonl")

    def initial_loss(*text, **options):
        options = {"model": run.model, "teacher": run.teacher, "steps": 1, "output_dir": run.out} | options
        argv = run.flags("distill", "--overwrite_output_dir", **options)
        position = argv.index("--train_file")
        return run_command(uptrain, *argv[:position], *text, *argv[position + 2 :])["initial_eval_loss"]

    pair = ["--text_columns", "question", "text"]
    texts = initial_loss("--train_file", table)  # reads the column "text"
    assert texts == initial_loss("--train_file", source.with_name("target.txt"))
    assert len({texts, initial_loss("--train_file", table, *pair), initial_loss("--train_file", source)}) == 3
    for flags, message in (
        (["--train_file", source, table], r"rows\.jsonl.*source\.txt"),
        (["--train_file", table, "--validation_file", source], r"rows\.jsonl.*source\.txt"),
        (["--train_file", source, *pair], "--text_columns is only supported for tables"),
        (["--train_file", table, *pair, "more"], "--text_columns must contain one or two columns, got 3"),
        (["--source_file", source], "--train_file"),
        ([], "--train_file.*--objective distill"),
        (["--train_file", table, *pair, "--max_length", 3], "--max_length must be at least 4"),
    ):
        with pytest.raises(ValueError, match=message):
            initial_loss(*flags)


def test_albert_pairs_have_token_types(run, source, tmp_path, bert, monkeypatch):
    sizes = {"embedding_size": 8, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 32}
    sizes |= {"num_hidden_layers": 2, "max_position_embeddings": 64}
    config = AlbertConfig(vocab_size=AutoConfig.from_pretrained(bert).vocab_size, **sizes)
    AlbertModel(config).save_pretrained(tmp_path / "albert")
    tokenizer = AutoTokenizer.from_pretrained(bert)
    tokenizer.model_input_names = ["input_ids", "attention_mask"]  # as for ALBERT in transformers 5
    tokenizer.init_kwargs["model_input_names"] = tokenizer.model_input_names
    tokenizer.save_pretrained(tmp_path / "albert")
    convert_checkpoint(tmp_path / "albert", tmp_path / "mqa", 1)
    seen = []
    monkeypatch.setattr(UptrainingObjective, "count", lambda self, batch: seen.append(batch) or 1)
    table = write_pairs(source, tmp_path / "rows.jsonl")
    argv = run.flags("distill", model=tmp_path / "mqa", teacher=tmp_path / "albert", steps=1, output_dir=run.out)
    position = argv.index("--train_file")
    pair = ["--train_file", str(table), "--text_columns", "question", "text"]
    run_command(uptrain, *argv[:position], *pair, *argv[position + 2 :])
    assert all(set(batch["token_type_ids"].unique().tolist()) == {0, 1} for batch in seen) and seen
    assert set(AutoTokenizer.from_pretrained(run.out)("a", "b")["token_type_ids"]) == {0, 1}


def test_question_answering_is_distilled(run, bert, tmp_path):
    torch.manual_seed(0)
    teacher = AutoModelForQuestionAnswering.from_pretrained(bert)
    with torch.no_grad():
        teacher.qa_outputs.weight.mul_(100)  # as confident as a trained model
    save_with_tokenizer(teacher, bert, tmp_path / "qa")
    convert_checkpoint(tmp_path / "qa", tmp_path / "mqa", 1)
    results = run("distill", "--logits_weight", 1, model=tmp_path / "mqa", teacher=tmp_path / "qa", steps=60)
    assert results["eval_logits_divergence"] < 0.5 * results["initial_eval_logits_divergence"]
    model = AutoModelForQuestionAnswering.from_pretrained(run.out)
    assert type(model).__name__ == "AttnVariantBertForQuestionAnswering"
    flags = ["--logits_weight", 1, "--overwrite_output_dir"]
    with pytest.raises(ValueError, match="--logits_weight requires logits"):
        run("distill", *flags, model=tmp_path / "mqa")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("fields", "term"),
    [
        ({"num_labels": 1}, "scores_error"),
        ({"num_labels": 2, "problem_type": "regression"}, "scores_error"),
        ({"num_labels": 3, "problem_type": "multi_label_classification"}, "logits_divergence"),
        ({"num_labels": 3}, "logits_divergence"),
    ],
)
def test_classifier_is_distilled_with_its_problem_type(run, bert, tmp_path, fields, term):
    torch.manual_seed(0)
    teacher = AutoModelForSequenceClassification.from_pretrained(bert, **fields)
    with torch.no_grad():
        teacher.classifier.weight.mul_(20)
    save_with_tokenizer(teacher, bert, tmp_path / "classifier")
    convert_checkpoint(tmp_path / "classifier", tmp_path / "mqa", 1)
    alone = ["--logits_weight", 1, "--hidden_states_weight", 0, "--attention_outputs_weight", 0, "--trainable", "all"]
    results = run("distill", *alone, model=tmp_path / "mqa", teacher=tmp_path / "classifier", steps=60)
    # The evaluation loss consists only of this term.
    assert results[f"eval_{term}"] == pytest.approx(results["eval_loss"], rel=1e-6)
    assert results["eval_loss"] < 0.5 * results["initial_eval_loss"]


def test_teacher_with_another_problem_type_raises_an_error(run, bert, tmp_path):
    for name, fields in (("scores", {"problem_type": "regression"}), ("classes", {})):
        model = AutoModelForSequenceClassification.from_pretrained(bert, num_labels=2, **fields)
        save_with_tokenizer(model, bert, tmp_path / name)
    convert_checkpoint(tmp_path / "scores", tmp_path / "mqa", 1)
    with pytest.raises(ValueError, match="one distribution over classes"):
        run("distill", "--logits_weight", 1, model=tmp_path / "mqa", teacher=tmp_path / "classes")


def test_t5_uptrains_on_pairs_and_reports_bleu(run, grouped_t5, source, tmp_path):
    target = source.with_name("target.txt")
    more = ["--trainable", "all", "--learning_rate", "5e-3", "--predict_with_generate", "--dropout_rate", 0]
    more += ["--validation_source_file", source, "--validation_target_file", target, "--eval_steps", 100]
    results = run("seq2seq", *more, model=grouped_t5, teacher=None, steps=60)
    assert results["eval_cross_entropy"] < 0.6 * results["initial_eval_cross_entropy"]
    assert results["eval_bleu"] > results["initial_eval_bleu"] and results["eval_samples"] == 64
    model = AutoModelForSeq2SeqLM.from_pretrained(run.out).eval()
    tokenizer = AutoTokenizer.from_pretrained(run.out)
    with torch.no_grad():
        batch = tokenizer(source.read_text().splitlines(), text_target=target.read_text().splitlines(), padding=True)
        batch = {key: torch.tensor(value) for key, value in batch.items()}
        batch["labels"][batch["labels"] == 0] = -100
        assert float(model(**batch).loss) == pytest.approx(results["eval_cross_entropy"], rel=1e-5)


def test_t5_is_distilled_on_a_table(run, grouped_t5, t5, source, tmp_path):
    lines = zip(*(path.read_text().splitlines() for path in (source, source.with_name("target.txt"))), strict=True)
    table = tmp_path / "rows.jsonl"
    write_lines(table, ({"en": s, "de": t} for s, t in lines))
    argv = ["--model_name_or_path", grouped_t5, "--teacher", t5, "--objective", "distill", "--train_file", table]
    argv += ["--source_column", "en", "--target_column", "de", "--output_dir", run.out, "--max_train_steps", 30]
    argv += ["--per_device_train_batch_size", 8, "--learning_rate", "2e-3", "--cpu", "--disable_tqdm"]
    results = run_command(uptrain, *argv)
    for name in ("decoder_hidden_states_error", "logits_divergence"):
        assert results[f"eval_{name}"] < 0.7 * results[f"initial_eval_{name}"]
    assert results["initial_eval_encoder_hidden_states_error"] < 1e-9  # only the decoder was converted
    assert "eval_cross_entropy" in results and "eval_embedding_cosine" not in results


def test_result_is_a_complete_sentence_transformers_checkpoint(run, grouped_bert, tmp_path):
    model = shutil.copytree(grouped_bert, tmp_path / "model")
    (model / "modules.json").write_text(json.dumps([{"path": ""}, {"path": "1_Pooling"}]))
    (model / "1_Pooling").mkdir()
    (model / "1_Pooling/config.json").write_text('{"pooling_mode_mean_tokens": true}')
    (model / "all_results.json").write_text("of the source")
    run(model=model)
    assert (run.out / "1_Pooling/config.json").read_text() == '{"pooling_mode_mean_tokens": true}'
    for name in ("modules.json", "tokenizer.json", "tokenizer_config.json"):
        assert (run.out / name).read_bytes() == (model / name).read_bytes()
    assert (run.out / "all_results.json").read_text() != "of the source"
    assert not (run.out / "conversion_report.json").exists()


def test_best_weights_of_an_uptraining_are_kept(run):
    results = run("distill", "--learning_rate", 0, "--eval_steps", 1, "--early_stopping_patience", 2, steps=9)
    assert results["steps"] == 3 and results["best_step"] == 1


def test_gradient_checkpointing_changes_no_result(run):
    more = ["--overwrite_output_dir"]
    plain = run("distill", *more)
    again = run("distill", *more, "--gradient_checkpointing")
    assert again["eval_loss"] == pytest.approx(plain["eval_loss"], rel=1e-6)
    assert math.isfinite(run("distill", *more, "--mixed_precision", "bf16")["eval_loss"])


def test_teacher_with_nan_outputs_raises_before_training(run, bert, tmp_path):
    teacher = shutil.copytree(bert, tmp_path / "broken")
    tensors = load_file(teacher / "model.safetensors")
    nan = r"contains NaN values in 1 of its tensors, such as bert\.encoder\.layer\.1\.output\.dense\.bias"
    cases = (math.nan, ValueError, nan), (math.inf, NonFiniteLossError, "held-out loss.*nan")
    for value, error, message in cases:
        tensors["bert.encoder.layer.1.output.dense.bias"][:] = value
        save_file(tensors, teacher / "model.safetensors", {"format": "pt"})
        with pytest.raises(error, match=message):
            run(teacher=teacher)


@pytest.mark.parametrize(
    ("objective", "more", "message"),
    [
        ("distill", ["--teacher", ""], "--objective distill .*--teacher"),
        ("mlm", ["--teacher", "", "--hidden_states_weight", 1], "--hidden_states_weight .*--teacher"),
        ("mlm", ["--hidden_states_weight", 0, "--attention_outputs_weight", 0, "--logits_weight", 0], "--teacher"),
        ("distill", ["--teacher", "/nowhere/teacher"], "/nowhere/teacher"),
        ("seq2seq", [], r"--objective.*\(attn_variant_bert\)"),
        ("distill", ["--predict_with_generate"], "--predict_with_generate"),
        ("distill", ["--train_file", "/nowhere/text"], "/nowhere/text"),
        ("distill", ["--validation_file", os.devnull], "no such file|is empty"),
        ("distill", ["--temperature", 0], "--temperature must be more than 0"),
        ("distill", ["--logits_weight", -1], "--logits_weight must be at least 0"),
        ("distill", ["--lora_rank", 0], "--lora_rank must be at least 1"),
        ("mlm", ["--mlm_probability", 1], "--mlm_probability must be in"),
        ("distill", ["--max_length", 65], "--max_length must be at most 64"),
        ("distill", ["--teacher_max_length", 8, "--logits_weight", 1], "pieces of a text have no"),
        ("distill", ["--eval_steps", 1, "--metric_for_best_model", "bleu"], "--metric_for_best_model.*'bleu'"),
    ],
)
def test_uptraining_errors_are_raised_before_training(run, objective, more, message, monkeypatch):
    monkeypatch.setattr(TrainingLoop, "_run_optimizer_step", None)
    without_teacher = more[:2] == ["--teacher", ""]
    with pytest.raises((ValueError, OSError), match=message):
        run(objective, *(more[2:] if without_teacher else more), **({"teacher": None} if without_teacher else {}))


def test_incompatible_models_error_names_the_models(run, bert, grouped_t5, t5, tiny_bert, tmp_path, monkeypatch):
    monkeypatch.setattr(TrainingLoop, "_run_optimizer_step", None)
    with pytest.raises(ValueError, match="--objective"):
        run("mlm", model=grouped_t5, teacher=None)
    with pytest.raises(ValueError, match="vocab_size"):
        run("distill", teacher=t5)
    with pytest.raises(ValueError, match=r"cannot be loaded as (AttnVariant)?BertForMaskedLM"):
        run("mlm", model=tiny_bert, teacher=None)
    with pytest.raises(ValueError, match="--logits_weight requires logits"):
        run("distill", "--logits_weight", 1, model=tiny_bert, teacher=tiny_bert)
    other = shutil.copytree(bert, tmp_path / "other")
    tokens = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokens["model"]["vocab"]
    vocabulary["dog"], vocabulary["cat"] = vocabulary["cat"], vocabulary["dog"]
    (other / "tokenizer.json").write_text(json.dumps(tokens))
    with pytest.raises(ValueError, match=r"--teacher.*vocabulary"):
        run("distill", teacher=other)


def test_targets_are_checked_like_those_of_seq2seq(run, t5, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(TrainingLoop, "_run_optimizer_step", None)
    with pytest.raises(ValueError, match=r"--max_target_length must be at least 2"):
        run("seq2seq", "--max_target_length", 1, model=t5, teacher=None)
    tokenizer = AutoTokenizer.from_pretrained(t5)
    sizes = {"d_model": 16, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "vocab_size": len(tokenizer)}
    sizes |= {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1, "decoder_start_token_id": 1}
    for name, positions in (("bart", 32), ("teacher", 24)):
        config = BartConfig(max_position_embeddings=positions, **sizes, **tokens, forced_eos_token_id=1)
        BartForConditionalGeneration(config).save_pretrained(tmp_path / "t5s" / name)
        tokenizer.save_pretrained(tmp_path / "t5s" / name)
    bart, teacher = tmp_path / "t5s/bart", tmp_path / "t5s/teacher"
    with pytest.raises(ValueError, match=r"--max_target_length must be at most 32, .* got 33"):
        run("seq2seq", "--max_length", 8, "--max_target_length", 33, model=bart, teacher=None)
    with pytest.raises(ValueError, match=r"24 positions.*30"):
        run("distill", "--max_length", 8, "--max_target_length", 30, model=bart, teacher=teacher)
    assert "train: " in caplog.text and "sources have more than --max_length 8 tokens and are truncated" in caplog.text


def test_held_out_text_without_masked_tokens_raises_an_error(run, tmp_path, monkeypatch):
    monkeypatch.setattr(TrainingLoop, "_run_optimizer_step", None)
    (tmp_path / "short.txt").write_text("dog\n")
    with pytest.raises(ValueError, match="contribute to the loss"):
        run("mlm", "--validation_file", tmp_path / "short.txt", "--mlm_probability", 0.01, teacher=None)


def test_resumed_uptraining_uses_the_same_evaluation_text(run, source, tmp_path, monkeypatch):
    lines = source.read_text().splitlines(keepends=True)
    for name, rows in (("dev1.txt", lines[:5]), ("dev2.txt", lines[5:10])):
        (tmp_path / name).write_text("".join(rows))
    run("mlm", "--checkpointing_steps", 2, "--validation_file", tmp_path / "dev1.txt", teacher=None)
    monkeypatch.setattr(TrainingLoop, "_run_optimizer_step", None)
    shutil.rmtree(tmp_path / "out/checkpoint-4")
    with pytest.raises(ValueError, match=r"hash of the held-out data was .* and is"):
        more = ["--validation_file", tmp_path / "dev2.txt", "--resume_from_checkpoint", "latest"]
        run("mlm", "--checkpointing_steps", 2, *more, teacher=None)


def test_lora_without_peft_raises_an_error(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match="--trainable"):
        run("distill", "--trainable", "lora")


@pytest.mark.thorough
def test_uptraining_in_two_processes_equals_one_with_a_double_batch(run, grouped_bert, bert, tmp_path):
    more = ["--gradient_accumulation_steps", 2, "--per_device_eval_batch_size", 2]
    # 3 steps of 16 rows do not reach the last batch of the epoch, which would repeat rows to fill both processes.
    out = {"model": grouped_bert, "teacher": bert, "steps": 3, "output_dir": tmp_path / "two"}
    expected = run("distill", *more, "--per_device_train_batch_size", 8, steps=3, output_dir=tmp_path / "one")
    argv = run.flags("distill", *more, "--per_device_train_batch_size", 4, **out)
    printed = run_and_check(2, run_script, "uptrain", argv)
    results = json.loads((tmp_path / "two/all_results.json").read_text())
    assert printed.count("distill on 3 held-out rows") == 1
    for name in ("eval_loss", "initial_eval_loss", "train_loss", "eval_embedding_cosine"):
        assert results[name] == pytest.approx(expected[name], rel=1e-4)


def test_training_without_improvement_gives_a_warning_and_a_note_on_the_card(run, caplog):
    message = "The held-out loss did not improve ("
    worse = run("distill", "--learning_rate", 1.0, "--num_warmup_steps", 0, steps=2)
    assert worse["eval_loss"] > worse["initial_eval_loss"] and worse["held_out_loss_improved"] is False
    assert caplog.text.count(message) == 1
    assert json.loads((run.out / "all_results.json").read_text())["held_out_loss_improved"] is False
    card = str(generate_model_card(run.out, "me/worse"))
    assert "The held-out loss did not improve." in card
    assert "distilled (2 steps, without a lower held-out loss)" in card
