"""What a finished run leaves: results and curves, the model, its predictions, a push to the Hub."""

import argparse
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from huggingface_hub import HfApi
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from ...files import (
    BEST_MODEL_FILE,
    CARD_NAME,
    CONFIG_NAME,
    CURVES_FILE,
    HISTORY_NAME,
    LOG_FILE,
    REPORT_NAME,
    RESULTS_NAME,
    atomic_write,
)
from ...model_history import ModelHistory, write_history
from .checkpoints import NAME_PATTERN
from .tracking import plot_curves, read_log, save_results

__all__ = [
    "check_hub_access",
    "push_folder",
    "remove_earlier_run",
    "save_bad_batch",
    "save_model",
    "save_predictions",
    "write_results",
]

PREDICTIONS_PREFIX = "predictions_"
BAD_BATCH_PREFIX = "bad_batch-"
# What an earlier run of ours leaves in its output folder and a new one must not mistake for its own.
STALE_PATTERN = re.compile(
    rf"{NAME_PATTERN.pattern}|\.tmp-.*|{re.escape(PREDICTIONS_PREFIX)}.*\.(tsv|json|jsonl)|{BAD_BATCH_PREFIX}.*\.pt|"
    + "|".join(
        re.escape(name) for name in (BEST_MODEL_FILE, LOG_FILE, CURVES_FILE, RESULTS_NAME, REPORT_NAME, HISTORY_NAME)
    )
)


def remove_earlier_run(output_dir: str | Path, is_source: bool) -> None:
    """Removes an earlier run's checkpoints, log, best weights and reports; its final model stays until it is replaced.

    Args:
        output_dir: The folder.
        is_source: Whether the model there is the one that the new run begins with: its history and the report of its
            conversion stay. The README.md of another model, with its licence, is removed: the new model's card would
            take both from it.

    Raises:
        OSError: Something could not be removed.
    """
    folder, kept = Path(output_dir), {HISTORY_NAME, REPORT_NAME} if is_source else set()
    # Without a model beside it, a README.md may be of anything.
    gone = {CARD_NAME} if not is_source and (folder / CONFIG_NAME).is_file() else set()
    for entry in list(folder.iterdir()):
        if entry.name in gone or (entry.name not in kept and STALE_PATTERN.fullmatch(entry.name)):
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()


def save_model(
    accelerator: Accelerator,
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    output_dir: str | Path,
    history: ModelHistory,
    carried: dict[str, torch.Tensor] | None = None,
) -> None:
    """Saves model, tokenizer and history into a folder, each file whole: written elsewhere and moved into place.

    Called on every process; only the main one writes.

    Args:
        accelerator: Of the run.
        model: As it was prepared.
        tokenizer: Its tokenizer.
        output_dir: The folder, which is there.
        history: Of `session.start_run`: how the model was made before this run.
        carried: Further tensors for the weights' file, which the model has no place for.

    Raises:
        OSError: The folder cannot be written; what was in it stays.
    """
    weights = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        if accelerator.is_fsdp2:  # gathered, tied weights are tensors of their own
            own = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
            weights = {name: tensor for name, tensor in weights.items() if name in own}
        temporary = Path(output_dir) / ".tmp-model"
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            with _as_own_class(accelerator.unwrap_model(model)) as unwrapped:
                unwrapped.save_pretrained(temporary, state_dict=weights | (carried or {}))
            tokenizer.save_pretrained(temporary)
            write_history(temporary, history)
        except Exception as error:  # safetensors has its own error for a full disk
            shutil.rmtree(temporary, ignore_errors=True)
            raise OSError(f"could not write the model to {output_dir} ({type(error).__name__}: {error})") from error
        # The config last: a folder with a config but without weights would look like a checkpoint.
        umask = os.umask(0)
        os.umask(umask)
        for path in sorted(temporary.iterdir(), key=lambda path: (path.name == CONFIG_NAME, path.name)):
            path.chmod(0o666 & ~umask)  # safetensors writes files that only their owner can read
            os.replace(path, Path(output_dir) / path.name)
        temporary.rmdir()
    accelerator.wait_for_everyone()


