"""Command `attn-variants pretrain`, also run by `scripts/pretrain_mlm.py`."""

from ..training.pretraining.settings import MaskedLMSettings
from .training import training_command

__all__ = ["main", "make_parser", "parse_args"]

DESCRIPTION = (
    "Pretrain an encoder (BERT, ALBERT, RoBERTa, ...) as a masked language model, or a BERT, RoBERTa or ELECTRA as a "
    "causal language model. The training starts from scratch or from a checkpoint."
)
EPILOG = """examples (a small BERT from scratch, on gzip shards of text with an empty line
between articles):
  %(prog)s --model_type bert \\
      --tokenizer_name google-bert/bert-base-uncased --config_overrides \\
      hidden_size=384,num_hidden_layers=6,intermediate_size=1536 \\
      --train_file wikipedia/train-*.txt.gz \\
      --validation_file wikipedia/valid.txt.gz --max_eval_samples 500 \\
      --max_train_steps 10000 --learning_rate 1e-3 --num_warmup_steps 500 \\
      --eval_steps 1000 --output_dir runs/bert

causal language modeling with a multi-query decoder:
  %(prog)s --objective clm --model_type bert \\
      --tokenizer_name google-bert/bert-base-uncased \\
      --num_key_value_heads 1 --train_file wikipedia/train-*.txt.gz \\
      --validation_file wikipedia/valid.txt.gz --max_eval_samples 500 \\
      --max_train_steps 10000 --learning_rate 5e-4 --num_warmup_steps 500 \\
      --eval_steps 1000 --output_dir runs/decoder

Text is read as a stream, tokenized and packed into blocks of --max_length during the training. --max_train_steps sets
the length of the training. A flag for a field of variants, such as --talking_heads, makes the new model a variant.
--output_dir contains the model with its tokenizer, all_results.json, train_log.jsonl and training_curves.png.
eval_loss is the mean over the masked tokens (with clm, over all tokens) in nats, the logarithm of eval_perplexity.

At the end, a gate checks whether the model uses its context: the dev loss must increase by at least 0.3 nats if the
words are shuffled, and if attention is set to zero. A model that has learned only the frequencies of tokens fails.
benchmarks/train/albert_mlm.py trains a small model that passes in 51 minutes on one CPU core. The examples above need
a GPU and were not run to the end.

To continue an interrupted run, repeat the command with --resume_from_checkpoint latest."""

make_parser, parse_args, main = training_command(
    MaskedLMSettings, "pretraining.masked_lm:pretrain_masked_lm", "pretrain_mlm.py", DESCRIPTION, EPILOG
)
