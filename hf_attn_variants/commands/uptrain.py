"""The command `attn-variants uptrain`, and `scripts/uptrain.py`."""

from ..training.uptraining.settings import UptrainingSettings
from .training import training_command

__all__ = ["main", "make_parser", "parse_args"]

DESCRIPTION = "Continue training a converted checkpoint to restore its quality."
EPILOG = """examples (4 key/value heads, drawn towards the model they come from: a BERT on
lines, one on pairs, a T5):
  %(prog)s ./minilm-gqa4 --teacher ./minilm \\
      --objective distill --train_file wikipedia/train-00000.txt.gz \\
      --output_dir runs/minilm-gqa4 --group_by_length --cpu
  %(prog)s ./squad-gqa4 --teacher ./squad \\
      --objective distill --logits_weight 1 --attention_outputs_weight 0 \\
      --trainable all --learning_rate 2e-5 --train_file pairs.jsonl \\
      --text_columns question context --max_length 256 \\
      --output_dir runs/squad-gqa4 --cpu
  %(prog)s ./t5-gqa4 --teacher ./t5 \\
      --objective seq2seq --source_file train.en.gz \\
      --target_file train.de.gz --validation_source_file val.en.gz \\
      --validation_target_file val.de.gz --predict_with_generate \\
      --output_dir runs/t5-gqa4 --cpu
and without a teacher, by T5's own pretraining (arXiv:2305.13245):
  %(prog)s ./t5-mqa --objective span_corruption \\
      --alpha 0.05 --pretraining_steps 1000000 --dataset_name allenai/c4 \\
      --dataset_config_name en --max_eval_samples 512 \\
      --output_dir runs/t5-mqa

distill: the teacher alone says what is right: the output of each layer and attention and, for an encoder-decoder, its
distribution over the targets (with --logits_weight 1 an encoder's over classes or answers, too). mlm, seq2seq: the
task itself, and the teacher where one is given. embedding: the teacher's sentence embeddings. span_corruption: spans
of a stream of text are left out, and are what a T5 is to write; its defaults are those of T5's pretraining. For a
classification task, use `attn-variants glue`.
Without --max_train_steps, --num_train_epochs or --alpha a run has 300 steps; without validation files the last 5 %% of
the rows (at most 512) are held out. Dev metrics are computed before, during (--eval_steps) and after training.
--output_dir gets the whole checkpoint (model, code, tokenizer, the source's side files), all_results.json,
train_log.jsonl and training_curves.png.
An interrupted run goes on exactly where it was: repeat the command with --resume_from_checkpoint latest."""

make_parser, parse_args, main = training_command(
    UptrainingSettings, "uptraining.task:Uptraining", "uptrain.py", DESCRIPTION, EPILOG
)
