"""What a finished run leaves: results and curves, and the model."""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from accelerate import Accelerator
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
)
from ...model_history import ModelHistory, write_history
from .checkpoints import NAME_PATTERN
from .settings import TrainingSettings
from .tracking import plot_curves, read_log, save_results

__all__ = ["remove_earlier_run", "save_bad_batch", "save_model", "write_results"]

PREDICTIONS_PREFIX = "predictions_"
BAD_BATCH_PREFIX = "bad_batch-"
# What an earlier run of ours leaves in its output folder and a new one must not mistake for its own.
STALE_PATTERN = re.compile(
    rf"{NAME_PATTERN.pattern}|\.tmp-.*|{re.escape(PREDICTIONS_PREFIX)}.*\.(tsv|json|jsonl|txt)|{BAD_BATCH_PREFIX}.*\.pt|"
    + "|".join(
        re.escape(name) for name in (BEST_MODEL_FILE, LOG_FILE, CURVES_FILE, RESULTS_NAME, REPORT_NAME, HISTORY_NAME)
    )
)


def remove_earlier_run(output_dir: str | Path, is_source: bool) -> None:
    """Remove an earlier run's checkpoints, log, best weights and reports, but not its final model.

    Of a model that the new run begins with (`is_source`), its history and the report of its conversion stay. The
    README.md of another one, with its licence, is removed: the new model's card would take both from it.

    Raises:
        OSError: if something could not be removed.
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
    """Save model, tokenizer and history into a folder, each file whole: written elsewhere and moved into place.

    Called on every process; only the main one writes. `carried` goes into the weights' file beside the model's.

    Raises:
        OSError: if the folder cannot be written; what was in it stays.
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
    # Last, and a picture that cannot be drawn is a warning.
    plot_curves(read_log(folder / LOG_FILE), metrics, folder / CURVES_FILE, f"{title}, seed {settings.seed}")
