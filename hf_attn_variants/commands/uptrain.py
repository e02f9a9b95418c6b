"""Command `attn-variants uptrain`, also run by `scripts/uptrain.py`."""

from ..training.uptraining.settings import UptrainingSettings
from .training import training_command

__all__ = ["main", "make_parser", "parse_args"]

DESCRIPTION = "Continue training a converted checkpoint to restore its quality."
EPILOG = """examples (distillation of models with 4 key/value heads from their base models:
a BERT on lines of text, a BERT on text pairs, a T5):
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
a T5 without a teacher, with T5's pretraining objective (arXiv:2305.13245):
  %(prog)s ./t5-mqa --objective span_corruption \\
      --alpha 0.05 --pretraining_steps 1000000 --dataset_name allenai/c4 \\
      --dataset_config_name en --max_eval_samples 512 \\
      --output_dir runs/t5-mqa

distill: the model reproduces the outputs of the layers and attentions of the teacher and, for an encoder-decoder, its
distribution over the targets. With --logits_weight 1, an encoder also reproduces the distribution over classes or
answers. mlm, seq2seq: the model is trained on the task and, if there is a teacher, on its outputs. embedding: the
model reproduces the sentence embeddings of the teacher. span_corruption: a T5 predicts spans that are removed from a
stream of text, with the default settings of T5's pretraining. For a classification task, use `attn-variants glue`.

Without --max_train_steps, --num_train_epochs or --alpha, a run has 300 steps. Without validation files, the last 5 %%
of the rows (at most 512) are the dev set. Dev metrics are computed before, during (--eval_steps) and after the
training. --output_dir contains the complete checkpoint (model, code, tokenizer, further files of the original model),
all_results.json, train_log.jsonl and training_curves.png.

To continue an interrupted run, repeat the command with --resume_from_checkpoint latest."""

make_parser, parse_args, main = training_command(
    UptrainingSettings, "uptraining.task:Uptraining", "uptrain.py", DESCRIPTION, EPILOG
)
