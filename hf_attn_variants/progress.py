"""Progress bars on stderr. They are updated live in a terminal or notebook, and now and then in a log file."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tqdm.auto import tqdm
from transformers.utils import logging as transformers_logging

# Seconds between two updates of a bar, on a screen and in a log file.
LIVE, LOGGED = 0.1, 20.0


def is_watched() -> bool:
    """Return whether somebody can see live progress bars, because stderr is a terminal or this is a notebook."""
    # In a notebook, a bar is a widget, and stderr is not a terminal.
    return sys.stderr.isatty() or any(base.__module__ == "tqdm.notebook" for base in tqdm.__mro__)


def progress_bar(*args: Any, disable: bool = False, **kwargs: Any) -> tqdm:
    """Return a progress bar of tqdm, which is disabled if the progress bars of Transformers are disabled.

    Args:
        args: positional arguments of tqdm.
        disable: whether to show no bar.
        kwargs: keyword arguments of tqdm.
    """
    interval = LIVE if is_watched() else LOGGED
    is_shown = not disable and transformers_logging.is_progress_bar_enabled()
    # tqdm draws a bar again if it was not updated for `maxinterval` seconds.
    intervals = {"mininterval": interval, "maxinterval": max(interval, 10.0)}
    return tqdm(*args, disable=not is_shown, dynamic_ncols=True, **intervals, **kwargs)


@contextmanager
def no_progress_bars(wanted: bool = True) -> Iterator[None]:
    """Disable the progress bars of this package, Transformers and datasets in a `with` block, if `wanted` is true."""
    if not wanted:
        yield
        return
    was_enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        with _no_bars_of_datasets():
            yield
    finally:
        if was_enabled:
            transformers_logging.enable_progress_bar()


@contextmanager
def _no_bars_of_datasets() -> Iterator[None]:
    if importlib.util.find_spec("datasets") is None:  # it belongs to the extra `train`
        yield
        return
    import datasets  # imported here, because it takes a second

    was_enabled = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if was_enabled:
            datasets.enable_progress_bars()
