"""The settings of multiple choice on a user's own tables."""

from dataclasses import dataclass
from typing import ClassVar

from ..engine.options import ALWAYS, WITH_BEST_WEIGHTS, check_metric, option, redefault
from ..engine.table_settings import TableSettings

__all__ = ["ANSWER_FORMATS", "FROM_0", "FROM_1", "LETTER", "METRICS", "TEXT", "MultipleChoiceSettings"]

METRICS = ("accuracy",)
# How a table says which choice is right: its letter, its number, or its text.
LETTER, FROM_0, FROM_1, TEXT = "letter", "from_0", "from_1", "text"
ANSWER_FORMATS = (LETTER, FROM_0, FROM_1, TEXT)


@dataclass(frozen=True, kw_only=True)
class MultipleChoiceSettings(TableSettings):
    """Which columns of the tables have what."""

    title: ClassVar[str] = "task"

    context_column: str | None = option(
        "The column of what a question is about (default: a common name, such as article, context or sent1; there "
        "need be none where there is a question).",
        None,
        resume=WITH_BEST_WEIGHTS,
    )
    question_column: str | None = option(
        "The column of questions (default: a common name, such as question or sent2; there need be none where there "
        "is a context).",
        None,
        resume=WITH_BEST_WEIGHTS,
    )
    choices_columns: tuple[str, ...] | None = option(
        "The columns of the choices, one each, or one column that has a list (default: common names, such as options, "
        "or ending0 and ending1).",
        None,
        metavar="NAME",
        resume=WITH_BEST_WEIGHTS,
    )
    answer_column: str | None = option(
        "The column that says which choice is right (default: a common name, such as answer or label).",
        None,
        resume=WITH_BEST_WEIGHTS,
    )
    answer_format: str | None = option(
        "How it says so: by a letter (A, B, ...), a number that counts from 0 or from 1, or the choice's text "
        "(default: what all answers of the training rows are; where that may be more than one, an error).",
        None,
        choices=ANSWER_FORMATS,
        resume=ALWAYS,
    )
    question_blank: str | None = option(
        "What a question has in the place of its answer; the choice takes this place, and follows questions without "
        "it (default: _ in RACE's tables, else none).",
        None,
        metavar="TEXT",
        resume=ALWAYS,
    )
    per_device_train_batch_size: int = redefault(
        8, help="Questions per device and forward pass, each with all its choices."
    )
    per_device_eval_batch_size: int = redefault(16)

    def check(self) -> None:
        super().check()
        columns = self.choices_columns or ()
        named = {
            "--context_column": self.context_column,
            "--question_column": self.question_column,
            "--answer_column": self.answer_column,
        }
        if len({*columns}) < len(columns):
            raise ValueError(f"--choices_columns must be different columns, got {', '.join(columns)}")
        taken: dict[str, str] = dict.fromkeys(columns, "--choices_columns")
        for flag, name in named.items():
            if name is not None and name in taken:
                raise ValueError(f"{flag} {name} is {taken[name]} as well: each column has one meaning")
            if name is not None:
                taken[name] = flag
        if self.question_blank is not None and not self.question_blank.strip():
            raise ValueError("--question_blank must not be blank")
        check_metric(self.metric_for_best_model, ("loss", *METRICS))
