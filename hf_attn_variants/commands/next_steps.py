"""What to do with a converted checkpoint: commands to paste, with the flags of the measured recipes."""

import argparse
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..files import RESULTS_NAME, load_json
from ..text_files import is_table

if TYPE_CHECKING:
    from ..conversion import ConversionReport

__all__ = ["next_steps"]

# The subcommand that trains such a head; the others are fine-tuned, as most are, on sentences.
TEXT_TO_TEXT = ("ForConditionalGeneration", "MTModel")
TASKS = dict.fromkeys(TEXT_TO_TEXT, "seq2seq") | {"ForQuestionAnswering": "squad", "ForTokenClassification": "ner"}
# Architectures that no command here trains: they read audio.
NOT_TRAINED = ("Whisper",)
# Heads that no command here fine-tunes.
NOT_TUNED = ("LMHeadModel", "ForCausalLM", "ForMultipleChoice", "T5EncoderModel")
# Heads that `attn-variants uptrain` draws towards no teacher, or that have none and want targets to read.
NOT_DISTILLED = ("ForMultipleChoice", *(f"{name}Model" for name in ("T5", "Bart", "Marian", "M2M100", "Pegasus")))
# Heads that are there after a fine-tuning alone: what they answer is kept, too.
TUNED = ("ForQuestionAnswering", "ForSequenceClassification", "ForTokenClassification")
# docs/conversion.md and docs/results.md: fitted heads are near the source's already, and merged ones are not.
DISTILL_FITTED = "--trainable all --learning_rate 1e-4 --max_train_steps 150"
DISTILL_TUNED = (
    "--logits_weight 1 --attention_outputs_weight 0 --trainable all --learning_rate 2e-5 --max_train_steps 280"
)
# Stand for what is the user's own.
TEXT, TARGETS, TARGET_COLUMN = "TEXT.txt", "TARGETS.txt", "TARGET"
TAGGED, TAGGED_DEV = "TAGGED.txt", "TAGGED-DEV.txt"
MEANINGS = {
    TEXT: "a file with lines of the text that the model is for",
    TARGETS: "a file with their targets, line by line",
    TARGET_COLUMN: "the table's column of targets",
    TAGGED: "a file of tagged words (`attn-variants ner --help` has its format)",
    TAGGED_DEV: "one to evaluate on",
}


def next_steps(report: "ConversionReport", args: argparse.Namespace) -> list[str]:
    """Return lines that say what to do after `attn-variants convert` with `args`, each command a line of its own."""
    merged = report.reduced()
    if not merged and not report.talking_heads:
        return []
    from ..registration import PREFIX

    head = report.architecture.removeprefix(PREFIX)
    if head.startswith(NOT_TRAINED):
        return []
    output, text = _folder(report.output_dir), _text_flags(args, head)
    steps, commands = [], []
    if merged and text is not None and not head.endswith(NOT_DISTILLED):
        commands.append(_uptrain(report, args, head, text, output))
        output = f"{output}-distilled"
        reads_labels = _objective(head) != "distill"
        steps.append("draw it towards its source" + ("" if reads_labels else ", which reads no labels"))
    if (tuning := _fine_tune(args, head, text, output)) is not None:
        commands.append(tuning)
        steps.append("fine-tune it")
    if not commands:
        return []
    reason = ""
    if merged and args.calibration_file is None:
        pools = any("pool" in layer.change for layer in report.layers)
        reason = f"{'heads merged' if pools else 'latents or kernels made'} without text need training; "
    words = {word for command in commands for word in shlex.split(command)}
    if missing := [f"{name}, {meaning}" for name, meaning in MEANINGS.items() if name in words]:
        commands.append("with yours in place of " + "; ".join(missing))
    lines = [f"Next: {reason}{', then '.join(steps)}:", *(f"  {command}" for command in commands)]
    if tuning is not None and args.per_layer_values is None and _blurs_comparisons(report, head):
        lines.append(
            "To compare two texts after the fine-tuning, convert with --keep_matching_layers 2 (docs/conversion.md)."
        )
    return lines


