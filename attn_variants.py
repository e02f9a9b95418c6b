"""Entry point of the `attn-variants` command, of `python -m attn_variants`, and of the files in `scripts/`.

This module is outside of the package. Therefore it can set the handler of Ctrl-C, and mark the process as a command,
before the package is imported.
"""

import signal
import sys
from collections.abc import Sequence
from typing import Any

__all__ = ["main", "run"]

# True if this process runs a command of the package. `hf_attn_variants/__init__.py` reads it.
is_command = False

# A terminal sends Ctrl-C to all processes. A command ends its worker processes, so the workers ignore Ctrl-C. A worker
# that multiprocessing spawns imports the program of the command, and thus this module, under the name `__mp_main__`.
if getattr(sys.modules.get("__mp_main__"), "__name__", "") == "__mp_main__":
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return the exit status.

    Args:
        argv: the arguments, the subcommand first. None means the command line of the process. With `argv`, the
            handler of Ctrl-C is not changed, because the process belongs to the caller.

    Example:
        >>> main(["convert", "./bert", "--num_key_value_heads", "4", "--output_dir", "bert-gqa4"])
        0
    """
    return _call("main", argv, owns_process=argv is None)


def run(command: Any) -> int:
    """Run a command as a script, with the command line of the process, and return the exit status.

    Args:
        command: the name of a command, or an object with the functions `parse_args` and `main`, as the modules of
            `hf_attn_variants.commands` have them.
    """
    return _call("run", command, owns_process=True)


def _call(function_name: str, argument: Any, owns_process: bool) -> int:
    global is_command
    is_command = True
    from hf_attn_variants.errors import exit_on_interrupt

    if owns_process:
        exit_on_interrupt()
    from hf_attn_variants import cli

    status = getattr(cli, function_name)(argument)
    if owns_process:
        exit_on_interrupt()  # the work is done, so that there is nothing to clean up while Python exits
    return status


if __name__ == "__main__":
    from attn_variants import main  # sets `is_command` in the module of this name instead of in `__main__`

    sys.exit(main())
