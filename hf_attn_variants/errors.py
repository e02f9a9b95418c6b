"""How a script tells its user what went wrong: one line and an exit status, no traceback."""

import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .interrupts import INTERRUPTED, is_first_process

__all__ = ["NonFiniteLossError", "TerminatedError", "as_value_error", "run_script"]


class NonFiniteLossError(ArithmeticError):
    """The loss or the gradient norm became NaN or infinite; the message names the step."""


class TerminatedError(RuntimeError):
    """SIGTERM ended training, after a checkpoint; the message says how to go on."""


def run_script(main: Callable[[], Any]) -> int:
    """Run `main()` and turn an expected error into one line on stderr.

    Args:
        main: the command's work, without arguments.

    Returns:
        The exit status: 0, or 2 after a ValueError, OSError, NonFiniteLossError or UpstreamChanged, or a shell's for a
        signal: 143 (SIGTERM) after a TerminatedError, 130 (SIGINT) after Ctrl-C. Any other exception is a bug and
        keeps its traceback; so do the first three with the environment variable `ATTN_VARIANTS_DEBUG=1`.
    """
    try:
        main()
    except TerminatedError as error:
        print(error, file=sys.stderr)
        return 128 + signal.SIGTERM
    except KeyboardInterrupt as interrupt:
        if is_first_process():  # a terminal sends it to all
            print(str(interrupt) or INTERRUPTED, file=sys.stderr)
        return 128 + signal.SIGINT
    except ImportError as error:
        from .modeling.upstream import UpstreamChanged

        if not isinstance(error, UpstreamChanged):
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (ValueError, OSError, NonFiniteLossError) as error:
        if os.environ.get("ATTN_VARIANTS_DEBUG") == "1":
            raise
        print(f"error: {' '.join(_own_message(error).split()) or type(error).__name__}", file=sys.stderr)
        return 2
    return 0


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
        first_line = next(iter(str(error).splitlines()), "")
        raise ValueError(f"{what}: {type(error).__name__}: {first_line}") from error
