"""Command `attn-variants ner`, also run by `scripts/run_ner.py`."""

from ..training.ner.settings import NerSettings
from .training import training_command

__all__ = ["main", "make_parser", "parse_args"]

DESCRIPTION = "Fine-tune and evaluate a token classifier, for example for named entities."
EPILOG = """example:
  %(prog)s ./bert-gqa4 --train_file conll/train.txt \\
      --validation_file conll/valid.txt --test_file conll/test.txt \\
      --num_train_epochs 3 --output_dir runs/conll

Files have the format of CoNLL: in each line, the word comes first and its tag (O, B-... or I-...) last. An empty line
follows each sentence. A `datasets` source has the columns tokens and ner_tags. --output_dir contains the model,
all_results.json (precision, recall and F1 of whole entities, computed by seqeval), train_log.jsonl,
training_curves.png and predictions_<split>.txt with one word and its tag per line.

To continue an interrupted run, repeat the command with --resume_from_checkpoint latest."""

make_parser, parse_args, main = training_command(
    NerSettings, "ner.task:NerFineTuning", "run_ner.py", DESCRIPTION, EPILOG
)
