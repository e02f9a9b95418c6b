"""Calls of CTranslate2, and the peak memory of an engine, measured in a separate process that serves one batch.

The process of a CTranslate2 engine must not import torch, which would count as memory of the engine. Therefore this
module imports neither torch nor Transformers at its top.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engines import Engine, Load

# The file that contains the peak memory of a process, and the file that resets the peak if "5" is written (proc(5)).
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"
# `is_command` lets the package import only the modules that are used.
PROGRAM = (
    "import attn_variants; attn_variants.is_command = True; from hf_attn_variants.serving import peak_memory; "
    "peak_memory.main()"
)
FEATURES_FILE = "features.npy"


@dataclass(frozen=True)
class ExportedModel:
    """Model of CTranslate2 with its inputs.

    Args:
        folder: the folder of the model.
        int8: whether the weights are int8.
        inputs: rows of token ids, or audio features as a numpy array [b, mel bins, frames].
        prompt: the first tokens of the decoder of a Whisper. Empty for other models.
    """

    folder: str
    int8: bool
    inputs: Any
    prompt: list[int]


def token_text(number: int) -> str:
    """Return the text of a token in the vocabulary of an exported model."""
    return f"<{number}>"


def make_ctranslate2_call(exported: ExportedModel, num_beams: int, threads: int) -> Callable[[int], None]:
    """Return a function that serves a batch with CTranslate2. Its argument is the number of new tokens.

    Args:
        exported: the model and its inputs.
        num_beams: the number of beams.
        threads: the number of threads of a call.
    """
    import ctranslate2

    compute_type = "int8_float32" if exported.int8 else "float32"
    options = {"device": "cpu", "compute_type": compute_type, "intra_threads": threads}
    if exported.prompt:
        whisper = ctranslate2.models.Whisper(exported.folder, **options)
        prompts = [exported.prompt] * len(exported.inputs)

        def transcribe(tokens: int) -> None:
            features = ctranslate2.StorageView.from_array(exported.inputs)
            # CTranslate2 generates half as many tokens as `max_length`.
            whisper.generate(features, prompts, beam_size=num_beams, max_length=2 * tokens)

        return transcribe
    translator = ctranslate2.Translator(exported.folder, **options)
    rows = [[token_text(number) for number in row] for row in exported.inputs]

    def translate(tokens: int) -> None:
        limits = {"min_decoding_length": tokens, "max_decoding_length": tokens, "max_input_length": 0}
        translator.translate_batch(rows, beam_size=num_beams, **limits)

    return translate


def peak_bytes(
    config: Mapping[str, Any], engine: "Engine", load: "Load", threads: int, exported: ExportedModel | None
) -> int | None:
    """Return the peak memory of a process that serves one batch with an engine, including its libraries.

    The peak is reset after the model was loaded, because making random weights is not a part of serving. The process
    has the same allocator settings as this one.

    Args:
        config: the config.json of the checkpoint.
        engine: the engine.
        load: the batch.
        threads: the number of threads of the process.
        exported: the model that CTranslate2 runs. None for an engine of torch.

    Returns:
        The number of bytes, or None if the operating system does not report it.

    Raises:
        ValueError: if the process fails. The message contains the end of its output.
    """
    if not CLEAR.exists():
        return None
    task: dict[str, Any] = {"config": dict(config), "engine": asdict(engine), "load": asdict(load), "threads": threads}
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with tempfile.TemporaryDirectory() as stage:
        if exported is not None:
            task["exported"] = _to_json(exported, Path(stage))
        command = [sys.executable, "-c", PROGRAM]
        process = subprocess.run(
            command, input=json.dumps(task), env=environment, capture_output=True, text=True, check=False
        )
    if process.returncode != 0:
        reason = " ".join(process.stderr.split())[-300:]
        if process.returncode == -signal.SIGKILL:
            reason = "it was killed, probably because of a lack of memory"
        raise ValueError(f"The process of {engine.name} failed (status {process.returncode}): {reason}")
    return int(process.stdout.splitlines()[-1])


def _to_json(exported: ExportedModel, folder: Path) -> dict[str, Any]:
    """Return an exported model as JSON values. Audio features are saved to a file, whose name replaces them."""
    values = dict(vars(exported))
    if exported.prompt:
        import numpy as np

        values["inputs"] = os.fspath(folder / FEATURES_FILE)
        np.save(values["inputs"], exported.inputs)
    return values


def main() -> None:
    """Serve one batch as described by the JSON object on stdin, and print the peak memory in bytes."""
    task = json.load(sys.stdin)
    load, threads, run = task["load"], task["threads"], None
    if "exported" in task:
        exported = ExportedModel(**task["exported"])
        if exported.prompt:
            import numpy as np

            exported = ExportedModel(exported.folder, exported.int8, np.load(exported.inputs), exported.prompt)
        run = make_ctranslate2_call(exported, load["num_beams"], threads)
    else:
        import torch

        from .engines import Engine, Load, build_model, make_torch_call, random_inputs

        torch.set_num_threads(threads)
        config, batch, engine = task["config"], Load(**load), Engine(**task["engine"])
        run = make_torch_call(build_model(config, engine), random_inputs(config, batch), batch, engine.compiled)
    CLEAR.write_text(RESET_PEAK)
    run(load["max_new_tokens"])
    [peak] = [line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM:")]
    print(1024 * int(peak.split()[1]))
