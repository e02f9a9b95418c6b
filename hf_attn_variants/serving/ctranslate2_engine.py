"""CTranslate2 as an engine: a model of random weights in a folder, and what runs it without torch."""

import importlib.util
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what runs a model needs no torch
    import torch

__all__ = ["Exported", "ctranslate2_run", "why_not", "write_folder"]

# What CTranslate2 looks for in a Whisper's vocabulary.
TRANSCRIPT, NO_TIMES, END = "<|startoftranscript|>", "<|notimestamps|>", "<|endoftext|>"


@dataclass(frozen=True)
class Exported:
    """A model that CTranslate2 can run, and what it is given.

    Args:
        folder: the model's.
        int8: whether its weights are.
        inputs: rows of token numbers, or the features of audio, a numpy array [b, mel bins, frames].
        prompt: of a Whisper, the tokens that its decoder reads first; of others empty.
    """

    folder: str
    int8: bool
    inputs: Any
    prompt: list[int]


def why_not(config: Mapping[str, Any], fields: Mapping[str, Any] | None = None) -> str | None:
    """Return why CTranslate2 cannot serve a checkpoint with some fields changed, in a sentence; None where it can."""
    from ..export.ctranslate2_fields import check_has_form
    from ..inspection.costs import variant_config
    from .engines import model_class_of

    try:
        check_has_form(model_class_of(config), variant_config(config, **(fields or {})))
    except ValueError as error:
        return str(error)
    if importlib.util.find_spec("ctranslate2") is None:
        return "CTranslate2 is not installed: `pip install ctranslate2`."
    return None


def write_folder(
    config: Mapping[str, Any], model: Any, inputs: "dict[str, torch.Tensor]", folder: Path, int8: bool
) -> Exported:
    """Write a model of this package as CTranslate2's, which never ends a text by itself.

    Args:
        config: the checkpoint's config.json.
        model: in float32; a quantisation changes its tensors.
        inputs: what a batch is, as torch's engines get it, without padding.
        folder: an empty one.
        int8: whether its weights become int8.

    Raises:
        ValueError: if nobody says with which token the decoder starts, or which ends a text.
    """
    from ..export.ctranslate2_specs import model_specification
    from ..export.ctranslate2_tokens import Tokens

    vocabulary = [_text(number) for number in range(model.config.vocab_size)]
    start, end = (_token(config, model, name) for name in ("decoder_start_token_id", "eos_token_id"))
    prompt = [start]
    if hears := "input_features" in inputs:
        no_times = next(number for number in range(len(vocabulary) - 1, 0, -1) if number not in (start, end))
        vocabulary[start], vocabulary[no_times], vocabulary[end] = TRANSCRIPT, NO_TIMES, END
        prompt.append(no_times)
    tokens = Tokens(vocabulary, prompt, end, vocabulary[0], [end], [])
    spec = model_specification(model, tokens, config["model_type"])
    spec.optimize(quantization="int8_float32" if int8 else "float32")
    spec.save(os.fspath(folder))
    given = inputs["input_features"].numpy() if hears else inputs["input_ids"].tolist()
    return Exported(os.fspath(folder), int8, given, prompt if hears else [])


def _token(config: Mapping[str, Any], model: Any, name: str) -> int:
    found = getattr(model.generation_config, name, None)
    found = config.get(name) if found is None else found
    if found is None:
        raise ValueError(f"config.json has no `{name}`, without which nothing is generated: set it there")
    return found[0] if isinstance(found, list) else found


def _text(number: int) -> str:
    return f"<{number}>"


def ctranslate2_run(exported: Exported, num_beams: int, threads: int) -> Callable[[int], None]:
    """Return what is timed: called with a number of new tokens. Imports no torch.

    Args:
        exported: the model and its inputs.
        num_beams: of the search.
        threads: of one call.
    """
    import ctranslate2

    compute_type = "int8_float32" if exported.int8 else "float32"
    options = {"device": "cpu", "compute_type": compute_type, "intra_threads": threads}
    if exported.prompt:
        whisper = ctranslate2.models.Whisper(exported.folder, **options)
        prompts = [exported.prompt] * len(exported.inputs)

        def hear(tokens: int) -> None:
            features = ctranslate2.StorageView.from_array(exported.inputs)
            # It writes half as many tokens as `max_length`.
            whisper.generate(features, prompts, beam_size=num_beams, max_length=2 * tokens)

        return hear
    translator = ctranslate2.Translator(exported.folder, **options)
    rows = [[_text(number) for number in row] for row in exported.inputs]

    def translate(tokens: int) -> None:
        limits = {"min_decoding_length": tokens, "max_decoding_length": tokens, "max_input_length": 0}
        translator.translate_batch(rows, beam_size=num_beams, **limits)

    return translate
