"""Checkpoints from which a run resumes exactly, the lock of an output folder, and the signals that stop a run."""

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
from accelerate.utils import SCALER_NAME as SCALER_FILE
from accelerate.utils import load, save
from safetensors import SafetensorError
from safetensors.torch import load_file, load_model
from torch import nn

from ...errors import is_first_process
from ...files import BEST_MODEL_FILE, LOG_FILE, STATE_FILE, load_json, write_problem

__all__ = [
    "STOP_SIGNALS",
    "FolderInUseError",
    "StopSignals",
    "TrainState",
    "describe_last_checkpoint",
    "find_checkpoint",
    "list_checkpoints",
    "load_checkpoint",
    "load_weights",
    "lock_folder",
    "save_best_weights",
    "save_checkpoint",
]

logger = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# A terminal sends Ctrl-C to every process, and a launcher passes it on: within so many seconds it is the same one.
CTRL_C_REPEAT_SECONDS = 1.0


class StopSignals:
    """Notes the signal that comes as `number`, for whoever can stop at a better moment."""

    def __init__(self) -> None:
        self.number: int | None = None
        self._interrupted: float | None = None
        self._process = os.getpid()

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Note them, until a second Ctrl-C, which is a KeyboardInterrupt; on other threads than the main one none."""
        if threading.current_thread() is not threading.main_thread():  # Python allows handlers in no other
            yield
            return
        # Who ignores Ctrl-C, or handles it, goes on doing so.
        numbers = [signal.SIGTERM]
        numbers += [signal.SIGINT] if signal.getsignal(signal.SIGINT) is signal.default_int_handler else []
        before = {number: signal.signal(number, self._handle) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: Any) -> None:
        if os.getpid() != self._process:  # a dataloader's worker, which its parent ends
            return
        if number == signal.SIGINT:
            now = time.monotonic()
            if self._interrupted is None:
                self._interrupted = now
                if is_first_process():  # by `os`: what the handler interrupts may hold the lock of stderr
                    os.write(2, b"\nCtrl-C: ending the step and saving a checkpoint; again to stop at once\n")
            elif now - self._interrupted > CTRL_C_REPEAT_SECONDS:
                raise KeyboardInterrupt
        self.number = number


# Beyond how long a killed run's data workers live on, which hold its folder as well.
WAIT_SECONDS = 12.0
PAUSE_SECONDS = 0.2


class FolderInUseError(ValueError):
    """Another process holds the folder."""


@contextmanager
def lock_folder(folder: str, wait_seconds: float | None = None) -> Iterator[bool]:
    """Hold an output folder for this process; the system lets go of it when the process ends, however it does.

    Args:
        folder: it is there; nothing is written into it.
        wait_seconds: how long to wait for another process that holds it; None = `WAIT_SECONDS`.

    Yields:
        Whether another one held it before, so that the folder may hold more than it did.

    Raises:
        FolderInUseError: if another process still holds it then.
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
                        f"--output_dir {folder} is in use: another run is writing into it; give another folder, or "
                        "wait until it ends"
                    ) from None
                if not waited:
                    logger.info("--output_dir %s is in use: waiting %g s for the other run to end", folder, wait)
                waited = True
                time.sleep(PAUSE_SECONDS)
            except OSError as error:  # a file system, some over a network, that holds no folder
                logger.warning("%s: a second run into it would not be refused here: %s", folder, error)
                break
        yield waited
    finally:
        # Workers that were forked share the descriptor: closing it here would not let go of the folder.
        try:
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        except OSError:
            pass
        os.close(descriptor)


# Tied weights are saved once and tied again when they are loaded: accelerate's warning at each save says no more.
logging.getLogger("accelerate.utils.other").setLevel(logging.ERROR)
NAME_PATTERN = re.compile(r"checkpoint-(\d+)")
# Parts of a fingerprint that checkpoints of earlier versions lack: their runs go on.
OPTIONAL_FINGERPRINT_KEYS = (
    "tags of the model",
    "hash of the held-out data",
    "hash of the held-out text",
    "held-out rows",
)


@dataclass
class TrainState:
    """Where a run stands; what `accelerate` does not know about it."""

    step: int = 0  # optimiser steps done
    epoch: int = 0  # which the next batch belongs to, from 0
    batch_in_epoch: int = 0  # batches of that epoch already used, on each process
    position: list[int] | None = None  # the last batch's "position", where it has one: how its data is found again
    # Over all processes: training examples, the tokens in them, and what training on them took; see `throughput`.
    examples: int = 0
    tokens: int = 0
    flops: int = 0
    loss_total: float = 0.0  # the sum of the mean losses of all steps
    # The same since the last log record, and its steps; `tokens` and `train_seconds` at that record.
    window_loss: float = 0.0
    window_steps: int = 0
    window_tokens: int = 0
    window_begin: float = 0.0
    lr: float = 0.0  # of the last step
    best_metric: float | None = None
    best_step: int | None = None
    bad_evaluations: int = 0  # since the best one
    finished: bool = False  # by early stopping
    train_seconds: float = 0.0  # in training steps, neither evaluation nor checkpoints
    # The settings and data that decide which weights the run ends with.
    fingerprint: dict[str, Any] = field(default_factory=dict)
    # What decides how sums are rounded; another one resumes with a warning.
    environment: dict[str, Any] = field(default_factory=dict)


