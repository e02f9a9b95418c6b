"""Layers whose heads look for a word's other occurrences: which these are, and a conversion that leaves them alone.

A model compares two texts by heads that find the same word in the other one ("duplicate token heads", arXiv
2211.00593, section 3). Shared keys and kernels blur what they find, the outputs on single texts hardly show it, and a
fine-tuning on pairs then learns late or never (docs/conversion_appendix.md). Few layers have such a head, of MiniLM's
six two. They can be seen in any text, for words come twice in single texts too. Of a layer with weights P:

    s(layer) = max over heads i of  mean over tokens t that occur again of  sum of P_i[t, u] over u != t with x_u = x_t
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...progress import progress_bar
from ..calibration_settings import Calibration
from ..plan import ConversionPlan
from .batches import Batch, padded

__all__ = ["check_matching_layers", "fields_keeping", "matching_shares"]

# The text that is looked at, texts and tokens of each, since all layers' attention weights are made for a batch. The
# two layers of MiniLM stand out on a hundred lines.
MOST_TEXTS, MOST_TOKENS = 512, 128


def check_matching_layers(count: Any, calibration: Calibration | None) -> None:
    """Raise ValueError unless so many layers can be asked for, and there is text to find them by."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"`keep_matching_layers` must be a number of layers, from 1; got {count!r}.")
    if calibration is None or calibration.audio is not None:
        raise ValueError("`keep_matching_layers` finds layers by text: give `calibration=` (--calibration_file).")


@torch.no_grad()
def matching_shares(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, calibration: Calibration
) -> list[float]:
    """Return s of each layer of a model's encoder (of a decoder alone: with u < t).

    Args:
        model: the source as this package's model.
        tokenizer: the model's.
        calibration: its texts, or pairs of texts, are read; the first `MOST_TEXTS`.

    Raises:
        ValueError: if no word of the text occurs twice in an example.
    """
    config, texts = model.config, calibration.texts[:MOST_TEXTS]
    device = calibration.device or ("cuda" if torch.cuda.is_available() else "cpu")
    encoder = (model.get_encoder() if _is_of_two(config) else model.base_model).eval().to(device)
    options = {"return_token_type_ids": True} if getattr(config, "type_vocab_size", 0) > 1 else {}
    options |= {"truncation": True, "max_length": min(calibration.length, MOST_TOKENS)}
    special = torch.tensor(tokenizer.all_special_ids)
    sums, count = defaultdict(float), 0
    for start in progress_bar(range(0, len(texts), calibration.batch_size), desc="looking for words", leave=False):
        some = texts[start : start + calibration.batch_size]
        columns = [some] if isinstance(some[0], str) else zip(*some, strict=True)
        tokens = tokenizer(*map(list, columns), **options)
        batch = padded(tokens["input_ids"], tokenizer.pad_token_id)
        if "return_token_type_ids" in options and "token_type_ids" in tokens:
            batch["token_type_ids"] = padded(tokens["token_type_ids"], 0)["input_ids"]
        same = _same_words(batch, special)
        if getattr(config, "is_decoder", False):
            same = same.tril()
        on_device = {name: tensor.to(device) for name, tensor in batch.items()}
        for layer, weights in enumerate(encoder(**on_device, output_attentions=True).attentions):
            found = (weights.cpu() * same[:, None]).sum((0, 2, 3)).double()  # [h]
            sums[layer] = sums[layer] + found
        count += int(same.any(-1).sum())
    if not count:
        raise ValueError(
            "`keep_matching_layers`: no word occurs twice in a text of the calibration; give longer texts."
        )
    return [round(float(sums[layer].amax()) / count, 4) for layer in range(len(sums))]


def fields_keeping(
    plan: ConversionPlan, fields: Mapping[str, Any], shares: Sequence[float], count: int
) -> dict[str, Any]:
    """Return the fields of a conversion that leaves the layers with the largest shares as they are.

    Args:
        plan: the conversion of all layers.
        fields: what it was made of.
        shares: by layer, as `matching_shares` returned them.
        count: how many layers stay.

    Raises:
        ValueError: if that leaves no layer to convert, or nothing is converted whose layers can differ.
    """
    prefix = "encoder_" if _is_of_two(plan.config) else ""
    names = [f"{prefix}{name}" for name in ("num_key_value_heads", "kv_lora_rank", "attention_kernel")]
    by_layer = dict(fields.get("per_layer_values") or {})
    names = [name for name in names if fields.get(name) is not None]
    if not names:
        raise ValueError(
            "`keep_matching_layers` is for an encoder's heads, ranks or kernels: give one for all layers "
            f"(`{prefix}num_key_value_heads`, ...)."
        )
    if plan.config.layer_count(names[0]) != len(shares):
        raise ValueError(
            "`keep_matching_layers` needs layers with weights of their own; those of the source share them."
        )
    if count >= len(shares):
        raise ValueError(
            f"`keep_matching_layers` must leave a layer to convert: there are {len(shares)}; got {count}."
        )
    kept = sorted(range(len(shares)), key=lambda layer: shares[layer])[-count:]
    for name in names:
        old = [plan.source_config.layer_value(name, layer) for layer in range(len(shares))]
        by_layer[name] = [old[layer] if layer in kept else fields[name] for layer in range(len(shares))]
    return {**fields, **dict.fromkeys(names), "per_layer_values": by_layer}


def _is_of_two(config: Any) -> bool:
    """Say whether a configuration is of an encoder and a decoder: the encoder's fields have names of their own."""
    return "encoder_num_key_value_heads" in config.kv_heads_fields()


def _same_words(batch: Batch, special: torch.Tensor) -> torch.Tensor:
    """Return of which tokens which others are the same, [b, n, n]; of padding and special tokens none."""
    ids = batch["input_ids"]
    is_word = batch["attention_mask"].bool() & ~torch.isin(ids, special)
    same = (ids[:, :, None] == ids[:, None, :]) & is_word[:, :, None]
    return same & ~torch.eye(ids.shape[1], dtype=torch.bool)
