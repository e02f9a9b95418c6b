"""Checkpoints for exact resuming, the lock of the output folder, and the signals that stop a run."""

import json
import logging
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import load, save
from safetensors import SafetensorError
from safetensors.torch import load_file, load_model
from torch import nn

from ...errors import is_first_process
from ...files import BEST_MODEL_FILE, LOG_FILE, STATE_FILE, describe_write_error, load_json

logger = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# A terminal sends Ctrl-C to every process, and a launcher forwards it: a second one within this time is the same one.
CTRL_C_REPEAT_SECONDS = 1.0


class StopSignals:
    """Records SIGTERM and Ctrl-C in `number`, so that the training loop can stop at a suitable moment."""

    def __init__(self) -> None:
        self.number: int | None = None
        self._interrupted: float | None = None
        self._process = os.getpid()

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Record the signals while the block runs. A second Ctrl-C raises KeyboardInterrupt.

        Only the main thread can do this; on other threads nothing is recorded.
        """
        if threading.current_thread() is not threading.main_thread():  # Python allows handlers only there
            yield
            return
        # If Ctrl-C is ignored or has a handler of the user, this does not change.
        numbers = [signal.SIGTERM]
        numbers += [signal.SIGINT] if signal.getsignal(signal.SIGINT) is signal.default_int_handler else []
        before = {number: signal.signal(number, self._handle) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: Any) -> None:
        """Record a signal. This is the signal handler."""
        if os.getpid() != self._process:  # a worker of a dataloader, which its parent stops
            return
        if number == signal.SIGINT:
            now = time.monotonic()
            if self._interrupted is None:
                self._interrupted = now
                if is_first_process():  # os.write, because the interrupted code may hold the lock of stderr
                    message = b"\nCtrl-C: The step is finished and a checkpoint saved. Press again to stop at once.\n"
                    os.write(2, message)
            elif now - self._interrupted > CTRL_C_REPEAT_SECONDS:
                raise KeyboardInterrupt
        self.number = number


# The data workers of a killed run hold the lock of its folder until they notice its end. This time is longer.
WAIT_SECONDS = 12.0
PAUSE_SECONDS = 0.2


class FolderInUseError(ValueError):
    """Error that is raised if another process uses the folder."""


@contextmanager
def lock_folder(folder: str, wait_seconds: float | None = None) -> Iterator[bool]:
    """Lock an output folder for this process. The operating system releases the lock when the process ends.

    Args:
        folder: The folder, which must exist. Nothing is written into it.
        wait_seconds: How long to wait for another process that has the lock. None: `WAIT_SECONDS`.

    Yields:
        Whether another process had the lock before. If so, the contents of the folder may have changed.

    Raises:
        FolderInUseError: If another process still has the lock after this time.
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
                        f"--output_dir {folder} is in use by another run. Give another folder, or wait until that run "
                        "ends."
                    ) from None
                if not waited:
                    logger.info("--output_dir %s is in use. Waiting %g s for the other run to end.", folder, wait)
                waited = True
                time.sleep(PAUSE_SECONDS)
            except OSError as error:  # some network file systems have no locks
                logger.warning("%s cannot be locked, so a second run could write into it: %s", folder, error)
                break
        yield waited
    finally:
        # Forked workers share the descriptor, so closing it here would not release the lock.
        try:
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        except OSError:
            pass
        os.close(descriptor)


# Tied weights are saved once and tied again when they are loaded, so Accelerate's warning at each save is not useful.
logging.getLogger("accelerate.utils.other").setLevel(logging.ERROR)
NAME_PATTERN = re.compile(r"checkpoint-(\d+)")


@dataclass
class TrainState:
    """The progress of a run, except the parts that Accelerate saves."""

    step: int = 0  # optimizer steps done
    epoch: int = 0  # epoch of the next batch, from 0
    batch_in_epoch: int = 0  # batches of this epoch that each process has used
    position: list[int] | None = None  # "position" of the last batch, if it has one; it is used to find the data again
    # On all processes together: training examples, their tokens, and the FLOPs of training; see `loop.TrainingCost`.
    examples: int = 0
    tokens: int = 0
    flops: int = 0
    loss_total: float = 0.0  # the sum of the mean losses of all steps
    # Loss and steps since the last log record; `tokens` and `train_seconds` at that record.
    window_loss: float = 0.0
    window_steps: int = 0
    window_tokens: int = 0
    window_begin: float = 0.0
    lr: float = 0.0  # learning rate of the last step
    best_metric: float | None = None
    best_step: int | None = None
    bad_evaluations: int = 0  # evaluations since the best one
    finished: bool = False  # whether early stopping ended the training
    train_seconds: float = 0.0  # time in training steps, without evaluations and checkpoints
    # Settings and data that determine the final weights.
    fingerprint: dict[str, Any] = field(default_factory=dict)
    # Hardware and software that determine how sums are rounded. If they differ, the run resumes with a warning.
    environment: dict[str, Any] = field(default_factory=dict)


