"""The settings of training on text to text."""

import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ...glue_tasks import TASKS
from ..engine.options import ALWAYS, AT_LEAST_1, FROM_0_BELOW_1, WITH_BEST_WEIGHTS, Settings, option, redefault
from ..engine.settings import EncoderDecoderVariantSettings, FineTuningSettings, LanguageSettings, NewModelSettings

__all__ = [
    "COLUMNS",
    "METRIC_PACKAGES",
    "SPLITS",
    "SQUAD",
    "TEXT_TASKS",
    "BleuSettings",
    "DecodingSettings",
    "Seq2SeqSettings",
    "check_text_metrics",
]

SQUAD = "squad"
TEXT_TASKS = (*(name for name, task in TASKS.items() if task.eval_splits), SQUAD)
# Each metric of texts, with the package that computes it.
METRIC_PACKAGES: dict[str, str | None] = {
    "bleu": "sacrebleu",
    "chrf": "sacrebleu",
    "rouge": "rouge_score",
    "accuracy": None,
}
# Of `evaluate`: a script's path however it is written, and a repository of the Hub.
LOCAL_METRIC = re.compile(r"[./~]|.*\.py$")
HUB_METRIC = re.compile(r"[\w.-]+/[\w.-]+")
BLEU_TOKENIZERS = ("none", "13a", "intl", "zh", "char", "ja-mecab", "ko-mecab", "flores101", "flores200")
SPLITS = ("train", "validation", "test")
# What the flags of a split's parallel text begin with.
PREFIXES = {"train": "", "validation": "validation_", "test": "test_"}
# The columns that are read where none are given.
COLUMNS = {"source_column": "source", "target_column": "target"}


def check_text_metrics(names: Sequence[str], trust_remote_code: bool = False) -> None:
    """Check that the metrics exist and that what computes them is installed.

    Args:
        names: of `METRIC_PACKAGES`, or `evaluate` metrics: a script's path, or a repository of the Hub.
        trust_remote_code: whether the code of a repository may be run.

    Raises:
        ValueError: if one does not, is not, or may not be run.
    """
    for name in names:
        if name in METRIC_PACKAGES:
            package = METRIC_PACKAGES[name]
            if package is not None and importlib.util.find_spec(package) is None:
                raise ValueError(f"--metrics {name} needs {package}: `pip install {package.replace('_', '-')}`")
        elif (script := Path(name).expanduser()).exists() or LOCAL_METRIC.match(name):
            if not script.exists():
                raise ValueError(f"--metrics {name}: there is no such file or folder")
        elif not HUB_METRIC.fullmatch(name):
            raise ValueError(
                f"unknown metric {name!r}: choose from {', '.join(METRIC_PACKAGES)}, or name an `evaluate` metric by "
                "its script (./my_metric.py) or its repository on the Hub (evaluate-metric/meteor)"
            )
        elif not trust_remote_code:
            raise ValueError(f"--metrics {name} runs code of the Hub: look at it, then add --trust_remote_code")


def _side(split: str, side: str, resume: str | None = None, more: str = "") -> str | None:
    return option(f"The {side} side of the {split} text, a row a line (.txt, .gz){more}.", None, resume=resume)


def _table(split: str, resume: str | None = None) -> tuple[str, ...] | None:
    shown = f"{split} tables instead (.csv, .tsv, .json, .jsonl; with --task_name its own format)."
    return option(shown, None, resume=resume)


@dataclass(frozen=True, kw_only=True)
class BleuSettings(Settings):
    """How BLEU divides texts into words."""

    title: ClassVar[str] = "decoding"

    tokenize: str | None = option(
        "sacrebleu's tokenizer for BLEU (default: zh for Chinese, ja-mecab or char for Japanese, char for Thai, "
        "else 13a).",
        None,
        choices=BLEU_TOKENIZERS,
    )


@dataclass(frozen=True, kw_only=True)
class DecodingSettings(BleuSettings):
    """How texts are generated and scored."""

    title: ClassVar[str] = "decoding"

    num_beams: tuple[int, ...] = option(
        "Beams (default: 1, greedy). With several numbers the last evaluation decodes with each; others with the "
        "first.",
        (1,),
    )
    length_penalty: float = option("Beam search's; more favours longer texts.", 1.0, resume=WITH_BEST_WEIGHTS)
    no_repeat_ngram_size: int | None = option(
        "No N tokens twice in a text (summaries).", None, range=AT_LEAST_1, resume=WITH_BEST_WEIGHTS
    )
    metrics: tuple[str, ...] | None = option(
        f"Of {', '.join(METRIC_PACKAGES)}; or an `evaluate` metric by its script (./my_metric.py) or its repository "
        "on the Hub (evaluate-metric/meteor) (default: bleu; with --task_name the task's own).",
        None,
        metavar="NAME",
    )
    eval_loss_only: bool = option("Decode only at the end; evaluate the loss while training.", False)
    skip_predict: bool = option("Do not predict the test split.", False)

    def check(self) -> None:
        super().check()
        if min(self.num_beams) < 1 or len(set(self.num_beams)) < len(self.num_beams):
            raise ValueError(f"--num_beams must be different numbers of at least 1, got {list(self.num_beams)}")


