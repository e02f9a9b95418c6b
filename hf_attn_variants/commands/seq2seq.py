"""The command `attn-variants seq2seq`, and `scripts/run_seq2seq.py`."""

from ..training.seq2seq.settings import Seq2SeqSettings
from .training import training_command

__all__ = ["main", "make_parser", "parse_args"]

DESCRIPTION = "Train and evaluate an encoder-decoder on text to text: translation, summarisation, GLUE, SQuAD."
EPILOG = """examples (translation decoded greedily and with 4 beams; STS-B as text; a
checkpoint's score):
  %(prog)s ./t5-gqa2 --source_file train.en.gz \\
      --target_file train.de.gz --validation_source_file val.en.gz \\
      --validation_target_file val.de.gz --max_length 64 --num_beams 1 4 \\
      --group_by_length --output_dir runs/en-de
  %(prog)s google-t5/t5-small --task_name stsb \\
      --data_dir glue/STS-B --max_target_length 8 --output_dir runs/t5-stsb
  %(prog)s runs/en-de --validation_source_file val.en.gz \\
      --validation_target_file val.de.gz --num_train_epochs 0 \\
      --output_dir runs/en-de-scores

Rows come from parallel text (--source_file and --target_file, line by line), from tables (--train_file with
--source_column and --target_column; a nested column is written translation.en), from a `datasets` source
(--dataset_name), or from --task_name, which words GLUE and SQuAD as T5 (arXiv:1910.10683) does. Rows with a blank side
are left out, but of a test split without targets none. --output_dir gets the model, all_results.json,
train_log.jsonl, training_curves.png and predictions_<split>.jsonl with the source, references and prediction of each
row. decode_tokens_per_second counts the generated tokens over the time in generation. T5 wants larger learning rates
than BERT: here the default is 3e-4.
An interrupted run goes on exactly where it was: repeat the command with --resume_from_checkpoint latest."""

make_parser, parse_args, main = training_command(
    Seq2SeqSettings, "seq2seq.task:Seq2SeqFineTuning", "run_seq2seq.py", DESCRIPTION, EPILOG
)
