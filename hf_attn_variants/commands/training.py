"""The training commands, whose flags are generated from the settings classes."""

import dataclasses
import importlib
import inspect
import os
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args, get_origin, get_type_hints

from ..command_parser import CommandParser, add_checkpoint_argument, get_program_name, parse_with_checkpoint
from ..training.classification import ClassificationSettings
from ..training.engine.settings import NewModelSettings, TrainingSettings, get_field_types, group_fields
from ..training.glue import GlueSettings
from ..training.ner import NerSettings
from ..training.pretraining import MaskedLMSettings, SpanCorruptionSettings
from ..training.seq2seq import Seq2SeqSettings
from ..training.squad import SquadSettings
from ..training.uptraining import UptrainingSettings

RESUMING = "To continue an interrupted run, repeat the command with --resume_from_checkpoint latest."


@dataclass(frozen=True)
class TrainingCommand:
    """A training command, which `cli.run` executes by calling `parse_args` and `main`.

    Attributes:
        settings: the settings class, whose fields become flags.
        trains: a function that takes the settings, or the name of such a function or of a `FineTuningTask`. Names have
            the form "module:name", relative to the `training` package, and are imported when training starts.
        script: the name of the equivalent script in scripts/, which `--help` shows.
        description: the text above the flags in `--help`.
        epilog: the text below the flags in `--help`.
    """

    settings: type[TrainingSettings]
    trains: str | Callable[[Any], dict[str, Any]]
    script: str
    description: str
    epilog: str

    def make_parser(self) -> ArgumentParser:
        """Return the parser of the command, with one flag per field and one argument group per settings class."""
        epilog = f"{self.epilog}\n\n{RESUMING}"
        parser = CommandParser(prog=get_program_name(self.script), description=self.description, epilog=epilog)
        types = get_type_hints(self.settings)
        for title, fields in group_fields(self.settings):
            group = parser.add_argument_group(title)
            for setting in fields:
                if setting.name == "model_name_or_path":
                    add_checkpoint_argument(group, setting.metadata["help"])
                else:
                    group.add_argument(f"--{setting.name}", **_make_flag_options(setting, types[setting.name]))
        return parser

    def parse_args(self, argv: Sequence[str] | None = None) -> Any:
        """Parse the command line and return the settings. If `argv` is None, the process arguments are parsed.

        The process exits with status 2 if a flag is unknown, or its value is missing or has the wrong type.

        Raises:
            ValueError: if a value is out of range, or settings cannot be combined.
        """
        needs_checkpoint = not issubclass(self.settings, NewModelSettings)
        return self.settings(**vars(parse_with_checkpoint(self.make_parser(), argv, required=needs_checkpoint)))

    def main(self, settings: Any) -> dict[str, Any]:
        """Train, evaluate and save the model, push it if `push_to_hub` is set, and return the results.

        The main process pushes the model at the very end, so that nothing is lost if the push fails. The other
        processes do not wait for the push, because NCCL limits the waiting time.

        Raises:
            ValueError: if the data, the model or the repository is not valid.
            OSError: if a file cannot be read or written, or the push fails.
        """
        from ..training.engine.finetune import fine_tune

        trainer: Any = self.trains
        if isinstance(trainer, str):
            module, name = trainer.split(":")
            trainer = getattr(importlib.import_module(f"..training.{module}", __package__), name)
        is_task = inspect.isclass(trainer)
        train: Any = partial(fine_tune, trainer) if is_task else trainer
        if not settings.push_to_hub:
            return train(settings)
        from ..hub import push

        destination = settings.output_dir, settings.hub_model_id, settings.hub_private_repo, settings.hub_token
        push.check_hub_access(*destination)
        results = train(settings)
        if os.environ.get("RANK", "0") == "0":
            print(f"Pushed to {push.push_trained_model(*destination)}")
        return results


