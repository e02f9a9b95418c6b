"""Command `attn-variants classify`, also run by `scripts/run_classification.py`."""

from ..training.classification.settings import ClassificationSettings
from .training import training_command

__all__ = ["main", "make_parser", "parse_args"]

DESCRIPTION = (
    "Fine-tune and evaluate a classifier of texts or text pairs on your own tables. A row has one label, several "
    "labels, or a number (regression)."
)
EPILOG = """examples (one label per row; several labels; a number for pairs; predictions only):
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

The training rows determine the kind of labels. Words and whole numbers are classes. Numbers of which some have a
decimal point are scores (regression). JSON lists, or cells with --label_separator, contain several labels. In unclear
cases, the command reports file, row and column, and --problem_type decides: a word among numbers, whole numbers with a
decimal point (1.0), or more than 200 different labels. Every training and dev row needs a label. If rows can have
several labels, an empty cell means no label. A test table without labels (or with only empty labels or -1) is
predicted, but not scored. Spaces around labels are removed. Classes are sorted (numbers by value), unless --labels
gives another order.

--output_dir contains the model, all_results.json (with the scores of each class), train_log.jsonl,
training_curves.png, confusion_matrix.png, predictions_dev.jsonl and predictions_test.jsonl. The predictions have one
row per line, with its number, label, prediction, probabilities and texts. Scores are computed on the dev rows. They
are slightly optimistic if --metric_for_best_model or --early_stopping_patience selected the weights on these rows.

To continue an interrupted run, repeat the command with --resume_from_checkpoint latest."""

TASK = "classification.task:ClassificationFineTuning"
make_parser, parse_args, main = training_command(
    ClassificationSettings, TASK, "run_classification.py", DESCRIPTION, EPILOG
)
