"""Datasets of the Hub as a user names them, with their splits."""

from typing import Any

from datasets import load_dataset

__all__ = ["load_splits"]


def load_splits(settings: Any) -> Any:
    """Return the splits of `--dataset_name`, by their names.

    Args:
        settings: with `dataset_name` and `dataset_config_name`.

    Raises:
        OSError: if it cannot be loaded.
    """
    try:
        return load_dataset(settings.dataset_name, settings.dataset_config_name)
    except Exception as error:  # the Hub's many ways to fail are one thing to the user
        raise OSError(
            f"cannot load --dataset_name {settings.dataset_name} ({type(error).__name__}: {error}); give files instead"
        ) from error
