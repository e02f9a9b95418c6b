"""The command `attn-variants glue`, and `scripts/run_glue.py`."""

from collections.abc import Sequence
from typing import Any

from ..training.glue.settings import GlueSettings
from .arguments import parse_settings
from .training import train_and_push

__all__ = ["main", "parse_args"]

DESCRIPTION = "Fine-tune and evaluate a sequence classifier on a GLUE task."
EPILOG = """example (STS-B from a folder of TSVs, on the CPU):
  %(prog)s --model_name_or_path ./minilm-gqa4 --task_name stsb --data_dir glue/STS-B \\
      --output_dir runs/stsb --num_train_epochs 3 --learning_rate 5e-5 --group_by_length --cpu

Without --data_dir the task is read from nyu-mll/glue on the Hub. --output_dir gets the model, all_results.json,
train_log.jsonl, training_curves.png, predictions_dev_<task>.tsv and, where there is a test file,
predictions_<task>.tsv; drop the prefix to submit it to GLUE. Scores are those of the dev set; --metric_for_best_model
and --early_stopping_patience choose the weights on it, so that its scores flatter the model a little.
An interrupted run goes on exactly where it was: repeat the command with --resume_from_checkpoint latest."""


def parse_args(argv: Sequence[str] | None = None) -> GlueSettings:
    """Read the command line (`sys.argv` without an argument); errors as of `arguments.parse_settings`."""
    return parse_settings(GlueSettings, argv, "run_glue.py", DESCRIPTION, EPILOG)


def main(settings: GlueSettings) -> dict[str, Any]:
    """Train, score, save and, where asked for, push; returns and raises what the training does."""
    from ..training.engine.finetune import fine_tune
    from ..training.glue.task import GlueFineTuning

    return train_and_push(settings, lambda: fine_tune(GlueFineTuning, settings))
