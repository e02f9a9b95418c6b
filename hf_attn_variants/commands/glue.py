"""Command `attn-variants glue`, also run by `scripts/run_glue.py`."""

from ..training.glue.settings import GlueSettings
from .training import training_command

__all__ = ["main", "make_parser", "parse_args"]

DESCRIPTION = "Fine-tune and evaluate a sequence classifier on a GLUE task."
EPILOG = """example (STS-B from a folder of TSV files, on the CPU):
  %(prog)s ./minilm-gqa4 --task_name stsb \\
      --data_dir glue/STS-B --output_dir runs/stsb --num_train_epochs 3 \\
      --learning_rate 5e-5 --group_by_length --cpu

Without --data_dir, the task is read from nyu-mll/glue on the Hub. --output_dir contains the model, all_results.json,
train_log.jsonl, training_curves.png, predictions_dev_<task>.tsv and, if there is a test file, predictions_<task>.tsv.
To submit the latter to GLUE, remove the prefix from its name. Scores are computed on the dev set. They are slightly
optimistic if --metric_for_best_model or --early_stopping_patience selected the weights on this set.

To continue an interrupted run, repeat the command with --resume_from_checkpoint latest."""

make_parser, parse_args, main = training_command(
    GlueSettings, "glue.task:GlueFineTuning", "run_glue.py", DESCRIPTION, EPILOG
)
