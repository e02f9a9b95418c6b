"""The command `attn-variants multiple-choice`, and `scripts/run_multiple_choice.py`."""

from ..training.multiple_choice.settings import MultipleChoiceSettings
from .training import training_command

__all__ = ["main", "make_parser", "parse_args"]

DESCRIPTION = "Fine-tune and evaluate a model on questions with choices: RACE, SWAG, or your own tables."
EPILOG = """examples (RACE and SWAG, whose columns are known; your own columns; predictions
alone):
  %(prog)s ./bert-gqa4 \\
      --train_file race/train.jsonl --validation_file race/dev.jsonl \\
      --max_length 512 --output_dir runs/race
  %(prog)s ./bert-gqa4 \\
      --train_file swag/train.csv --validation_file swag/val.csv \\
      --output_dir runs/swag
  %(prog)s ./bert-gqa4 --train_file quiz.csv \\
      --validation_file dev.csv --question_column asked \\
      --choices_columns one two three --answer_column right \\
      --answer_format from_1 --output_dir runs/quiz
  %(prog)s runs/quiz --test_file new.csv \\
      --question_column asked --choices_columns one two three \\
      --num_train_epochs 0 --output_dir runs/new

A row is a question with its choices. An encoder reads the context and, behind it, the question with one choice, and
gives that a score; the choice with the highest score is its answer. An encoder-decoder (T5, BART) reads the question,
its choices and the context as one text, and the likeliest choice is its answer; its --learning_rate should be larger,
such as 3e-4. A context alone, or a question alone, will do.
Choices are columns, one each, of which the last may be blank in some rows, or one column with a list (in a CSV as
JSON). One question may have more choices than another.

The answer is a letter, a number from 0 or from 1, or the text of a choice: what all answers of the training rows are
decides, and where they could be two of these, you are asked for --answer_format. RACE is known by its columns
(article, question, options, answer: letters, and _ in a question is the place of the choice), and so is SWAG (sent1,
sent2, ending0 to ending3, label: from 0). A test table may have no answers (or all empty, or all -1); it is then
predicted.

--output_dir gets the model, all_results.json, train_log.jsonl, training_curves.png, and predictions_dev.jsonl and
predictions_test.jsonl: a row's number, answer, prediction and the probabilities of its choices a line.
An interrupted run goes on exactly where it was: repeat the command with --resume_from_checkpoint latest."""

TASK = "multiple_choice.task:MultipleChoiceFineTuning"
make_parser, parse_args, main = training_command(
    MultipleChoiceSettings, TASK, "run_multiple_choice.py", DESCRIPTION, EPILOG
)
