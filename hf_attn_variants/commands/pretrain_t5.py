"""Command `attn-variants pretrain-t5`, also run by `scripts/pretrain_span_corruption.py`."""

from ..training.pretraining.settings import SpanCorruptionSettings
from .training import training_command

__all__ = ["main", "make_parser", "parse_args"]

DESCRIPTION = "Pretrain a T5 with span corruption, from scratch or from a checkpoint."
EPILOG = """example (a small multi-query T5 from scratch, on gzip shards of text with an
empty line between articles):
  %(prog)s --model_type t5 \\
      --tokenizer_name google-t5/t5-small --num_key_value_heads 1 \\
      --train_file wikipedia/train-*.txt.gz \\
      --validation_file wikipedia/valid.txt.gz --max_eval_samples 500 \\
      --optim adafactor --adafactor_scale_parameter --learning_rate 1e-2 \\
      --lr_scheduler_type inverse_sqrt --num_warmup_steps 500 \\
      --max_train_steps 10000 --eval_steps 1000 --dropout_rate 0 \\
      --output_dir runs/t5 \\
      --config_overrides d_model=256,d_kv=32,d_ff=1024,num_layers=4,num_heads=8

Text is read as a stream, tokenized and packed into blocks during the training. A block has --max_length input tokens
and, with the default noise, at most a quarter as many target tokens. Like T5, the example uses Adafactor with steps
in proportion to each parameter. AdamW with one learning rate for all parameters learns little more than the
frequencies of tokens for a long time, because the embeddings of T5 are large. --output_dir contains the model with
its tokenizer, all_results.json, train_log.jsonl and training_curves.png. eval_loss is the mean over the target tokens
in nats.

At the end, a gate checks whether the model uses its context: the dev loss must increase by at least 0.3 nats if the
words of the inputs are shuffled, and if attention is set to zero. A model that has learned only the frequencies of
tokens fails.

To continue an interrupted run, repeat the command with --resume_from_checkpoint latest."""

make_parser, parse_args, main = training_command(
    SpanCorruptionSettings,
    "pretraining.span_corruption:pretrain_span_corruption",
    "pretrain_span_corruption.py",
    DESCRIPTION,
    EPILOG,
)
