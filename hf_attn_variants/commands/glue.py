"""The command `attn-variants glue`, and `scripts/run_glue.py`."""

from ..training.glue.settings import GlueSettings
from .training import training_command

__all__ = ["main", "make_parser", "parse_args"]

DESCRIPTION = "Fine-tune and evaluate a sequence classifier on a GLUE task."
EPILOG = """example (STS-B from a folder of TSVs, on the CPU):
  %(prog)s ./minilm-gqa4 --task_name stsb \\
      --data_dir glue/STS-B --output_dir runs/stsb --num_train_epochs 3 \\
      --learning_rate 5e-5 --group_by_length --cpu

Without --data_dir the task is read from nyu-mll/glue on the Hub. --output_dir gets the model, all_results.json,
train_log.jsonl, training_curves.png, predictions_dev_<task>.tsv and, where there is a test file,
predictions_<task>.tsv; drop the prefix to submit it to GLUE. Scores are those of the dev set; --metric_for_best_model
and --early_stopping_patience choose the weights on it, so that its scores flatter the model a little.
An interrupted run goes on exactly where it was: repeat the command with --resume_from_checkpoint latest."""

make_parser, parse_args, main = training_command(
    GlueSettings, "glue.task:GlueFineTuning", "run_glue.py", DESCRIPTION, EPILOG
)
