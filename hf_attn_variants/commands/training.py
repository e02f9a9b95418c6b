"""What every training command does around its training: the push to the Hub, tried first and done last."""

import os
from collections.abc import Callable
from typing import Any

from ..training.engine.settings import TrainingSettings

__all__ = ["train_and_push"]


def train_and_push(settings: TrainingSettings, train: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Train, and push the result where `push_to_hub` asks for it.

    The main process pushes, at the very end, so that a push that fails loses nothing; the others need not wait for it,
    and NCCL would not let them wait long.

    Returns:
        What `train` returns.

    Raises:
        ValueError, OSError: as `train` does, or if the Hub would not take the model, or did not.
    """
    if not settings.push_to_hub:
        return train()
    from ..hub.trained import check_hub_access, push_trained

    place = settings.output_dir, settings.hub_model_id, settings.hub_private_repo, settings.hub_token
    check_hub_access(*place)
    results = train()
    if os.environ.get("RANK", "0") == "0":
        print(f"pushed to {push_trained(*place)}")
    return results
