"""Token-matching layers: the layers whose heads attend to other occurrences of the same word.

A model compares two texts with heads that find the same word in the other text ("duplicate token heads", arXiv
2211.00593, section 3). Shared keys and kernels make these heads less precise. This hardly changes the outputs for
single texts, but a fine-tuning on pairs of texts then learns late or never (docs/what_did_not_help.md). Few layers
have such a head, two of six in MiniLM. Any text shows them, because words also occur twice in single texts. The share
of a layer with attention weights P is

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
from .batches import Batch, pad_rows, tokenize_texts

__all__ = ["check_matching_layers", "fields_keeping", "matching_shares"]

# Number of texts, and of tokens per text, that are used. The attention weights of all layers must fit into memory. A
# hundred lines are enough to find the two layers of MiniLM. The length does not depend on the calibration's
# `max_length`, because heads that copy from one part of a text to another only show if both parts are read.
MAX_TEXTS, MAX_TOKENS = 512, 128
# Fields that change a layer, without their prefix: heads, latent and kernel.
LAYER_FIELDS = ("num_key_value_heads", "kv_lora_rank", "attention_kernel")


def check_matching_layers(
    plan: ConversionPlan, fields: Mapping[str, Any], count: Any, calibration: Calibration | None
) -> None:
    """Check that a number of token-matching layers can stay unchanged. This needs no text.

    Args:
        plan: The plan that converts all layers.
        fields: The fields of this plan.
        count: Number of layers that stay unchanged.
        calibration: The calibration whose text is used to find these layers.

    Raises:
        ValueError: if the number leaves no layer to convert, there is no text, there is no encoder, its layers share
            their weights, or another argument changes all layers or selects layers.
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"`keep_matching_layers` must be an integer of at least 1, got {count!r}.")
    if plan.reads_audio:
        raise ValueError("`keep_matching_layers` must only be given for models that read text. Leave it out.")
    if calibration is None:
        raise ValueError("`keep_matching_layers` needs text to find layers. Give `calibration` (--calibration_file).")
    prefix = _get_encoder_prefix(plan)
    if prefix is None:
        raise ValueError(
            f"`keep_matching_layers` must only be given for models with an encoder, got {plan.model_class.__name__}. "
            "Leave it out."
        )
    names = _list_layer_fields(prefix, fields)
    if not names:
        raise ValueError(
            "`keep_matching_layers` needs new heads, ranks or a kernel for the other encoder layers. Give "
            f"`{prefix}num_key_value_heads`, for example."
        )
    by_layer = [name for name in fields.get("per_layer_values") or {} if name in plan.config.by_layer_fields()]
    if conflicts := [name for name in by_layer if _is_layer_field(prefix, name)]:
        raise ValueError(
            f"`keep_matching_layers` must not be given with `per_layer_values` of `{conflicts[0]}`. Leave one of them "
            "out."
        )
    if fields.get(f"{prefix}attention_pattern") is not None:
        raise ValueError(
            f"`keep_matching_layers` must not be given with `{prefix}attention_pattern`, which changes all layers. "
            "Leave one of them out."
        )
    modules = [module for module in plan.modules if not module.site.is_cross_attention and _is_in(prefix, module)]
    if any(plan.model_class.count_module_runs(plan.config, module.name) > 1 for module in modules):
        raise ValueError(
            "`keep_matching_layers` must only be given for models whose layers do not share weights. Leave it out."
        )
    if count >= len(modules):
        raise ValueError(
            f"`keep_matching_layers` must be less than the number of layers ({len(modules)}), got {count}. Give a "
            "smaller number."
        )


