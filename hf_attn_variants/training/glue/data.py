"""Reads GLUE from a folder of TSVs or from the Hub."""

import io
import logging
from pathlib import Path

from datasets import Dataset, load_dataset

from ...glue_tasks import TASKS, GlueTask, parse_label
from ...open_files import read_file
from ...text_lines import ends_by_returns, is_blank
from ..classification.data import ClassificationSplit, make_rows

__all__ = ["load_ax", "load_glue", "read_tsv"]

logger = logging.getLogger(__name__)
HUB_DATASET = "nyu-mll/glue"


def read_tsv(path: str | Path, task: GlueTask, has_labels: bool = True) -> Dataset:
    """Read one GLUE TSV: with a header or without, with a byte-order mark or without, quotes taken literally.

    Return the columns `text1`, `text2` (pairs only), `index` and, unless `has_labels` is false as for a test file,
    `label` (int, or float for STS-B).

    Raises:
        OSError: if the file is not there.
        ValueError: if it is empty, lacks a column, holds a cut row, a label out of range or bytes that are no UTF-8;
            the message names the file and the line.
    """
    path = Path(path)
    if not path.is_file():
        raise OSError(f"{path}: no such file")
    content = read_file(path).removeprefix(b"\xef\xbb\xbf")
    lines = content.splitlines() if ends_by_returns(io.BytesIO(content)) else content.split(b"\n")
    # str.splitlines would also split at U+0085 and U+2028, which occur inside sentences.
    rows = [(number, _decode(path, number, line)) for number, line in enumerate(lines, start=1) if line.rstrip(b"\r")]
    if not rows:
        raise ValueError(f"{path}: the file is empty")
    header, rows = _split_header(path, rows, task, has_labels)
    if not rows:
        raise ValueError(f"{path}: the file has a header and no rows")
    text_at = [at for names in task.text_columns if (at := _find(header, names)) is not None]  # all: there are such
    label_at = _find(header, task.label_columns) if has_labels else None
    index_at = None if has_labels else _find(header, ("index", "id"))
    names = ["index", *(f"text{i + 1}" for i in range(len(text_at))), *(["label"] if has_labels else [])]
    columns: dict[str, list] = {name: [] for name in names}
    broken, empty = 0, []
    for position, (number, cells) in enumerate(rows):
        if len(cells) != len(header):
            if task.may_have_broken_rows:
                broken += 1
                continue
            raise ValueError(
                f"{path}, line {number}: {len(cells)} columns where there should be {len(header)} "
                f"({', '.join(header)})"
            )
        for i, at in enumerate(text_at):
            columns[f"text{i + 1}"].append(cells[at])
        if any(is_blank(cells[at]) for at in text_at):
            empty.append(number)
        columns["index"].append(cells[index_at] if index_at is not None else str(position))
        if label_at is not None:
            try:
                columns["label"].append(parse_label(task, cells[label_at].strip()))
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
    if broken:
        logger.warning("%s: %d of %d rows are cut by a line break and were left out", path, broken, len(rows))
    if empty:
        message = "%s: %d of %d rows have an empty cell, which is read as an empty text; the first is line %d"
        logger.warning(message, path, len(empty), len(rows), empty[0])
    return make_rows(columns)


def _decode(path: Path, number: int, line: bytes) -> list[str]:
    try:
        return line.decode("utf-8").rstrip("\r").split("\t")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}, line {number}: not UTF-8 ({error.reason} at byte {error.start})") from None


def _find(header: list[str], names: tuple[str, ...]) -> int | None:
    lowered = [cell.strip().lower() for cell in header]
    return next((lowered.index(name.lower()) for name in names if name.lower() in lowered), None)


def _split_header(
    path: Path, rows: list[tuple[int, list[str]]], task: GlueTask, has_labels: bool
) -> tuple[list[str], list[tuple[int, list[str]]]]:
    first = rows[0][1]
    wanted = [*task.text_columns, *([task.label_columns] if has_labels else [])]
    missing = [names for names in wanted if _find(first, names) is None]
    if not missing:
        lowered = [cell.strip().lower() for cell in first]
        if twice := [name for names in wanted for name in names if lowered.count(name.lower()) > 1]:
            raise ValueError(f"{path}, line 1: two columns are named {twice[0]!r}; rename one")
        return first, rows[1:]
    layouts = task.headerless if has_labels else task.headerless_test
    # A row that names some of the columns is a header that lacks the others, not a sentence.
    if len(missing) == len(wanted) and len(first) in layouts:
        return list(layouts[len(first)]), rows
    expected = " and ".join("|".join(names) for names in missing)
    raise ValueError(
        f"{path}, line 1: no column {expected} in [{', '.join(cell[:30] for cell in first[:16])}], and this is no "
        f"{task.folder} layout without a header ({', '.join(map(str, layouts)) or 'none is known'} columns)"
    )


