"""The configuration of a checkpoint that is looked at: its config.json alone."""

from pathlib import Path
from typing import Any

from transformers.utils import cached_file

from ..conversion.checkpoint.source import check_whole_model, local_folder, read_config
from ..files import CONFIG_NAME

__all__ = ["read_checkpoint_config"]


def read_checkpoint_config(checkpoint: str, revision: str | None = None, token: str | None = None) -> dict[str, Any]:
    """Return the config.json of a folder, or of a Hub repository, of which nothing else is downloaded.

    Raises:
        OSError: if there is none.
        ValueError: if it is no configuration of transformers.
    """
    folder = local_folder(checkpoint)
    if folder is None:
        try:
            found: Any = cached_file(checkpoint, CONFIG_NAME, revision=revision, token=token)
            folder = Path(found).parent
        except OSError as error:
            raise OSError(f"there is no folder {checkpoint!r}, and as a Hub id it cannot be read: {error}") from error
    elif revision is not None:
        raise ValueError(f"`revision` is for Hub ids; {checkpoint!r} is a folder.")
    check_whole_model(folder, allow_pickle=True)
    return read_config(folder)
