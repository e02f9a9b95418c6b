"""Chooses the field values of each layer: ranks that fit into a cache budget, and layers that stay unchanged.

**Cache budget** (`kv_cache_bytes`). The budget determines ranks instead of head counts. The keys and values of k heads
of size d are equivalent to a latent of rank 2 k d with constrained projections, and a latent of the same rank without
this constraint loses less.

**Token-matching layers** (`keep_matching_layers`). To compare two texts, a model uses heads that find the same word in
the other text ("duplicate token heads", arXiv 2211.00593, section 3). Shared keys and kernels make these heads less
precise. This hardly changes the outputs for single texts, but fine-tuning on pairs of texts then converges slowly or
not at all (docs/what_did_not_help.md). Only a few layers have such heads, for example two of six in MiniLM. They can
be found with any text because words are also repeated within single texts. The matching share of a layer with
attention weights P is

    s(layer) = max over heads i of  mean over repeated tokens t of  sum of P_i[t, u] over u != t with x_u = x_t
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..modeling.attention.attention_sites import AttentionSite
from ..modeling.fields.variant_config import supports_decoder_cache
from ..modeling.mechanisms.kernels.attention_kernel import AttentionKernel
from ..modeling.ops.variant_attention import AttentionHeads
from ..progress import progress_bar
from ..registration import get_max_input_length, get_variant_config_class
from .attention_modules import AttentionModule
from .calibration_settings import Calibration
from .checkpoint.tensor_files import TensorEntry
from .plan import ConversionPlan


def count_cached_values(heads: AttentionHeads, input_dim: int, kernel: AttentionKernel | None = None) -> int:
    """Return the number of values that an attention module caches per token, for a latent or for keys and values.

    Args:
        heads: The head counts of the module.
        input_dim: Input size of the key and value projections, which is the maximum size of a latent.
        kernel: The kernel that replaces the softmax. The result is 0 for a causal kernel, because the size of its
            state does not depend on the number of tokens.
    """
    if kernel is not None and kernel.is_causal:
        return 0
    if heads.rank is not None:
        return min(heads.rank, input_dim)
    return heads.key * heads.head_dim + heads.value * heads.value_dim


def compute_cache_bytes_per_token(
    config: Any, attentions: Iterable[tuple[AttentionSite, int]]
) -> dict[str, int] | None:
    """Return the cache size per token in bytes for each type of attention, summed over all layers.

    A latent that all layers share is counted only once. Decoders also cache the keys and values of short source texts
    (`latent_attention.should_store_expanded_latent`). These are not counted because they are no larger than the
    projection weights.

    Args:
        config: The variant configuration of the model.
        attentions: The attention type and the cached bytes per token of each module (see `count_cached_values`).

    Returns:
        {type: bytes}. The sizes for "self" and "decoder" are per generated token, and the size for "cross" is per
        source token. None if the model has no cache, either because it is an encoder or because
        `supports_decoder_cache` returns False.
    """
    if not supports_decoder_cache(config):
        return None
    sites: Counter[str] = Counter()
    for site, size in attentions:
        # Encoder attention is not cached.
        if site.get_stack_name(config) != "decoder":
            continue
        is_shared = site.shares_latent and getattr(config, site.rank_field or "", None) is not None
        sites[site.name] = size if is_shared else sites[site.name] + size
    return dict(sites) or None


# Fields for a preliminary plan, which shows the attention modules that can be compressed. The ranks do not matter.
PROBE_FIELDS = {"cross_kv_lora_rank": 1, "kv_lora_rank": 1}

# If the budget allows at least MIN_STEPPED_RANK values per layer, ranks are multiples of RANK_STEP, which is efficient
# on GPUs.
RANK_STEP, MIN_STEPPED_RANK = 8, 16


def check_cache_budget(kv_cache_bytes: Sequence[int], fields: Mapping[str, Any]) -> None:
    """Check the cache budget, which consists of the bytes per source token and per generated token.

    Args:
        kv_cache_bytes: The value passed by the user.
        fields: The other conversion fields.

    Raises:
        ValueError: if the budget does not consist of two numbers, or if a field also sets a rank or the number of
            key/value heads.
    """
    if len(kv_cache_bytes) != 2:
        raise ValueError(
            "`kv_cache_bytes` must be two numbers (bytes per source token and per generated token), got "
            f"{kv_cache_bytes!r}."
        )
    per_layer_values = fields.get("per_layer_values") or {}
    for name in (*PROBE_FIELDS, "num_key_value_heads"):
        if fields.get(name) is not None or name in per_layer_values:
            raise ValueError(f"`kv_cache_bytes` cannot be combined with `{name}` because it determines this field.")


def check_supports_cache_budget(config: Mapping[str, Any]) -> None:
    """Check that a config.json belongs to an encoder-decoder, for which a cache budget is supported.

    Raises:
        ValueError: if it belongs to another model.
    """
    architecture = next(iter(config.get("architectures") or ()), "")
    has_latents = "cross_kv_lora_rank" in get_variant_config_class(config.get("model_type", "")).get_rank_fields()
    if not has_latents or architecture.endswith(("EncoderModel", "ForTokenClassification")):
        raise ValueError(
            "`kv_cache_bytes` is only supported for encoder-decoders with latents, which cache source and generated "
            f"tokens, not for {architecture or config['model_type']}. Set head counts or ranks instead."
        )


def choose_ranks_for_budget(
    probe_plan: ConversionPlan,
    kv_cache_bytes: Sequence[int],
    entries: Mapping[str, TensorEntry],
    measure_losses: Callable[[list[AttentionModule]], list[torch.Tensor]],
) -> dict[str, Any]:
    """Choose the latent ranks whose cache fits into the budget, and return them as configuration fields.

    Args:
        probe_plan: A plan that compresses all attention modules to latents (`PROBE_FIELDS`).
        kv_cache_bytes: Bytes per source token and per generated token, in the stored dtype.
        entries: The tensors of the original model.
        measure_losses: Function that returns the share of energy lost at each rank (`compute_energy_loss_by_rank`) for
            each of the given modules.

    Raises:
        ValueError: if the budget is less than one value per latent and token, or is not below the current cache size.
    """
    config, width = probe_plan.source_config, probe_plan.source_config.hidden_size
    sizes, numbers = [], {}
    for module in probe_plan.modules:
        itemsize = (probe_plan.dtype or entries[module.tensors["key_weight"]]).itemsize
        numbers[module.name] = count_cached_values(module.site.get_heads(config, module.name), width)
        sizes.append((module.site, numbers[module.name] * itemsize))
    old_sizes = compute_cache_bytes_per_token(config, sizes) or {}
    if not old_sizes:
        raise ValueError(
            "`kv_cache_bytes` is not supported because this model's dynamic talking heads do not allow a cache."
        )
    source, generated = (size // itemsize for size in kv_cache_bytes)
    layers = [module for module in probe_plan.modules if module.site.name == "decoder"]
    if source < 1 or generated < len(layers):
        raise ValueError(
            f"`kv_cache_bytes` must be at least {itemsize} bytes per source token and {itemsize * len(layers)} bytes "
            f"per generated token (one value per latent), got {kv_cache_bytes[0]} and {kv_cache_bytes[1]}."
        )
    fields: dict[str, Any] = {}
    if source * itemsize < old_sizes["cross"]:
        fields["cross_kv_lora_rank"] = min(source, width)
    if generated * itemsize < old_sizes["decoder"]:
        max_ranks = [min(numbers[module.name], width) for module in layers]
        ranks = allocate_ranks(measure_losses(layers), generated, max_ranks)
        # A layer whose cache does not have to shrink keeps its latent, or its keys and values.
        new_ranks = [
            module.site.get_heads(config, module.name).rank if rank == numbers[module.name] else rank
            for module, rank in zip(layers, ranks, strict=True)
        ]
        fields["per_layer_values"] = {"kv_lora_rank": new_ranks}
    if not fields:
        raise ValueError(
            f"`kv_cache_bytes` must be below the current cache size of {old_sizes['cross']} bytes per source token or "
            f"{old_sizes['decoder']} bytes per generated token, got {kv_cache_bytes[0]} and {kv_cache_bytes[1]}. "
            "Decrease the number of bytes."
        )
    return fields


def allocate_ranks(energy_losses: Sequence[torch.Tensor], total_rank: int, max_ranks: Sequence[int]) -> list[int]:
    """Choose a rank for each layer such that all layers together lose the least energy.

    Args:
        energy_losses: For each layer, the share of energy lost at each rank, starting at rank 0. It must be convex.
        total_rank: Maximum sum of all ranks, which must be at least the number of layers.
        max_ranks: Maximum rank of each layer.
    """
    step = RANK_STEP if total_rank >= MIN_STEPPED_RANK * len(energy_losses) else 1
    ranks = [min(step, max_rank) for max_rank in max_ranks]

    def compute_gain(layer: int) -> float:
        """Return how much energy a larger rank preserves per added value, or -1 if the rank cannot be increased."""
        rank = ranks[layer]
        new_rank = min(rank + step, max_ranks[layer])
        if new_rank == rank or sum(ranks) + new_rank - rank > total_rank:
            return -1.0
        losses = energy_losses[layer]
        return float(losses[min(rank, len(losses) - 1)] - losses[min(new_rank, len(losses) - 1)]) / (new_rank - rank)

    while max(gains := [compute_gain(layer) for layer in range(len(ranks))]) >= 0:
        best = gains.index(max(gains))
        ranks[best] = min(ranks[best] + step, max_ranks[best])
    return ranks


# Maximum number of texts, and of tokens per text, that are used to find token-matching layers. The attention weights
# of all layers must fit into memory. A hundred lines are enough to find the two layers in MiniLM. The length does not
# depend on `max_length` because token-matching heads can only be found if both occurrences of a word are read.
MAX_TEXTS, MAX_TOKENS = 512, 128
# Fields that change the heads, latent or kernel of a layer, without their prefix.
LAYER_FIELDS = ("num_key_value_heads", "kv_lora_rank", "attention_kernel")


def check_matching_layers(
    plan: ConversionPlan, fields: Mapping[str, Any], count: Any, calibration: Calibration | None
) -> None:
    """Check that the given number of token-matching layers can stay unchanged, without reading any text.

    Args:
        plan: A plan that converts all layers.
        fields: The conversion fields of this plan.
        count: Number of layers that stay unchanged.
        calibration: The calibration settings with the text that is used to find these layers.

    Raises:
        ValueError: if there is no text, no encoder or no layer left to convert, if the encoder layers cannot differ,
            or if other arguments do not change the encoder layers or also select layers.
    """
    if calibration is None:
        raise ValueError(
            "`keep_matching_layers` needs text to find the layers. Set `calibration` (--calibration_file)."
        )
    prefix = _get_encoder_prefix(plan)
    modules = [m for m in plan.modules if not m.site.is_cross_attention and m.site.stack_prefix == prefix]
    runs = [plan.model_class.count_module_runs(plan.config, module.name) for module in modules]
    has_layer_values = "per_layer_values" in plan.config.get_variant_fields()
    if prefix is None or plan.reads_audio or max(runs) > 1 or not has_layer_values:
        raise ValueError(
            "`keep_matching_layers` is only supported for text encoders whose layers can have different heads, not "
            f"for {plan.model_class.__name__}. Remove it."
        )
    if not 0 < count < len(modules):
        raise ValueError(f"`keep_matching_layers` must be between 1 and {len(modules) - 1}, got {count}.")
    if not _list_layer_fields(prefix, fields):
        raise ValueError(
            "`keep_matching_layers` needs new heads, ranks or a kernel for the other encoder layers. Set a field such "
            f"as `{prefix}num_key_value_heads`."
        )
    conflicts = {f"{prefix}{field}" for field in LAYER_FIELDS} & (fields.get("per_layer_values") or {}).keys()
    if conflicts or fields.get(f"{prefix}attention_pattern") is not None:
        name = f"per_layer_values` of `{conflicts.pop()}" if conflicts else f"{prefix}attention_pattern"
        raise ValueError(f"`keep_matching_layers` cannot be combined with `{name}`, which selects other layers.")


@torch.no_grad()
def compute_matching_shares(
    plan: ConversionPlan, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, calibration: Calibration
) -> list[float]:
    """Return the matching share s of each encoder layer (see the module docstring).

    In a decoder-only BERT model, only earlier tokens u < t are counted.

    Args:
        plan: A plan that converts all layers.
        model: The original model in this package's class.
        tokenizer: The model's tokenizer.
        calibration: The calibration settings. The first `MAX_TEXTS` texts or pairs are used, up to `MAX_TOKENS` tokens
            each.

    Raises:
        ValueError: if no example contains a word twice, or if the tokenizer does not belong to the model.
    """
    from .calibration.batches import pad_sequences, tokenize_texts

    config, texts = model.config, calibration.texts[:MAX_TEXTS]
    device = calibration.device or ("cuda" if torch.cuda.is_available() else "cpu")
    encoder = (model.get_encoder() if _get_encoder_prefix(plan) else model.base_model).eval().to(device)
    length = min(MAX_TOKENS, get_max_input_length(config) or MAX_TOKENS)
    encoded, segments = tokenize_texts(config, tokenizer, texts, length)
    special = torch.tensor(tokenizer.all_special_ids)
    sums: dict[int, Any] = defaultdict(float)
    count = 0
    size = calibration.resolved_batch_size
    for start in progress_bar(range(0, len(texts), size), desc="finding token-matching layers", leave=False):
        rows = slice(start, start + size)
        batch = pad_sequences(encoded[rows], tokenizer.pad_token_id)
        if segments is not None:
            batch["token_type_ids"] = pad_sequences(segments[rows], 0)["input_ids"]
        is_identical = _make_identical_token_mask(batch, special)
        if getattr(config, "is_decoder", False):
            is_identical = is_identical.tril()
        model_inputs = {name: tensor.to(device) for name, tensor in batch.items()}
        for layer, weights in enumerate(encoder(**model_inputs, output_attentions=True).attentions):
            sums[layer] = sums[layer] + (weights.cpu() * is_identical[:, None]).sum((0, 2, 3)).double()  # [h]
        count += int(is_identical.any(-1).sum())
    if not count:
        raise ValueError(
            "`keep_matching_layers` needs texts that contain a word twice, but `calibration` contains no such text. "
            "Provide longer texts."
        )
    return [round(float(sums[layer].amax()) / count, 4) for layer in range(len(sums))]


def exclude_matching_layers(
    plan: ConversionPlan, fields: Mapping[str, Any], shares: Sequence[float], count: int
) -> dict[str, Any]:
    """Return the conversion fields that leave the layers with the largest shares unchanged.

    Args:
        plan, fields, count: See `check_matching_layers`.
        shares: The matching share of each layer (see `compute_matching_shares`).
    """
    unchanged = sorted(range(len(shares)), key=lambda layer: shares[layer])[-count:]
    per_layer_values = dict(fields.get("per_layer_values") or {})
    names = _list_layer_fields(_get_encoder_prefix(plan) or "", fields)
    for name in names:
        old = [plan.source_config.get_layer_value(name, layer) for layer in range(len(shares))]
        per_layer_values[name] = [old[layer] if layer in unchanged else fields[name] for layer in range(len(shares))]
    return {**fields, **dict.fromkeys(names), "per_layer_values": per_layer_values}


def _get_encoder_prefix(plan: ConversionPlan) -> str | None:
    """Return the prefix of encoder fields, or None if the model has no encoder."""
    if "encoder_num_key_value_heads" not in plan.config.get_kv_heads_fields():
        return ""
    return "encoder_" if any(module.site.stack_prefix == "encoder_" for module in plan.modules) else None


def _list_layer_fields(prefix: str, fields: Mapping[str, Any]) -> list[str]:
    """Return the names in `fields` that change the layers of the encoder or decoder with the given prefix."""
    names = [f"{prefix}{field}" for field in LAYER_FIELDS]
    return [name for name, value in fields.items() if value is not None and name in names]


def _make_identical_token_mask(batch: dict[str, torch.Tensor], special_token_ids: torch.Tensor) -> torch.Tensor:
    """Return a boolean mask [b, n, n] of pairs of identical tokens, excluding padding and special tokens."""
    ids = batch["input_ids"]
    is_word = batch["attention_mask"].bool() & ~torch.isin(ids, special_token_ids)
    is_identical = (ids[:, :, None] == ids[:, None, :]) & is_word[:, :, None] & is_word[:, None, :]
    return is_identical & ~torch.eye(ids.shape[1], dtype=torch.bool)