def _collect_environment(accelerator: Accelerator) -> dict[str, Any]:
    """Return the hardware and software that determine the order in which sums are rounded."""
    device = accelerator.device.type
    return {
        "device": torch.cuda.get_device_name(accelerator.device) if device == "cuda" else device,
        "CPU threads": torch.get_num_threads() if device == "cpu" else None,
        "torch": torch.__version__,
        "mixed precision": accelerator.mixed_precision,
    }


def list_checkpoints(output_dir: str | Path) -> list[Path]:
    """Return the complete checkpoints of a run, oldest first."""
    folders = [path for path in Path(output_dir).glob("checkpoint-*") if NAME_PATTERN.fullmatch(path.name)]
    complete = [path for path in folders if (path / STATE_FILE).is_file()]
    return sorted(complete, key=_get_step)


def describe_last_checkpoint(output_dir: str | Path) -> str:
    """Return the last sentence of a failed write's message, which names the last checkpoint, or "" without one."""
    checkpoints = list_checkpoints(output_dir)
    return f" The last good checkpoint is {checkpoints[-1]}." if checkpoints else ""


def _get_step(checkpoint: Path) -> int:
    """Return the step in the name of a checkpoint."""
    match: Any = NAME_PATTERN.fullmatch(checkpoint.name)  # `list_checkpoints` has checked the name
    return int(match[1])


def find_checkpoint(resume_from: str, output_dir: str | Path) -> Path:
    """Find the checkpoint that `--resume_from_checkpoint` names.

    Args:
        resume_from: The value of the flag: a folder or "latest".
        output_dir: The output folder of the run, for "latest".

    Raises:
        ValueError: If the checkpoint does not exist or is not complete.
    """
    if resume_from == "latest":
        checkpoints = list_checkpoints(output_dir)
        if not checkpoints:
            raise ValueError(
                f"--resume_from_checkpoint latest needs a complete checkpoint, but {output_dir} has none. Start a new "
                "run, and save checkpoints with --checkpointing_steps."
            )
        return checkpoints[-1]
    path = Path(resume_from)
    if not (path / STATE_FILE).is_file():
        raise ValueError(
            f"--resume_from_checkpoint must be `latest` or a folder with a complete checkpoint, but {path} has no "
            f"{STATE_FILE}."
        )
    return path


def save_checkpoint(
    accelerator: Accelerator, state: TrainState, output_dir: str | Path, save_total_limit: int | None = None
) -> Path:
    """Save the model, optimizer, schedule, random states, position, log and best weights as `checkpoint-<step>`.

    This is called on every process. Everything is written to a temporary folder, flushed to the disk and renamed. If
    the run is killed or the disk is full, the earlier checkpoints do not change.

    Args:
        accelerator: The accelerator of the run.
        state: The progress of the run.
        output_dir: The output folder of the run.
        save_total_limit: The number of checkpoints to keep. Checkpoints of later steps are deleted first (they are
            left over if a run resumed from an earlier checkpoint), then the oldest ones.

    Raises:
        OSError: If the checkpoint could not be written. In this case no incomplete checkpoint remains.
    """
    output_dir = Path(output_dir)
    target = output_dir / f"checkpoint-{state.step}"
    temporary = output_dir / f".tmp-checkpoint-{state.step}"
    if accelerator.is_main_process:
        shutil.rmtree(temporary, ignore_errors=True)
    accelerator.wait_for_everyone()
    state.environment = _collect_environment(accelerator)
    try:
        accelerator.save_state(str(temporary))
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            _finish_checkpoint(state, output_dir, temporary, target)
    except Exception as error:  # a full disk causes an OSError, a RuntimeError or a SafetensorError
        shutil.rmtree(temporary, ignore_errors=True)
        raise OSError(
            f"The checkpoint {target} could not be written {describe_write_error(error)}."
            f"{describe_last_checkpoint(output_dir)}"
        ) from error
    if accelerator.is_main_process and save_total_limit is not None:
        others = [path for path in list_checkpoints(output_dir) if path != target]
        others.sort(key=lambda path: _get_step(path) <= state.step)  # later steps first, both parts oldest first
        for old in others[: max(len(others) + 1 - save_total_limit, 0)]:
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
        _flush(path)
    if target.exists():
        _remove_checkpoint(target)
    os.replace(temporary, target)
    _flush(output_dir)