def _file_splits(
    task: GlueTask, data_dir: str | None, files: dict[str, str | None], with_train: bool
) -> dict[str, Path]:
    folder = Path(data_dir) if data_dir is not None else None
    if folder is not None and not folder.is_dir():
        raise OSError(f"--data_dir {folder}: no such folder")
    names = {"train": "train.tsv", **task.eval_splits, **task.test_splits}
    found = {split: folder / name for split, name in names.items() if folder is not None and (folder / name).is_file()}
    first_eval, first_test = next(iter(task.eval_splits)), next(iter(task.test_splits))
    for split, key in (("train", "train_file"), (first_eval, "validation_file"), (first_test, "test_file")):
        if given := files.get(key):
            found[split] = Path(given)
    for split in (*(["train"] if with_train else []), first_eval):
        if split not in found:
            hint = ""
            if folder is not None and (folder / task.folder).is_dir():
                hint = f"; did you mean --data_dir {folder / task.folder}?"
            raise OSError(f"{folder / names[split] if folder is not None else names[split]}: no such file{hint}")
    return {split: path for split, path in found.items() if with_train or split != "train"}


def load_glue(
    task: GlueTask, data_dir: str | None = None, files: dict[str, str | None] | None = None, with_train: bool = True
) -> dict[str, ClassificationSplit]:
    """Read every split of a task that is there: from TSVs where a folder or a file is given, otherwise from the Hub.

    The folder has `train.tsv`, `dev.tsv` (MNLI: `dev_matched.tsv`, `dev_mismatched.tsv`) and test files; these and
    `dev_mismatched.tsv` may be missing. `train_file`, `validation_file` and `test_file` of `files` go before it.

    Raises:
        OSError: if the train or dev file is missing, or the Hub cannot be reached.
        ValueError: if a file is wrong; see `read_tsv`.
    """
    files = {name: (files or {}).get(name) for name in ("train_file", "validation_file", "test_file")}
    if data_dir is not None or any(files.values()):
        paths = _file_splits(task, data_dir, files, with_train)
        is_labelled = {split: split not in task.test_splits for split in paths}
        rows = {split: read_tsv(path, task, is_labelled[split]) for split, path in paths.items()}
        return {split: ClassificationSplit(split, data) for split, data in rows.items()}
    try:
        loaded = load_dataset(HUB_DATASET, task.name)
    except Exception as error:  # the Hub's many ways to fail are one thing to the user
        raise OSError(
            f"cannot load {task.name} of {HUB_DATASET} from the Hub ({type(error).__name__}: {error}); "
            "give a folder of GLUE TSVs with --data_dir"
        ) from error
    splits = [*(["train"] if with_train else []), *task.eval_splits, *task.test_splits]
    return {split: _hub_split(task, split, loaded[split]) for split in splits if split in loaded}


def _hub_split(task: GlueTask, split: str, data: Dataset) -> ClassificationSplit:
    renamed = {}
    for i, names in enumerate(task.text_columns):
        at = _find(data.column_names, names)
        if at is None:
            raise ValueError(
                f"{HUB_DATASET}, {task.name}, {split}: no column {'|'.join(names)} in {data.column_names}"
            )
        renamed[data.column_names[at]] = f"text{i + 1}"
    data = data.rename_columns(renamed)
    if "idx" in data.column_names:
        data = data.rename_column("idx", "index")
    if split in task.test_splits and "label" in data.column_names:
        data = data.remove_columns("label")
    return ClassificationSplit(split, data)


def load_ax(data_dir: str | None = None) -> ClassificationSplit | None:
    """Read the diagnostic set where it is: beside the MNLI files, in a sibling folder, or on the Hub.

    Return None where a folder was given and the file is not in it.
    """
    task = TASKS["ax"]
    if data_dir is None:
        return _hub_split(task, "test", load_dataset(HUB_DATASET, "ax", split="test"))
    for folder in (Path(data_dir), Path(data_dir).parent / "AX", Path(data_dir).parent / "diagnostic"):
        for name in ("AX.tsv", "diagnostic.tsv"):
            if (folder / name).is_file():
                return ClassificationSplit("test", read_tsv(folder / name, task, has_labels=False))
    return None