@contextmanager
def _as_own_class(model: nn.Module) -> Iterator[nn.Module]:
    from torch.distributed.fsdp import FSDPModule

    # FSDP2 makes a class for a model it shards, and what would be saved as the model's code is torch's.
    sharded = type(model)
    model.__class__ = next(found for found in sharded.__mro__ if not issubclass(found, FSDPModule))
    try:
        yield model
    finally:
        model.__class__ = sharded


def save_predictions(path: str | Path, indices: Iterable[str], predictions: Iterable[str]) -> None:
    """Writes a GLUE submission file: a header and one `index<TAB>prediction` a line."""
    rows = [f"{index}\t{prediction}" for index, prediction in zip(indices, predictions, strict=True)]
    atomic_write(path, "\n".join(["index\tprediction", *rows]) + "\n")


def check_hub_access(args: argparse.Namespace) -> None:
    """Checks before training that the model can be pushed after it.

    Raises:
        ValueError: The repository's name is wrong or it is public against `--hub_private_repo`, there is no valid
            token, or the Hub does not answer.
    """
    if not args.push_to_hub:
        return
    try:
        validate_repo_id(_repo_id(args))
    except HFValidationError as error:
        raise ValueError(f"--hub_model_id: {' '.join(str(error).split())}") from error
    api = HfApi(token=args.hub_token)
    try:
        api.whoami()
    except Exception as error:  # no token, a bad one, no network: three error families of as many libraries
        raise ValueError(
            f"--push_to_hub: the Hub does not accept this session ({type(error).__name__}: {error}); "
            "run `hf auth login` or give --hub_token"
        ) from error
    if args.hub_private_repo:
        from ...hub import check_visibility, full_repo_id

        check_visibility(api, full_repo_id(_repo_id(args), api), private=True)


def save_bad_batch(
    accelerator: Accelerator, batches: list[dict[str, Tensor]], output_dir: str | Path, step: int
) -> str:
    """Saves this process's batches of a step that went wrong, for `torch.load`; returns where, or why it could not."""
    path = Path(output_dir) / f"{BAD_BATCH_PREFIX}{step}-{accelerator.process_index}.pt"
    try:
        torch.save([{key: value.cpu() for key, value in batch.items()} for batch in batches], path)
    except (OSError, RuntimeError) as error:  # a full disk is either
        path.unlink(missing_ok=True)
        return f"could not be saved ({type(error).__name__}: {error})"
    return f"are in {path}"


def write_results(args: argparse.Namespace, results: dict[str, Any], metrics: list[str], title: str) -> None:
    """Writes `all_results.json` and `training_curves.png`. Called on the main process.

    Args:
        args: Of `arguments.add_shared_arguments`.
        results: What `all_results.json` begins with.
        metrics: Names of the dev metrics to draw, without "eval_".
        title: Above the curves; the seed is added.

    Raises:
        OSError: A file could not be written.
    """
    folder = Path(args.output_dir)
    save_results(folder / RESULTS_NAME, results, args)
    plot_curves(read_log(folder / LOG_FILE), metrics, folder / CURVES_FILE, f"{title}, seed {args.seed}")


def push_folder(args: argparse.Namespace) -> None:
    """Uploads the output folder without its checkpoints, with a model card of the run, in one commit.

    Called on the main process at the very end, so that a push that fails loses nothing; the others need not wait for
    it, and NCCL would not let them wait long. Without `--push_to_hub` it does nothing.

    Raises:
        ValueError, OSError: It was not pushed; the model is in the output folder, and the message says what to do.
    """
    if not args.push_to_hub:
        return
    from ...hub import full_repo_id, plan_push, push_checkpoint

    api = HfApi(token=args.hub_token)
    repo_id = _repo_id(args)
    private = True if args.hub_private_repo else None
    try:
        plan = plan_push(args.output_dir, full_repo_id(repo_id, api))
        url = push_checkpoint(plan, private=private, commit_message="Fine-tuned model", api=api).url
    except (ValueError, OSError) as error:
        kind = ValueError if isinstance(error, ValueError) else OSError
        raise kind(
            f"{error} The trained model is in {args.output_dir}; `attn-variants push --model_name_or_path "
            f"{args.output_dir} --repo_id {repo_id}` pushes it without training again."
        ) from error
    print(f"pushed to {url}")


def _repo_id(args: argparse.Namespace) -> str:
    return args.hub_model_id or Path(args.output_dir).resolve().name
