"""Settings for fine-tuning on SQuAD."""

from dataclasses import dataclass
from typing import ClassVar

from ..engine.settings import (
    AT_LEAST_0,
    AT_LEAST_1,
    FINITE_NUMBER,
    FineTuningSettings,
    check_metric_for_best_model,
    dev_option,
    fixed_option,
    option,
    override_option,
)

# The metrics for v1.1 (False) and v2.0 (True) that can select the best weights.
METRIC_NAMES: dict[bool, tuple[str, ...]] = {
    False: ("exact_match", "f1"),
    True: ("exact", "f1", "HasAns_exact", "HasAns_f1", "NoAns_exact", "NoAns_f1", "best_exact", "best_f1"),
}


@dataclass(frozen=True, kw_only=True)
class SquadSettings(FineTuningSettings):
    """Settings for fine-tuning on SQuAD, such as the questions, the windows of long contexts, and the answers.

    Example:
        ```python
        settings = SquadSettings(model_name_or_path="bert-gqa4", output_dir="out")
        results = fine_tune(SquadFineTuning, settings)
        ```
    """

    title: ClassVar[str] = "task"

    train_file: str | None = option(
        "File with training questions in the SQuAD JSON format, plain text or .gz (default: load them from the Hub).",
        None,
    )
    validation_file: str | None = dev_option("File with dev questions in the same format.", None)
    test_file: str | None = option("File with questions to answer. Answers in the file are ignored.", None)
    version_2_with_negative: bool = fixed_option("Use SQuAD v2.0, in which some questions have no answer.", False)
    null_score_diff_threshold: float = dev_option(
        "For v2.0, predict no answer if its score exceeds the best answer's score by more than this value (default: "
        "%(default)s).",
        0.0,
        range=FINITE_NUMBER,
    )
    doc_stride: int | None = fixed_option(
        "Number of tokens shared by neighboring windows of a context (default: 128, or half of a window's context "
        "tokens if there are at most 128).",
        None,
        range=AT_LEAST_0,
    )
    max_query_length: int = fixed_option(
        "Maximum length of a question in tokens. Longer questions are truncated (default: %(default)s).",
        64,
        range=AT_LEAST_1,
    )
    n_best_size: int = dev_option("Number of answers in the n-best file (default: %(default)s).", 20, range=AT_LEAST_1)
    max_answer_length: int = dev_option(
        "Maximum length of an answer in tokens (default: %(default)s).", 30, range=AT_LEAST_1
    )
    max_length: int = override_option(384)

    @property
    def threshold(self) -> float | None:
        """The null odds above which "no answer" is predicted. None for v1.1, in which all questions have an answer."""
        return self.null_score_diff_threshold if self.version_2_with_negative else None

    def check(self) -> None:
        """Check the settings, including those that are specific to this task."""
        super().check()
        if self.train_file is not None and self.validation_file is None:
            raise ValueError("--train_file requires --validation_file. Set both.")
        if self.validation_file is not None and self.train_file is None and not self.only_evaluates:
            raise ValueError("--validation_file requires --train_file. To only evaluate, set --num_train_epochs 0.")
        check_metric_for_best_model(self.metric_for_best_model, ("loss", *METRIC_NAMES[self.version_2_with_negative]))
