"""Calibration text as users have it: lists, files of lines, tables; a sample of it is drawn. Folders are of audio."""

import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...text_files import read_columns, read_lines, read_pairs, text_columns
from ..calibration_settings import CALIBRATION_SIZE, MIN_TEXTS, Calibration, CalibrationLike
from .audio import read_audio_calibration

__all__ = ["as_calibration", "read_calibration"]


def as_calibration(calibration: CalibrationLike | None, seed: int = 0) -> Calibration | None:
    """Return a calibration of what a user gave: one, texts or pairs of texts, a path, or None.

    The path is of a file of texts, or of a folder of audio.

    Raises:
        TypeError: if it is anything else.
        ValueError, OSError: as for `Calibration` and `read_calibration`, which draws examples by the seed.
    """
    if calibration is None or isinstance(calibration, Calibration):
        return calibration
    if isinstance(calibration, str | os.PathLike):
        if not Path(calibration).expanduser().exists():
            raise FileNotFoundError(
                f"there is no calibration file {os.fspath(calibration)!r:.200}; texts themselves are given as a list."
            )
        is_folder = Path(calibration).expanduser().is_dir()
        return (read_audio_calibration if is_folder else read_calibration)(calibration, seed=seed)
    if isinstance(calibration, Sequence) and not isinstance(calibration, bytes | bytearray):
        return Calibration(calibration)
    raise TypeError(
        "`calibration` takes a list of texts, a list of pairs of texts, the path of a text file, of a table or of a "
        f"folder of audio, or a `Calibration`; got {type(calibration).__name__}."
    )


def read_calibration(
    path: str | os.PathLike,
    *,
    columns: Sequence[str] | str | None = None,
    target_file: str | os.PathLike | None = None,
    target_column: str | None = None,
    size: int | None = None,
    seed: int = 0,
    **settings: Any,
) -> Calibration:
    """Read calibration text from a file and draw examples of it.

    Args:
        path: UTF-8 text, an example a line, or a table (.csv, .tsv, .json, .jsonl); .gz too.
        columns: of a table: its column of texts, or two columns of texts that the model reads as pairs; None = "text".
        target_file: encoder-decoders: the target of each line.
        target_column: the same in a table.
        size: how many examples are drawn, two at least; None = 2048.
        seed: which ones.
        settings: further fields of `Calibration`.

    Raises:
        OSError: if a file cannot be read.
        ValueError: if it holds something else, or an argument does not go with it.
    """
    size = CALIBRATION_SIZE if size is None else size
    if size < MIN_TEXTS:
        raise ValueError(f"`size` (--calibration_size) must be at least {MIN_TEXTS}; got {size}.")
    if isinstance(columns, str):
        columns = [columns]
    texts, targets = _read_examples(path, columns, target_file, target_column)
    if len(texts) > size:
        chosen = sorted(random.Random(seed).sample(range(len(texts)), size))
        texts, targets = [texts[i] for i in chosen], targets and [targets[i] for i in chosen]
    return Calibration(texts, targets, **settings)


def _read_examples(
    path: str | os.PathLike,
    columns: Sequence[str] | None,
    target_file: str | os.PathLike | None,
    target_column: str | None,
) -> tuple[list[Any], list[str] | None]:
    """Read texts, or pairs of them, and the targets, if any."""
    of_texts = "`columns` of `read_calibration` (--calibration_columns)"
    of_targets = "`target_column` of `read_calibration` (--calibration_target_column)"
    text_names = text_columns([path], columns, of_texts)
    if text_names:
        if target_file is not None:
            raise ValueError(
                f"`target_file` (--calibration_target_file) is for lines of text; a table takes {of_targets}."
            )
        named = of_texts + (f" and {of_targets}" if target_column else "")
        rows = read_columns([path], [*text_names, *([target_column] if target_column else [])], named)
        texts = [row[: len(text_names)] if len(text_names) == 2 else row[0] for row in rows]
        return texts, [row[-1] for row in rows] if target_column else None
    if target_column is not None:
        raise ValueError(f"{of_targets} is for a table; {path} is none.")
    if target_file is None:
        return read_lines([path]), None
    sources, targets = zip(*read_pairs(path, target_file), strict=True)
    return list(sources), list(targets)
