"""Flags of other commands that are called otherwise here, or are not needed: what an error says."""

import argparse
import re
import sys
from collections.abc import Mapping, Sequence

__all__ = ["HF_NAMES", "TRAINING_NAMES", "check_names"]

# A flag of transformers' run_*.py or of its TrainingArguments, and what to give here.
HF_NAMES = {
    "batch_size": "--per_device_train_batch_size",
    "bf16": "--mixed_precision bf16",
    "do_eval": "dev rows that are given are evaluated; --num_train_epochs 0 only evaluates",
    "do_predict": "test rows that are given are predicted; --skip_predict leaves them out",
    "do_regression": "--problem_type regression",
    "do_train": "a run trains, unless --num_train_epochs is 0",
    "epochs": "--num_train_epochs",
    "eval_strategy": "--eval_steps N; without it after every epoch",
    "evaluation_strategy": "--eval_steps N; without it after every epoch",
    "fp16": "--mixed_precision fp16",
    "ignore_mismatched_sizes": "not needed: an output layer for other labels is replaced, with a warning",
    "label_column_name": "--label_column",
    "load_best_model_at_end": "--metric_for_best_model NAME keeps the best weights",
    "lr": "--learning_rate",
    "max_seq_length": "--max_length",
    "max_steps": "--max_train_steps",
    "metric_name": "all metrics of the problem are computed; --metric_for_best_model names the one that decides",
    "overwrite_cache": "not needed: nothing of the data is kept",
    "pad_to_max_length": "--pad_to_multiple_of N",
    "per_gpu_eval_batch_size": "--per_device_eval_batch_size",
    "per_gpu_train_batch_size": "--per_device_train_batch_size",
    "preprocessing_num_workers": "not needed: rows are made into tokens by one process, many at a time",
    "remove_columns": "not needed: other columns than --text_columns and --label_column are not read",
    "remove_splits": "--train_split_name, --validation_split_name and --test_split_name name those that are read",
    "save_steps": "--checkpointing_steps",
    "save_strategy": "--checkpointing_steps, a number or epoch",
    "shuffle_seed": "--seed",
    "text_column_delimiter": "two --text_columns are read as a pair, with the model's own token between them",
    "text_column_names": "--text_columns, divided by spaces: one, or two that are read as a pair",
    "token": "--hub_token",
    "use_cpu": "--cpu",
    "warmup_steps": "--num_warmup_steps",
}

# A flag of the training commands, and what to give to a command that calibrates.
TRAINING_NAMES = {
    "train_file": "--calibration_file",
    "source_file": "--calibration_file",
    "target_file": "--calibration_target_file",
    "text_columns": "--calibration_columns",
    "source_column": "--calibration_columns",
    "target_column": "--calibration_target_column",
}


def check_names(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None, names: Mapping[str, str] = HF_NAMES
) -> None:
    """End the process with a line and status 2 where a command line has flags of `names` that the parser lacks.

    What is said names flags of the parser alone: a name that leads to another command's is left to argparse.
    """
    there, said = parser._option_string_actions, []
    for argument in sys.argv[1:] if argv is None else argv:
        if argument == "--":
            break
        flag = argument.partition("=")[0]
        advice = names.get(flag.removeprefix("--")) if flag.startswith("--") and flag not in there else None
        if advice is not None and all(name in there for name in re.findall(r"--\w+", advice)):
            said.append(f"there is no {flag}: {'use ' * advice.startswith('--')}{advice}")
    if said:
        parser.error("; ".join(said))
