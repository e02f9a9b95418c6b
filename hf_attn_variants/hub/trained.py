"""A push of what a training made: tried before the training begins, done when it has ended."""

from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.utils import validate_repo_id

from .push import check_visibility, explained, full_repo_id, plan_push, push_checkpoint

__all__ = ["check_hub_access", "push_trained"]


def check_hub_access(output_dir: str, hub_model_id: str | None, private: bool, token: str | None) -> None:
    """Check before a training that its model can be pushed after it.

    Args:
        output_dir: the folder for the model; its name is the default of the repository's.
        hub_model_id: the repository, user/name.
        private: whether it is to be private.
        token: instead of the stored one.

    Raises:
        ValueError: if the repository's name is wrong, or it is public and `private` is true.
        OSError: if there is no valid token, or the Hub does not answer.
    """
    repo_id, api = _repo_id(output_dir, hub_model_id), HfApi(token=token)
    validate_repo_id(repo_id)
    with explained(repo_id):
        api.whoami()
        check_visibility(api, full_repo_id(repo_id, api), private or None)


def push_trained(output_dir: str, hub_model_id: str | None, private: bool, token: str | None) -> str:
    """Upload a trained model without its checkpoints, with a model card of the run, in one commit.

    Args: as of `check_hub_access`.

    Returns:
        Where it is on the Hub.

    Raises:
        OSError: if it was not pushed; the model is in the folder, and the message says what to do.
    """
    repo_id, api = _repo_id(output_dir, hub_model_id), HfApi(token=token)
    try:
        plan = plan_push(output_dir, full_repo_id(repo_id, api))
        return push_checkpoint(plan, private=private or None, commit_message="Fine-tuned model", api=api).url
    except (ValueError, OSError) as error:
        raise OSError(
            f"{error} The trained model is in {output_dir}; `attn-variants push --model_name_or_path {output_dir} "
            f"--repo_id {repo_id}` pushes it without training again."
        ) from error


def _repo_id(output_dir: str, hub_model_id: str | None) -> str:
    return hub_model_id or Path(output_dir).resolve().name
