"""Pictures that stand beside results: whatever goes wrong with one, the results are there."""

import io
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .files import atomic_write

__all__ = ["write_picture"]

logger = logging.getLogger(__name__)


def write_picture(path: Path, draw: Callable[[], Any], **options: Any) -> None:
    """Write a picture, or warn that it could not be drawn.

    Args:
        path: the file.
        draw: returns a figure of matplotlib.
        options: of its `savefig`.

    Raises:
        OSError: if the file cannot be written.
    """
    image = io.BytesIO()
    try:
        draw().savefig(image, format="png", **options)
    except Exception as error:  # matplotlib's own parsers, fonts and memory
        reason = " ".join(str(error).split())[:200]
        logger.warning("%s could not be drawn (%s: %s); all else is there", path, type(error).__name__, reason)
        return
    atomic_write(path, image.getvalue())
