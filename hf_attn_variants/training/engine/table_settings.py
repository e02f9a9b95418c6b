"""The settings of every task on a user's own tables: which files, or which `datasets` source and its splits."""

from dataclasses import dataclass
from typing import ClassVar

from .options import WITH_BEST_WEIGHTS, option
from .settings import FineTuningSettings

__all__ = ["TableSettings"]

NEEDS_DEV = ("metric_for_best_model", "early_stopping_patience", "eval_steps")


@dataclass(frozen=True, kw_only=True)
class TableSettings(FineTuningSettings):
    """Which tables."""

    title: ClassVar[str] = "tables"

    train_file: tuple[str, ...] | None = option("Training tables: .csv, .tsv, .json, .jsonl, each also .gz.", None)
    validation_file: tuple[str, ...] | None = option("Dev tables, likewise.", None, resume=WITH_BEST_WEIGHTS)
    test_file: tuple[str, ...] | None = option("Tables to predict, with or without labels.", None)
    dataset_name: str | None = option("Folder or Hub id of a `datasets` source instead of files.", None)
    dataset_config_name: str | None = option("Its configuration.", None)
    train_split_name: str = option("Its training split (default: %(default)s).", "train")
    validation_split_name: str | None = option(
        "Its dev split (default: validation, where there is one).", None, resume=WITH_BEST_WEIGHTS
    )
    test_split_name: str | None = option("Its test split (default: test, where there is one).", None)
    skip_predict: bool = option("Do not predict the test rows.", False)

    def check(self) -> None:
        super().check()
        files = {split: getattr(self, f"{split}_file") for split in ("train", "validation", "test")}
        if any(files.values()) == (self.dataset_name is not None):
            got = "; got both" if self.dataset_name is not None else ""
            raise ValueError(f"give --train_file (and --validation_file, --test_file), or --dataset_name{got}")
        if self.dataset_name is not None:
            return
        if self.dataset_config_name is not None:
            raise ValueError("--dataset_config_name needs --dataset_name")
        for split, default in (("train", "train"), ("validation", None), ("test", None)):
            if getattr(self, f"{split}_split_name") != default:
                raise ValueError(f"--{split}_split_name needs --dataset_name; of files give --{split}_file")
        if not self.only_evaluates and not files["train"]:
            raise ValueError("training needs --train_file (or --num_train_epochs 0, to evaluate or predict only)")
        if self.only_evaluates and not (files["validation"] or files["test"]):
            raise ValueError("--num_train_epochs 0 only evaluates: give --validation_file or --test_file")
        self.check_dev(bool(files["validation"]))

    def check_dev(self, is_there: bool) -> None:
        """Raise ValueError where a setting asks for dev rows that are not there."""
        for name in NEEDS_DEV if not is_there else ():
            if getattr(self, name) is not None:
                raise ValueError(f"--{name} needs dev rows: --validation_file, or a dev split of --dataset_name")
