"""Reads GLUE data, fine-tunes and evaluates models on GLUE tasks, and creates submission files."""

import io
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import Accelerator
from datasets import Dataset
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

from ...files import has_carriage_return_line_endings, is_blank, read_file
from ...glue_tasks import TASKS, GlueTask, format_prediction, get_task, parse_label
from ..classification.data import ClassificationSplit, make_in_memory_dataset
from ..classification.task import NO_TRAINING_ROWS, EvalSet, SequenceClassification, pearson, spearman
from ..engine.dataset_splits import load_dataset_splits
from ..engine.settings import check_metric_for_best_model
from . import GlueSettings

logger = logging.getLogger(__name__)
HUB_DATASET = "nyu-mll/glue"


def read_glue_tsv(path: str | Path, task: GlueTask, has_labels: bool = True) -> Dataset:
    """Read a GLUE TSV file. A header and a byte-order mark are optional, and quotes are literal characters.

    Args:
        path: The path of the file.
        task: The GLUE task.
        has_labels: Whether the file contains labels. Test files do not contain labels.

    Returns:
        A dataset with the columns `text1`, `text2` (only for pairs), `index` and, if `has_labels` is True, `label`
        (int, or float for STS-B).

    Raises:
        OSError: If the file does not exist.
        ValueError: If the file is empty, lacks a column, or contains an incomplete row, an invalid label, or bytes
            that are not UTF-8. The message names the file and the line.
    """
    path = Path(path)
    content = read_file(path).removeprefix(b"\xef\xbb\xbf")
    lines = content.splitlines() if has_carriage_return_line_endings(io.BytesIO(content)) else content.split(b"\n")
    # `str.splitlines` would also split the text at U+0085 and U+2028, which occur inside sentences.
    rows = [
        (number, _parse_tsv_line(path, number, line))
        for number, line in enumerate(lines, start=1)
        if line.rstrip(b"\r")
    ]
    header, rows = _split_header(path, rows, task, has_labels) if rows else ([], rows)
    if not rows:
        raise ValueError(f"{path} must contain at least one row, but is empty.")
    # `_split_header` has checked that all text columns exist.
    text_positions = [position for names in task.text_columns if (position := _find_column(header, names)) is not None]
    label_position = _find_column(header, task.label_columns) if has_labels else None
    index_position = None if has_labels else _find_column(header, ("index", "id"))
    names = ["index", *(f"text{i + 1}" for i in range(len(text_positions))), *(["label"] if has_labels else [])]
    columns: dict[str, list] = {name: [] for name in names}
    broken, empty = 0, []
    for position, (number, cells) in enumerate(rows):
        if len(cells) != len(header):
            if task.may_have_broken_rows:
                broken += 1
                continue
            raise ValueError(
                f"{path}, line {number}: The row must have {len(header)} columns ({', '.join(header)}), got "
                f"{len(cells)}."
            )
        for i, text_position in enumerate(text_positions):
            columns[f"text{i + 1}"].append(cells[text_position])
        if any(is_blank(cells[text_position]) for text_position in text_positions):
            empty.append(number)
        columns["index"].append(cells[index_position] if index_position is not None else str(position))
        if label_position is not None:
            try:
                columns["label"].append(parse_label(task, cells[label_position].strip()))
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
    _warn_about_rows(path, broken, empty, len(rows))
    return make_in_memory_dataset(columns)


def _warn_about_rows(path: Path, broken: int, empty: list[int], total: int) -> None:
    """Warn about rows that are skipped, and about rows (their line numbers) with empty cells."""
    if broken:
        logger.warning(f"{path}: {broken} of {total} rows are split by a line break. These rows are skipped.")
    if empty:
        logger.warning(
            f"{path}: {len(empty)} of {total} rows have an empty cell, which is read as empty text. The first one is "
            f"in line {empty[0]}."
        )


