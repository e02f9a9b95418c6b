"""Progress bars on stderr: for people who watch, so none in a log file or where transformers shows none."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tqdm.auto import tqdm
from transformers.utils import logging as transformers_logging

__all__ = ["no_progress_bars", "progress_bar"]


def progress_bar(*args: Any, **kwargs: Any) -> tqdm:
    """Return tqdm's bar; it shows nothing unless stderr is a terminal or this is a notebook."""
    # A notebook's bar is a widget: its stderr is no terminal and need not be one.
    watched = sys.stderr.isatty() or any(base.__module__ == "tqdm.notebook" for base in tqdm.__mro__)
    shown = watched and transformers_logging.is_progress_bar_enabled()
    return tqdm(*args, disable=not shown, dynamic_ncols=True, **kwargs)


@contextmanager
def no_progress_bars(wanted: bool = True) -> Iterator[None]:
    """Show no bar inside, neither transformers' nor this package's, if that is `wanted`."""
    had = transformers_logging.is_progress_bar_enabled()
    if wanted:
        transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if wanted and had:
            transformers_logging.enable_progress_bar()