def _make_flag_options(setting: dataclasses.Field, annotation: Any) -> dict[str, Any]:
    """Return the keyword arguments for `add_argument` that define the flag for a field."""
    flag = {name: value for name, value in setting.metadata.items() if name not in ("range", "resume")}
    if setting.default_factory is not dataclasses.MISSING:
        flag["default"] = setting.default_factory()
    elif setting.default is not dataclasses.MISSING:
        flag["default"] = setting.default
    else:
        flag["required"] = True
    if callable(flag.get("choices")):
        flag["choices"] = flag["choices"]()
    kind = get_field_types(annotation)[0]
    if kind is bool:
        return {"action": "store_true", **flag}
    if get_origin(kind) is tuple:
        return {"nargs": "+", "type": get_args(kind)[0], **flag}
    return {"type": kind, **flag}


uptrain = TrainingCommand(
    UptrainingSettings,
    "uptraining.task:Uptraining",
    "uptrain.py",
    "Train a converted checkpoint to restore its quality.",
    """examples (distilling base models into models with 4 key/value heads: a BERT
model on lines of text, a BERT model on text pairs, and a T5 model):
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
a T5 model with its pretraining objective instead of a teacher
(arXiv:2305.13245):
  %(prog)s ./t5-mqa --objective span_corruption \\
      --alpha 0.05 --pretraining_steps 1000000 --dataset_name allenai/c4 \\
      --dataset_config_name en --max_eval_samples 512 \\
      --output_dir runs/t5-mqa

With --objective distill, the model learns to reproduce the outputs of the teacher's layers and attention modules and,
for encoder-decoder models, its distribution over the targets. With --logits_weight 1, an encoder also learns the
distribution over classes or answers. With mlm and seq2seq, the model is trained on the task and, if there is a
teacher, on the teacher's outputs. With embedding, the model learns the teacher's sentence embeddings. With
span_corruption, a T5 model predicts spans removed from a stream of text, with the default settings from T5's
pretraining. For classification tasks, use `attn-variants glue`.

Without --max_train_steps, --num_train_epochs or --alpha, the model is trained for 300 steps. Without validation files,
the last 5%% of the rows (at most 512) are used as the dev set. Dev metrics are computed before, during (--eval_steps)
and after training. --output_dir contains the complete checkpoint (model, code, tokenizer and other files from the
original model), all_results.json, train_log.jsonl and training_curves.png.""",
)

pretrain = TrainingCommand(
    MaskedLMSettings,
    "pretraining.task:pretrain_masked_lm",
    "pretrain_mlm.py",
    "Pretrain an encoder (BERT, ALBERT, RoBERTa, ...) as a masked language model, or a BERT, RoBERTa or ELECTRA "
    "model as a causal language model. Training starts from scratch or from a checkpoint.",
    """examples (a small BERT model from scratch, on gzip shards of text with an empty
line between articles):
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

Text is read as a stream, tokenized and packed into blocks of --max_length tokens during training. --max_train_steps
sets the number of steps. Flags for variant fields, such as --talking_heads, make the new model a variant. --output_dir
contains the model and its tokenizer, all_results.json, train_log.jsonl and training_curves.png. eval_loss is the mean
loss over the masked tokens (with clm, over all tokens) in nats, which is the logarithm of eval_perplexity.

After training, the command checks whether the model uses its context. The dev loss must increase by at least 0.3 nats
when the words are shuffled, and when attention is set to zero. A model that has only learned token frequencies fails.
benchmarks/train/albert_mlm.py trains a small model that passes the check in 51 minutes on one CPU core. The examples
above require a GPU and were not run to completion.""",
)

