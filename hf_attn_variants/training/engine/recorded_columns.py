"""What a finished model was trained to read, columns above all: the defaults of a run that only evaluates it."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from ...files import RESULTS_NAME, load_json
from ...text_files import has_column
from .settings import FineTuningSettings

__all__ = ["absent_column", "warn_of_other_length", "with_recorded_columns"]

logger = logging.getLogger(__name__)
# What results of another program, or damaged ones, raise.
UNREADABLE = (AttributeError, TypeError, ValueError)
SettingsT = TypeVar("SettingsT", bound=FineTuningSettings)


def with_recorded_columns(
    settings: SettingsT,
    first: dict[str, Any] | None,
    columns: Mapping[str, Sequence[str]],
    others: Sequence[str] = (),
) -> SettingsT:
    """Return the settings of a run that only evaluates, with what is not given as the model's results have it.

    The results are `all_results.json` in the model's folder. What is taken from them is logged.

    Args:
        settings: the run's.
        first: a row by column; a column that it lacks is not taken. None: the run reads no table.
        columns: the settings that name columns; with each, the settings that say how that column is read.
        others: settings that are taken whatever the columns are.
    """
    if (path := _results_of(settings)) is None:
        return settings
    try:
        recorded = _recorded(path)
    except UNREADABLE as error:
        logger.warning("%s does not say which columns were trained on (%s)", path, error)
        return settings
    given = {name for setting in columns for name in _names(getattr(settings, setting))}
    taken: dict[str, Any] = {}
    for setting, ways in columns.items():
        names = _names(recorded.get(setting))
        if not names or first is None or not all(has_column(first, name) for name in names):
            continue
        if getattr(settings, setting) is None and given.isdisjoint(names):
            taken[setting] = tuple(names) if isinstance(recorded[setting], list) else names[0]
        elif _names(getattr(settings, setting)) != names:
            continue
        for way in ways:
            if getattr(settings, way) is None and recorded.get(way) is not None:
                taken[way] = recorded[way]
    taken |= {name: recorded[name] for name in others if getattr(settings, name) is None and recorded.get(name)}
    if taken:
        shown = " ".join(f"--{name} {_shown(value)}" for name, value in taken.items())
        logger.info("as in %s: %s", path, shown)
    return replace(settings, **taken)


def absent_column(settings: FineTuningSettings, first: dict[str, Any], setting: str) -> str | None:
    """Return the column that a model was trained with, where the run names none and a row lacks it; else None.

    Another column that is called as such columns often are would be something else.

    Args:
        settings: those of a run, before `with_recorded_columns`.
        first: the row, by column.
        setting: the setting that names the column.
    """
    if getattr(settings, setting) is not None or (path := _results_of(settings)) is None:
        return None
    try:
        column = _recorded(path).get(setting)
    except UNREADABLE:
        return None
    return column if isinstance(column, str) and not has_column(first, column) else None


def _shown(value: Any) -> str:
    return " ".join(map(repr, _names(value))) if isinstance(value, str | tuple | list) else str(value)


def warn_of_other_length(settings: FineTuningSettings) -> None:
    """Warn where a run that only evaluates cuts texts at another length than the model's training did."""
    if (path := _results_of(settings)) is None:
        return
    try:
        length = _recorded(path).get("max_length", settings.max_length)
    except UNREADABLE:
        return
    if length != settings.max_length:
        message = "texts are cut at %d tokens, and the model was trained with --max_length %s (%s)"
        logger.warning(message, settings.max_length, length, path)


def _results_of(settings: FineTuningSettings) -> Path | None:
    """Return the results of the training of a model that is only evaluated, if they are there."""
    path = Path(settings.source).expanduser() / RESULTS_NAME if settings.only_evaluates else None
    return path if path is not None and path.is_file() else None


def _recorded(path: Path) -> dict[str, Any]:
    results = load_json(path)
    return {**(results.get("arguments") or {}), **results}


def _names(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value or ())
