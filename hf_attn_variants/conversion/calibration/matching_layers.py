"""Layers whose heads look for a word's other occurrences: which these are, and a conversion that leaves them alone.

A model compares two texts by heads that find the same word in the other one ("duplicate token heads", arXiv
2211.00593, section 3). Shared keys and kernels blur what they find, the outputs on single texts hardly show it, and a
fine-tuning on pairs then learns late or never (docs/what_did_not_help.md). Few layers have such a head, of MiniLM's
six two. They can be seen in any text, for words come twice in single texts too. Of a layer with weights P:

    s(layer) = max over heads i of  mean over tokens t that occur again of  sum of P_i[t, u] over u != t with x_u = x_t
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...progress import progress_bar
from ...registration import longest_input
from ..calibration_settings import Calibration
from ..plan import ConversionPlan
from .batches import Batch, padded, tokens_of

__all__ = ["check_matching_layers", "fields_keeping", "matching_shares"]

# The text that is looked at, texts and tokens of each, since all layers' attention weights are made for a batch. The
# two layers of MiniLM stand out on a hundred lines. However short a calibration's examples are cut: heads that copy
# from one part of a text to another (of a reaction, to its product) show only where both parts are read.
MOST_TEXTS, MOST_TOKENS = 512, 128
# Fields that change a layer, without their prefix: an encoder's heads, latent and kernel.
OF_A_LAYER = ("num_key_value_heads", "kv_lora_rank", "attention_kernel")


def check_matching_layers(
    plan: ConversionPlan, fields: Mapping[str, Any], count: Any, calibration: Calibration | None
) -> None:
    """Check that so many layers can stay as they are, before any text is read.

    Args:
        plan: the conversion of all layers.
        fields: what it was made of.
        count: how many layers stay.
        calibration: the text to find them by.

    Raises:
        ValueError: if the number is none that leaves a layer to convert; there is no text, or no encoder whose layers
            have weights of their own; or a layer would not be the same as before, or is settled already.
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"`keep_matching_layers` must be a number of layers, from 1; got {count!r}.")
    if plan.hears:
        raise ValueError("`keep_matching_layers` finds layers by text; this model reads audio.")
    if calibration is None:
        raise ValueError("`keep_matching_layers` finds layers by text: give `calibration=` (--calibration_file).")
    prefix = _prefix(plan)
    if prefix is None:
        raise ValueError(
            f"`keep_matching_layers` is for encoders; {plan.model_class.__name__} is the decoder of a model with one."
        )
    names = _asked(prefix, fields)
    if not names:
        raise ValueError(
            "`keep_matching_layers` is for an encoder's heads, ranks or kernels: give one for all layers "
            f"(`{prefix}num_key_value_heads`, ...)."
        )
    by_layer = [name for name in fields.get("per_layer_values") or {} if name in plan.config.by_layer_fields()]
    if also := [name for name in by_layer if _is_of(prefix, name)]:
        raise ValueError(
            f"`keep_matching_layers` chooses layers; `per_layer_values` says it of `{also[0]}`: give one."
        )
    if fields.get(f"{prefix}attention_pattern") is not None:
        raise ValueError(
            f"`keep_matching_layers` leaves layers as they are; `{prefix}attention_pattern` changes all: give one."
        )
    modules = [module for module in plan.modules if not module.site.is_cross_attention and _is_in(prefix, module)]
    if any(plan.model_class.module_runs(plan.config, module.name) > 1 for module in modules):
        raise ValueError(
            "`keep_matching_layers` needs layers with weights of their own; those of the source share them."
        )
    if count >= len(modules):
        raise ValueError(
            f"`keep_matching_layers` must leave a layer to convert: there are {len(modules)}; got {count}."
        )


@torch.no_grad()
def matching_shares(
    plan: ConversionPlan, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, calibration: Calibration
) -> list[float]:
    """Return s of each layer of a source's encoder (of a BERT as a decoder: with u < t).

    Args:
        plan: the conversion of all layers.
        model: the source as this package's model.
        tokenizer: the model's.
        calibration: its texts, or pairs of texts, are read: the first `MOST_TEXTS`, to `MOST_TOKENS` tokens.

    Raises:
        ValueError: if no word of the text occurs twice in an example, or the tokenizer is not the model's.
    """
    config, texts = model.config, calibration.texts[:MOST_TEXTS]
    device = calibration.device or ("cuda" if torch.cuda.is_available() else "cpu")
    encoder = (model.get_encoder() if _prefix(plan) else model.base_model).eval().to(device)
    length = min(MOST_TOKENS, longest_input(config) or MOST_TOKENS)
    encoded, segments = tokens_of(config, tokenizer, texts, length)
    special = torch.tensor(tokenizer.all_special_ids)
    sums: dict[int, Any] = defaultdict(float)
    count = 0
    starts = range(0, len(texts), calibration.batch_rows)
    for start in progress_bar(starts, desc="looking for words that come twice", leave=False):
        rows = slice(start, start + calibration.batch_rows)
        batch = padded(encoded[rows], tokenizer.pad_token_id)
        if segments is not None:
            batch["token_type_ids"] = padded(segments[rows], 0)["input_ids"]
        same = _same_words(batch, special)
        if getattr(config, "is_decoder", False):
            same = same.tril()
        on_device = {name: tensor.to(device) for name, tensor in batch.items()}
        for layer, weights in enumerate(encoder(**on_device, output_attentions=True).attentions):
            sums[layer] = sums[layer] + (weights.cpu() * same[:, None]).sum((0, 2, 3)).double()  # [h]
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
        plan, fields, count: as they were checked.
        shares: by layer, as `matching_shares` returned them.
    """
    staying = sorted(range(len(shares)), key=lambda layer: shares[layer])[-count:]
    by_layer, names = dict(fields.get("per_layer_values") or {}), _asked(_prefix(plan) or "", fields)
    for name in names:
        old = [plan.source_config.layer_value(name, layer) for layer in range(len(shares))]
        by_layer[name] = [old[layer] if layer in staying else fields[name] for layer in range(len(shares))]
    return {**fields, **dict.fromkeys(names), "per_layer_values": by_layer}


def _prefix(plan: ConversionPlan) -> str | None:
    """Return what the names of an encoder's fields begin with; None where there is no encoder."""
    if "encoder_num_key_value_heads" not in plan.config.kv_heads_fields():
        return ""
    return "encoder_" if any(_is_in("encoder_", module) for module in plan.modules) else None


def _is_in(prefix: str, module: Any) -> bool:
    """Say whether an attention is in the stack of a prefix."""
    return module.site.stack_prefix == prefix


def _is_of(prefix: str, name: str) -> bool:
    """Say whether a field changes the layers of this stack."""
    return name in [f"{prefix}{each}" for each in OF_A_LAYER]


def _asked(prefix: str, fields: Mapping[str, Any]) -> list[str]:
    """Return the fields of a stack's layers that are given."""
    return [name for name, value in fields.items() if value is not None and _is_of(prefix, name)]


def _same_words(batch: Batch, special: torch.Tensor) -> torch.Tensor:
    """Return which pairs of tokens are the same, [b, n, n]; none with padding or special tokens."""
    ids = batch["input_ids"]
    is_word = batch["attention_mask"].bool() & ~torch.isin(ids, special)
    same = (ids[:, :, None] == ids[:, None, :]) & is_word[:, :, None] & is_word[:, None, :]
    return same & ~torch.eye(ids.shape[1], dtype=torch.bool)