pretrain_t5 = TrainingCommand(
    SpanCorruptionSettings,
    "pretraining.span_corruption:pretrain_span_corruption",
    "pretrain_span_corruption.py",
    "Pretrain a T5 model with span corruption, from scratch or from a checkpoint.",
    """example (a small multi-query T5 model from scratch, on gzip shards of text with
an empty line between articles):
  %(prog)s --model_type t5 \\
      --tokenizer_name google-t5/t5-small --num_key_value_heads 1 \\
      --train_file wikipedia/train-*.txt.gz \\
      --validation_file wikipedia/valid.txt.gz --max_eval_samples 500 \\
      --optim adafactor --adafactor_scale_parameter --learning_rate 1e-2 \\
      --lr_scheduler_type inverse_sqrt --num_warmup_steps 500 \\
      --max_train_steps 10000 --eval_steps 1000 --dropout_rate 0 \\
      --output_dir runs/t5 \\
      --config_overrides d_model=256,d_kv=32,d_ff=1024,num_layers=4,num_heads=8

Text is read as a stream, tokenized and packed into blocks during training. A block has --max_length input tokens and,
with the default noise, at most a quarter as many target tokens. Like T5, the example uses Adafactor, whose steps are
scaled by the size of each parameter. With AdamW and a single learning rate for all parameters, the model learns little
more than token frequencies for a long time, because T5's embeddings are large. --output_dir contains the model and its
tokenizer, all_results.json, train_log.jsonl and training_curves.png. eval_loss is the mean loss over the target tokens
in nats.

After training, the command checks whether the model uses its context. The dev loss must increase by at least 0.3 nats
when the words in the inputs are shuffled, and when attention is set to zero. A model that has only learned token
frequencies fails.""",
)

classify = TrainingCommand(
    ClassificationSettings,
    "classification.task:ClassificationFineTuning",
    "run_classification.py",
    "Fine-tune and evaluate a classifier for texts or text pairs on your own tables. Each row has one label, several "
    "labels, or a number (regression).",
    """examples (one label per row, several labels per row, a number for each text
pair, and only predictions):
  %(prog)s ./minilm-gqa4 --train_file train.csv \\
      --validation_file dev.csv --test_file test.csv --output_dir runs/reviews
  %(prog)s ./minilm-gqa4 --train_file train.csv \\
      --validation_file dev.csv --text_columns body --label_column tags \\
      --label_separator ';' --class_weights balanced --output_dir runs/tags
  %(prog)s ./minilm-gqa4 --train_file pairs.tsv.gz \\
      --validation_file dev.jsonl --text_columns left right \\
      --label_column similarity --problem_type regression \\
      --output_dir runs/pairs
  %(prog)s runs/reviews --test_file new.jsonl \\
      --num_train_epochs 0 --output_dir runs/new

The kind of labels is detected from the training rows. Words and whole numbers are classes. Numbers are scores
(regression) if some of them have decimals. JSON lists, or cells with --label_separator, contain several labels. In
ambiguous cases (a word among numbers, whole numbers with a decimal point such as 1.0, or more than 200 different
labels), the command reports the file, row and column, and --problem_type must be set. Every training and dev row needs
a label. If rows can have several labels, an empty cell means no label. For a test table without labels (or with only
empty labels or -1), predictions are written, but no scores. Spaces around labels are removed. Classes are sorted
(numbers by value) unless --labels specifies another order.

--output_dir contains the model, all_results.json (with the scores of each class), train_log.jsonl,
training_curves.png, confusion_matrix.png, predictions_dev.jsonl and predictions_test.jsonl. Each line in the
prediction files contains the number, label, prediction, probabilities and texts of one row. Scores are computed on the
dev rows. They are slightly optimistic if --metric_for_best_model or --early_stopping_patience is set, because the
weights are then selected on the same rows.""",
)

glue = TrainingCommand(
    GlueSettings,
    "glue.task:GlueFineTuning",
    "run_glue.py",
    "Fine-tune and evaluate a sequence classifier on a GLUE task.",
    """example (STS-B from a folder with TSV files, on the CPU):
  %(prog)s ./minilm-gqa4 --task_name stsb \\
      --data_dir glue/STS-B --output_dir runs/stsb --num_train_epochs 3 \\
      --learning_rate 5e-5 --group_by_length --cpu

Without --data_dir, the task is read from nyu-mll/glue on the Hub. --output_dir contains the model, all_results.json,
train_log.jsonl, training_curves.png, predictions_dev_<task>.tsv and, if there is a test file, predictions_<task>.tsv.
To submit the latter to GLUE, remove the prefix from its name. Scores are computed on the dev set. They are slightly
optimistic if --metric_for_best_model or --early_stopping_patience is set, because the weights are then selected on the
same set.""",
)

