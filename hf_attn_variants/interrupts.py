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
    now, then = (signal.default_int_handler, _exit) if at_once else (_exit, signal.default_int_handler)
    if _is_own_command() and signal.getsignal(signal.SIGINT) is now:
        signal.signal(signal.SIGINT, then)


def is_first_process() -> bool:
    """Whether this process speaks for all that were launched with it on this machine."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _exit(number: int, frame: Any) -> None:
    if is_first_process():
        os.write(2, f"{INTERRUPTED}\n".encode())
    os._exit(128 + number)


def _is_own_command() -> bool:
    # While `python -m hf_attn_variants` imports the package, sys.argv[0] is "-m".
    program = Path(sys.argv[0])
    own = program.stem == COMMAND or program.resolve().parent == PACKAGE.parent / "scripts"
    return own or (str(program) == "-m" and any(name.split(".")[0] == PACKAGE.name for name in sys.orig_argv[1:]))


exit_on_interrupt(at_once=True)
