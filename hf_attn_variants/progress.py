"""Progress bars on stderr, which are updated often in terminals and notebooks, and rarely in log files."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from tqdm.auto import tqdm
from transformers.utils import logging as transformers_logging

# Seconds between two updates of a progress bar, in a terminal or notebook and in a log file.
INTERACTIVE_INTERVAL, LOG_FILE_INTERVAL = 0.1, 20.0


def is_interactive() -> bool:
    """Return whether the user can see live progress bars, in a terminal or in a notebook."""
    # In a notebook, a bar is a widget, and stderr is not a terminal.
    return sys.stderr.isatty() or any(base.__module__ == "tqdm.notebook" for base in tqdm.__mro__)


def progress_bar(*args: Any, disable: bool = False, **kwargs: Any) -> tqdm:
    """Return a tqdm progress bar, which is disabled if the progress bars in Transformers are disabled.

    Args:
        args: positional arguments for tqdm.
        disable: whether to disable the progress bar.
        kwargs: keyword arguments for tqdm.
    """
    interval = INTERACTIVE_INTERVAL if is_interactive() else LOG_FILE_INTERVAL
    is_shown = not disable and transformers_logging.is_progress_bar_enabled()
    # tqdm refreshes a bar that was not updated for `maxinterval` seconds.
    intervals = {"mininterval": interval, "maxinterval": max(interval, 10.0)}
    return tqdm(*args, disable=not is_shown, dynamic_ncols=True, **intervals, **kwargs)


@contextmanager
def disable_progress_bars(disable: bool = True) -> Iterator[None]:
    """Disable the progress bars of this package, Transformers and Datasets in a `with` block if `disable` is true."""
    with ExitStack() as stack:
        if disable and transformers_logging.is_progress_bar_enabled():
            transformers_logging.disable_progress_bar()
            stack.callback(transformers_logging.enable_progress_bar)
        if disable and importlib.util.find_spec("datasets") is not None:  # it is part of the `train` extra
            import datasets  # imported here, because the import takes a second

            if not datasets.are_progress_bars_disabled():
                datasets.disable_progress_bars()
                stack.callback(datasets.enable_progress_bars)
        yield