def _describe_environment(accelerator: Accelerator) -> dict[str, Any]:
    """Return what decides in which order sums are rounded."""
    device = accelerator.device.type
    return {
        "device": torch.cuda.get_device_name(accelerator.device) if device == "cuda" else device,
        "CPU threads": torch.get_num_threads() if device == "cpu" else None,
        "torch": torch.__version__,
        "mixed precision": accelerator.mixed_precision,
    }


def list_checkpoints(output_dir: str | Path) -> list[Path]:
    """List the complete checkpoints of a run, oldest first."""
    folders = [path for path in Path(output_dir).glob("checkpoint-*") if NAME_PATTERN.fullmatch(path.name)]
    whole = [path for path in folders if (path / STATE_FILE).is_file()]
    return sorted(whole, key=_get_step)


def describe_last_checkpoint(output_dir: str | Path) -> str:
    """Return the end of a failed write's message: which checkpoint to go on from; "" where there is none."""
    kept = list_checkpoints(output_dir)
    return f"; the last good checkpoint is {kept[-1]}" if kept else ""


def _get_step(checkpoint: Path) -> int:
    found: Any = NAME_PATTERN.fullmatch(checkpoint.name)  # it is one that was listed
    return int(found[1])


def find_checkpoint(resume_from: str, output_dir: str | Path) -> Path:
    """Find the checkpoint that `--resume_from_checkpoint` names.

    Raises:
        ValueError: if there is none, or the folder is no complete checkpoint.
    """
    if resume_from == "latest":
        found = list_checkpoints(output_dir)
        if not found:
            used = Path(output_dir).is_dir() and any(Path(output_dir).iterdir())
            start = "start over with --overwrite_output_dir in its place" if used else "start without the flag"
            raise ValueError(
                f"--resume_from_checkpoint latest: no complete checkpoint in {output_dir}; {start}, and save some "
                "with --checkpointing_steps"
            )
        return found[-1]
    path = Path(resume_from)
    if not path.is_dir():
        raise ValueError(
            f"--resume_from_checkpoint {path}: there is no such folder; `latest` is the newest checkpoint in "
            "--output_dir"
        )
    if not (path / STATE_FILE).is_file():
        raise ValueError(f"--resume_from_checkpoint {path}: not a complete checkpoint (it has no {STATE_FILE})")
    return path


def save_checkpoint(
    accelerator: Accelerator, state: TrainState, output_dir: str | Path, save_total_limit: int | None = None
) -> Path:
    """Save model, optimiser, schedule, random states, position, log and best weights as `checkpoint-<step>`.

    Everything is written to a temporary folder, flushed to the disk and renamed, so that a run killed or a disk filled
    on the way leaves the earlier checkpoints as they are. Called on every process.

    With `save_total_limit` other checkpoints are deleted until this many are left, first those of later steps, which a
    run that went back to an earlier one leaves behind, then the oldest.

    Raises:
        OSError: if it could not be written; nothing is left behind.
    """
    output_dir = Path(output_dir)
    target = output_dir / f"checkpoint-{state.step}"
    temporary = output_dir / f".tmp-checkpoint-{state.step}"
    if accelerator.is_main_process:
        shutil.rmtree(temporary, ignore_errors=True)
    accelerator.wait_for_everyone()
    state.environment = _describe_environment(accelerator)
    try:
        accelerator.save_state(str(temporary))
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            _finish_checkpoint(state, output_dir, temporary, target)
    except Exception as error:  # a full disk is an OSError, a RuntimeError or a SafetensorError by who writes
        shutil.rmtree(temporary, ignore_errors=True)
        reason = f"{write_problem(error)}{describe_last_checkpoint(output_dir)}"
        raise OSError(f"could not write checkpoint {target} {reason}") from error
    if accelerator.is_main_process and save_total_limit is not None:
        others = [path for path in list_checkpoints(output_dir) if path != target]
        others.sort(key=lambda path: _get_step(path) <= state.step)  # later ones first, each kind oldest first
        for old in others[: max(len(others) + 1 - save_total_limit, 0)]:
            _remove_checkpoint(old)
    accelerator.wait_for_everyone()
    return target