@torch.no_grad()
def matching_shares(
    plan: ConversionPlan, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, calibration: Calibration
) -> list[float]:
    """Return the share s of each encoder layer (see the module docstring).

    If the model is a decoder-only BERT, only earlier tokens u < t count.

    Args:
        plan: The plan that converts all layers.
        model: The original model in this package's class.
        tokenizer: Its tokenizer.
        calibration: The calibration. Its first `MAX_TEXTS` texts or pairs are used, up to `MAX_TOKENS` tokens each.

    Raises:
        ValueError: if no example contains a word twice, or the tokenizer does not belong to the model.
    """
    config, texts = model.config, calibration.texts[:MAX_TEXTS]
    device = calibration.device or ("cuda" if torch.cuda.is_available() else "cpu")
    encoder = (model.get_encoder() if _get_encoder_prefix(plan) else model.base_model).eval().to(device)
    length = min(MAX_TOKENS, longest_input(config) or MAX_TOKENS)
    encoded, segments = tokenize_texts(config, tokenizer, texts, length)
    special = torch.tensor(tokenizer.all_special_ids)
    sums: dict[int, Any] = defaultdict(float)
    count = 0
    starts = range(0, len(texts), calibration.batch_rows)
    for start in progress_bar(starts, desc="finding token-matching layers", leave=False):
        rows = slice(start, start + calibration.batch_rows)
        batch = pad_rows(encoded[rows], tokenizer.pad_token_id)
        if segments is not None:
            batch["token_type_ids"] = pad_rows(segments[rows], 0)["input_ids"]
        same = _find_same_tokens(batch, special)
        if getattr(config, "is_decoder", False):
            same = same.tril()
        on_device = {name: tensor.to(device) for name, tensor in batch.items()}
        for layer, weights in enumerate(encoder(**on_device, output_attentions=True).attentions):
            sums[layer] = sums[layer] + (weights.cpu() * same[:, None]).sum((0, 2, 3)).double()  # [h]
        count += int(same.any(-1).sum())
    if not count:
        raise ValueError(
            "`keep_matching_layers` needs texts that contain a word twice, and the calibration has none. Give longer "
            "texts."
        )
    return [round(float(sums[layer].amax()) / count, 4) for layer in range(len(sums))]


def fields_keeping(
    plan: ConversionPlan, fields: Mapping[str, Any], shares: Sequence[float], count: int
) -> dict[str, Any]:
    """Return the fields of a conversion that leaves the layers with the largest shares unchanged.

    Args:
        plan, fields, count: The arguments of `check_matching_layers`.
        shares: The share of each layer from `matching_shares`.
    """
    unchanged = sorted(range(len(shares)), key=lambda layer: shares[layer])[-count:]
    by_layer = dict(fields.get("per_layer_values") or {})
    names = _list_layer_fields(_get_encoder_prefix(plan) or "", fields)
    for name in names:
        old = [plan.source_config.layer_value(name, layer) for layer in range(len(shares))]
        by_layer[name] = [old[layer] if layer in unchanged else fields[name] for layer in range(len(shares))]
    return {**fields, **dict.fromkeys(names), "per_layer_values": by_layer}


def _get_encoder_prefix(plan: ConversionPlan) -> str | None:
    """Return the prefix of the fields of an encoder, or None if there is no encoder."""
    if "encoder_num_key_value_heads" not in plan.config.kv_heads_fields():
        return ""
    return "encoder_" if any(_is_in("encoder_", module) for module in plan.modules) else None


def _is_in(prefix: str, module: Any) -> bool:
    """Return whether an attention is in the encoder or decoder with this prefix."""
    return module.site.stack_prefix == prefix


def _is_layer_field(prefix: str, name: str) -> bool:
    """Return whether a field changes the layers of the encoder or decoder with this prefix."""
    return name in [f"{prefix}{field}" for field in LAYER_FIELDS]


def _list_layer_fields(prefix: str, fields: Mapping[str, Any]) -> list[str]:
    """Return the given fields that change the layers of the encoder or decoder with this prefix."""
    return [name for name, value in fields.items() if value is not None and _is_layer_field(prefix, name)]


def _find_same_tokens(batch: Batch, special: torch.Tensor) -> torch.Tensor:
    """Return which pairs of tokens are equal, [b, n, n]. Padding and special tokens are not equal to any token."""
    ids = batch["input_ids"]
    is_word = batch["attention_mask"].bool() & ~torch.isin(ids, special)
    same = (ids[:, :, None] == ids[:, None, :]) & is_word[:, :, None] & is_word[:, None, :]
    return same & ~torch.eye(ids.shape[1], dtype=torch.bool)
