"""Error handling of the commands: exit statuses, one-line error messages and Ctrl-C."""

import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

INTERRUPTED = "Stopped by Ctrl-C"


def exit_on_interrupt() -> None:
    """Let Ctrl-C end the process at once with a one-line message.

    It is used while there is nothing to clean up. A signal handler that the user installed is not replaced.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit)


def unwind_on_interrupt() -> None:
    """Undo `exit_on_interrupt`, so that Ctrl-C raises KeyboardInterrupt and running code can clean up."""
    if signal.getsignal(signal.SIGINT) is _exit:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def is_first_process() -> bool:
    """Return whether this is the process that prints messages for all processes of a launch on this machine."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _exit(number: int, frame: Any) -> None:
    if is_first_process():
        os.write(2, f"{INTERRUPTED}.\n".encode())
    os._exit(128 + number)


NOT_PRINTED = "error: The standard output cannot be written ({}). All files that precede the output are complete."
# Parts of the messages with which Python, torch and the operating system report a lack of memory.
NO_MEMORY = ("can't allocate memory", "Cannot allocate memory", "out of memory", "bad allocation", "std::bad_alloc")


class NonFiniteLossError(ArithmeticError):
    """Error raised if the loss or the gradient norm is NaN or infinite. The message names the step."""


class TerminatedError(RuntimeError):
    """Error raised after SIGTERM ended a training, which saved a checkpoint. The message explains how to resume it."""


def run_script(main: Callable[[], Any]) -> int:
    """Run `main()` and print an expected error as one line on stderr.

    An unexpected exception is a bug and keeps its traceback. With the environment variable `ATTN_VARIANTS_DEBUG=1`, a
    ValueError, an OSError, a NonFiniteLossError and a lack of memory keep their tracebacks, too.

    Args:
        main: a function without arguments that does the work of the command.

    Returns:
        The exit status:

        - 0 after success,
        - the attribute `exit_status` of an expected error, if it has this attribute,
        - 2 after a ValueError, an OSError, a NonFiniteLossError, a TransformersChangedError, a lack of memory, or a
          failure to write to stdout,
        - 143 (SIGTERM) after a TerminatedError,
        - 130 (SIGINT) after Ctrl-C.
    """
    try:
        main()
    except TerminatedError as error:
        return _exit_status(128 + signal.SIGTERM, str(error))
    except KeyboardInterrupt as interrupt:
        # A terminal sends Ctrl-C to all processes of a launch. Only one of them prints the message.
        return _exit_status(128 + signal.SIGINT, (str(interrupt) or f"{INTERRUPTED}.") if is_first_process() else "")
    except Exception as error:
        no_memory = is_out_of_memory(error)
        if _is_upstream_changed(error):
            return _exit_status(2, f"error: {error}")
        is_expected = no_memory or isinstance(error, ValueError | OSError | NonFiniteLossError)
        if not is_expected or os.environ.get("ATTN_VARIANTS_DEBUG") == "1":
            raise
        message = " ".join(_original_message(error).split()) or type(error).__name__
        if no_memory:
            message = f"There is not enough memory ({message[:200]}). Use a smaller batch size or a smaller model."
        return _exit_status(getattr(error, "exit_status", 2), f"error: {message}")
    return _exit_status(0)


def _exit_status(status: int, message: str = "") -> int:
    """Flush stdout, print the message and return the exit status, which is changed if stdout cannot be written."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        # Python flushes again when it exits, and would print a message of its own.
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status, message = status or 2, NOT_PRINTED.format(error)
    if message:
        with suppress(OSError):
            print(message, file=sys.stderr)
    return status


def _is_upstream_changed(error: Exception) -> bool:
    # Importing the module here might fail for the same reason.
    module = sys.modules.get("hf_attn_variants.modeling.transformers_internals")
    return module is not None and isinstance(error, module.TransformersChangedError)


def _original_message(error: Exception) -> str:
    # A worker of a DataLoader raises an error of the same type. Its message is a traceback that ends with the original
    # message.
    message = str(error)
    if re.match(r"Caught \w+ in DataLoader worker process", message):
        message = re.split(rf"\n(?:\w+\.)*{type(error).__name__}: ?", message)[-1]
    return message


@contextmanager
def as_value_error(prefix: str, *self_explanatory: type[Exception]) -> Iterator[None]:
    """Convert any exception that an invalid value causes in Transformers or torch into a ValueError.

    Other errors of the types ValueError and OSError, and a lack of memory, are not changed.

    Args:
        prefix: the beginning of the message. It says what is invalid.
        self_explanatory: exception types whose messages are used without the name of the type.
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
        # The first line of huggingface_hub's messages names the field, the second one contains the value.
        text = " ".join(line.strip() for line in str(error).strip().splitlines()[:2])
        raise ValueError(f"{prefix}: {type(error).__name__}: {text}") from error


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether Python, torch or the operating system raised an error because of a lack of memory."""

    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError | OSError) and any(words in str(error) for words in NO_MEMORY)