def _finish_checkpoint(state: TrainState, output_dir: Path, temporary: Path, target: Path) -> None:
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
    try:
        # A new best model replaces the file, it does not write into it: the link keeps the old weights at no cost.
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _flush(path: Path) -> None:
    # A rename can reach the disk before the data it names: a power cut would leave an empty "complete" checkpoint.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_checkpoint(folder: Path) -> None:
    # Renamed first, so that one half deleted is no checkpoint either.
    doomed = folder.with_name(f".tmp-removed-{folder.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    os.replace(folder, doomed)
    shutil.rmtree(doomed)


def load_checkpoint(
    accelerator: Accelerator, path: Path, output_dir: str | Path, fingerprint: dict[str, Any]
) -> TrainState:
    """Restore what `save_checkpoint` saved, the random states last, and return the state. Called on every process.

    The run's folder gets the log and the best weights back as they were.

    Raises:
        ValueError: if the run's settings or training data are not those saved (the message names each with its old and
            new value), the checkpoint's weights do not fit the model, or one of its files is damaged.
    """
    try:
        state = TrainState(**load_json(path / STATE_FILE))
    except TypeError as error:
        raise ValueError(f"{path / STATE_FILE} is no state of a run: {error}") from error
    if changed := _describe_changes(state.fingerprint, fingerprint):
        raise ValueError(f"cannot resume exactly from {path}: {changed}; give the values it was saved with")
    rounding = _describe_changes(state.environment, _describe_environment(accelerator))
    if rounding and accelerator.is_main_process:
        logger.warning("resuming from %s to rounding, not bit by bit: %s", path, rounding)
    random_states = path / f"random_states_{accelerator.process_index}.pkl"
    if not random_states.is_file():
        raise ValueError(f"cannot resume exactly from {path}: no {random_states.name}")
    if accelerator.scaler is not None and not (path / SCALER_FILE).is_file():
        precision = state.environment.get("mixed precision", "no")
        raise ValueError(
            f"cannot resume from {path} with --mixed_precision fp16: it has no state of a loss scaler; it was saved "
            f"with --mixed_precision {precision}"
        )
    if accelerator.is_main_process:
        for leftover in Path(output_dir).glob(".tmp-*"):
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        for name in (LOG_FILE, BEST_MODEL_FILE):
            # What the interrupted run wrote after the checkpoint is about to happen again.
            (Path(output_dir) / name).unlink(missing_ok=True)
            if (path / name).is_file():
                shutil.copyfile(path / name, Path(output_dir) / f".tmp-{name}")
                os.replace(Path(output_dir) / f".tmp-{name}", Path(output_dir) / name)
    accelerator.wait_for_everyone()
    try:
        accelerator.load_state(str(path))
    except RuntimeError as error:
        raise ValueError(f"{path} does not fit this model: {error}") from error
    except (SafetensorError, UnpicklingError, EOFError) as error:
        raise ValueError(
            f"{path} is damaged ({type(error).__name__}: {error}): go on from an earlier checkpoint, or start over"
        ) from error
    same_device = state.environment.get("device") == _describe_environment(accelerator)["device"]
    _check_random_state(random_states, accelerator.device if same_device else torch.device("cpu"))
    return state


def _describe_changes(saved: dict[str, Any], now: dict[str, Any]) -> str:
    saved = {key: now[key] for key in OPTIONAL_FINGERPRINT_KEYS if key in now} | saved
    return ", ".join(f"{key} was {saved.get(key)} and is {now[key]}" for key in now if saved.get(key) != now[key])


def _check_random_state(path: Path, device: torch.device) -> None:
    """Check that accelerate restored the random states: where it cannot, it goes on without them."""
    try:
        states = load(path)
        restored = torch.equal(torch.get_rng_state(), states["torch_manual_seed"])
        if restored and device.type == "cuda":
            restored = torch.equal(
                torch.cuda.get_rng_state(device), states["torch_cuda_manual_seed"][device.index or 0]
            )
    except Exception as error:  # unpickling a damaged file can raise anything
        raise ValueError(f"cannot resume exactly: {path} cannot be read ({type(error).__name__}: {error})") from error
    if not restored:
        raise ValueError(f"cannot resume exactly: the random states of {path} could not be restored")


def save_best_weights(accelerator: Accelerator, model: nn.Module, output_dir: str | Path) -> None:
    """Write the weights of the best evaluation so far, in place of earlier ones. Called on every process.

    Raises:
        OSError: if they could not be written; nothing half written is left, and the message names the last good
            checkpoint.
    """
    weights = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        path = Path(output_dir) / BEST_MODEL_FILE
        temporary = path.with_name(f".tmp-{path.name}")
        try:
            save(weights, str(temporary), safe_serialization=True)
            temporary.replace(path)
        except Exception as error:  # safetensors has its own error for a full disk
            temporary.unlink(missing_ok=True)
            reason = f"{write_problem(error)}{describe_last_checkpoint(output_dir)}"
            raise OSError(f"could not write the best weights to {output_dir} {reason}") from error
    accelerator.wait_for_everyone()


def load_weights(accelerator: Accelerator, model: nn.Module, path: Path) -> None:
    """Give a prepared model the weights of a safetensors file, each process its share. Called on every process."""
    if not accelerator.is_fsdp2:
        load_model(accelerator.unwrap_model(model), str(path))
        return
    from torch.distributed.tensor import DTensor, distribute_tensor

    held = model.state_dict()
    with torch.no_grad():
        for name, tensor in load_file(path).items():  # of tied weights it has one
            target, tensor = held[name], tensor.to(held[name].device)
            if isinstance(target, DTensor):
                tensor = distribute_tensor(tensor, target.device_mesh, target.placements)
            target.copy_(tensor)