squad = TrainingCommand(
    SquadSettings,
    "squad.task:SquadFineTuning",
    "run_squad.py",
    "Fine-tune and evaluate an extractive question answering model on SQuAD v1.1 or v2.0.",
    """example (SQuAD v1.1 from its JSON files, on the CPU):
  %(prog)s ./minilm-gqa4 --train_file squad/train-v1.1.json \\
      --validation_file squad/dev-v1.1.json --max_length 256 \\
      --num_train_epochs 1 --group_by_length --output_dir runs/squad --cpu

Without --train_file and --validation_file, SQuAD is read from rajpurkar/squad on the Hub, or from rajpurkar/squad_v2
with --version_2_with_negative. A context longer than --max_length is split into windows, which overlap by --doc_stride
tokens. "No answer" is represented by the position of the first token, such as [CLS]. --output_dir contains the model,
all_results.json (exact match and F1, computed as in the official scripts), train_log.jsonl, training_curves.png,
predictions_dev.json (for the official scripts), predictions_nbest_dev.json and, for v2.0,
predictions_null_odds_dev.json. With --test_file, it also contains the predictions for the test split. For v2.0,
eval_best_f1 is computed with the best threshold on the dev set. If the answers are in a script without spaces, such as
Chinese or Thai, F1 compares characters and all punctuation is ignored, as in MLQA (arXiv:1910.07475).""",
)

seq2seq = TrainingCommand(
    Seq2SeqSettings,
    "seq2seq.task:Seq2SeqFineTuning",
    "run_seq2seq.py",
    "Fine-tune and evaluate an encoder-decoder on text pairs for tasks such as translation, summarization, GLUE or "
    "SQuAD.",
    """examples (translation with greedy search and with 4 beams, STS-B as text, and
scoring an existing checkpoint):
  %(prog)s ./t5-gqa2 --source_file train.en.gz \\
      --target_file train.de.gz --validation_source_file val.en.gz \\
      --validation_target_file val.de.gz --max_length 64 --num_beams 1 4 \\
      --group_by_length --output_dir runs/en-de
  %(prog)s google-t5/t5-small --task_name stsb \\
      --data_dir glue/STS-B --max_target_length 8 --output_dir runs/t5-stsb
  %(prog)s runs/en-de --validation_source_file val.en.gz \\
      --validation_target_file val.de.gz --num_train_epochs 0 \\
      --output_dir runs/en-de-scores

Rows are read from parallel files (--source_file and --target_file), from tables (--train_file with --source_column and
--target_column, where translation.en is a nested column), from a `datasets` source (--dataset_name), or from a task
(--task_name). The latter formats GLUE and SQuAD as text, like T5 (arXiv:1910.10683). Rows with a blank source or
target are skipped, except in a test split without targets. --output_dir contains the model, all_results.json,
train_log.jsonl, training_curves.png and predictions_<split>.jsonl with the source, references and prediction of each
row. decode_tokens_per_second is the number of generated tokens divided by the generation time. The default learning
rate is 3e-4, because T5 requires larger learning rates than BERT.""",
)

ner = TrainingCommand(
    NerSettings,
    "ner.task:NerFineTuning",
    "run_ner.py",
    "Fine-tune and evaluate a token classifier, for tasks such as named entity recognition.",
    """example:
  %(prog)s ./bert-gqa4 --train_file conll/train.txt \\
      --validation_file conll/valid.txt --test_file conll/test.txt \\
      --num_train_epochs 3 --output_dir runs/conll

Files must be in CoNLL format. Each line begins with a word and ends with its tag (O, B-... or I-...). An empty line
follows each sentence. A `datasets` source has the columns tokens and ner_tags. --output_dir contains the model,
all_results.json (precision, recall and F1 for whole entities, computed by seqeval), train_log.jsonl,
training_curves.png and predictions_<split>.txt with one word and its tag per line.""",
)
