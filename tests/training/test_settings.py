"""Check settings: how a command line sets them, their errors, and the settings that a resumed run must share."""

import dataclasses
import inspect
from pathlib import Path

import pytest
from transformers.trainer_utils import SchedulerType

from hf_attn_variants.commands.training import classify, glue, ner, pretrain, pretrain_t5, seq2seq, squad, uptrain
from hf_attn_variants.training.engine.settings import SCHEDULES, FineTuningSettings, TrainingSettings, group_fields
from hf_attn_variants.training.glue import GlueSettings
from hf_attn_variants.training.pretraining import MaskedLMSettings
from hf_attn_variants.training.seq2seq import Seq2SeqSettings

NEEDED = {
    glue: ["--task_name", "stsb"],
    classify: ["--train_file", "a"],
    squad: [],
    ner: ["--train_file", "a", "--validation_file", "b"],
    seq2seq: ["--source_file", "a", "--target_file", "b"],
    uptrain: ["--objective", "mlm"],
    pretrain: ["--train_file", "a", "--max_train_steps", "9"],
    pretrain_t5: ["--train_file", "a", "--max_train_steps", "9"],
}


def type_of(command):
    return type(command.parse_args(["m", "--output_dir", "o", *NEEDED[command]]))


@pytest.mark.parametrize("command", NEEDED, ids=lambda command: command.settings.__name__)
def test_flags_and_defaults_follow_the_fields(command):
    settings = command.parse_args(["m", "--output_dir", "o", *NEEDED[command]])
    required = {"model_name_or_path", "output_dir", *(name[2:] for name in NEEDED[command] if name.startswith("--"))}
    again = type(settings)(**{name: getattr(settings, name) for name in required})
    assert again == settings
    flags = [item.name for _, fields in group_fields(type(settings)) for item in fields]
    assert sorted(flags) == sorted(item.name for item in dataclasses.fields(settings))


def test_field_type_determines_the_flag_parser():
    argv = ["m", "--output_dir", "o", "--source_file", "a", "--target_file", "b"]
    argv += ["--num_beams", "1", "4", "--learning_rate", "1e-3", "--group_by_length", "--checkpointing_steps", "epoch"]
    settings = seq2seq.parse_args([*argv, "--lr_scheduler_kwargs", '{"x": 1}', "--max_length", "7"])
    assert (settings.num_beams, settings.learning_rate, settings.group_by_length) == ((1, 4), 1e-3, True)
    assert (settings.checkpointing_steps, settings.lr_scheduler_kwargs) == ("epoch", {"x": 1})
    # These defaults depend on other settings.
    assert (settings.max_target_length, settings.metrics) == (7, ("bleu",))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"max_length": 0}, "--max_length must be at least 1, got 0"),
        ({"learning_rate": float("nan")}, "--learning_rate must be at least 0, got nan"),
        ({"seed": 99999999999999}, "--seed must be from 0 to 4294967295"),
        ({"warmup_ratio": 1.0}, r"--warmup_ratio must be in \[0, 1\), got 1.0"),
        ({"optim": "sgd"}, "--optim must be one of adamw, adafactor, got 'sgd'"),
        ({"gradient_accumulation_steps": 0}, "--gradient_accumulation_steps must be at least 1"),
        ({"dropout_rate": 1}, "--dropout_rate must be in"),
        ({"max_train_minutes": 0}, "--max_train_minutes must be more than 0, got 0"),
        ({"checkpointing_steps": 0}, "--checkpointing_steps must be a positive number or 'epoch', got 0"),
        ({"model_name_or_path": None}, "--model_name_or_path is required"),
        ({"task_name": "imdb"}, "--task_name must be .* got 'imdb'"),
    ],
)
def test_python_settings_are_checked_like_flags(changed, message):
    good = {"model_name_or_path": "m", "task_name": "stsb", "output_dir": "o"}
    GlueSettings(**good)
    with pytest.raises(ValueError, match=message):
        GlueSettings(**good | changed)


def test_python_values_are_converted_like_flags():
    settings = MaskedLMSettings(
        train_file="a.txt",
        validation_file=["b.txt", "c.txt"],
        model_type="bert",
        tokenizer_name=Path("bert"),
        output_dir=Path("o"),
        max_train_steps=3,
    )
    assert settings.train_file == ("a.txt",) and settings.validation_file == ("b.txt", "c.txt")
    assert (settings.tokenizer_name, settings.output_dir) == ("bert", "o")


@pytest.mark.parametrize("settings", [type_of(command) for command in NEEDED], ids=lambda item: item.__name__)
def test_field_default_comes_from_the_nearest_class(settings):
    """Check dataclasses with several bases, for which Python would use the default of the first base."""
    for item in dataclasses.fields(settings):
        owner = next(base for base in settings.__mro__ if item.name in inspect.get_annotations(base))
        assert item.metadata == owner.__dataclass_fields__[item.name].metadata, (item.name, owner)


def test_settings_are_frozen():
    settings = GlueSettings(model_name_or_path="m", task_name="stsb", output_dir="o")
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.seed = 1
    assert dataclasses.replace(settings, seed=1).seed == 1 and settings.seed == 42


def test_resumed_run_must_share_settings_that_affect_weights():
    shared = {"model_name_or_path": "m", "output_dir": "o"}
    glue_settings = GlueSettings(task_name="stsb", **shared)
    always, best = (glue_settings.get_resume_fingerprint(with_best) for with_best in (False, True))
    assert best.keys() - always.keys() == {"eval_steps", "greater_is_better", "max_eval_samples", "validation_file"}
    assert {"seed", "learning_rate", "max_length", "group_by_length"} <= always.keys()
    assert not always.keys() & {"output_dir", "logging_steps", "cpu", "per_device_eval_batch_size"}
    text = Seq2SeqSettings(train_file=("a",), validation_file=("b", "c"), **shared)
    # A tuple becomes a list, as in the JSON file of a checkpoint.
    assert text.get_resume_fingerprint(True)["validation_file"] == ["b", "c"]


def test_flag_groups_are_in_reading_order():
    titles = [title for title, _ in group_fields(GlueSettings)]
    assert titles == ["task", "model", "data", "training", "output", "hub"]
    assert [title for title, _ in group_fields(MaskedLMSettings)][:3] == ["objective", "masking", "text"]
    shared = {item.name for item in dataclasses.fields(TrainingSettings)}
    more = {item.name for item in dataclasses.fields(FineTuningSettings)} - shared
    assert more == {"max_train_samples", "group_by_length", "pad_to_multiple_of"}


def test_schedule_names_equal_transformers():
    assert set(SCHEDULES) == {kind.value for kind in SchedulerType} - {"reduce_lr_on_plateau", "greedy"}
