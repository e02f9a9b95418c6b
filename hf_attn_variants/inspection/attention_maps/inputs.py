"""What a model reads for its maps, one text and perhaps a target, and the labels of the tokens."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from ...generation_calls import limits_of_the_call
from ...modeling.fields.variant_config import can_cache
from ...text_lines import is_unicode

__all__ = ["model_inputs", "token_labels"]


def token_labels(tokenizer: PreTrainedTokenizerBase, ids: torch.Tensor) -> tuple[str, ...]:
    """Return one readable label a token: its text, or the vocabulary's name where a piece alone is no text."""
    labels = []
    for token in ids.tolist():
        name = str(tokenizer.convert_ids_to_tokens(token))
        text = str(tokenizer.decode([token])).strip()
        labels.append(name if not text or "\N{REPLACEMENT CHARACTER}" in text else text)
    return tuple(labels)


def _encoded(tokenizer: PreTrainedTokenizerBase, text: str, max_length: int, name: str) -> dict[str, torch.Tensor]:
    if not text.strip():
        raise ValueError(f"`{name}` is empty.")
    if not is_unicode(text):
        raise ValueError(f"`{name}` {text!r:.80} is no Unicode text: it holds half a surrogate pair.")
    batch = tokenizer(text, truncation=True, max_length=max_length, return_tensors="pt")
    if not batch["input_ids"].shape[1]:
        raise ValueError(f"`{name}` {text!r} has no tokens.")
    return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}


def _is_cut(tokenizer: PreTrainedTokenizerBase, text: str, max_length: int) -> bool:
    return len(tokenizer(text)["input_ids"]) > max_length


def model_inputs(
    model: Any, tokenizer: PreTrainedTokenizerBase, text: str, target_text: str | None, max_length: int
) -> tuple[dict[str, torch.Tensor], str | None, bool]:
    """The model's arguments, the text that a decoder reads, and whether a text was cut."""
    inputs = {name: ids.to(model.device) for name, ids in _encoded(tokenizer, text, max_length, "text").items()}
    is_cut = _is_cut(tokenizer, text, max_length)
    if not hasattr(model.base_model, "decoder"):
        return inputs, None, is_cut
    if target_text is not None:
        target = _encoded(tokenizer, target_text, max_length, "target_text")["input_ids"].to(model.device)
        is_cut |= _is_cut(tokenizer, target_text, max_length)
    elif model.can_generate():
        options: dict[str, Any] = {"use_cache": can_cache(model.config)}
        options |= {"max_new_tokens": max_length, "num_beams": 1, "do_sample": False}
        with limits_of_the_call(model):
            target = model.generate(**inputs, **options)[:, 1:]
        is_cut |= target.shape[1] == max_length and int(target[0, -1]) != tokenizer.eos_token_id
        target_text = str(tokenizer.decode(target[0], skip_special_tokens=True))
    else:
        raise ValueError(f"{type(model).__name__} generates nothing by itself: give a `target_text`.")
    start = torch.full_like(target[:, :1], model.config.decoder_start_token_id)
    return inputs | {"decoder_input_ids": torch.cat([start, target[:, :-1]], dim=1)}, target_text, is_cut