@dataclass(frozen=True, kw_only=True)
class Seq2SeqSettings(
    DecodingSettings, LanguageSettings, NewModelSettings, FineTuningSettings, EncoderDecoderVariantSettings
):
    """Which texts. `max_target_length` and `metrics`, where not given, become what they are by default."""

    title: ClassVar[str] = "text"

    source_file: str | None = _side("training", "source")
    target_file: str | None = _side("training", "target")
    validation_source_file: str | None = _side("dev", "source", WITH_BEST_WEIGHTS)
    validation_target_file: str | None = _side("dev", "target", WITH_BEST_WEIGHTS)
    test_source_file: str | None = _side("test", "source")
    test_target_file: str | None = _side("test", "target", more="; without it the split is only predicted")
    train_file: tuple[str, ...] | None = _table("Train")
    validation_file: tuple[str, ...] | None = _table("Validation", WITH_BEST_WEIGHTS)
    test_file: tuple[str, ...] | None = _table("Test")
    source_column: str | None = option(
        "A table's source (default: source; of a run that only evaluates the model's own).",
        None,
        resume=WITH_BEST_WEIGHTS,
    )
    target_column: str | None = option("A table's target (default: target, likewise).", None, resume=WITH_BEST_WEIGHTS)
    dataset_name: str | None = option("Folder or Hub id of a `datasets` source instead of files.", None)
    dataset_config_name: str | None = option("Its configuration.", None)
    task_name: str | None = option(
        f"A task that is worded as text: {', '.join(TEXT_TASKS)}; without files: from the Hub.", None
    )
    data_dir: str | None = option("Folder with the TSVs of a GLUE --task_name.", None)
    source_prefix: str | None = option(
        "Text put before each source ('summarize: '; default: none, likewise). '' puts none.", None
    )
    max_target_length: int | None = option(
        "Tokens of a target (default: --max_length).", None, range=AT_LEAST_1, resume=ALWAYS
    )
    label_smoothing_factor: float = option(
        "Share of a label that is spread over all tokens.", 0.0, range=FROM_0_BELOW_1, resume=ALWAYS
    )
    model_type: str | None = redefault(choices=("t5", "bart", "marian"))
    learning_rate: float = redefault(3e-4)

    def __post_init__(self) -> None:
        if self.max_target_length is None:
            object.__setattr__(self, "max_target_length", self.max_length)
        given = self.metrics
        if given is None and self.task_name is None:
            object.__setattr__(self, "metrics", ("bleu",))
        super().__post_init__()
        if given is not None and self.task_name is not None:
            raise ValueError(f"--metrics: --task_name {self.task_name} has its own")
        check_text_metrics(self.metrics or (), self.trust_remote_code)

    def resume_values(self, with_best_weights: bool) -> dict[str, Any]:
        """Return, as JSON holds them, the settings that a resumed run must share."""
        # The checkpoints of earlier versions name the columns that are read where none are given.
        values = super().resume_values(with_best_weights)
        return values | {name: COLUMNS[name] for name in COLUMNS.keys() & values if values[name] is None}

    def check(self) -> None:
        super().check()
        has_parallel = {s: getattr(self, f"{prefix}source_file") is not None for s, prefix in PREFIXES.items()}
        has_table = {split: getattr(self, f"{split}_file") is not None for split in SPLITS}
        for split, prefix in PREFIXES.items():
            has_target = getattr(self, f"{prefix}target_file") is not None
            if has_target != has_parallel[split] and not (split == "test" and has_parallel[split]):
                raise ValueError(f"--{prefix}source_file and --{prefix}target_file belong together: give both")
            if has_parallel[split] and has_table[split]:
                raise ValueError(f"give --{prefix}source_file or --{split}_file, not both")
        kinds = {
            "parallel text (--source_file, ...) or tables (--train_file, ...)": any(has_parallel.values())
            or (any(has_table.values()) and self.task_name is None),
            "--dataset_name": self.dataset_name is not None,
            "--task_name": self.task_name is not None,
        }
        given = [kind for kind, there in kinds.items() if there]
        if len(given) != 1:
            got = f"; got {' and '.join(given)}" if given else ""
            raise ValueError(f"give one source of text: {'; or '.join(kinds)}{got}")
        if self.data_dir is not None and self.task_name is None:
            raise ValueError("--data_dir needs --task_name")
        if self.dataset_name is not None or self.task_name is not None:
            return
        if not self.only_evaluates and not (has_parallel["train"] or has_table["train"]):
            raise ValueError(
                "training needs --source_file and --target_file, or --train_file (or --num_train_epochs 0)"
            )
        if self.only_evaluates and not any(has[split] for has in (has_parallel, has_table) for split in SPLITS[1:]):
            raise ValueError("--num_train_epochs 0 only evaluates: give --validation_source_file or --validation_file")
