"""Generates model cards and pushes checkpoints to the Hugging Face Hub.

`generate_model_card` generates a model card from conversion and training reports. `plan_push` lists the files to push,
and `push_checkpoint` pushes them in a single commit.

Example:
    >>> plan = plan_push("bert-gqa4", "user/bert-gqa4", CardOptions(license="apache-2.0"))
    >>> print(plan.summary())
    >>> push_checkpoint(plan, private=True)
"""

from .card import CardOptions, generate_model_card
from .push import PushPlan, PushResult, check_visibility, plan_push, push_checkpoint, resolve_repo_id

__all__ = [
    "CardOptions",
    "PushPlan",
    "PushResult",
    "check_visibility",
    "generate_model_card",
    "plan_push",
    "push_checkpoint",
    "resolve_repo_id",
]