def _blurs_comparisons(report: "ConversionReport", head: str) -> bool:
    """Say whether all layers of an encoder were fitted, those too by which a fine-tuned model would compare texts."""
    is_plain_encoder = "encoder_num_key_value_heads" not in report.heads and not head.startswith("Albert")
    return (
        is_plain_encoder
        and not head.endswith(TUNED)
        and report.method == "calibrated"
        and report.matching_shares is None
        and len(report.layers) > 2
        and all(layer.change != "same" for layer in report.layers)
    )


def _uptrain(report: "ConversionReport", args: argparse.Namespace, head: str, text: Sequence[str], output: str) -> str:
    teacher = args.model_name_or_path
    if args.revision is not None:  # a teacher is named without one
        from ..conversion.checkpoint.source import cached_folder

        teacher = os.fspath(cached_folder(teacher, report.source_revision) or teacher)
    recipe = ""
    if report.method == "calibrated" and _objective(head) == "distill":
        recipe = DISTILL_TUNED if head.endswith(TUNED) else DISTILL_FITTED
    length = [] if report.calibration is None else ["--max_length", str(report.calibration["max_length"])]
    return _command(
        ["uptrain", "--model_name_or_path", output, "--teacher", teacher, "--objective", _objective(head)],
        recipe.split(),
        text,
        length,
        ["--group_by_length", "--output_dir", f"{output}-distilled"],
    )


def _objective(head: str) -> str:
    return "seq2seq" if head.endswith(TEXT_TO_TEXT) else "distill"


def _fine_tune(args: argparse.Namespace, head: str, text: Sequence[str] | None, model: str) -> str | None:
    """Return the command that goes on with the model's own task; None where there is none, or it is not known."""
    name = next((task for suffix, task in TASKS.items() if head.endswith(suffix)), "glue")
    command = [name, "--model_name_or_path", model]
    data: Sequence[str] | None = ()
    if name == "seq2seq":
        data = text
    elif name == "ner":
        data = ["--train_file", TAGGED, "--validation_file", TAGGED_DEV]
    elif name == "glue":
        task = _task_of_source(args)
        # Another task than the one that it was tuned on would begin with another head.
        if head.endswith(NOT_TUNED) or (task is None and head.endswith(TUNED)):
            return None
        name = task or ("stsb" if len(args.calibration_columns or ()) == 2 else "sst2")
        data = ["--task_name", name]
    return None if data is None else _command(command, data, ["--output_dir", f"{model}-{name}"])


def _text_flags(args: argparse.Namespace, head: str) -> list[str] | None:
    """Return the calibration's text as the training commands take it, or names that stand for a user's own.

    None where they cannot take it: an encoder-decoder's source is one column, and it was calibrated on two.
    """
    file, target, columns = args.calibration_file, args.calibration_target_file, args.calibration_columns
    if not head.endswith(TEXT_TO_TEXT):
        named = [] if columns is None else ["--text_columns", *columns]
        return ["--train_file", file or TEXT, *named]
    given = {f"--{name}": getattr(args, name) for name in ("source_lang", "target_lang")}
    languages = [word for flag, value in given.items() if value is not None for word in (flag, value)]
    if file is None or not is_table(file):
        return ["--source_file", file or TEXT, "--target_file", target or TARGETS, *languages]
    source, *second = columns or ["text"]
    if second:
        return None
    target = args.calibration_target_column or TARGET_COLUMN
    return ["--train_file", file, "--source_column", source, "--target_column", target, *languages]


def _task_of_source(args: argparse.Namespace) -> str | None:
    """Return the task of GLUE that the source was tuned on by this package; None where nothing says it."""
    try:
        name = load_json(Path(args.model_name_or_path).expanduser() / RESULTS_NAME)["task_name"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return name if isinstance(name, str) else None


def _folder(output_dir: str) -> str:
    # "." has no name that a sibling's could begin with.
    path = os.path.normpath(output_dir)
    return os.path.abspath(path) if os.path.basename(path) in (".", "..") else path


def _command(*parts: Sequence[str]) -> str:
    return shlex.join(["attn-variants", *(word for part in parts for word in part)])
