"""How a command ends: one line and an exit status for an error, and Ctrl-C."""

import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

__all__ = [
    "INTERRUPTED",
    "NonFiniteLossError",
    "TerminatedError",
    "as_value_error",
    "exit_on_interrupt",
    "is_first_process",
    "is_out_of_memory",
    "run_script",
    "unwind_on_interrupt",
]

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


NOT_PRINTED = "error: what is printed cannot be written ({}); all files that come before it are there"
NO_MEMORY = ("can't allocate memory", "Cannot allocate memory", "out of memory", "bad allocation", "std::bad_alloc")


class NonFiniteLossError(ArithmeticError):
    """The loss or the gradient norm became NaN or infinite; the message names the step."""


class TerminatedError(RuntimeError):
    """SIGTERM ended training, after a checkpoint; the message says how to go on."""


def run_script(main: Callable[[], Any]) -> int:
    """Run `main()` and turn an expected error into one line on stderr.

    Args:
        main: the command's work, without arguments.

    Returns:
        The exit status: 0, or 2 after a ValueError, OSError, NonFiniteLossError, UpstreamChanged, want of memory or a
        stdout that took nothing; an error's own `exit_status`; or a shell's for a signal: 143 (SIGTERM) after a
        TerminatedError, 130 (SIGINT) after Ctrl-C. Any other exception is a bug and keeps its traceback; so do the
        first three and want of memory with the environment variable `ATTN_VARIANTS_DEBUG=1`.
    """
    try:
        main()
    except TerminatedError as error:
        return _ended(128 + signal.SIGTERM, str(error))
    except KeyboardInterrupt as interrupt:
        # A terminal sends it to all.
        return _ended(128 + signal.SIGINT, (str(interrupt) or INTERRUPTED) if is_first_process() else "")
    except Exception as error:
        no_memory = is_out_of_memory(error)
        if _is_upstream_changed(error):
            return _ended(2, f"error: {error}")
        known = no_memory or isinstance(error, ValueError | OSError | NonFiniteLossError)
        if not known or os.environ.get("ATTN_VARIANTS_DEBUG") == "1":
            raise
        if _is_of_a_print(error):
            return _ended(2, NOT_PRINTED.format(error))
        message = " ".join(_own_message(error).split()) or type(error).__name__
        if no_memory:
            message = f"there is not enough memory ({message[:200]}): give smaller batches, or a smaller model"
        return _ended(getattr(error, "exit_status", 2), f"error: {message}")
    return _ended(0)


def _ended(status: int, message: str = "") -> int:
    """Say how a command ended, and return its exit status; what it printed may not have been written yet."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        # Python flushes once more at its end, and would say so in its own words.
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status, message = status or 2, NOT_PRINTED.format(error)
    if message:
        with suppress(OSError):
            print(message, file=sys.stderr)
    return status


def _is_upstream_changed(error: Exception) -> bool:
    module = sys.modules.get("hf_attn_variants.modeling.upstream")  # importing it here might fail for the same reason
    return module is not None and isinstance(error, module.UpstreamChanged)


def _is_of_a_print(error: Exception) -> bool:
    """Say whether an error is that of a `print` to a stdout that takes nothing.

    The system's errors have a number, ours have words alone; one of a file names the file.
    """
    if not isinstance(error, OSError) or error.errno is None or error.filename is not None:
        return False
    if error.__traceback__ is None:
        return False
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return "print" in frame.f_code.co_names


def _own_message(error: Exception) -> str:
    # Of a dataloader's worker comes an error of the same type whose message is the traceback; its end is the message.
    message = str(error)
    if re.match(r"Caught \w+ in DataLoader worker process", message):
        message = re.split(rf"\n(?:\w+\.)*{type(error).__name__}: ?", message)[-1]
    return message


@contextmanager
def as_value_error(what: str, *explained: type[Exception]) -> Iterator[None]:
    """Turn what a wrong value raises anywhere in transformers or torch into a ValueError.

    Args:
        what: what holds the value and that it is wrong: the message begins so.
        explained: errors whose messages say all; any other ValueError or OSError passes as it is.
    """
    try:
        yield
    except explained as error:
        raise ValueError(f"{what}: {' '.join(str(error).split())}") from error
    except (ValueError, OSError):
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        # Two lines: huggingface_hub's first one names the field and its second one the value.
        text = " ".join(line.strip() for line in str(error).strip().splitlines()[:2])
        raise ValueError(f"{what}: {type(error).__name__}: {text}") from error


def is_out_of_memory(error: BaseException) -> bool:
    """Say whether an error is that there is no memory: Python's, torch's or the system's."""
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError | OSError) and any(words in str(error) for words in NO_MEMORY)