def _parse_tsv_line(path: Path, line_number: int, line: bytes) -> list[str]:
    """Split a line of the file into cells, and check that the line is valid UTF-8."""
    try:
        return line.decode("utf-8").rstrip("\r").split("\t")
    except UnicodeDecodeError as error:
        problem = f"{error.reason} at byte {error.start}"
        raise ValueError(
            f"{path}, line {line_number}: The line is not valid UTF-8 ({problem}). Convert the file."
        ) from None


def _find_column(header: list[str], names: tuple[str, ...]) -> int | None:
    """Return the position of a column in a header, ignoring case, or None if the header lacks the column.

    The column can have any of the given names. Earlier names take precedence.
    """
    lowered = [cell.strip().lower() for cell in header]
    return next((lowered.index(name.lower()) for name in names if name.lower() in lowered), None)


def _split_header(
    path: Path, rows: list[tuple[int, list[str]]], task: GlueTask, has_labels: bool
) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """Separate the header from the rows.

    If the file has no header, the task's default header for this number of columns is used.
    """
    first = rows[0][1]
    required = [*task.text_columns, *([task.label_columns] if has_labels else [])]
    missing = [names for names in required if _find_column(first, names) is None]
    if not missing:
        lowered = [cell.strip().lower() for cell in first]
        if repeated := [name for names in required for name in names if lowered.count(name.lower()) > 1]:
            raise ValueError(
                f"{path}, line 1: Column names must be distinct, got {repeated[0]!r} twice. Rename one of them."
            )
        return first, rows[1:]
    layouts = task.headerless_columns if has_labels else task.headerless_test_columns
    # A first row that contains some of the column names is an incomplete header instead of an example.
    if len(missing) == len(required) and len(first) in layouts:
        return list(layouts[len(first)]), rows
    if len(first) == 1 and "," in first[0]:
        raise ValueError(
            f"{path}, line 1: The columns of a GLUE file must be separated by tabs, got {first[0][:60]!r}. To train "
            "on a CSV file, use `attn-variants classify`."
        )
    expected = " and ".join("|".join(names) for names in missing)
    raise ValueError(
        f"{path}, line 1: There is no column {expected} in [{', '.join(cell[:30] for cell in first[:16])}]. Add the "
        f"column. The supported numbers of columns for {task.folder} files without a header are: "
        f"{', '.join(map(str, layouts)) or 'none'}."
    )


def _find_split_files(
    task: GlueTask, data_dir: str | None, files: dict[str, str | None], with_train: bool
) -> dict[str, Path]:
    """Find the file of each split from the folder and the file flags."""
    folder = Path(data_dir) if data_dir is not None else None
    names = {"train": "train.tsv", **task.eval_splits, **task.test_splits}
    paths = {split: folder / name for split, name in names.items() if folder is not None and (folder / name).is_file()}
    first_eval, first_test = next(iter(task.eval_splits)), next(iter(task.test_splits))
    for split, key in (("train", "train_file"), (first_eval, "validation_file"), (first_test, "test_file")):
        if file := files.get(key):
            paths[split] = Path(file)
    for split in (*(["train"] if with_train else []), first_eval):
        if split not in paths:
            path = folder / names[split] if folder is not None else names[split]
            raise OSError(f"The file {path} does not exist. Correct --data_dir or the file flags.")
    return {split: path for split, path in paths.items() if with_train or split != "train"}


def load_glue(
    task: GlueTask, data_dir: str | None = None, files: dict[str, str | None] | None = None, with_train: bool = True
) -> dict[str, ClassificationSplit]:
    """Read all splits of a task, from TSV files if a folder or a file is set, and from the Hub otherwise.

    The folder contains `train.tsv`, `dev.tsv` (MNLI: `dev_matched.tsv` and `dev_mismatched.tsv`) and test files. The
    test files and `dev_mismatched.tsv` are optional.

    Args:
        task: The GLUE task.
        data_dir: The folder that contains the files.
        files: The paths of `train_file`, `validation_file` and `test_file`, which override the files in the folder.
            Other keys are ignored.
        with_train: Whether to read the train split.

    Raises:
        OSError: If the train or dev file is missing, or if the Hub cannot be reached.
        ValueError: If a file has invalid content. See `read_glue_tsv`.
    """
    files = {name: (files or {}).get(name) for name in ("train_file", "validation_file", "test_file")}
    if data_dir is not None or any(files.values()):
        paths = _find_split_files(task, data_dir, files, with_train)
        is_labelled = {split: split not in task.test_splits for split in paths}
        rows = {split: read_glue_tsv(path, task, is_labelled[split]) for split, path in paths.items()}
        return {split: ClassificationSplit(split, data) for split, data in rows.items()}
    loaded = load_dataset_splits(HUB_DATASET, task.name, "Set --data_dir to a folder with the TSV files.")
    splits = [*(["train"] if with_train else []), *task.eval_splits, *task.test_splits]
    return {split: _convert_hub_split(task, split, loaded[split]) for split in splits if split in loaded}


