"""How much memory an engine takes alone: a process of its own loads it, serves one batch, and says its peak."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .ctranslate2_engine import Exported, ctranslate2_run

if TYPE_CHECKING:  # the process of CTranslate2 needs no torch
    from .engines import Engine, Load

__all__ = ["peak_bytes"]

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
# What makes the kernel begin a process's peak anew (proc(5)).
RESET_PEAK = "5"
# The process is one of this package's commands: it imports what it uses.
PROGRAM = (
    "import attn_variants; attn_variants.is_command = True; from hf_attn_variants.serving import peak_memory; "
    "peak_memory.main()"
)
FEATURES = "features.npy"


def peak_bytes(
    config: Mapping[str, Any], engine: "Engine", load: "Load", threads: int, exported: Exported | None
) -> int | None:
    """Return the most memory that a process has which serves one batch by an engine, its libraries included.

    The peak counts from when the model is loaded: making random weights is no part of serving. The process holds
    memory as this one does: it gives large blocks back, or keeps them.

    Args:
        config: the checkpoint's config.json.
        engine, load: what serves, and what.
        threads: of the process.
        exported: what CTranslate2 runs; None: torch runs the engine.

    Returns:
        Bytes; None where the system does not say it.

    Raises:
        ValueError: if the process failed, with the end of what it said.
    """
    if not CLEAR.exists():
        return None
    told: dict[str, Any] = {"config": dict(config), "engine": asdict(engine), "load": asdict(load), "threads": threads}
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with tempfile.TemporaryDirectory() as stage:
        if exported is not None:
            told["exported"] = _stored(exported, Path(stage))
        command = [sys.executable, "-c", PROGRAM]
        done = subprocess.run(
            command, input=json.dumps(told), env=environment, capture_output=True, text=True, check=False
        )
    if done.returncode != 0:
        said = " ".join(done.stderr.split())[-300:]
        if done.returncode == -signal.SIGKILL:
            said = "it was killed, most likely for want of memory"
        raise ValueError(f"{engine.name} failed in a process of its own (status {done.returncode}): {said}")
    return int(done.stdout.splitlines()[-1])


def _stored(exported: Exported, folder: Path) -> dict[str, Any]:
    """Return the JSON values of what CTranslate2 runs; features of audio go into a file, named in their place."""
    values = dict(vars(exported))
    if exported.prompt:
        import numpy as np

        values["inputs"] = os.fspath(folder / FEATURES)
        np.save(values["inputs"], exported.inputs)
    return values


def main() -> None:
    """Serve one batch of what stdin says, and print the peak in bytes."""
    told = json.load(sys.stdin)
    load, threads, run = told["load"], told["threads"], None
    if "exported" in told:
        exported = Exported(**told["exported"])
        if exported.prompt:
            import numpy as np

            exported = Exported(exported.folder, exported.int8, np.load(exported.inputs), exported.prompt)
        run = ctranslate2_run(exported, load["num_beams"], threads)
    else:
        import torch

        from .engines import Engine, Load, build_model, random_inputs, torch_run

        torch.set_num_threads(threads)
        config, given, engine = told["config"], Load(**load), Engine(**told["engine"])
        run = torch_run(build_model(config, engine), random_inputs(config, given), given, engine.compiled)
    CLEAR.write_text(RESET_PEAK)
    run(load["max_new_tokens"])
    [peak] = [line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM:")]
    print(1024 * int(peak.split()[1]))
