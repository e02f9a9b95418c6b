"""What Ctrl-C does in this package's own commands, whose imports alone take seconds."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

__all__ = ["INTERRUPTED", "exit_on_interrupt", "is_first_process"]

INTERRUPTED = "stopped by Ctrl-C"
COMMAND = "attn-variants"
PACKAGE = Path(__file__).resolve().parent


def exit_on_interrupt(at_once: bool) -> None:
    """Lets Ctrl-C end a command of this package with one line, or unwind its stack again, as Python does.

    In a process that was started as anything else, and where somebody ignores or handles Ctrl-C, nothing changes.

    Args:
        at_once: True while there is nothing to unwind: in imports, and once a command has ended.
    """
    now = signal.getsignal(signal.SIGINT)
    if at_once and now is signal.default_int_handler and _is_own_command():
        signal.signal(signal.SIGINT, _exit)
    elif not at_once and now is _exit:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def is_first_process() -> bool:
    """Whether this process speaks for all that were launched with it on this machine."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _exit(number: int, frame: Any) -> None:
    if is_first_process():
        os.write(2, f"{INTERRUPTED}\n".encode())
    os._exit(128 + number)


def _is_own_command() -> bool:
    # While `python -m hf_attn_variants` imports the package, sys.argv[0] is "-m", and then a file of the package.
    program = Path(sys.argv[0])
    if str(program) == "-m":
        return any(name.split(".")[0] == PACKAGE.name for name in sys.orig_argv[1:])
    return program.stem == COMMAND or program.resolve().parent in (PACKAGE.parent / "scripts", PACKAGE)


exit_on_interrupt(at_once=True)
