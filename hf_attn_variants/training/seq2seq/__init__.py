"""Settings for fine-tuning on text-to-text tasks."""

import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ...glue_tasks import TASKS
from ..engine.settings import (
    AT_LEAST_1,
    FROM_0_BELOW_1,
    SPLITS,
    EncoderDecoderVariantSettings,
    FineTuningSettings,
    LanguageSettings,
    NewModelSettings,
    Settings,
    dev_option,
    fixed_option,
    option,
    override_option,
)

SQUAD = "squad"
TEXT_TASKS = (*(name for name, task in TASKS.items() if task.eval_splits), SQUAD)
# The built-in text metrics, and the packages that compute them.
METRIC_PACKAGES: dict[str, str | None] = {
    "bleu": "sacrebleu",
    "chrf": "sacrebleu",
    "rouge": "rouge_score",
    "accuracy": None,
}
# The name of an `evaluate` metric in a Hub repository.
HUB_METRIC = re.compile(r"\w[\w.-]*/[\w.-]+(?<!\.py)")
BLEU_TOKENIZERS = ("none", "13a", "intl", "zh", "char", "ja-mecab", "ko-mecab", "flores101", "flores200")
# The prefixes of the parallel-text flags for each split.
FLAG_PREFIXES = ("", "validation_", "test_")
# The default column names.
DEFAULT_COLUMNS = {"source_column": "source", "target_column": "target"}


def check_text_metrics(names: Sequence[str], trust_remote_code: bool = False) -> None:
    """Check that metrics exist and that their packages are installed.

    Args:
        names: The metrics, which are names in `METRIC_PACKAGES`, or paths to scripts or Hub repositories of `evaluate`
            metrics.
        trust_remote_code: Whether to allow code from a Hub repository to run.

    Raises:
        ValueError: If a metric does not exist, if it requires a package that is not installed, or if it is in a Hub
            repository although `trust_remote_code` is False.
    """
    for name in names:
        if name in METRIC_PACKAGES:
            package = METRIC_PACKAGES[name]
            if package is not None and importlib.util.find_spec(package) is None:
                raise ValueError(
                    f"--metrics {name} requires {package}. Run `pip install {package.replace('_', '-')}`."
                )
        elif Path(name).expanduser().exists():
            continue
        elif not HUB_METRIC.fullmatch(name):
            raise ValueError(
                f"--metrics must be one of {', '.join(METRIC_PACKAGES)} or an `evaluate` metric, got {name!r}. "
                "Specify an `evaluate` metric by its script (./my_metric.py) or its repository "
                "(evaluate-metric/meteor)."
            )
        elif not trust_remote_code:
            raise ValueError(
                f"--metrics {name} runs code from the Hub. Inspect the code, and set --trust_remote_code to allow it."
            )


def _make_parallel_text_option(split: str, side: str, extra_help: str = "") -> str | None:
    """Create the option for one side of a split's parallel text."""
    make_option = dev_option if split == "dev" else option
    return make_option(f"File with the {side} texts of the {split} split, one per line (.txt, .gz){extra_help}.", None)


def _make_table_option(split: str) -> tuple[str, ...] | None:
    """Create the option for the tables of a split."""
    make_option = dev_option if split == "Validation" else option
    return make_option(
        f"{split} tables instead of text files (.csv, .tsv, .json, .jsonl; with --task_name, the task's own format).",
        None,
    )


@dataclass(frozen=True, kw_only=True)
class BleuSettings(Settings):
    """Settings for the BLEU tokenizer."""

    title: ClassVar[str] = "decoding"

    tokenize: str | None = option(
        "SacreBLEU tokenizer for BLEU (default: zh for Chinese, ja-mecab or char for Japanese, char for Thai, and "
        "otherwise 13a).",
        None,
        choices=BLEU_TOKENIZERS,
    )


@dataclass(frozen=True, kw_only=True)
class DecodingSettings(BleuSettings):
    """Settings for generating texts and computing metrics for them."""

    title: ClassVar[str] = "decoding"

    num_beams: tuple[int, ...] = option(
        "Number of beams (default: 1, greedy search). If there are several numbers, the last evaluation uses each of "
        "them, and all other evaluations use the first one.",
        (1,),
    )
    length_penalty: float = dev_option("Length penalty for beam search. Higher values favor longer texts.", 1.0)
    no_repeat_ngram_size: int | None = dev_option(
        "Prevent sequences of N tokens from occurring twice in a text (for summaries).", None, range=AT_LEAST_1
    )
    metrics: tuple[str, ...] | None = option(
        f"Metrics to compute: {', '.join(METRIC_PACKAGES)}, or `evaluate` metrics by script (./my_metric.py) or by "
        "Hub repository (evaluate-metric/meteor). Defaults to bleu or, with --task_name, to the task's own metrics.",
        None,
        metavar="NAME",
    )
    eval_loss_only: bool = option(
        "Compute only the loss in evaluations during training, and generate texts only at the end.", False
    )
    skip_predict: bool = option("Skip the predictions for the test split.", False)

    def check(self) -> None:
        """Check the settings, including `num_beams`."""
        super().check()
        if min(self.num_beams) < 1 or len(set(self.num_beams)) < len(self.num_beams):
            raise ValueError(f"--num_beams must be distinct numbers of at least 1, got {list(self.num_beams)}.")


