"""One run an output folder: of two at a time each would write its log and its checkpoints among the other's."""

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["FolderInUseError", "held_folder"]

logger = logging.getLogger(__name__)

# Beyond how long a killed run's data workers live on, which hold its folder as well.
WAIT_SECONDS = 12.0
PAUSE_SECONDS = 0.2


class FolderInUseError(ValueError):
    """Another process holds the folder."""


@contextmanager
def held_folder(folder: str, wait_seconds: float | None = None) -> Iterator[bool]:
    """Hold an output folder for this process; the system lets go of it when the process ends, however it does.

    Args:
        folder: it is there; nothing is written into it.
        wait_seconds: how long to wait for another process that holds it; None = `WAIT_SECONDS`.

    Yields:
        Whether another one held it before, so that the folder may hold more than it did.

    Raises:
        FolderInUseError: if another process still holds it then.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield False
        return
    wait = WAIT_SECONDS if wait_seconds is None else wait_seconds
    deadline = time.monotonic() + wait
    descriptor, waited = os.open(folder, os.O_RDONLY), False
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise FolderInUseError(
                        f"--output_dir {folder} is in use: another run is writing into it; give another folder, or "
                        "wait until it ends"
                    ) from None
                if not waited:
                    logger.info("--output_dir %s is in use: waiting %g s for the other run to end", folder, wait)
                waited = True
                time.sleep(PAUSE_SECONDS)
            except OSError as error:  # a file system, some over a network, that holds no folder
                logger.warning("%s: a second run into it would not be refused here: %s", folder, error)
                break
        yield waited
    finally:
        # Workers that were forked share the descriptor: closing it here would not let go of the folder.
        try:
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        except OSError:
            pass
        os.close(descriptor)
