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
SCRIPTS_IMPORT = b"from hf_attn_variants.errors import run_script\n"


def exit_on_interrupt(at_once: bool) -> None:
    """Lets Ctrl-C end a command of this package with one line, or unwind its stack again, as Python does.

    A process that such a command starts to help it ignores Ctrl-C: a terminal sends it to all, and the command ends
    its helpers. In a process that was started as anything else, and where somebody ignores or handles Ctrl-C, nothing
    changes.

    Args:
        at_once: True while there is nothing to unwind: in imports, and once a command has ended.
    """
    now = signal.getsignal(signal.SIGINT)
    if at_once and now is signal.default_int_handler and _is_own_command():
        signal.signal(signal.SIGINT, signal.SIG_IGN if _is_helper() else _exit)
    elif not at_once and now is _exit:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def is_first_process() -> bool:
    """Whether this process speaks for all that were launched with it on this machine."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _exit(number: int, frame: Any) -> None:
    if is_first_process():
        os.write(2, f"{INTERRUPTED}\n".encode())
    os._exit(128 + number)


def _is_helper() -> bool:
    # Started by multiprocessing, or by datasets' copy of it, with the sys.argv of the process that it helps. While it
    # imports that one's program, `multiprocessing.parent_process()` is still None.
    return any(part.startswith(("from multiprocessing.", "from multiprocess.")) for part in sys.orig_argv)


def _is_own_command() -> bool:
    program = Path(sys.argv[0] if sys.argv else "")
    if str(program) == "-m":  # while `python -m hf_attn_variants` imports the package; a file of the package follows
        name = sys.orig_argv[-len(sys.argv)].removeprefix("-m")
        return name.split(".")[0] == PACKAGE.name
    if not program.is_file():  # "", "-" or "-c"
        return False
    folder = program.resolve().parent
    # Beside an installed package, `scripts` is somebody else's.
    ours = folder == PACKAGE.parent / "scripts" and SCRIPTS_IMPORT in program.read_bytes()
    return program.stem == COMMAND or folder == PACKAGE or ours


exit_on_interrupt(at_once=True)
