"""Saves and restores training checkpoints, locks the output folder, and handles the signals that stop a run."""

import json
import logging
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import load, save
from safetensors.torch import load_file, load_model
from torch import nn

from ...errors import is_first_process
from ...files import BEST_MODEL_FILE, LOG_FILE, STATE_FILE, describe_write_error, load_json

logger = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# A terminal sends Ctrl-C to every process, and a launcher also forwards it to its processes. A second signal within
# this time is treated as a duplicate.
CTRL_C_REPEAT_SECONDS = 1.0


class StopSignalRecorder:
    """Records SIGTERM and Ctrl-C in `number`, so that the training loop can stop after the current step."""

    def __init__(self) -> None:
        self.number: int | None = None
        self._interrupted: float | None = None

    @contextmanager
    def record_signals(self) -> Iterator[None]:
        """Record the signals while the `with` block runs. A second Ctrl-C raises `KeyboardInterrupt`.

        Signals are only recorded if this is called on the main thread.
        """
        if threading.current_thread() is not threading.main_thread():  # Python allows no handlers there
            yield
            return
        # Leave Ctrl-C unchanged if it is ignored or if the user has installed a handler.
        numbers = [signal.SIGTERM]
        numbers += [signal.SIGINT] if signal.getsignal(signal.SIGINT) is signal.default_int_handler else []
        old_handlers = {number: signal.signal(number, self._handle_signal) for number in numbers}
        try:
            yield
        finally:
            for number, handler in old_handlers.items():
                signal.signal(number, handler)

    def _handle_signal(self, signum: int, frame: Any) -> None:
        """Record a signal, or raise `KeyboardInterrupt` for a second Ctrl-C."""
        if signum == signal.SIGINT:
            current_time = time.monotonic()
            if self._interrupted is None:
                self._interrupted = current_time
                if is_first_process():  # `os.write` is used because the interrupted code may hold stderr's lock
                    message = "Ctrl-C: Finishing the step and saving a checkpoint. Press again to stop immediately."
                    os.write(2, f"\n{message}\n".encode())
            elif current_time - self._interrupted > CTRL_C_REPEAT_SECONDS:
                raise KeyboardInterrupt
        self.number = signum


# This must exceed the time that the data workers of a killed run need to notice that the run ended, because they hold
# the lock on the folder until then.
WAIT_SECONDS = 12.0
PAUSE_SECONDS = 0.2


class FolderInUseError(ValueError):
    """Raised if another process is using the output folder."""


