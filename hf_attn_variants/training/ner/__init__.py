"""Settings for fine-tuning on token classification, such as named entity recognition."""

import importlib.util
from dataclasses import dataclass
from typing import ClassVar

from ..engine.settings import FineTuningSettings, check_metric_for_best_model, dev_option, option

ENTITY_METRICS = ("precision", "recall", "f1", "accuracy")


@dataclass(frozen=True, kw_only=True)
class NerSettings(FineTuningSettings):
    """Settings for fine-tuning on token classification, such as the files with tagged sentences.

    Example:
        ```python
        settings = NerSettings(
            model_name_or_path="bert-gqa4", train_file="train.txt", validation_file="dev.txt", output_dir="out"
        )
        results = fine_tune(NerFineTuning, settings)
        ```
    """

    title: ClassVar[str] = "task"

    train_file: str | None = option(
        "File with training sentences in the CoNLL format (plain text or .gz) as described below.", None
    )
    validation_file: str | None = dev_option("File with dev sentences in the same format.", None)
    test_file: str | None = option(
        "File with sentences to tag. If every word has a tag, the model's tags are scored.", None
    )
    dataset_name: str | None = option("Folder or Hub id of a `datasets` source to use instead of files.", None)
    dataset_config_name: str | None = option("Configuration of the `datasets` source.", None)

    def check(self) -> None:
        """Check the settings, including those that are specific to this task."""
        super().check()
        files = [self.train_file, self.validation_file, self.test_file]
        has_files = self.validation_file is not None and (self.train_file is not None or self.only_evaluates)
        if has_files == (self.dataset_name is not None) or (self.dataset_name is not None and any(files)):
            raise ValueError("Set either --train_file and --validation_file, or --dataset_name.")
        if importlib.util.find_spec("seqeval") is None:
            raise ValueError("Entity scores require the seqeval package. Run `pip install seqeval`.")
        check_metric_for_best_model(self.metric_for_best_model, ("loss", *ENTITY_METRICS))