@dataclass(frozen=True, kw_only=True)
class Seq2SeqSettings(
    DecodingSettings, LanguageSettings, NewModelSettings, FineTuningSettings, EncoderDecoderVariantSettings
):
    """Settings for fine-tuning on text-to-text tasks, such as the texts and the task.

    By default, `max_target_length` equals `max_length`, and `metrics` contains BLEU unless `task_name` is set.

    Example:
        ```python
        settings = Seq2SeqSettings(
            model_name_or_path="t5-gqa4", train_file=("train.csv",), validation_file=("dev.csv",), output_dir="out"
        )
        results = fine_tune(Seq2SeqFineTuning, settings)
        ```
    """

    title: ClassVar[str] = "text"

    source_file: str | None = _make_parallel_text_option("training", "source")
    target_file: str | None = _make_parallel_text_option("training", "target")
    validation_source_file: str | None = _make_parallel_text_option("dev", "source")
    validation_target_file: str | None = _make_parallel_text_option("dev", "target")
    test_source_file: str | None = _make_parallel_text_option("test", "source")
    test_target_file: str | None = _make_parallel_text_option(
        "test", "target", extra_help="; if not set, the split is predicted without scores"
    )
    train_file: tuple[str, ...] | None = _make_table_option("Train")
    validation_file: tuple[str, ...] | None = _make_table_option("Validation")
    test_file: tuple[str, ...] | None = _make_table_option("Test")
    source_column: str | None = dev_option(
        "Column that contains the source texts (default: source, or the column used in training if the model is "
        "only evaluated).",
        None,
    )
    target_column: str | None = dev_option(
        "Column that contains the target texts (default: target; if the model is only evaluated, its training "
        "column).",
        None,
    )
    dataset_name: str | None = option("Folder or Hub id of a `datasets` source to use instead of files.", None)
    dataset_config_name: str | None = option("Configuration of the `datasets` source.", None)
    task_name: str | None = option(
        f"Task to format as text ({', '.join(TEXT_TASKS)}). It is loaded from the Hub if no files are given.", None
    )
    data_dir: str | None = option("Folder with the TSV files of a GLUE task (with --task_name).", None)
    source_prefix: str | None = option(
        "Text to prepend to each source, such as 'summarize: ' (default: none; if the model is only evaluated, its "
        "training prefix). '' disables it.",
        None,
    )
    max_target_length: int | None = fixed_option(
        "Maximum length of a target in tokens (default: --max_length).", None, range=AT_LEAST_1
    )
    label_smoothing_factor: float = fixed_option(
        "Share of each label's weight that is distributed over all tokens.", 0.0, range=FROM_0_BELOW_1
    )
    model_type: str | None = override_option(choices=("t5", "bart", "marian"))
    learning_rate: float = override_option(3e-4)

    def __post_init__(self) -> None:
        """Set the defaults of `max_target_length` and `metrics`, and check the settings."""
        if self.max_target_length is None:
            object.__setattr__(self, "max_target_length", self.max_length)
        if self.metrics is None and self.task_name is None:
            object.__setattr__(self, "metrics", ("bleu",))
        super().__post_init__()
        check_text_metrics(self.metrics or (), self.trust_remote_code)

    def check(self) -> None:
        """Check that the settings are valid, and that there is exactly one source of text."""
        super().check()
        has_parallel = any(getattr(self, f"{prefix}source_file") for prefix in FLAG_PREFIXES)
        has_tables = self.task_name is None and any(getattr(self, f"{split}_file") for split in SPLITS)
        for prefix in FLAG_PREFIXES[:2]:
            if (getattr(self, f"{prefix}source_file") is None) != (getattr(self, f"{prefix}target_file") is None):
                raise ValueError(f"--{prefix}source_file and --{prefix}target_file must be set together. Set both.")
        kinds = {
            "parallel text (--source_file, ...) or tables (--train_file, ...)": has_parallel or has_tables,
            "--dataset_name": self.dataset_name is not None,
            "--task_name": self.task_name is not None,
        }
        used = [kind for kind, is_used in kinds.items() if is_used]
        if len(used) != 1:
            invalid_value = " and ".join(used) if used else "none"
            raise ValueError(f"Set exactly one source of text ({'; or '.join(kinds)}), got {invalid_value}.")