def _convert_hub_split(task: GlueTask, split: str, data: Dataset) -> ClassificationSplit:
    """Convert a split from the Hub to a `ClassificationSplit`, which requires other column names."""
    for i, names in enumerate(task.text_columns):
        columns = [name for name in names if name in data.column_names]
        if not columns:
            raise ValueError(
                f"{HUB_DATASET}, {task.name}, {split}: There is no column {'|'.join(names)} in {data.column_names}. "
                "Set --data_dir to a folder with the TSV files."
            )
        data = data.rename_column(columns[0], f"text{i + 1}")
    if "idx" in data.column_names:
        data = data.rename_column("idx", "index")
    if split in task.test_splits and "label" in data.column_names:
        data = data.remove_columns("label")
    return ClassificationSplit(split, data)


def load_ax_diagnostics(data_dir: str | None = None) -> ClassificationSplit | None:
    """Read the diagnostic set AX from the MNLI folder, from a sibling folder, or from the Hub.

    Returns:
        The diagnostic set, or None if `data_dir` is set and the file does not exist.
    """
    task = TASKS["ax"]
    if data_dir is None:
        return _convert_hub_split(task, "test", load_dataset_splits(HUB_DATASET, "ax", split="test"))
    for folder in (Path(data_dir), Path(data_dir).parent / "AX", Path(data_dir).parent / "diagnostic"):
        for name in ("AX.tsv", "diagnostic.tsv"):
            if (folder / name).is_file():
                return ClassificationSplit("test", read_glue_tsv(folder / name, task, has_labels=False))
    return None


# Functions that compute metrics from the true values and the predictions. F1 is computed for class 1. If all
# predictions are the same, the Matthews correlation is 0, and the Pearson and Spearman correlations are NaN.
METRIC_FUNCTIONS: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "accuracy": accuracy_score,
    "f1": lambda references, predictions: f1_score(references, predictions, zero_division=0.0),
    "matthews_correlation": matthews_corrcoef,
    "pearson": pearson,
    "spearmanr": spearman,
}


def compute_glue_metrics(names: Sequence[str], predictions: np.ndarray, references: np.ndarray) -> dict[str, float]:
    """Compute GLUE metrics from class ids or scores [examples].

    Args:
        names: The names of the metrics.
        predictions: The predicted values [examples].
        references: The true values [examples].

    Returns:
        The values by metric name. If there are several metrics, `combined_score` is their mean, which is used in the
        GLUE ranking.

    Example:
        ```python
        compute_glue_metrics(["accuracy"], np.array([0, 1, 1]), np.array([0, 1, 0]))  # {"accuracy": 0.666...}
        ```
    """
    values = {name: float(METRIC_FUNCTIONS[name](references, predictions)) for name in names}
    if len(names) > 1:
        values["combined_score"] = float(np.mean([values[name] for name in names]))
    return values


