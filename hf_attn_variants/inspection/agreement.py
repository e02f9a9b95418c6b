"""Does a model compute what it should? Asked before it is timed: the speed of a wrong answer is of no use."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers.modeling_outputs import BaseModelOutput

from ..modeling.fields.variant_config import can_cache

__all__ = ["check_cache", "check_upstream"]

TOKENS, PROMPT, SOURCE, ROWS = 8, 4, 16, 2
# Of the largest output: float32 in another order of summation.
TOLERANCE = 1e-4


@torch.no_grad()
def check_upstream(ours: Any, upstream: Any, decodes: bool) -> None:
    """Give our multi-head model the weights of upstream's, and compare what they decode or put out.

    Args:
        ours, upstream: float32 models of one shape on one device.
        decodes: compare eight tokens, decoded greedily; else outputs of two texts, one of them padded (or of audio).

    Raises:
        ValueError: if they differ.
    """
    ours.load_state_dict(upstream.state_dict())
    names = f"{type(ours).__name__} and {type(upstream).__name__} of the same weights"
    if decodes:
        _compare_decoded(f"{names} decode differently", _decoded(ours), _decoded(upstream))
        return
    inputs = _inputs(ours)
    _compare(f"{names} put out different numbers", _output(ours, inputs), _output(upstream, inputs))


@torch.no_grad()
def check_cache(models: Mapping[str, Any]) -> None:
    """Compare the eight tokens that each model decodes through its cache with those that it decodes without one.

    Args:
        models: encoder-decoders by what they are called, in float32.

    Raises:
        ValueError: if they differ.
    """
    for name, model in models.items():
        if can_cache(model.config):
            what = f"{name} decodes differently through its cache and without one"
            _compare_decoded(what, _decoded(model), _decoded(model, use_cache=False))


def _compare_decoded(what: str, *pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Compare tokens [rows, 8] and what they were chosen by, logits [rows, 8, vocabulary].

    The tokens alone say little: models of random weights may write one token over and over, whatever they read.
    """
    (found, logits), (expected, others) = pair
    # A text is compared up to its first tie, broken by the order of summation.
    alike = (found == expected).long().cumprod(1).roll(1, 1).index_fill(1, found.new_tensor(0), 1).bool()
    _compare(what, logits[alike], others[alike])


def _compare(what: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    difference = float((found - expected).abs().max() / expected.abs().max())
    if not difference <= TOLERANCE:
        raise ValueError(f"{what}, {difference:.1e} of the largest number apart: nothing is timed.")


def _generator(model: Any) -> torch.Generator:
    return torch.Generator(device=model.device).manual_seed(0)


def _decoded(model: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens decoded from outputs of an encoder, half of the second text padding, and their logits."""
    shape = (ROWS, SOURCE, model.config.d_model)
    states: Any = torch.randn(shape, generator=_generator(model), device=model.device)
    given = {"encoder_outputs": BaseModelOutput(states), "attention_mask": _mask(model, SOURCE)}
    # A text of one token over and over, as random weights write it, gives the same whether it is remembered or not.
    given["decoder_input_ids"] = _words(model, PROMPT)
    options |= {"max_new_tokens": TOKENS, "num_beams": 1, "do_sample": False}
    found = model.generate(**given, **options, output_logits=True, return_dict_in_generate=True)
    return found.sequences[:, -TOKENS:], torch.stack(found.logits, 1)


def _inputs(model: Any) -> dict[str, torch.Tensor]:
    if model.main_input_name == "input_features":
        shape = (ROWS, model.config.num_mel_bins, 2 * model.config.max_source_positions)
        return {"input_features": torch.randn(shape, generator=_generator(model), device=model.device)}
    length = min(SOURCE, getattr(model.config, "max_position_embeddings", None) or SOURCE)
    return {"input_ids": _words(model, length), "attention_mask": _mask(model, length)}


def _words(model: Any, length: int) -> torch.Tensor:
    shape, generator = (ROWS, length), _generator(model)
    return torch.randint(model.config.vocab_size, shape, generator=generator, device=model.device)


def _mask(model: Any, length: int) -> torch.Tensor:
    mask = torch.ones(ROWS, length, dtype=torch.long, device=model.device)
    mask[1, length // 2 :] = 0
    return mask


def _output(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the first tensor that a model puts out, of tokens that are no padding."""
    output = model(**inputs)[0].float()
    return output[inputs["attention_mask"].bool()] if "attention_mask" in inputs else output
