"""The command `attn-variants pretrain-t5`, and `scripts/pretrain_span_corruption.py`."""

from ..training.pretraining.settings import SpanCorruptionSettings
from .training import training_command

__all__ = ["main", "make_parser", "parse_args"]

DESCRIPTION = "Pretrain a T5 by span corruption, from scratch or from a checkpoint."
EPILOG = """example (a small multi-query T5 from scratch, on gzip shards; an empty line
separates their articles):
  %(prog)s --model_type t5 \\
      --tokenizer_name google-t5/t5-small --num_key_value_heads 1 \\
      --train_file wikipedia/train-*.txt.gz \\
      --validation_file wikipedia/valid.txt.gz --max_eval_samples 500 \\
      --optim adafactor --adafactor_scale_parameter --learning_rate 1e-2 \\
      --lr_scheduler_type inverse_sqrt --num_warmup_steps 500 \\
      --max_train_steps 10000 --eval_steps 1000 --dropout_rate 0 \\
      --output_dir runs/t5 \\
      --config_overrides d_model=256,d_kv=32,d_ff=1024,num_layers=4,num_heads=8

Text is read as a stream, tokenised and packed into blocks as training goes; a block becomes --max_length input tokens
and, at the default noise, a quarter as many target tokens or fewer. Adafactor with steps in proportion to each
parameter is T5's own optimiser: AdamW at one rate for all stays long at the frequencies of tokens, since T5's
embeddings are large. --output_dir gets the model with its tokenizer, all_results.json, train_log.jsonl and
training_curves.png. eval_loss is the mean over the target tokens in nats. At the end a gate says whether the model
reads its context at all: the dev loss with the words of the inputs shuffled, and with attention zeroed, must each be
0.3 nats worse; a young model that only knows how frequent tokens are fails it.
An interrupted run goes on exactly where it was: repeat the command with --resume_from_checkpoint latest."""

make_parser, parse_args, main = training_command(
    SpanCorruptionSettings,
    "pretraining.span_corruption:pretrain_span_corruption",
    "pretrain_span_corruption.py",
    DESCRIPTION,
    EPILOG,
)