def _link_or_copy(source: Path, target: Path) -> None:
    """Link a file, or copy it if the file system has no links."""
    try:
        # New best weights replace the file and do not write into it, so a link keeps the old weights without a copy.
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _flush(path: Path) -> None:
    """Flush a file or folder to the disk."""
    # Otherwise, a rename could reach the disk before the data, and a power cut would leave an empty checkpoint.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_checkpoint(folder: Path) -> None:
    """Delete a checkpoint."""
    # It is renamed first, so that a half-deleted folder does not count as a checkpoint.
    doomed = folder.with_name(f".tmp-removed-{folder.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    os.replace(folder, doomed)
    shutil.rmtree(doomed)


def load_checkpoint(
    accelerator: Accelerator, path: Path, output_dir: str | Path, fingerprint: dict[str, Any]
) -> TrainState:
    """Restore everything that `save_checkpoint` saved, the random states last. Called on every process.

    The log and the best weights in the output folder are reset to those of the checkpoint.

    Args:
        accelerator: The accelerator with the prepared model, optimizer and schedule.
        path: The checkpoint.
        output_dir: The output folder of the run.
        fingerprint: The settings and data that must be the same as in the checkpoint.

    Returns:
        The progress of the run.

    Raises:
        ValueError: If a setting or the training data differ from the saved ones (the message contains the old and the
            new values), the weights do not fit the model, or a file is damaged.
    """
    state = TrainState(**load_json(path / STATE_FILE))
    if changes := _describe_changes(state.fingerprint, fingerprint):
        raise ValueError(f"Cannot resume exactly from {path}: {changes}. Use the same values as before.")
    differences = _describe_changes(state.environment, _collect_environment(accelerator))
    if differences and accelerator.is_main_process:
        logger.warning("Resuming from %s is exact only up to rounding: %s.", path, differences)
    if accelerator.is_main_process:
        for leftover in Path(output_dir).glob(".tmp-*"):
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        for name in (LOG_FILE, BEST_MODEL_FILE):
            # The resumed run writes again what the interrupted run wrote after the checkpoint.
            (Path(output_dir) / name).unlink(missing_ok=True)
            if (path / name).is_file():
                shutil.copyfile(path / name, Path(output_dir) / f".tmp-{name}")
                os.replace(Path(output_dir) / f".tmp-{name}", Path(output_dir) / name)
    accelerator.wait_for_everyone()
    try:
        accelerator.load_state(str(path))
    except (RuntimeError, SafetensorError, UnpicklingError, EOFError) as error:
        raise ValueError(
            f"The checkpoint {path} is damaged or does not fit this model ({type(error).__name__}: {error}). Resume "
            "from an earlier checkpoint, or start a new run."
        ) from error
    same_device = state.environment.get("device") == _collect_environment(accelerator)["device"]
    random_states = path / f"random_states_{accelerator.process_index}.pkl"
    _check_random_state(random_states, accelerator.device if same_device else torch.device("cpu"))
    return state


def _describe_changes(saved: dict[str, Any], now: dict[str, Any]) -> str:
    """Return the keys whose values changed, with their old and new values, as text."""
    return ", ".join(f"{key} was {saved.get(key)} and is {now[key]}" for key in now if saved.get(key) != now[key])


def _check_random_state(path: Path, device: torch.device) -> None:
    """Check that Accelerate restored the random states, because it continues silently if it could not."""
    try:
        states = load(path)
        restored = torch.equal(torch.get_rng_state(), states["torch_manual_seed"])
        if restored and device.type == "cuda":
            restored = torch.equal(
                torch.cuda.get_rng_state(device), states["torch_cuda_manual_seed"][device.index or 0]
            )
    except Exception as error:  # unpickling a damaged file can raise anything
        raise ValueError(
            f"Cannot resume exactly, because {path} cannot be read ({type(error).__name__}: {error})."
        ) from error
    if not restored:
        raise ValueError(f"Cannot resume exactly, because the random states in {path} could not be restored.")


def save_best_weights(accelerator: Accelerator, model: nn.Module, output_dir: str | Path) -> None:
    """Write the weights of the best evaluation so far, which replace earlier ones. Called on every process.

    Raises:
        OSError: If they could not be written. No incomplete file remains, and the message names the last good
            checkpoint.
    """
    weights = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        path = Path(output_dir) / BEST_MODEL_FILE
        temporary = path.with_name(f".tmp-{path.name}")
        try:
            save(weights, str(temporary), safe_serialization=True)
            temporary.replace(path)
        except Exception as error:  # safetensors raises its own error for a full disk
            temporary.unlink(missing_ok=True)
            raise OSError(
                f"The best weights could not be written to {output_dir} {describe_write_error(error)}."
                f"{describe_last_checkpoint(output_dir)}"
            ) from error
    accelerator.wait_for_everyone()


def load_weights(accelerator: Accelerator, model: nn.Module, path: Path) -> None:
    """Load the weights of a safetensors file into a prepared model, sharded if necessary. Called on every process."""
    if not accelerator.is_fsdp2:
        load_model(accelerator.unwrap_model(model), str(path))
        return
    from torch.distributed.tensor import DTensor, distribute_tensor

    current = model.state_dict()
    with torch.no_grad():
        for name, tensor in load_file(path).items():  # it contains tied weights only once
            target, tensor = current[name], tensor.to(current[name].device)
            if isinstance(target, DTensor):
                tensor = distribute_tensor(tensor, target.device_mesh, target.placements)
            target.copy_(tensor)
