"""The command `attn-variants classify`, and `scripts/run_classification.py`."""

from ..training.classification.settings import ClassificationSettings
from .training import training_command

__all__ = ["main", "make_parser", "parse_args"]

DESCRIPTION = (
    "Fine-tune and evaluate a classifier of texts, or of pairs, on your own tables: one label a row, several, or a "
    "number (regression)."
)
EPILOG = """examples (one label a row, several, a number for pairs; predictions alone):
  %(prog)s ./minilm-gqa4 --train_file train.csv \\
      --validation_file dev.csv --test_file test.csv --output_dir runs/reviews
  %(prog)s ./minilm-gqa4 --train_file train.csv \\
      --validation_file dev.csv --text_columns body --label_column tags \\
      --label_separator ';' --class_weights balanced --output_dir runs/tags
  %(prog)s ./minilm-gqa4 --train_file pairs.tsv.gz \\
      --validation_file dev.jsonl --text_columns left right \\
      --label_column similarity --problem_type regression \\
      --output_dir runs/pairs
  %(prog)s runs/reviews --test_file new.jsonl \\
      --num_train_epochs 0 --output_dir runs/new

What labels are is decided by the training rows. Words and whole numbers are classes, numbers of which some have a
point a scale (regression); a list in JSON, or cells with --label_separator, several labels a row. What could be meant
otherwise is refused with file, row and column, and --problem_type decides: a word among numbers, whole numbers written
with a point (1.0), more than 200 different labels. Every training and dev row needs a label, but with several a row an
empty cell is none. A test table may have no labels (or all empty, or all -1); it is then predicted alone.
Space around a label is no part of it. Classes are sorted, numbers by value; --labels gives another order.

--output_dir gets the model, all_results.json (with the scores of each class), train_log.jsonl, training_curves.png,
confusion_matrix.png, and predictions_dev.jsonl and predictions_test.jsonl: a row's number, label, prediction,
probabilities and texts a line. Scores are those of the dev rows; --metric_for_best_model and
--early_stopping_patience choose the weights on them, so that they flatter the model a little.
An interrupted run goes on exactly where it was: repeat the command with --resume_from_checkpoint latest."""

TASK = "classification.task:ClassificationFineTuning"
make_parser, parse_args, main = training_command(
    ClassificationSettings, TASK, "run_classification.py", DESCRIPTION, EPILOG
)
