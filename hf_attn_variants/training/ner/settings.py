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
    test_file: str | None = option("Sentences to tag; if each word has a tag, they are scored.", None)
    dataset_name: str | None = option("Folder or Hub id of a `datasets` source instead of files.", None)
    dataset_config_name: str | None = option("Its configuration.", None)

    def check(self) -> None:
        super().check()
        files = [self.train_file, self.validation_file, self.test_file]
        whole = self.validation_file is not None and (self.train_file is not None or self.only_evaluates)
        if whole == (self.dataset_name is not None) or (self.dataset_name is not None and any(files)):
            raise ValueError("give --train_file and --validation_file (and --test_file), or --dataset_name")
        if self.dataset_config_name is not None and self.dataset_name is None:
            raise ValueError("--dataset_config_name needs --dataset_name")
        if importlib.util.find_spec("seqeval") is None:
            raise ValueError("entities are scored by seqeval: `pip install seqeval`")
        check_metric(self.metric_for_best_model, ("loss", *METRICS))
