"""How long a model takes for a pass over text or audio, or for the decoding of some tokens."""

import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import StoppingCriteria
from transformers.modeling_outputs import BaseModelOutput

from ..generation_calls import limits_of_the_call

__all__ = ["FirstToken", "Times", "decoding_or_pass", "run_times"]

# Seconds until the first token was there, where there is one, and until the end.
Times = tuple[float | None, float]


class FirstToken(StoppingCriteria):
    """Stops nothing; notes when the first token was there."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.time: float | None = None

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if self.time is None:
            _wait(self.device)
            self.time = time.perf_counter()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def decoding_or_pass(
    model: Any, batch_size: int, length: int, decoding: tuple[int, int] | None
) -> Callable[[], StoppingCriteria | None]:
    """Return what is timed, for `run_times`.

    Args:
        model: it must end no text by itself before its time (`eos_token_id`).
        batch_size, length: of the text or audio or, for an encoder-decoder, of the encoder's outputs; all random.
        decoding: the tokens to generate and the beams; None = a pass over the text.
    """
    if decoding is None and model.main_input_name == "input_features":
        shape = (batch_size, model.config.num_mel_bins, 2 * length)  # the encoder halves its frames
        features = torch.randn(shape, device=model.device, dtype=model.dtype)
        return lambda: (model(input_features=features), None)[1]
    if decoding is None:
        ids = torch.randint(model.config.vocab_size, (batch_size, length), device=model.device)
        return lambda: (model(input_ids=ids), None)[1]
    states: Any = torch.randn(batch_size, length, model.config.d_model, device=model.device, dtype=model.dtype)
    mask = torch.ones(batch_size, length, dtype=torch.long, device=model.device)
    options: dict[str, Any] = {"max_new_tokens": decoding[0], "num_beams": decoding[1], "do_sample": False}
    if model.main_input_name == "input_features":  # Whisper's own code would look for further segments of the audio
        options |= {"force_unique_generate_call": True, "return_timestamps": False}

    def run() -> StoppingCriteria:
        # A fresh output for each call: a search with beams writes its repeated states into the one that it is given.
        given = {"encoder_outputs": BaseModelOutput(states), "attention_mask": mask}
        first = FirstToken(str(model.device))
        with limits_of_the_call(model):
            model.generate(**given, **options, stopping_criteria=[first])
        return first

    return run


@torch.no_grad()
def run_times(run: Callable[[], Any], device: str) -> Times:
    """Return the seconds until the first token was there (None for a pass) and until the end."""
    _wait(device)
    start = time.perf_counter()
    first = run()
    _wait(device)
    end = time.perf_counter()
    return None if first is None else first.time - start, end - start


def _wait(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
