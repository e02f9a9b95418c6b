"""The command `attn-variants superglue`, and `scripts/run_superglue.py`."""

from ..training.superglue.settings import SuperGlueSettings
from .training import training_command

__all__ = ["main", "make_parser", "parse_args"]

DESCRIPTION = "Fine-tune and evaluate on a SuperGLUE task."
EPILOG = """examples (BoolQ from a folder of its official files; CB from the Hub, on the
CPU; COPA by a T5, in words):
  %(prog)s ./bert-gqa4 --task_name boolq \\
      --data_dir superglue/BoolQ --max_length 256 --group_by_length \\
      --output_dir runs/boolq
  %(prog)s ./bert-gqa4 --task_name cb \\
      --num_train_epochs 10 --cpu --output_dir runs/cb
  %(prog)s google-t5/t5-small --task_name copa \\
      --data_dir superglue/COPA --learning_rate 3e-4 \\
      --output_dir runs/copa

Without --data_dir the task is read from aps/super_glue on the Hub. BoolQ, CB, RTE, WiC and WSC are classified as texts
or pairs. Each answer of MultiRC and each candidate of ReCoRD, put into the query, is told right or wrong by itself.
COPA is multiple choice, for models that have this head. An encoder-decoder (T5, BART) reads each task in T5's wording,
and the likeliest of the possible answers counts; --classifier gives it a head instead. Scores are the official ones,
from 0 to 1, of the dev set.

--output_dir gets the model, all_results.json, train_log.jsonl, training_curves.png, predictions_dev_<task>.jsonl and,
where there is a test file, predictions_<task>.jsonl; drop the prefix to submit it to SuperGLUE. A model of RTE also
predicts the diagnostic sets AX-b and AX-g, from the Hub or where their files lie in the folder or beside it.
`attn-variants average` makes one table of several runs.
An interrupted run goes on exactly where it was: repeat the command with --resume_from_checkpoint latest."""

TASK = "superglue.task:fine_tune_superglue"
make_parser, parse_args, main = training_command(SuperGlueSettings, TASK, "run_superglue.py", DESCRIPTION, EPILOG)
