"""Models of CTranslate2 and their calls. This module imports neither torch nor Transformers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["ExportedModel", "make_ctranslate2_call", "token_text"]


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