@contextmanager
def lock_folder(folder: str, wait_seconds: float | None = None) -> Iterator[bool]:
    """Lock an output folder for this process. The operating system releases the lock when the process ends.

    Args:
        folder: The folder, which must exist. No file is written to it.
        wait_seconds: The number of seconds to wait for another process to release the lock. Defaults to
            `WAIT_SECONDS`.

    Yields:
        True if another process held the lock at first, so that the contents of the folder may have changed.

    Raises:
        FolderInUseError: If another process still holds the lock after `wait_seconds`.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield False
        return
    wait = WAIT_SECONDS if wait_seconds is None else wait_seconds
    deadline = time.monotonic() + wait
    descriptor, waited = os.open(folder, os.O_RDONLY), False
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise FolderInUseError(
                        f"--output_dir {folder} is in use by another run. Choose another folder, or wait until that "
                        "run ends."
                    ) from None
                if not waited:
                    logger.info("--output_dir %s is in use. Waiting %g s for the other run to end.", folder, wait)
                waited = True
                time.sleep(PAUSE_SECONDS)
            except OSError as error:  # some network file systems do not support locks
                logger.warning(
                    "Could not lock %s, so another run could write to it at the same time: %s", folder, error
                )
                break
        yield waited
    finally:
        # Forked workers share the file descriptor, so closing it here would not release the lock.
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


# Tied weights are saved once and tied again when they are loaded, so Accelerate's warning about them is not useful.
logging.getLogger("accelerate.utils.other").setLevel(logging.ERROR)
NAME_PATTERN = re.compile(r"checkpoint-(\d+)")


@dataclass
class TrainState:
    """The progress of a training run, except for the parts that Accelerate saves."""

    step: int = 0  # the number of completed optimizer steps
    epoch: int = 0  # epoch of the next batch, counted from 0
    batch_in_epoch: int = 0  # the number of batches of this epoch that each process has used
    position: list[int] | None = None  # the "position" in the last batch, if any, from which a resumed run continues
    # Totals over all processes: the training examples, their tokens, and the training FLOPs (see
    # `loop.TrainingCostCounter`).
    examples: int = 0
    tokens: int = 0
    flops: int = 0
    loss_total: float = 0.0  # the sum of the mean losses of all steps
    # The sum of the losses and the number of steps since the last log record, and the values of `tokens` and
    # `train_seconds` at that record.
    window_loss: float = 0.0
    window_steps: int = 0
    window_tokens: int = 0
    window_begin: float = 0.0
    lr: float = 0.0  # learning rate of the last step
    best_metric: float | None = None
    best_step: int | None = None
    bad_evaluations: int = 0  # the number of evaluations since the best evaluation
    finished: bool = False  # whether early stopping ended the run
    train_seconds: float = 0.0  # the time spent in training steps, without evaluations and checkpoints
    # The settings and data that determine the final weights.
    fingerprint: dict[str, Any] = field(default_factory=dict)
    # The hardware and software that affect the rounding of sums. If they differ, the run resumes with a warning.
    environment: dict[str, Any] = field(default_factory=dict)


def _collect_environment(accelerator: Accelerator) -> dict[str, Any]:
    """Return the hardware and software properties that affect the rounding of sums."""
    device = accelerator.device.type
    return {
        "device": torch.cuda.get_device_name(accelerator.device) if device == "cuda" else device,
        "CPU threads": torch.get_num_threads() if device == "cpu" else None,
        "torch": torch.__version__,
        "mixed precision": accelerator.mixed_precision,
    }


def get_checkpoint_step(checkpoint: Path) -> int:
    """Return the step from the folder name of a checkpoint."""
    return int(checkpoint.name.removeprefix("checkpoint-"))


def list_checkpoints(output_dir: str | Path) -> list[Path]:
    """List the complete checkpoints of a run, sorted by step."""
    folders = [path for path in Path(output_dir).glob("checkpoint-*") if NAME_PATTERN.fullmatch(path.name)]
    complete = [path for path in folders if (path / STATE_FILE).is_file()]
    return sorted(complete, key=get_checkpoint_step)


def describe_last_checkpoint(output_dir: str | Path) -> str:
    """Return a sentence for messages that names the last complete checkpoint, or "" if there is no checkpoint."""
    checkpoints = list_checkpoints(output_dir)
    return f" The last good checkpoint is {checkpoints[-1]}." if checkpoints else ""


def find_checkpoint(resume_from: str, output_dir: str | Path) -> Path:
    """Return the path of the checkpoint that `--resume_from_checkpoint` selects.

    Args:
        resume_from: The value of the flag, which is a folder or "latest".
        output_dir: The output folder of the run, which is searched if `resume_from` is "latest".

    Raises:
        ValueError: If the checkpoint does not exist or is incomplete.
    """
    is_latest = resume_from == "latest"
    place = output_dir if is_latest else resume_from
    folders = list_checkpoints(output_dir) if is_latest else [Path(resume_from)]
    if not folders or not (folders[-1] / STATE_FILE).is_file():
        raise ValueError(
            f"--resume_from_checkpoint {resume_from} requires a complete checkpoint, but {place} has none. Start a "
            "new run and save checkpoints with --checkpointing_steps."
        )
    return folders[-1]


@contextmanager
def convert_write_errors(problem: str, output_dir: Path, temporary: Path | None = None) -> Iterator[None]:
    """Convert any error in the `with` block to an `OSError` that names the last complete checkpoint.

    Args:
        problem: The beginning of the message, such as "The model could not be written".
        output_dir: The output folder of the run.
        temporary: The incomplete file or folder to remove after an error.
    """
    try:
        yield
    except Exception as error:  # a full disk can cause an OSError, a RuntimeError or a SafetensorError
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
            with suppress(OSError):
                temporary.unlink()
        last = describe_last_checkpoint(output_dir)
        raise OSError(f"{problem} {describe_write_error(error)}.{last}") from error


def save_checkpoint(
    accelerator: Accelerator, state: TrainState, output_dir: str | Path, save_total_limit: int | None = None
) -> Path:
    """Save the model, optimizer, schedule, random states, progress, log and best weights as `checkpoint-<step>`.

    This function must be called on every process. All files are written to a temporary folder and flushed to disk
    before the folder is renamed. If the run is killed or the disk is full, earlier checkpoints are left unchanged.

    Args:
        accelerator: The accelerator of the run.
        state: The progress of the run.
        output_dir: The output folder of the run.
        save_total_limit: The maximum number of checkpoints to keep, or None to keep all. Checkpoints from later steps
            (which are left over if the run resumed from an earlier checkpoint) are deleted first, followed by the
            oldest checkpoints.

    Raises:
        OSError: If the checkpoint could not be written. No incomplete checkpoint is left behind.
    """
    output_dir = Path(output_dir)
    target = output_dir / f"checkpoint-{state.step}"
    temporary = output_dir / f".tmp-checkpoint-{state.step}"
    if accelerator.is_main_process:
        shutil.rmtree(temporary, ignore_errors=True)
    accelerator.wait_for_everyone()
    state.environment = _collect_environment(accelerator)
    with convert_write_errors(f"The checkpoint {target} could not be written", output_dir, temporary):
        accelerator.save_state(str(temporary))
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            _finish_checkpoint(state, output_dir, temporary, target)
    if accelerator.is_main_process and save_total_limit is not None:
        other_checkpoints = [path for path in list_checkpoints(output_dir) if path != target]
        # Later steps come first, and then the oldest checkpoints.
        other_checkpoints.sort(key=lambda path: get_checkpoint_step(path) <= state.step)
        for old in other_checkpoints[: max(len(other_checkpoints) + 1 - save_total_limit, 0)]:
            _remove_checkpoint(old)
    accelerator.wait_for_everyone()
    return target


def _finish_checkpoint(state: TrainState, output_dir: Path, temporary: Path, target: Path) -> None:
    """Add the log, the best weights and the state to a temporary checkpoint, and rename it to its final name."""
    if (output_dir / LOG_FILE).is_file():
        shutil.copyfile(output_dir / LOG_FILE, temporary / LOG_FILE)
    if state.best_step is not None and (output_dir / BEST_MODEL_FILE).is_file():
        _link_or_copy(output_dir / BEST_MODEL_FILE, temporary / BEST_MODEL_FILE)
    (temporary / STATE_FILE).write_text(json.dumps(asdict(state), indent=2), encoding="utf-8")
    for path in [*temporary.rglob("*"), temporary]:
        _flush_to_disk(path)
    if target.exists():
        _remove_checkpoint(target)
    os.replace(temporary, target)
    _flush_to_disk(output_dir)


def _link_or_copy(source: Path, target: Path) -> None:
    """Link a file, or copy it if the file system does not support links."""
    try:
        # New best weights replace the file instead of overwriting its content, so a link preserves the old weights.
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _flush_to_disk(path: Path) -> None:
    """Flush a file or folder to disk."""
    # Without this, the new name could reach the disk before the data, and a power failure could leave an empty
    # checkpoint.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_checkpoint(folder: Path) -> None:
    """Delete a checkpoint."""
    # The folder is renamed first, so that a partially deleted folder does not count as a checkpoint.
    hidden_folder = folder.with_name(f".tmp-removed-{folder.name}")
    shutil.rmtree(hidden_folder, ignore_errors=True)
    os.replace(folder, hidden_folder)
    shutil.rmtree(hidden_folder)


def load_checkpoint(
    accelerator: Accelerator, path: Path, output_dir: str | Path, fingerprint: dict[str, Any]
) -> TrainState:
    """Restore the state that `save_checkpoint` saved. This function must be called on every process.

    The random states are restored last. The log and the best weights in the output folder are replaced by those in the
    checkpoint.

    Args:
        accelerator: The accelerator with the prepared model, optimizer and schedule.
        path: The checkpoint.
        output_dir: The output folder of the run.
        fingerprint: The settings and data that must be the same as in the checkpoint.

    Returns:
        The progress of the run.

    Raises:
        ValueError: If a setting or the training data has changed (the message contains the old and the new values), if
            the weights do not match the model, or if a file is damaged.
    """
    state = TrainState(**load_json(path / STATE_FILE))
    if changes := _describe_changes(state.fingerprint, fingerprint):
        raise ValueError(f"Cannot resume exactly from {path}: {changes}. Use the same values as before.")
    differences = _describe_changes(state.environment, _collect_environment(accelerator))
    if differences and accelerator.is_main_process:
        logger.warning("Resuming from %s is only exact up to rounding: %s.", path, differences)
    if accelerator.is_main_process:
        for leftover_folder in Path(output_dir).glob(".tmp-*"):
            shutil.rmtree(leftover_folder) if leftover_folder.is_dir() else leftover_folder.unlink()
        for name in (LOG_FILE, BEST_MODEL_FILE):
            # The resumed run recreates what the interrupted run wrote after the checkpoint.
            (Path(output_dir) / name).unlink(missing_ok=True)
            if (path / name).is_file():
                shutil.copyfile(path / name, Path(output_dir) / f".tmp-{name}")
                os.replace(Path(output_dir) / f".tmp-{name}", Path(output_dir) / name)
    accelerator.wait_for_everyone()
    try:
        accelerator.load_state(str(path))
        random_states = load(path / f"random_states_{accelerator.process_index}.pkl")
    except Exception as error:  # unpickling a damaged file can raise any exception
        raise ValueError(
            f"The checkpoint {path} is damaged or does not match this model ({type(error).__name__}: {error}). Resume "
            "from an earlier checkpoint, or start a new run."
        ) from error
    restored = torch.equal(torch.get_rng_state(), random_states["torch_manual_seed"])
    device = accelerator.device
    if device.type == "cuda" and state.environment.get("device") == _collect_environment(accelerator)["device"]:
        saved = random_states["torch_cuda_manual_seed"][device.index or 0]
        restored = restored and torch.equal(torch.cuda.get_rng_state(device), saved)
    if not restored:  # Accelerate does not raise an error if it cannot restore the random states
        raise ValueError(f"Cannot resume exactly because the random states in {path} could not be restored.")
    return state


# Settings that older checkpoints do not contain, with the values that were used in those runs.
UNRECORDED_SETTINGS = {"objective": "mlm", "keep_whitespace": False}


def _describe_changes(saved: dict[str, Any], current_settings: dict[str, Any]) -> str:
    """Describe the keys whose values changed, with the old and new values."""
    old_settings = {
        key: saved[key] if saved.get(key) is not None else UNRECORDED_SETTINGS.get(key) for key in current_settings
    }
    return ", ".join(
        f"{key} was {old_settings[key]} and is now {current_settings[key]}"
        for key in current_settings
        if old_settings[key] != current_settings[key]
    )


def save_best_weights(accelerator: Accelerator, model: nn.Module, output_dir: str | Path) -> None:
    """Save the current weights as the best weights so far. This function must be called on every process.

    Raises:
        OSError: If the weights could not be written. No incomplete file is left behind, and the message names the last
            complete checkpoint.
    """
    weights = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        folder = Path(output_dir)
        temporary = folder / f".tmp-{BEST_MODEL_FILE}"
        with convert_write_errors(f"The best weights could not be written to {folder}", folder, temporary):
            save(weights, str(temporary), safe_serialization=True)
            temporary.replace(folder / BEST_MODEL_FILE)
    accelerator.wait_for_everyone()


def load_weights(accelerator: Accelerator, model: nn.Module, path: Path) -> None:
    """Load weights from a safetensors file into a prepared model, which may be sharded.

    This function must be called on every process.
    """
    if not accelerator.is_fsdp2:
        load_model(accelerator.unwrap_model(model), str(path))
        return
    from torch.distributed.tensor import DTensor, distribute_tensor

    current = model.state_dict()
    with torch.no_grad():
        for name, tensor in load_file(path).items():  # the file contains tied weights only once
            target, tensor = current[name], tensor.to(current[name].device)
            if isinstance(target, DTensor):
                tensor = distribute_tensor(tensor, target.device_mesh, target.placements)
            target.copy_(tensor)
