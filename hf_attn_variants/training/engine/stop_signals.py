"""The signals that end a run between two steps: SIGTERM, and Ctrl-C."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ...interrupts import is_first_process

__all__ = ["STOP_SIGNALS", "StopSignals"]

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# A terminal sends Ctrl-C to every process, and a launcher passes it on: within so many seconds it is the same one.
SAME_CTRL_C = 1.0


class StopSignals:
    """Notes the signal that comes as `number`, for whoever can stop at a better moment."""

    def __init__(self) -> None:
        self.number: int | None = None
        self._interrupted: float | None = None
        self._process = os.getpid()

    @contextmanager
    def noticed(self) -> Iterator[None]:
        """Note them, until a second Ctrl-C, which is a KeyboardInterrupt; on other threads than the main one none."""
        if threading.current_thread() is not threading.main_thread():  # Python allows handlers in no other
            yield
            return
        # Who ignores Ctrl-C, or handles it, goes on doing so.
        numbers = [signal.SIGTERM]
        numbers += [signal.SIGINT] if signal.getsignal(signal.SIGINT) is signal.default_int_handler else []
        before = {number: signal.signal(number, self._notice) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _notice(self, number: int, frame: Any) -> None:
        if os.getpid() != self._process:  # a dataloader's worker, which its parent ends
            return
        if number == signal.SIGINT:
            now = time.monotonic()
            if self._interrupted is None:
                self._interrupted = now
                if is_first_process():  # by `os`: what the handler interrupts may hold the lock of stderr
                    os.write(2, b"\nCtrl-C: ending the step and saving a checkpoint; again to stop at once\n")
            elif now - self._interrupted > SAME_CTRL_C:
                raise KeyboardInterrupt
        self.number = number
