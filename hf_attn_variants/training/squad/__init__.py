"""Settings of fine-tuning on SQuAD."""

from dataclasses import dataclass
from typing import ClassVar

from ..engine.settings import (
    A_NUMBER,
    ALWAYS,
    AT_LEAST_0,
    AT_LEAST_1,
    WITH_BEST_WEIGHTS,
    FineTuningSettings,
    check_metric,
    option,
    override_option,
)

# The metrics of v1.1 (False) and v2.0 (True) that can select the best weights.
METRIC_NAMES: dict[bool, tuple[str, ...]] = {
    False: ("exact_match", "f1"),
    True: ("exact", "f1", "HasAns_exact", "HasAns_f1", "NoAns_exact", "NoAns_f1", "best_exact", "best_f1"),
}


@dataclass(frozen=True, kw_only=True)
class SquadSettings(FineTuningSettings):
    """The questions, the windows of long contexts, and the selection of answers.

    Example:
        ```python
        settings = SquadSettings(model_name_or_path="bert-gqa4", output_dir="out")
        results = fine_tune(SquadFineTuning, settings)
        ```
    """

    title: ClassVar[str] = "task"

    train_file: str | None = option(
        "Training questions in the JSON format of SQuAD, plain text or .gz (default: from the Hub).", None
    )
    validation_file: str | None = option("Dev questions in the same format.", None, resume=WITH_BEST_WEIGHTS)
    test_file: str | None = option("Questions to predict. Their answers are not read.", None)
    version_2_with_negative: bool = option(
        "Use SQuAD v2.0, where some questions have no answer.", False, resume=ALWAYS
    )
    null_score_diff_threshold: float = option(
        "v2.0: predict no answer if its score exceeds that of the best answer by more than this (default: "
        "%(default)s).",
        0.0,
        range=A_NUMBER,
        resume=WITH_BEST_WEIGHTS,
    )
    doc_stride: int | None = option(
        "Number of tokens that neighboring windows of a context share (default: 128, or half of the context tokens of "
        "a window if these are at most 128).",
        None,
        range=AT_LEAST_0,
        resume=ALWAYS,
    )
    max_query_length: int = option(
        "Maximum length of a question in tokens. Longer questions are cut (default: %(default)s).",
        64,
        range=AT_LEAST_1,
        resume=ALWAYS,
    )
    n_best_size: int = option(
        "Number of answers in the n-best file (default: %(default)s).",
        20,
        range=AT_LEAST_1,
        resume=WITH_BEST_WEIGHTS,
    )
    max_answer_length: int = option(
        "Maximum length of an answer in tokens (default: %(default)s).",
        30,
        range=AT_LEAST_1,
        resume=WITH_BEST_WEIGHTS,
    )
    max_length: int = override_option(384)

    @property
    def threshold(self) -> float | None:
        """The null odds above which a question has no answer. None for v1.1, where every question has one."""
        return self.null_score_diff_threshold if self.version_2_with_negative else None

    def check(self) -> None:
        """Check the settings, in addition to the checks of all tasks."""
        super().check()
        if self.train_file is not None and self.validation_file is None:
            raise ValueError("--train_file needs --validation_file. Set both.")
        if self.validation_file is not None and self.train_file is None and not self.only_evaluates:
            raise ValueError("--validation_file needs --train_file. To evaluate only, set --num_train_epochs 0.")
        check_metric(self.metric_for_best_model, ("loss", *METRIC_NAMES[self.version_2_with_negative]))
