"""Progress bars on stderr: live for those who watch, a line now and then in a log file."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tqdm.auto import tqdm
from transformers.utils import logging as transformers_logging

__all__ = ["is_watched", "no_progress_bars", "progress_bar"]

# Seconds between two states of a bar, on a screen and in a log file.
LIVE, LOGGED = 0.1, 20.0


def is_watched() -> bool:
    """Return whether bars are drawn for somebody who watches: stderr is a terminal, or this is a notebook."""
    # A notebook's bar is a widget: its stderr is no terminal and need not be one.
    return sys.stderr.isatty() or any(base.__module__ == "tqdm.notebook" for base in tqdm.__mro__)


def progress_bar(*args: Any, disable: bool = False, **kwargs: Any) -> tqdm:
    """Return tqdm's bar with an estimate; none where transformers shows none; in a log file a line now and then.

    Args:
        args, kwargs: tqdm's.
        disable: show none.
    """
    interval = LIVE if is_watched() else LOGGED
    shown = not disable and transformers_logging.is_progress_bar_enabled()
    # tqdm itself draws a bar again that has shown nothing new for `maxinterval` seconds.
    intervals = {"mininterval": interval, "maxinterval": max(interval, 10.0)}
    return tqdm(*args, disable=not shown, dynamic_ncols=True, **intervals, **kwargs)


@contextmanager
def no_progress_bars(wanted: bool = True) -> Iterator[None]:
    """Show no bar inside, neither this package's nor those of transformers and datasets, if that is `wanted`."""
    if not wanted:
        yield
        return
    had = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        with _no_bars_of_datasets():
            yield
    finally:
        if had:
            transformers_logging.enable_progress_bar()


@contextmanager
def _no_bars_of_datasets() -> Iterator[None]:
    if importlib.util.find_spec("datasets") is None:  # it is of the extra `train`
        yield
        return
    import datasets  # takes a second

    had = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if had:
            datasets.enable_progress_bars()
