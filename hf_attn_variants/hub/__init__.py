"""Sharing a checkpoint on the Hugging Face Hub: its model card, and the one commit that it goes up in.

`model_card` fills the card from what was really run; `plan_push` says what would go up, and `push_checkpoint` does it.
"""

from .card import CardOptions, model_card
from .push import PushPlan, PushResult, check_visibility, full_repo_id, plan_push, push_checkpoint

__all__ = [
    "CardOptions",
    "PushPlan",
    "PushResult",
    "check_visibility",
    "full_repo_id",
    "model_card",
    "plan_push",
    "push_checkpoint",
]
