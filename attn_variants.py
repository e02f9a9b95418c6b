"""The `attn-variants` command, also as `python -m attn_variants`, and what each of `scripts/` is.

It stands outside the package, so that it can say what Ctrl-C does, and that this process is a command, before the
package is imported.
"""

import signal
import sys
from collections.abc import Sequence
from typing import Any

__all__ = ["main", "run"]

# Whether this process is one of this package's commands: `hf_attn_variants/__init__.py` asks.
is_command = False

# A terminal sends Ctrl-C to all processes, and a command ends those that help it: they ignore it. A helper that
# multiprocessing spawns imports the command's program, and so this module, under this name.
if getattr(sys.modules.get("__mp_main__"), "__name__", "") == "__mp_main__":
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand of the command line, or of `argv`; return the exit status.

    Called with `argv`, in a program that goes on, it leaves what Ctrl-C does as it is.
    """
    return _call("main", argv, owns_process=argv is None)


def run(command: Any) -> int:
    """Run a subcommand as a script of its own, on the command line of the process; return the exit status.

    Args:
        command: its name, or what has a `parse_args` and a `main` as the modules of `hf_attn_variants.commands` have.
    """
    return _call("run", command, owns_process=True)


def _call(name: str, given: Any, owns_process: bool) -> int:
    global is_command
    is_command = True
    from hf_attn_variants.errors import exit_on_interrupt

    if owns_process:
        exit_on_interrupt()
    from hf_attn_variants import cli

    status = getattr(cli, name)(given)
    if owns_process:
        exit_on_interrupt()  # nothing is left to unwind while Python ends
    return status


if __name__ == "__main__":
    from attn_variants import main  # the package asks the module of this name, not `__main__`

    sys.exit(main())
