"""The command `attn-variants pretrain`, and `scripts/pretrain_mlm.py`."""

from ..training.pretraining.settings import MaskedLMSettings
from .training import training_command

__all__ = ["main", "make_parser", "parse_args"]

DESCRIPTION = (
    "Pretrain an encoder (BERT, ALBERT, RoBERTa, ...) as a masked language model, or a BERT, RoBERTa or ELECTRA as a "
    "causal one, from scratch or from a checkpoint."
)
EPILOG = """examples (a small BERT from scratch, on gzip shards of text whose articles an
empty line separates):
  %(prog)s --model_type bert \\
      --tokenizer_name google-bert/bert-base-uncased --config_overrides \\
      hidden_size=384,num_hidden_layers=6,intermediate_size=1536 \\
      --train_file wikipedia/train-*.txt.gz \\
      --validation_file wikipedia/valid.txt.gz --max_eval_samples 500 \\
      --max_train_steps 10000 --learning_rate 1e-3 --num_warmup_steps 500 \\
      --eval_steps 1000 --output_dir runs/bert

the same with each next token, by a multi-query decoder:
  %(prog)s --objective clm --model_type bert \\
      --tokenizer_name google-bert/bert-base-uncased \\
      --num_key_value_heads 1 --train_file wikipedia/train-*.txt.gz \\
      --validation_file wikipedia/valid.txt.gz --max_eval_samples 500 \\
      --max_train_steps 10000 --learning_rate 5e-4 --num_warmup_steps 500 \\
      --eval_steps 1000 --output_dir runs/decoder

Text is read as a stream, tokenised and packed into blocks of --max_length as training goes; --max_train_steps says how
long. A flag of a field of variants, such as --talking_heads, makes the new model one. --output_dir gets the model
with its tokenizer, all_results.json, train_log.jsonl and training_curves.png. eval_loss is the mean over the masked
tokens (with clm over all) in nats, the logarithm of eval_perplexity. At the end a gate says whether the model reads
its context at all: the dev loss with the words shuffled, and with attention zeroed, must each be 0.3 nats worse; a
young model that only knows how frequent tokens are fails it. A small model and a small vocabulary that passed, in 51
minutes on one CPU core: benchmarks/train/albert_mlm.py. These commands are for a GPU, and were not run to their end.
An interrupted run goes on exactly where it was: repeat the command with --resume_from_checkpoint latest."""

make_parser, parse_args, main = training_command(
    MaskedLMSettings, "pretraining.masked_lm:pretrain_masked_lm", "pretrain_mlm.py", DESCRIPTION, EPILOG
)
