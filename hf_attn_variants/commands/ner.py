"""The command `attn-variants ner`, and `scripts/run_ner.py`."""

from ..training.ner.settings import NerSettings
from .training import training_command

__all__ = ["main", "make_parser", "parse_args"]

DESCRIPTION = "Fine-tune and evaluate a token classifier, on named entities for example."
EPILOG = """example:
  %(prog)s ./bert-gqa4 --train_file conll/train.txt \\
      --validation_file conll/valid.txt --test_file conll/test.txt \\
      --num_train_epochs 3 --output_dir runs/conll

CoNLL's format: a word first in its line and its tag (O, B-... or I-...) last, an empty line behind each sentence. A
`datasets` source has columns tokens and ner_tags. --output_dir gets the model, all_results.json (precision, recall and
F1 of whole entities, by seqeval), train_log.jsonl, training_curves.png and predictions_<split>.txt, a word and its tag
a line. An interrupted run goes on exactly where it was: repeat the command with --resume_from_checkpoint latest."""

make_parser, parse_args, main = training_command(
    NerSettings, "ner.task:NerFineTuning", "run_ner.py", DESCRIPTION, EPILOG
)
