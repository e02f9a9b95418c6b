"""The settings of fine-tuning on token classification."""

import importlib.util
from dataclasses import dataclass
from typing import ClassVar

from ..engine.options import WITH_BEST_WEIGHTS, check_metric, option
from ..engine.settings import FineTuningSettings

__all__ = ["METRICS", "NerSettings"]

METRICS = ("precision", "recall", "f1", "accuracy")


@dataclass(frozen=True, kw_only=True)
class NerSettings(FineTuningSettings):
    """Which tagged sentences."""

    title: ClassVar[str] = "task"

    train_file: str | None = option("Training sentences in CoNLL's format, plain or .gz; see below.", None)
    validation_file: str | None = option("Dev sentences, likewise.", None, resume=WITH_BEST_WEIGHTS)
    test_file: str | None = option("Sentences to tag, with or without tags.", None)
    dataset_name: str | None = option("Folder or Hub id of a `datasets` source instead of files.", None)
    dataset_config_name: str | None = option("Its configuration.", None)

    def check(self) -> None:
        super().check()
        has_files = self.validation_file is not None and (self.train_file is not None or self.only_evaluates)
        if has_files == (self.dataset_name is not None):
            raise ValueError("give --train_file and --validation_file, or --dataset_name")
        if importlib.util.find_spec("seqeval") is None:
            raise ValueError("entities are scored by seqeval: `pip install seqeval`")
        check_metric(self.metric_for_best_model, ("loss", *METRICS))
