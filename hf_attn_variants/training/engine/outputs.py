"""What a finished run leaves: results and curves, and the model."""

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from ...files import (
    BEST_MODEL_FILE,
    CONFIG_NAME,
    CURVES_FILE,
    HISTORY_NAME,
    LOG_FILE,
    REPORT_NAME,
    RESULTS_NAME,
    write_problem,
)
from ...model_folder import RESULTS, STAGE, replace_model
from ...model_history import ModelHistory, write_history
from .checkpoints import NAME_PATTERN
from .settings import TrainingSettings
from .tracking import plot_curves, read_log, save_results

__all__ = ["is_own_source", "remove_earlier_run", "save_bad_batch", "save_model", "write_results"]

PREDICTIONS_PREFIX = "predictions_"
BAD_BATCH_PREFIX = "bad_batch-"
# What an earlier run of ours leaves in its output folder and a new one must not mistake for its own.
STALE_PATTERN = re.compile(
    rf"{NAME_PATTERN.pattern}|\.tmp-.*|{BAD_BATCH_PREFIX}.*\.(pt|safetensors)|"
    + "|".join(re.escape(name) for name in (BEST_MODEL_FILE, LOG_FILE))
)


def is_own_source(settings: TrainingSettings) -> bool:
    """Say whether a run begins with the model that lies in its own output folder."""
    source = settings.model_name_or_path
    return source is not None and Path(source).expanduser().resolve() == Path(settings.output_dir).resolve()


def remove_earlier_run(output_dir: str | Path) -> None:
    """Remove an earlier run's checkpoints, log and best weights; its model and what tells of it stay until the end.

    Raises:
        OSError: if something could not be removed.
    """
    folder = Path(output_dir)
    # Without a model that they tell of, results are of nobody.
    results = () if (folder / CONFIG_NAME).exists() else (*RESULTS, REPORT_NAME, HISTORY_NAME)
    for entry in list(folder.iterdir()):
        if STALE_PATTERN.fullmatch(entry.name) or any(fnmatchcase(entry.name, each) for each in results):
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()


def save_model(
    accelerator: Accelerator,
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    settings: TrainingSettings,
    history: ModelHistory,
    carried: dict[str, torch.Tensor] | None = None,
    add_files: Callable[[Path], None] | None = None,
) -> None:
    """Save model, tokenizer and history into the output folder, whole, in the place of what an earlier run left.

    Called on every process; only the main one writes. `carried` goes into the weights' file beside the model's, and
    `add_files` is called with the folder in which the model is made, to put more beside it.

    Raises:
        OSError: if the folder cannot be written; what was in it stays.
    """
    folder, weights = Path(settings.output_dir), accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        if accelerator.is_fsdp2:  # gathered, tied weights are tensors of their own
            own = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
            weights = {name: tensor for name, tensor in weights.items() if name in own}
        stage = folder / STAGE
        shutil.rmtree(stage, ignore_errors=True)
        try:
            with _as_own_class(accelerator.unwrap_model(model)) as unwrapped:
                unwrapped.save_pretrained(stage, state_dict=weights | (carried or {}))
            tokenizer.save_pretrained(stage)
            write_history(stage, history)
            if add_files is not None:
                add_files(stage)
            umask = os.umask(0)
            os.umask(umask)
            for path in stage.iterdir():
                if path.is_file():
                    path.chmod(0o666 & ~umask)  # safetensors writes files that only their owner can read
        except Exception as error:  # safetensors has its own error for a full disk
            shutil.rmtree(stage, ignore_errors=True)
            raise OSError(f"could not write the model to {folder} {write_problem(error)}") from error
        replace_model(stage, folder, is_own_source(settings) or bool(settings.resume_from_checkpoint))
    accelerator.wait_for_everyone()


@contextmanager
def _as_own_class(model: Any) -> Iterator[Any]:
    from torch.distributed.fsdp import FSDPModule

    # FSDP2 makes a class for a model it shards, and what would be saved as the model's code is torch's.
    sharded = type(model)
    model.__class__ = next(found for found in sharded.__mro__ if not issubclass(found, FSDPModule))
    try:
        yield model
    finally:
        model.__class__ = sharded


def save_bad_batch(
    accelerator: Accelerator, batches: list[dict[str, Tensor]], output_dir: str | Path, step: int
) -> str:
    """Save this process's batches of a step that went wrong; returns where, or why it could not.

    In the file "0.input_ids" is that of the first batch; a step has several where gradients are accumulated.
    """
    path = Path(output_dir) / f"{BAD_BATCH_PREFIX}{step}-{accelerator.process_index}.safetensors"
    named = ((f"{i}.{name}", each) for i, batch in enumerate(batches) for name, each in batch.items())
    # Copies: two names of one tensor, labels that are the inputs for example, are no safetensors.
    found = {name: each.cpu().clone(memory_format=torch.contiguous_format) for name, each in named}
    try:
        path.write_bytes(safetensors.torch.save(found))
    except OSError as error:
        path.unlink(missing_ok=True)
        return f"could not be saved ({type(error).__name__}: {error})"
    return f"are in {path}"


def write_results(settings: TrainingSettings, results: dict[str, Any], metrics: list[str], title: str) -> None:
    """Write `all_results.json` and `training_curves.png`, which shows `metrics`; called on the main process.

    Raises:
        OSError: if a file could not be written.
    """
    folder = Path(settings.output_dir)
    save_results(folder / RESULTS_NAME, results, settings)
    plot_curves(read_log(folder / LOG_FILE), metrics, folder / CURVES_FILE, f"{title}, seed {settings.seed}")
