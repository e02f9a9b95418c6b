"""Command `attn-variants seq2seq`, also run by `scripts/run_seq2seq.py`."""

from ..training.seq2seq.settings import Seq2SeqSettings
from .training import training_command

__all__ = ["main", "make_parser", "parse_args"]

DESCRIPTION = "Fine-tune and evaluate an encoder-decoder on text pairs: translation, summarization, GLUE, SQuAD."
EPILOG = """examples (translation with greedy search and with 4 beams; STS-B as text; the
score of a checkpoint):
  %(prog)s ./t5-gqa2 --source_file train.en.gz \\
      --target_file train.de.gz --validation_source_file val.en.gz \\
      --validation_target_file val.de.gz --max_length 64 --num_beams 1 4 \\
      --group_by_length --output_dir runs/en-de
  %(prog)s google-t5/t5-small --task_name stsb \\
      --data_dir glue/STS-B --max_target_length 8 --output_dir runs/t5-stsb
  %(prog)s runs/en-de --validation_source_file val.en.gz \\
      --validation_target_file val.de.gz --num_train_epochs 0 \\
      --output_dir runs/en-de-scores

Rows come from parallel files (--source_file and --target_file), from tables (--train_file with --source_column and
--target_column, nested columns as translation.en), from a `datasets` source (--dataset_name), or from --task_name. The
latter formats GLUE and SQuAD as text, as T5 does (arXiv:1910.10683). Rows with a blank source or target are left out,
except in a test split without targets. --output_dir contains the model, all_results.json, train_log.jsonl,
training_curves.png and predictions_<split>.jsonl with the source, references and prediction of each row.
decode_tokens_per_second is the number of generated tokens divided by the time of the generation. T5 needs larger
learning rates than BERT, so that the default is 3e-4.

To continue an interrupted run, repeat the command with --resume_from_checkpoint latest."""

make_parser, parse_args, main = training_command(
    Seq2SeqSettings, "seq2seq.task:Seq2SeqFineTuning", "run_seq2seq.py", DESCRIPTION, EPILOG
)