class GlueFineTuning(SequenceClassification[GlueSettings]):
    """Fine-tuning on a GLUE task (arXiv 1804.07461), which is regression for STS-B and classification otherwise.

    The results contain `eval_<metric>` for each dev split. Metrics for MNLI's mismatched dev split have the suffix
    `_mm`.

    Example:
        ```python
        settings = GlueSettings(model_name_or_path="bert-gqa4", task_name="sst2", output_dir="out")
        results = fine_tune(GlueFineTuning, settings)
        ```
    """

    def __init__(self, settings: GlueSettings, accelerator: Accelerator):
        super().__init__(settings, accelerator)
        self.task = get_task(settings.task_name)
        self.labels = self.task.labels
        self.problem_type = "regression" if self.task.is_regression else "single_label_classification"
        self.configure_tokenizer(pair=len(self.task.text_columns) == 2)
        splits, self.test_splits = self._load_splits()
        self.train = splits["train"]
        self.dev_splits = [splits[name] for name in self.task.eval_splits if name in splits]
        self.name, self.main_metric = self.task.folder, self.task.main_metric
        self.dev_predictions: dict[str, np.ndarray] = {}
        metrics = self.task.metric_names
        suffixes = ("", "_mm")[: len(self.dev_splits)]
        known_metrics = [f"{name}{suffix}" for suffix in suffixes for name in ("loss", *metrics)]
        check_metric_for_best_model(settings.metric_for_best_model, known_metrics)
        self.shown_metrics = (*metrics, *(f"{name}_mm" for name in metrics))

    def _load_splits(self) -> tuple[dict[str, ClassificationSplit], list[tuple[GlueTask, ClassificationSplit]]]:
        """Read the train, dev and test splits before training, so that errors in any file are reported early."""
        settings, task = self.settings, self.task
        with_train = not settings.only_evaluates
        splits = load_glue(task, settings.data_dir, settings.values(), with_train=with_train)
        splits["train"] = splits["train"].take(settings.max_train_samples) if with_train else NO_TRAINING_ROWS
        for name in task.eval_splits.keys() & splits.keys():
            splits[name] = splits[name].take(settings.max_eval_samples)
        if settings.skip_predict:
            return splits, []
        test_splits = [(task, splits[name]) for name in task.test_splits if name in splits]
        has_files = any((settings.train_file, settings.validation_file, settings.test_file))
        if task.name == "mnli" and (settings.data_dir is not None or not has_files):
            ax = load_ax_diagnostics(settings.data_dir)
            test_splits += [(TASKS["ax"], ax)] if ax is not None else []
        return splits, test_splits

    def score(self, eval_set: EvalSet, logits: np.ndarray) -> dict[str, float]:
        predictions = self.dev_predictions[eval_set.split.name] = self._to_predictions(self.task, logits)
        return compute_glue_metrics(self.task.metrics, predictions, eval_set.labels)

    def _to_predictions(self, task: GlueTask, logits: np.ndarray) -> np.ndarray:
        """Convert logits to scores [rows] or to class ids of the task [rows]."""
        return logits[:, 0] if task.is_regression else np.asarray(self.label_map.to_task)[logits.argmax(-1)]

    def get_fingerprint(self) -> dict[str, Any]:
        return {"task_name": self.task.name, **super().get_fingerprint()}

    def get_results(self) -> dict[str, Any]:
        return {"task_name": self.task.name}

    def get_prediction_files(self) -> dict[str, str]:
        return dict(
            _format_submission(self.task, split, self.dev_predictions[split.name], "dev_") for split in self.dev_splits
        )

    def predict(self) -> tuple[dict[str, Any], dict[str, str]]:
        files: dict[str, str] = {}
        for task, split in self.test_splits:
            logits = self.predict_logits(self.make_eval_set(split))
            files |= [_format_submission(task, split, self._to_predictions(task, logits))]
        return {}, files


def _format_submission(
    task: GlueTask, split: ClassificationSplit, predictions: Any, prefix: str = ""
) -> tuple[str, str]:
    """Return the name and content of a submission file with a header and one `index<TAB>prediction` line per row."""
    rows = zip(split.data["index"], predictions, strict=True)
    lines = ["index\tprediction", *(f"{index}\t{format_prediction(task, value)}" for index, value in rows)]
    return f"{prefix}{task.get_submission_file(split.name)}", "\n".join(lines) + "\n"
