"""Error handling for the commands: exit statuses, one-line error messages and Ctrl-C."""

import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

INTERRUPTED_MESSAGE = "Stopped by Ctrl-C"


def exit_on_interrupt() -> None:
    """Make Ctrl-C end the process immediately with a one-line message.

    Call this function only while there is nothing to clean up. Signal handlers installed by the user are not replaced.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit_immediately)


def unwind_on_interrupt() -> None:
    """Undo `exit_on_interrupt`, so that Ctrl-C raises KeyboardInterrupt and the running code can clean up."""
    if signal.getsignal(signal.SIGINT) is _exit_immediately:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def is_first_process() -> bool:
    """Return whether this is the first process launched on this machine. It prints messages for all processes."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _exit_immediately(signum: int, frame: Any) -> None:
    if is_first_process():
        os.write(2, f"{INTERRUPTED_MESSAGE}.\n".encode())
    os._exit(128 + signum)


STDOUT_ERROR_MESSAGE = (
    "error: Cannot write to the standard output ({}). All files written before the output are complete."
)
# The messages that Python, torch and the operating system use for out-of-memory errors.
OUT_OF_MEMORY_PATTERN = re.compile(r"[Cc]an('t|not) allocate memory|out of memory|bad allocation|std::bad_alloc")


class NonFiniteLossError(ArithmeticError):
    """Raised if the loss or the gradient norm is NaN or infinite. The message contains the step."""


class TerminatedError(RuntimeError):
    """Raised after SIGTERM stops a training run and a checkpoint is saved. The message explains how to resume."""


def run_script(main: Callable[[], Any]) -> int:
    """Run `main()` and print expected errors as a single line on stderr.

    Unexpected exceptions are bugs and keep their tracebacks. If the environment variable `ATTN_VARIANTS_DEBUG` is 1,
    ValueErrors, OSErrors, NonFiniteLossErrors and out-of-memory errors also keep their tracebacks.

    Args:
        main: a function without arguments that runs the command.

    Returns:
        The exit status:

        - 0 after success,
        - the `exit_status` attribute of an expected error, if it has one,
        - 2 after a ValueError, an OSError, a NonFiniteLossError, a TransformersChangedError, an out-of-memory error,
          or a failed write to stdout,
        - 143 (SIGTERM) after a TerminatedError,
        - 130 (SIGINT) after Ctrl-C.
    """
    try:
        main()
    except TerminatedError as error:
        return _print_and_get_exit_status(128 + signal.SIGTERM, str(error))
    except KeyboardInterrupt as interrupt:
        # A terminal sends Ctrl-C to all launched processes. Only one of them prints the message.
        return _print_and_get_exit_status(
            128 + signal.SIGINT, (str(interrupt) or f"{INTERRUPTED_MESSAGE}.") if is_first_process() else ""
        )
    except Exception as error:
        no_memory = is_out_of_memory(error)
        if _is_upstream_changed(error):
            return _print_and_get_exit_status(2, f"error: {error}")
        is_expected = no_memory or isinstance(error, ValueError | OSError | NonFiniteLossError)
        if not is_expected or os.environ.get("ATTN_VARIANTS_DEBUG") == "1":
            raise
        message = " ".join(_get_original_message(error).split()) or type(error).__name__
        if no_memory:
            message = f"There is not enough memory ({message[:200]}). Use a smaller batch size or a smaller model."
        return _print_and_get_exit_status(getattr(error, "exit_status", 2), f"error: {message}")
    return _print_and_get_exit_status(0)


def _print_and_get_exit_status(status: int, message: str = "") -> int:
    """Flush stdout, print the message and return the exit status, which is not 0 if stdout cannot be written."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        # Python flushes again when it exits, and would print its own message.
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status, message = status or 2, STDOUT_ERROR_MESSAGE.format(error)
    if message:
        with suppress(OSError):
            print(message, file=sys.stderr)
    return status


def _is_upstream_changed(error: Exception) -> bool:
    # Importing the module here might fail for the same reason.
    module = sys.modules.get("hf_attn_variants.modeling.transformers_internals")
    return module is not None and isinstance(error, module.TransformersChangedError)


def _get_original_message(error: Exception) -> str:
    # A DataLoader worker raises an error of the same type, whose message is a traceback that ends with the original
    # message.
    message = str(error)
    if re.match(r"Caught \w+ in DataLoader worker process", message):
        message = re.split(rf"\n(?:\w+\.)*{type(error).__name__}: ?", message)[-1]
    return message


@contextmanager
def convert_to_value_error(prefix: str, *self_explanatory: type[Exception]) -> Iterator[None]:
    """Convert exceptions that Transformers or torch raises for an invalid value into a ValueError.

    ValueErrors, OSErrors and out-of-memory errors are raised unchanged.

    Args:
        prefix: the beginning of the message, which explains what is invalid.
        self_explanatory: exception types whose messages are used without the type name.
    """
    try:
        yield
    except self_explanatory as error:
        raise ValueError(f"{prefix}: {' '.join(str(error).split())}") from error
    except (ValueError, OSError):
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        # In messages from huggingface_hub, the first line contains the field and the second line contains the value.
        text = " ".join(line.strip() for line in str(error).strip().splitlines()[:2])
        raise ValueError(f"{prefix}: {type(error).__name__}: {text}") from error


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error from Python, torch or the operating system was caused by a lack of memory."""
    is_candidate = isinstance(error, RuntimeError | OSError)
    return isinstance(error, MemoryError) or (is_candidate and OUT_OF_MEMORY_PATTERN.search(str(error)) is not None)
