"""Functions that run CTranslate2, and that measure the peak memory of an engine in a separate process.

The process serves one batch. For a CTranslate2 engine, it must not import torch, because the memory that torch uses
would also be counted. Therefore, this module does not import torch or Transformers at the top level.
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
    import torch

    from .engines import Engine, Workload

# Tokens that CTranslate2 requires in the vocabulary of a Whisper model.
TRANSCRIPT_TOKEN, NO_TIMESTAMPS_TOKEN, END_TOKEN = "<|startoftranscript|>", "<|notimestamps|>", "<|endoftext|>"
# The file that contains the peak memory of the process, and the file to which "5" is written to reset the peak memory
# (see proc(5)).
STATUS_FILE, CLEAR_FILE = Path("/proc/self/status"), Path("/proc/self/clear_refs")
# With `is_command`, the package imports only the modules that are used.
PROGRAM = (
    "import attn_variants; attn_variants.is_command = True; from hf_attn_variants.serving import peak_memory; "
    "peak_memory.main()"
)
FEATURES_FILE = "features.npy"


@dataclass(frozen=True)
class ExportedModel:
    """An exported CTranslate2 model and its inputs.

    Args:
        folder: the folder that contains the model.
        int8: whether the weights are int8.
        inputs: lists of token ids, or audio features as a NumPy array [b, mel bins, frames].
        prompt: the first decoder tokens for a Whisper model. It is empty for other models.
    """

    folder: str
    int8: bool
    inputs: Any
    prompt: list[int]


def format_token(token_id: int) -> str:
    """Return the string for a token id in the vocabulary of an exported model."""
    return f"<{token_id}>"


def write_ctranslate2_folder(
    config: Mapping[str, Any], model: Any, inputs: "dict[str, torch.Tensor]", folder: Path, int8: bool
) -> ExportedModel:
    """Write a model from this package in CTranslate2 format, without an end-of-sequence token that stops generation.

    Args:
        config: the config.json of the checkpoint.
        model: the model in float32. Quantization modifies its tensors.
        inputs: a batch without padding, in the same format as for the torch engines.
        folder: an empty folder.
        int8: whether to quantize the weights to int8.

    Raises:
        ValueError: if the start token of the decoder or the end-of-sequence token is unknown.
    """
    from ..export.ctranslate2 import build_model_specification
    from ..export.ctranslate2_check import TokenizerVocab

    vocabulary = [format_token(number) for number in range(model.config.vocab_size)]
    start, end = (_get_token_id(config, model, name) for name in ("decoder_start_token_id", "eos_token_id"))
    prompt = [start]
    if is_audio := "input_features" in inputs:
        no_times = next(number for number in range(len(vocabulary) - 1, 0, -1) if number not in (start, end))
        vocabulary[start], vocabulary[no_times], vocabulary[end] = TRANSCRIPT_TOKEN, NO_TIMESTAMPS_TOKEN, END_TOKEN
        prompt.append(no_times)
    tokens = TokenizerVocab(vocabulary, prompt, end, vocabulary[0], [end], [])
    spec = build_model_specification(model, tokens, config["model_type"])
    spec.optimize(quantization="int8_float32" if int8 else "float32")
    spec.save(os.fspath(folder))
    batch = inputs["input_features"].numpy() if is_audio else inputs["input_ids"].tolist()
    return ExportedModel(os.fspath(folder), int8, batch, prompt if is_audio else [])


def _get_token_id(config: Mapping[str, Any], model: Any, name: str) -> int:
    token = getattr(model.generation_config, name, None)
    token = config.get(name) if token is None else token
    if token is None:
        raise ValueError(f"config.json must contain `{name}` because the model generates text. Add it to the file.")
    return token[0] if isinstance(token, list) else token


def make_ctranslate2_call(exported: ExportedModel, num_beams: int, threads: int) -> Callable[[int], None]:
    """Return a function that serves a batch with CTranslate2. Its argument is the number of tokens to generate.

    Args:
        exported: the model and its inputs.
        num_beams: the number of beams.
        threads: the number of threads per call.
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
    rows = [[format_token(number) for number in row] for row in exported.inputs]

    def translate(tokens: int) -> None:
        limits = {"min_decoding_length": tokens, "max_decoding_length": tokens, "max_input_length": 0}
        translator.translate_batch(rows, beam_size=num_beams, **limits)

    return translate


def measure_peak_bytes(
    config: Mapping[str, Any], engine: "Engine", workload: "Workload", threads: int, exported: ExportedModel | None
) -> int | None:
    """Measure the peak memory of a process that serves one batch with an engine, including all libraries.

    The peak is reset after loading the model, because creating random weights is not part of serving. The process has
    the same allocator settings as this one.

    Args:
        config: the config.json of the checkpoint.
        engine: the engine.
        workload: the batch.
        threads: the number of threads for the process.
        exported: the model that CTranslate2 runs. None for a torch engine.

    Returns:
        The peak memory in bytes, or None if the operating system does not report it.

    Raises:
        ValueError: if the process fails. The message contains the end of its output.
    """
    if not CLEAR_FILE.exists():
        return None
    task: dict[str, Any] = {"config": dict(config), "threads": threads}
    task |= {"engine": asdict(engine), "load": asdict(workload)}
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with tempfile.TemporaryDirectory() as stage:
        if exported is not None:
            task["exported"] = _exported_model_to_json(exported, Path(stage))
        command = [sys.executable, "-c", PROGRAM]
        process = subprocess.run(
            command, input=json.dumps(task), env=environment, capture_output=True, text=True, check=False
        )
    if process.returncode != 0:
        reason = "".join(process.stderr.splitlines()[-1:])[:300]
        if process.returncode == -signal.SIGKILL:
            reason = "it was killed, probably because of a lack of memory"
        raise ValueError(f"The process for {engine.name} failed (status {process.returncode}): {reason}")
    return int(process.stdout.splitlines()[-1])


def _exported_model_to_json(exported: ExportedModel, folder: Path) -> dict[str, Any]:
    """Convert an exported model to JSON values. Audio features are saved to a file and replaced with its path."""
    values = dict(vars(exported))
    if exported.prompt:
        import numpy as np

        values["inputs"] = os.fspath(folder / FEATURES_FILE)
        np.save(values["inputs"], exported.inputs)
    return values


def main() -> None:
    """Serve one batch as described by the JSON object on stdin, and print the peak memory in bytes."""
    task = json.load(sys.stdin)
    load, threads = task["load"], task["threads"]
    if "exported" in task:
        exported = ExportedModel(**task["exported"])
        if exported.prompt:
            import numpy as np

            exported = ExportedModel(exported.folder, exported.int8, np.load(exported.inputs), exported.prompt)
        run = make_ctranslate2_call(exported, load["num_beams"], threads)
    else:
        import torch

        from .engines import Engine, Workload, build_model, make_torch_call, make_workload_inputs

        torch.set_num_threads(threads)
        config, batch, engine = task["config"], Workload(**load), Engine(**task["engine"])
        run = make_torch_call(build_model(config, engine), make_workload_inputs(config, batch), batch, engine.compiled)
    CLEAR_FILE.write_text("5")
    run(load["max_new_tokens"])
    [peak] = [line for line in STATUS_FILE.read_text().splitlines() if line.startswith("VmHWM:")]
    print(1024 * int(peak.split()[1]))
