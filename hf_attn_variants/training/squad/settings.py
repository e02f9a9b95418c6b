"""The settings of fine-tuning on SQuAD."""

from dataclasses import dataclass
from typing import ClassVar

from ..engine.options import (
    A_NUMBER,
    ALWAYS,
    AT_LEAST_0,
    AT_LEAST_1,
    WITH_BEST_WEIGHTS,
    check_metric,
    option,
    redefault,
)
from ..engine.settings import FineTuningSettings

__all__ = ["METRIC_NAMES", "SquadSettings"]

# The metrics of v1.1 (False) and v2.0 (True) that weights can be chosen by.
METRIC_NAMES: dict[bool, tuple[str, ...]] = {
    False: ("exact_match", "f1"),
    True: ("exact", "f1", "HasAns_exact", "HasAns_f1", "NoAns_exact", "NoAns_f1", "best_exact", "best_f1"),
}


@dataclass(frozen=True, kw_only=True)
class SquadSettings(FineTuningSettings):
    """Which questions, how contexts are cut into windows, and how answers are chosen."""

    title: ClassVar[str] = "task"

    train_file: str | None = option("Training questions: SQuAD's JSON, plain or .gz; default: the Hub.", None)
    validation_file: str | None = option("Dev questions, likewise.", None, resume=WITH_BEST_WEIGHTS)
    test_file: str | None = option("Questions to predict; their answers are not read.", None)
    version_2_with_negative: bool = option("SQuAD v2.0: some questions have no answer.", False, resume=ALWAYS)
    null_score_diff_threshold: float = option(
        "v2.0: no answer where its score exceeds the best answer's by more than this (default: %(default)s).",
        0.0,
        range=A_NUMBER,
        resume=WITH_BEST_WEIGHTS,
    )
    doc_stride: int | None = option(
        "Tokens that two windows of a context share (default: 128, or half of what a window has for its context where "
        "that is no more).",
        None,
        range=AT_LEAST_0,
        resume=ALWAYS,
    )
    max_query_length: int = option(
        "Tokens of a question; longer ones are cut (%(default)s).", 64, range=AT_LEAST_1, resume=ALWAYS
    )
    n_best_size: int = option(
        "Answers in the n-best file (default: %(default)s).", 20, range=AT_LEAST_1, resume=WITH_BEST_WEIGHTS
    )
    max_answer_length: int = option(
        "Tokens of an answer (default: %(default)s).", 30, range=AT_LEAST_1, resume=WITH_BEST_WEIGHTS
    )
    max_length: int = redefault(384)

    @property
    def threshold(self) -> float | None:
        """Return the null odds above which a question has no answer; None in v1.1: every question has one."""
        return self.null_score_diff_threshold if self.version_2_with_negative else None

    def check(self) -> None:
        super().check()
        if self.train_file is not None and self.validation_file is None:
            raise ValueError("--train_file needs --validation_file")
        if self.validation_file is not None and self.train_file is None and not self.only_evaluates:
            raise ValueError("--validation_file needs --train_file (or --num_train_epochs 0, to evaluate only)")
        check_metric(self.metric_for_best_model, ("loss", *METRIC_NAMES[self.version_2_with_negative]))
