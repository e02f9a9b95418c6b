"""Fine-tune and evaluate a model on questions with choices; `--help` lists the flags."""

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from attn_variants import run
from hf_attn_variants.commands.arguments import parse_settings
from hf_attn_variants.commands.training import train_and_push
from hf_attn_variants.training.engine.options import ALWAYS, WITH_BEST_WEIGHTS, check_metric, option, redefault
from hf_attn_variants.training.engine.table_settings import TableSettings

DESCRIPTION = "Fine-tune and evaluate a model on questions with choices: RACE, SWAG, or your own tables."
EPILOG = "README.md beside this script has examples."
FORMATS = ("letter", "from_0", "from_1", "text")


@dataclass(frozen=True, kw_only=True)
class MultipleChoiceSettings(TableSettings):
    """The tables and the meaning of their columns."""

    title: ClassVar[str] = "task"

    context_column: str | None = option("Column of the context.", None, resume=WITH_BEST_WEIGHTS)
    question_column: str | None = option("Column of the question.", None, resume=WITH_BEST_WEIGHTS)
    choices_columns: tuple[str, ...] | None = option(
        "One column per choice, or one column with a list.", None, metavar="NAME", resume=WITH_BEST_WEIGHTS
    )
    answer_column: str | None = option("Column of the right choice.", None, resume=WITH_BEST_WEIGHTS)
    answer_format: str | None = option(
        "How the answer names a choice (default: the only format that fits).", None, choices=FORMATS, resume=ALWAYS
    )
    per_device_train_batch_size: int = redefault(
        TableSettings, "per_device_train_batch_size", 8, help="Questions per device and forward pass."
    )
    per_device_eval_batch_size: int = redefault(TableSettings, "per_device_eval_batch_size", 16)

    def check(self) -> None:
        super().check()
        check_metric(self.metric_for_best_model, ("loss", "accuracy"))


def parse_args(argv: Sequence[str] | None = None) -> MultipleChoiceSettings:
    """Read the command line, or `argv`."""
    script = "examples/multiple_choice/run_multiple_choice.py"
    return parse_settings(MultipleChoiceSettings, argv, script, DESCRIPTION, EPILOG)


def main(settings: MultipleChoiceSettings) -> dict[str, Any]:
    """Train, evaluate and predict; return the results."""
    from choice_task import MultipleChoiceFineTuning

    from hf_attn_variants.training import fine_tune

    return train_and_push(settings, lambda: fine_tune(MultipleChoiceFineTuning, settings))


if __name__ == "__main__":
    logging.basicConfig(format="%(levelname)s: %(message)s")
    logging.getLogger("hf_attn_variants").setLevel(logging.INFO)
    sys.exit(run(sys.modules[__name__]))
