"""What Ctrl-C does in this package's own commands, whose imports alone take seconds."""

import os
import signal
from typing import Any

__all__ = ["INTERRUPTED", "exit_on_interrupt", "is_first_process", "unwind_on_interrupt"]

INTERRUPTED = "stopped by Ctrl-C"


def exit_on_interrupt() -> None:
    """Let Ctrl-C end the process at once with one line, while there is nothing to unwind.

    Where somebody ignores or handles it, nothing changes.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit)


def unwind_on_interrupt() -> None:
    """Undo `exit_on_interrupt`: Ctrl-C raises KeyboardInterrupt again, so that work can clean up after itself."""
    if signal.getsignal(signal.SIGINT) is _exit:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def is_first_process() -> bool:
    """Say whether this process speaks for all that were launched with it on this machine."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _exit(number: int, frame: Any) -> None:
    if is_first_process():
        os.write(2, f"{INTERRUPTED}\n".encode())
    os._exit(128 + number)
