"""Settings for multiple choice, from which the flags are generated."""

from dataclasses import dataclass
from typing import ClassVar

from hf_attn_variants.training.engine.settings import (
    ALWAYS_COMPARED,
    AT_LEAST_1,
    WITH_BEST_WEIGHTS,
    TableSettings,
    check_metric_for_best_model,
    option,
)

ANSWER_FORMATS = ("letter", "from_0", "from_1", "text")


@dataclass(frozen=True, kw_only=True)
class MultipleChoiceSettings(TableSettings):
    """Settings for the tables and the columns they contain."""

    title: ClassVar[str] = "task"

    context_column: str | None = option("Column with the context.", None, resume=WITH_BEST_WEIGHTS)
    question_column: str | None = option("Column with the question.", None, resume=WITH_BEST_WEIGHTS)
    choices_columns: tuple[str, ...] | None = option("Columns with the choices.", None, resume=WITH_BEST_WEIGHTS)
    answer_column: str | None = option("Column with the correct choice.", None, resume=WITH_BEST_WEIGHTS)
    answer_format: str | None = option("Format of the answers.", None, choices=ANSWER_FORMATS, resume=ALWAYS_COMPARED)
    per_device_train_batch_size: int = option(
        "Number of questions per device in a training batch.", 8, range=AT_LEAST_1, resume=ALWAYS_COMPARED
    )
    per_device_eval_batch_size: int = option(
        "Number of questions per device in an evaluation batch.", 16, range=AT_LEAST_1
    )

    def check(self) -> None:
        """Check the settings, in addition to the checks for all tasks with tables."""
        super().check()
        check_metric_for_best_model(self.metric_for_best_model, ("loss", "accuracy"))
