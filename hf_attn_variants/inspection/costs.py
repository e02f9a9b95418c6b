"""Computes the costs of a checkpoint and its possible variants from its `config.json`.

There are variants for all possible numbers of key/value heads and for a few latent ranks, and a variant with talking
heads. The weights and all other files in the checkpoint are not read. Parameters, FLOPs and cache sizes are computed
from a model, which can be on the meta device. A multiplication and an addition count as two FLOPs. Only matrix
products are counted. Softmax, norms and biases are ignored.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.utils import cached_file

from ..conversion.attention_tensors import get_kv_head_change, get_latent_change
from ..conversion.checkpoint.source import check_complete_model, find_local_folder, read_config
from ..conversion.layer_choice import compute_cache_bytes_per_token, count_cached_values
from ..errors import convert_to_value_error
from ..files import CONFIG_NAME
from ..modeling.attention.attention_sites import AttentionSite, is_local_layer
from ..modeling.attention.latent_attention import count_latent_flops
from ..modeling.attention.model_mixin import AttnVariantModelMixin
from ..modeling.fields.composition import ATTENTION_EXTENSIONS
from ..modeling.fields.field_table import FIELD_TEXTS, PLACE_WORDINGS, look_up_field
from ..modeling.fields.layer_values import LayerValue
from ..modeling.fields.mechanism_fields import has_kernel
from ..modeling.fields.variant_config import supports_decoder_cache
from ..modeling.mechanisms.attention_extension import get_extensions
from ..modeling.mechanisms.head_sharing import GroupedQueryAttention, HeadSharing, get_head_sharing
from ..modeling.mechanisms.kernels.kernel_table import KERNELS, get_kernel_class
from ..modeling.mechanisms.latents import get_projection_rank
from ..modeling.mechanisms.patterns.pattern_table import PATTERNS, get_pattern_class
from ..modeling.mechanisms.score_function import ScoreFunction
from ..modeling.mechanisms.talking_heads import (
    BOTH,
    KIND,
    count_talking_heads_flops,
    get_dynamic_terms,
    has_talking_heads,
    supports_cache,
)
from ..modeling.ops.variant_attention import VariantAttention
from ..native.native_model import NativeModelMixin
from ..registration import get_variant_config_class, get_variant_model_class
from .text_tables import describe_talking_projections, select_place_prefixes


def read_checkpoint_config(checkpoint: str, revision: str | None = None, token: str | None = None) -> dict[str, Any]:
    """Read a checkpoint's `config.json`. No other file is downloaded from the Hub.

    Args:
        checkpoint: A folder or a Hub id.
        revision: A branch, tag or commit in the Hub repository.
        token: The access token for the Hub.

    Returns:
        The content of the file.

    Raises:
        OSError: If the checkpoint has no `config.json`.
        ValueError: If the file is not a Transformers configuration, or `revision` is set for a folder.
    """
    folder = find_local_folder(checkpoint)
    if folder is None:
        try:
            file: Any = cached_file(checkpoint, CONFIG_NAME, revision=revision, token=token)
            folder = Path(file).parent
        except OSError as error:
            raise OSError(f"There is no folder {checkpoint!r}, and it cannot be read as a Hub id: {error}") from error
    elif revision is not None:
        raise ValueError(f"`revision` is only supported for Hub ids, but {checkpoint!r} is a folder. Remove it.")

    check_complete_model(folder, allow_pickle=True)
    return read_config(folder)


INVALID_CONFIGURATION_MESSAGE = "The configuration is invalid"


@dataclass(frozen=True)
class VariantCost:
    """The costs of one variant, which form one row in a `CostTable`.

    Args:
        name: The name of the variant, for example "GQA-4".
        fields: The configuration fields that define the variant.
        current: Whether the variant is the unchanged checkpoint.
        convertible: Whether the checkpoint can be converted to the variant.
        parameters: The number of parameters. Tied parameters are counted once.
        attention_parameters: The number of parameters in the attention modules.
        flops_per_token: The result of `flops_per_token`, which for a decoder applies to the next generated token.
        kv_cache_bytes_per_token: The result of `compute_kv_cache_bytes_per_token`.
        kv_cache_bytes: The cache size in bytes for the whole batch, or None if the model has no cache.
        largest_batch: The number of sequences whose caches fit into `memory` together with the weights. None if
            the model has no cache or `memory` is not set.
    """

    name: str
    fields: dict[str, Any]
    current: bool
    convertible: bool
    parameters: int
    attention_parameters: int
    flops_per_token: dict[str, int]
    kv_cache_bytes_per_token: dict[str, int] | None
    kv_cache_bytes: int | None
    largest_batch: int | None = None


@dataclass(frozen=True)
class CostTable:
    """The costs of a checkpoint and its variants, with the sizes for which they were computed.

    Args:
        checkpoint: The name of the checkpoint.
        architecture: The name of the model class.
        batch_size: The number of sequences per batch.
        length: The number of tokens that a token attends to, which is the sequence length in an encoder and the number
            of cached tokens in a decoder.
        source_length: The number of tokens that the encoder of an encoder-decoder reads.
        dtype: The dtype of the weights and the cache.
        rows: The variants.
        num_beams: The number of beams per sequence.
        memory: The number of bytes available for the weights and the cache, or None if they are not limited.
        upstream_kv_cache_bytes: The cache size in bytes with the Transformers class, which repeats the encoder keys
            and values for each beam. None if this cache is not larger.
        upstream_largest_batch: The `largest_batch` for the Transformers class.
    """

    checkpoint: str
    architecture: str
    batch_size: int
    length: int
    source_length: int
    dtype: str
    rows: list[VariantCost]
    num_beams: int = 1
    memory: int | None = None
    upstream_kv_cache_bytes: int | None = None
    upstream_largest_batch: int | None = None

    @property
    def current(self) -> VariantCost:
        """The row for the unchanged checkpoint."""
        return next(row for row in self.rows if row.current)

    @property
    def current_kv_cache_bytes(self) -> int | None:
        """The cache size in bytes of the checkpoint in its current class, which may be a Transformers class."""
        return self.upstream_kv_cache_bytes or self.current.kv_cache_bytes

    def get_weight_bytes(self, row: VariantCost) -> int:
        """Return the size of a variant's parameters in bytes."""
        return row.parameters * get_bytes_per_element(self.dtype)

    def compute_savings(self, row: VariantCost) -> dict[str, int | None]:
        """Return a variant's savings compared with the unchanged checkpoint. Negative numbers are additional costs."""
        current, caches = self.current, (self.current_kv_cache_bytes, row.kv_cache_bytes)
        cache = None if caches[0] is None or caches[1] is None else caches[0] - caches[1]
        saved = {"weight_bytes": self.get_weight_bytes(current) - self.get_weight_bytes(row), "kv_cache_bytes": cache}
        flops = current.flops_per_token.items()
        return saved | {f"{stack}_flops_per_token": count - row.flops_per_token[stack] for stack, count in flops}

    def to_dict(self) -> dict[str, Any]:
        """Return the table as JSON values, including the `savings` of each row."""
        values = asdict(self)
        values["rows"] = [asdict(row) | {"savings": self.compute_savings(row)} for row in self.rows]
        return values


def make_variant_config(config: Mapping[str, Any], **fields: Any) -> Any:
    """Return the variant configuration that a `config.json` describes.

    Args:
        config: The content of `config.json`.
        **fields: Fields that override those in the file.

    Raises:
        ValueError: If the architecture is not supported, a value is invalid, or a Transformers checkpoint has layers
            of different sizes (`per_layer_config`).
    """
    config_class = get_variant_config_class(config.get("model_type", ""))
    if config.get("per_layer_config") and config["model_type"] != config_class.model_type:
        raise ValueError(
            "`per_layer_config` (layers of different sizes) is only supported for checkpoints from this package."
        )
    with convert_to_value_error(INVALID_CONFIGURATION_MESSAGE):
        return config_class.from_upstream(dict(config), **fields)


def resolve_source_model(config: Mapping[str, Any]) -> tuple[type[AttnVariantModelMixin], Any]:
    """Return this package's model class and configuration for a `config.json`.

    Raises:
        ValueError: If the architecture is not supported.
    """
    model_config = make_variant_config(config)
    architecture = next(iter(config.get("architectures") or ()), None)
    return get_variant_model_class(architecture or model_config.auto_classes["AutoModel"]), model_config


def get_values_by_layer(config: Any, field: str) -> list[Any]:
    """Return the value of a configuration field in each layer of the encoder or decoder that it belongs to."""
    return [config.get_layer_value(field, layer) for layer in range(config.get_num_layers(field))]


def get_variant_name(config: Any, field: str = HeadSharing.field) -> str:
    """Return the name of the attention variant in a configuration.

    Examples are "MHA", "GQA-4", "GQA-1..8 by layer", "MQA + talking heads", "MHA + cross latent 128 + latent 64" and
    "MHA + cached encoder outputs".

    Args:
        config: The variant configuration.
        field: The key/value head field of the encoder or decoder to describe.
    """
    counts = set(get_values_by_layer(config, field)) or {getattr(config, field)}
    sharing = get_head_sharing(counts, config.get_query_heads(field))
    number = str(max(counts)) if len(counts) == 1 else f"{min(counts)}..{max(counts)} by layer"
    parts = [f"{sharing.label}-{number}" if sharing is GroupedQueryAttention else sharing.label]
    for name in _list_rank_fields(config, field):
        ranks = get_values_by_layer(config, name)
        if known := {rank for rank in ranks if rank is not None}:
            is_cross = name.startswith("cross_")
            text = f"{'cross ' if is_cross else ''}latent {'..'.join(map(str, sorted({min(known), max(known)})))}"
            if known == {config.hidden_size}:  # the latents are the input itself
                text = "cached encoder outputs" if is_cross else "cached layer inputs"
            parts.append(text + _describe_layers(ranks))
    if config.value_head_dim is not None:
        parts.append(f"values of {config.value_head_dim}")
    parts += describe_scores(config, (field,)) + describe_extensions(config, (field,))
    parts += [
        "talking heads" + ("" if kind == BOTH else f" ({kind})") + suffix
        for kind, suffix in describe_talking_projections(config, (field,))
    ]
    prefix = "encoder_" if field.startswith("encoder_") else ""
    pattern = getattr(config, f"{prefix}attention_pattern")
    if pattern is not None and "attention_block_size" in get_pattern_class(pattern).needed:
        parts.append(f"{pattern.replace('_', ' ')} {getattr(config, f'{prefix}attention_block_size')}")
    elif pattern is not None:
        windows = get_values_by_layer(config, f"{prefix}attention_window")
        parts.append("window " + "..".join(map(str, sorted({w for w in windows if w is not None}))))
    for place in [prefix] if prefix else ["", "cross_"]:
        if (kernel := getattr(config, f"{place}attention_kernel", None)) is not None:
            window = f" {getattr(config, f'{place}attention_window')}" if get_kernel_class(kernel).needs_window else ""
            layers = _describe_layers(get_values_by_layer(config, f"{place}attention_kernel"))
            parts.append(f"{'cross ' if place == 'cross_' else ''}{kernel}{window}{layers}")
    return " + ".join(parts)


def describe_scores(config: Any, fields: Sequence[str]) -> list[str]:
    """Return descriptions of scores other than dot products, such as "additive scores in cross-attention".

    The place is omitted if the scores are used in all places of the encoder or decoder.

    Args:
        config: A variant configuration.
        fields: The key/value head fields of the encoder or decoder to describe.
    """
    names = {prefix: get_score_name(config, prefix) for prefix in select_place_prefixes(config, fields)}
    if len({*names.values()}) == 1:
        return [f"{score} scores" for score in {*names.values()} - {None}]
    used = {prefix: score for prefix, score in names.items() if score is not None}
    return [f"{score} scores in {PLACE_WORDINGS[prefix].place}" for prefix, score in used.items()]


def describe_extensions(config: Any, fields: Sequence[str]) -> list[str]:
    """Return descriptions of the attention extensions, such as "output gates in cross-attention".

    The place is omitted if an extension is used in all places of the encoder or decoder.

    Args:
        config: A variant configuration.
        fields: The key/value head fields of the encoder or decoder to describe.
    """
    all_prefixes, texts = select_place_prefixes(config, fields), list[Any]()
    for extension in ATTENTION_EXTENSIONS:
        text = FIELD_TEXTS[extension.field].card
        prefixes = [prefix for prefix in all_prefixes if extension.find_requesting_field(config, prefix)]
        if len(prefixes) == len(all_prefixes):
            texts.append(text)
        else:
            texts += [f"{text} in {PLACE_WORDINGS[prefix].place}" for prefix in prefixes]
    return texts


def _describe_layers(values: list[LayerValue]) -> str:
    """Return " in <n> of <m> layers" if some layers have no value, and "" otherwise."""
    return f" in {len(values) - values.count(None)} of {len(values)} layers" if None in values else ""


def _list_rank_fields(config: Any, field: str) -> list[str]:
    """Return the rank fields of the encoder or decoder that a head field belongs to, with cross-attention first."""
    names = [name for name in config.get_rank_fields() if name.startswith("encoder_") == field.startswith("encoder_")]
    return sorted(names, key=lambda name: not name.startswith("cross_"))


def compute_cost_table(
    config: Mapping[str, Any],
    checkpoint: str = "",
    batch_size: int = 1,
    length: int = 512,
    source_length: int | None = None,
    dtype: str | None = None,
    num_beams: int = 1,
    memory: int | None = None,
) -> CostTable:
    """Compute the costs of a checkpoint and its possible variants without reading weights.

    Args:
        config: The checkpoint's `config.json`.
        checkpoint: The name of the checkpoint, for the table.
        batch_size: The number of sequences per batch.
        length: The number of tokens attended to (see `CostTable`).
        source_length: The number of tokens that the encoder reads. Defaults to `length`, or to the number of positions
            in an audio encoder.
        dtype: The dtype of the weights and the cache. Defaults to the dtype in the configuration, or float32.
        num_beams: The number of beams per sequence. All beams of a sequence share the encoder keys and values.
        memory: The number of bytes available for the weights and the cache. Activations are not counted.

    Raises:
        ValueError: If the configuration is invalid or not supported, a size is less than 1, or `num_beams` or `memory`
            is set for a model without a cache.

    Example:
        >>> table = compute_cost_table(read_checkpoint_config("google-t5/t5-small"), num_beams=4)
        >>> {row.name: row.kv_cache_bytes for row in table.rows}
    """
    model_class, current = resolve_source_model(config)
    source_length = (get_num_audio_positions(current) or length) if source_length is None else source_length
    check_sizes(batch_size=batch_size, length=length, source_length=source_length, num_beams=num_beams, memory=memory)
    dtype = dtype or str(current.dtype or "float32").removeprefix("torch.")
    field = get_varied_heads_field(model_class, current)
    itemsize = get_bytes_per_element(dtype)
    sizes, rows, upstream_bytes = (itemsize, length, source_length, num_beams), [], None
    for fields in iterate_variant_fields(current, field, list_kv_head_counts(current, field)):
        variant = make_variant_config(config, **fields)
        with convert_to_value_error(INVALID_CONFIGURATION_MESSAGE), torch.device("meta"):
            model = untie_output_embeddings(model_class(variant), config)
        is_current = _get_variant_values(variant) == _get_variant_values(current)
        description = (get_variant_name(variant, field), fields, is_current, _is_convertible(current, variant))
        rows.append(VariantCost(*description, **_compute_costs(model, sizes, batch_size, memory)))
        if is_current and config["model_type"] != type(current).model_type:
            upstream_bytes = compute_kv_cache_bytes(model, *sizes, repeats_source=True)
    architecture = (config.get("architectures") or [model_class.__name__])[0]
    table = CostTable(checkpoint, architecture, batch_size, length, source_length, dtype, rows, num_beams, memory)
    if table.current.kv_cache_bytes is None and (num_beams > 1 or memory is not None):
        argument = "memory" if num_beams == 1 else "num_beams"
        raise ValueError(f"`{argument}` is not supported for {architecture}, which has no key/value cache. Remove it.")
    if upstream_bytes is None or batch_size * upstream_bytes == table.current.kv_cache_bytes:
        return table
    largest = compute_largest_batch(memory, itemsize * table.current.parameters, upstream_bytes)
    return replace(table, upstream_kv_cache_bytes=batch_size * upstream_bytes, upstream_largest_batch=largest)


def _compute_costs(
    model: AttnVariantModelMixin, sizes: tuple[int, int, int, int], batch_size: int, memory: int | None
) -> dict[str, Any]:
    """Count the costs of a model, and return them as fields of `VariantCost`."""
    itemsize, length, source_length, _ = sizes
    parameters = sum(parameter.numel() for parameter in model.parameters())
    cache = compute_kv_cache_bytes(model, *sizes)
    return {
        "parameters": parameters,
        "attention_parameters": count_attention_parameters(model),
        "flops_per_token": count_flops_per_token(model, length, source_length, decodes=True, batch_size=batch_size),
        "kv_cache_bytes_per_token": compute_kv_cache_bytes_per_token(model, itemsize),
        "kv_cache_bytes": None if cache is None else batch_size * cache,
        "largest_batch": compute_largest_batch(memory, itemsize * parameters, cache),
    }


def get_num_audio_positions(config: Any) -> int | None:
    """Return the fixed number of positions that an audio encoder reads, or None for a text model."""
    return getattr(config, "max_source_positions", None)


def iterate_variant_fields(
    current: Any, field: str, counts: Iterable[int], talking_heads: bool = True, latents: bool = True
) -> Iterator[dict[str, Any]]:
    """Yield the fields of each variant, with multi-head attention first.

    There is one variant for each number of key/value heads in `counts`, with the model's current latents. If the
    layers have different numbers of heads, the unchanged model is also a variant. If the model does not have latents
    or talking heads, variants with latents or talking heads are added.

    Args:
        current: The configuration of the model.
        field: The key/value head field.
        counts: The numbers of key/value heads.
        talking_heads, latents: Whether to include variants with talking heads and with latents.
    """
    ranks = _list_rank_fields(current, field)
    if has_latents(current, field):
        yield {field: current.get_query_heads(field)} | dict.fromkeys(ranks)
    yield from ({field: count} for count in counts)
    if field in (current.per_layer_values or {}):
        yield {"per_layer_values": current.per_layer_values}
    # These variants cannot be combined with kernels.
    if has_kernel(current) or _has_unconvertible_attention(current):
        return
    # With latents, dynamic terms that read the encoder outputs would be computed from the latents instead.
    keeps_cross_cache = supports_cache(get_dynamic_terms(current, "cross_"))
    if latents and supports_decoder_cache(current) and keeps_cross_cache and not has_latents(current, field):
        yield from iterate_latent_variants(current, ranks)
    # Talking heads require the same number of heads in the encoder and the decoder.
    is_even = len({current.get_query_heads(name) for name in current.get_kv_heads_fields()}) == 1
    if talking_heads and KIND in current.get_variant_fields() and not has_talking_heads(current) and is_even:
        yield {KIND: BOTH}


def has_latents(config: Any, field: str | None = None) -> bool:
    """Return whether a configuration has latents in the encoder or decoder that `field` belongs to.

    If `field` is None, latents in any encoder or decoder count.
    """
    names = config.get_rank_fields() if field is None else _list_rank_fields(config, field)
    return any(getattr(config, name) is not None for name in names)


def iterate_latent_variants(current: Any, ranks: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield the fields of a few latent variants.

    For models with cross-attention, the variants are cached encoder outputs, a cross-attention latent with a quarter
    of the width, and this latent combined with a self-attention latent that is as large as a multi-query cache. For
    other models, the only variant has latents with a quarter of the width.
    """
    width, multi_query_values = current.hidden_size, 2 * current.get_attention_head_dim()
    quarter = max(1, width // 4)
    if "cross_kv_lora_rank" in ranks:
        yield {"cross_kv_lora_rank": width}
        yield {"cross_kv_lora_rank": quarter}
        yield {"cross_kv_lora_rank": quarter, "kv_lora_rank": min(width, multi_query_values)}
    else:
        yield from ({name: quarter} for name in ranks)


def list_used_fields(model_class: "type[AttnVariantModelMixin]", config: Any) -> tuple[str, ...]:
    """Return the key/value head fields and rank fields that the attention modules of a model class use."""
    with convert_to_value_error(INVALID_CONFIGURATION_MESSAGE), torch.device("meta"):
        sites = [site for site, _, _ in model_class(config).named_attention_modules()]
    used = {site.kv_heads_field for site in sites} | {site.rank_field for site in sites}
    return tuple(name for name in (*config.get_kv_heads_fields(), *config.get_rank_fields()) if name in used)


def get_varied_heads_field(model_class: "type[AttnVariantModelMixin]", config: Any) -> str:
    """Return the name of the key/value head field to vary: the decoder's, or the encoder's if there is no decoder."""
    return next(iter(list_used_fields(model_class, config)), HeadSharing.field)


def list_kv_head_counts(config: Any, field: str) -> list[int]:
    """Return the possible numbers of key/value heads in descending order.

    These are the divisors of the number of query heads. Except for the number of query heads itself, they must also
    divide the number of value heads.
    """
    heads = config.get_query_heads(field)
    value_heads = {
        config.get_talking_heads(prefix, layer).output
        for prefix in select_place_prefixes(config, (field,))
        for layer in range(config.get_num_layers(prefix + KIND))
    }
    divisors = (k for k in range(heads, 0, -1) if heads % k == 0)
    return [k for k in divisors if k == heads or not any(count % k for count in value_heads)]


def _get_variant_values(config: Any) -> dict[str, Any]:
    """Return the values of a configuration's variant fields."""
    return {name: getattr(config, name) for name in config.get_variant_fields()}


def _is_convertible(source: Any, target: Any) -> bool:
    """Return whether a model with the `source` configuration can be converted to the `target` configuration."""
    if _get_variant_values(source) != _get_variant_values(target) and _has_unconvertible_attention(source):
        return False
    try:
        for field in source.get_kv_heads_fields():
            for pair in zip(get_values_by_layer(source, field), get_values_by_layer(target, field), strict=True):
                get_kv_head_change(*pair)
        for field in source.get_rank_fields():
            for pair in zip(get_values_by_layer(source, field), get_values_by_layer(target, field), strict=True):
                get_latent_change(*(get_projection_rank(rank, source.hidden_size) for rank in pair))
    except ValueError:
        return False
    return True


def _has_unconvertible_attention(config: Any) -> bool:
    """Return whether the attention in a configuration has parameters that cannot be converted."""
    values = [getattr(config, name) for name in (*config.get_kernel_fields(), *config.get_pattern_fields())]
    head_dependent_names = [name for name in KERNELS if get_kernel_class(name).tensors_per_key_head]
    head_dependent_names += [name for name in PATTERNS if get_pattern_class(name).learned]
    prefixes = [p for p in look_up_field(ScoreFunction.field)[1].prefixes if hasattr(config, p + ScoreFunction.field)]
    has_scores = any(get_score_name(config, prefix) is not None for prefix in prefixes)
    return has_scores or config.value_head_dim is not None or any(name in values for name in head_dependent_names)


def get_score_name(config: Any, prefix: str) -> str | None:
    """Return the name of the score function set by the fields with this prefix, or None for the dot product."""
    requested = ScoreFunction.find_requesting_field(config, prefix)
    return None if requested is None else requested[1]


# The minimum number of bytes per value in a kernel's state, because sums are stored in float32 even in half precision.
STATE_ITEMSIZE = 4
# The names of linear layers that run once per sequence, regardless of its length.
ONCE_PER_SEQUENCE_PATTERN = re.compile(
    r"(.*\.)?pooler(\..*)?|cls\.seq_relationship|sop_classifier\..*|classification_head\..*|pre_classifier|"
    r"sequence_summary\..*"
)


def check_sizes(**sizes: int | None) -> None:
    """Check that sizes are at least 1.

    Args:
        **sizes: {argument name: value}. Values of None are not checked.

    Raises:
        ValueError: If a size is less than 1.
    """
    for name, value in sizes.items():
        if value is not None and value < 1:
            raise ValueError(f"`{name}` must be at least 1, got {value}.")


def untie_output_embeddings(model: AttnVariantModelMixin, config: Mapping[str, Any]) -> AttnVariantModelMixin:
    """Untie the output embeddings of a model if `tie_word_embeddings` in its `config.json` is False.

    This is necessary because the configuration class of T5 always sets `tie_word_embeddings` to True. The model is
    changed in place and returned.
    """
    head = model.get_output_embeddings()
    if head is not None and model.config.tie_word_embeddings and config.get("tie_word_embeddings") is False:
        head.weight = nn.Parameter(torch.empty_like(head.weight))
    return model


def get_bytes_per_element(dtype: str) -> int:
    """Return the number of bytes per element for a floating-point dtype.

    Args:
        dtype: The name of the dtype, for example "float32".

    Raises:
        ValueError: If torch has no floating-point dtype with this name.
    """
    torch_dtype = getattr(torch, dtype, None)
    if not isinstance(torch_dtype, torch.dtype) or not torch_dtype.is_floating_point:
        raise ValueError(f"`dtype` must be the name of a floating-point torch dtype, such as float32, got {dtype!r}.")
    return torch_dtype.itemsize


def compute_kv_cache_bytes_per_token(model: AttnVariantModelMixin, itemsize: int) -> dict[str, int] | None:
    """Return the cache size per token (see `compute_cache_bytes_per_token`), with `itemsize` bytes per value."""
    sizes = []
    for site, path, module in model.named_attention_modules():
        heads, kernel = site.get_heads(model.config, path), _get_core_module(module, site).kernel
        sizes.append((site, itemsize * count_cached_values(heads, model.config.hidden_size, kernel)))
    return compute_cache_bytes_per_token(model.config, sizes)


def compute_kv_cache_bytes(
    model: AttnVariantModelMixin,
    itemsize: int,
    length: int,
    source_length: int,
    num_beams: int = 1,
    repeats_source: bool = False,
) -> int | None:
    """Return the total cache size of a sequence in bytes, or None if the model has no cache.

    With a window, the cache contains at most as many tokens as the window. With a kernel, it contains the state of the
    kernel.

    Args:
        model: A variant model.
        itemsize: The number of bytes per value.
        length: The number of tokens that the decoder has read or generated.
        source_length: The number of tokens that the encoder has read.
        num_beams: The number of beams. Each beam has its own generated tokens, and all beams share the source.
        repeats_source: Whether the source is stored for each beam, as in the Transformers classes.
    """
    repeats_source = repeats_source or isinstance(model, NativeModelMixin)
    is_shared = model.config.is_encoder_decoder and not repeats_source
    is_shared = is_shared and not has_talking_heads(model.config, "cross_")
    sizes = []
    for site, path, module in model.named_attention_modules():
        core, heads = _get_core_module(module, site), site.get_heads(model.config, path)
        tokens = source_length if site.is_cross_attention else length
        tokens = tokens if core.key_range is None else min(tokens, core.key_range.before)
        size = itemsize * tokens * count_cached_values(heads, model.config.hidden_size, core.kernel)
        if core.kernel is not None:  # cross-attention also caches the keys and values from which the state is computed
            size += max(itemsize, STATE_ITEMSIZE) * core.kernel.count_state_values(heads)
        sizes.append((site, size if site.is_cross_attention and is_shared else num_beams * size))
    cache = compute_cache_bytes_per_token(model.config, sizes)
    return None if cache is None else sum(cache.values())


def compute_largest_batch(memory: int | None, weight_bytes: int, cache_bytes: int | None) -> int | None:
    """Return the largest batch whose caches fit into memory together with the weights, or 0 if the weights do not fit.

    Args:
        memory: The available number of bytes, or None if it is not limited.
        weight_bytes: The size of the weights in bytes.
        cache_bytes: The cache size of one sequence in bytes, or None if the model has no cache.
    """
    return None if memory is None or not cache_bytes else max(0, (memory - weight_bytes) // cache_bytes)


def _get_core_module(module: Any, site: AttentionSite) -> VariantAttention:
    """Return the submodule that calls the attention function."""
    return module.get_submodule(site.core)


def count_flops_per_token(
    model: AttnVariantModelMixin, length: int, source_length: int, decodes: bool = False, batch_size: int = 1
) -> dict[str, int]:
    """Return the number of floating-point operations per token in a forward pass.

    With latents, this number depends on how many tokens are processed at once. For a whole text, the keys and values
    are computed once from each latent (expanded form). For a single token, multi-query attention on the latents
    (absorbed form) is used if it is cheaper.

    Args:
        model: A variant model.
        length: The number of tokens that a token attends to in an encoder-only model or in a decoder.
        source_length: The same number for the encoder of an encoder-decoder and for cross-attention.
        decodes: Whether the decoder generates one token at a time. If True, latents are counted in the form
            that the model uses for generation. Otherwise, they are counted in the expanded form.
        batch_size: The number of sequences per batch. For short source texts, the form depends on this number.

    Returns:
        {"encoder": ..., "decoder": ...}, with only the parts that the model has. The encoder includes the keys,
        values and latents for cross-attention. Model heads that run once per sequence are not counted.
    """
    config = model.config
    flops: Counter[str] = Counter()
    prefix = f"{model.base_model_prefix}." if model.base_model is not model else ""
    modules = model.named_modules()
    linears = {name.removeprefix(prefix): layer for name, layer in modules if isinstance(layer, nn.Linear)}
    has_decoder = any(site.get_stack_name(config) == "decoder" for site, _, _ in model.named_attention_modules())
    decodes = decodes and supports_decoder_cache(config)
    for site, path, module in model.named_attention_modules():
        runs, stack = model.count_module_runs(config, path), site.get_stack_name(config)
        heads = site.get_heads(config, path)
        key_stack = "encoder" if site.is_cross_attention else stack
        layers = {linear: linears.pop(f"{path}.{linear}") for linear in dict.fromkeys(site.projections.values())}
        projections = {role: layers[linear] for role, linear in site.projections.items()}
        # The keys and values of a fused layer belong to the same stack as its queries and are counted with them.
        flops[stack] += 2 * runs * (projections["query"].weight.numel() + projections["output"].weight.numel())
        latent = linears.pop(site.get_latent_projection_path(path), None)  # a latent that layers share is counted once
        flops[key_stack] += 0 if latent is None else 2 * runs * latent.weight.numel()
        attended = source_length if site.is_cross_attention or site.stack == "encoder" else length
        core = _get_core_module(module, site)
        attended = attended if core.key_range is None else core.key_range.count_attended_keys(attended)
        attended = attended if core.compression is None else core.compression.count_attended_keys(attended)
        if is_local_layer(config, site.get_layer_index(config, path)):
            attended = min(attended, 2 * config.sliding_window + 1)
        query_dim = projections["query"].in_features
        key_dim = projections["key"].in_features if site.is_cross_attention else query_dim
        parts = [count_talking_heads_flops(heads, query_dim, key_dim, attended)]
        key_value = () if site.is_fused else (projections["key"], projections["value"])
        if decodes and heads.rank is not None:
            is_step, is_cached = stack == "decoder", site.is_cross_attention
            parts.append(count_latent_flops(core, key_value, attended, batch_size, is_step, is_cached))
        else:
            parts.append(_count_attention_flops(core, key_value, attended))
        extras = [core.compression, core.score, *get_extensions(core).values()]
        parts += [extra.count_flops() for extra in extras if extra is not None]
        for flops_per_key, flops_per_query in parts:
            flops[key_stack] += runs * flops_per_key
            flops[stack] += runs * flops_per_query
    for name, linear in linears.items():
        if not runs_once_per_sequence(model, name):
            parent = name.split(".")[0] if config.is_encoder_decoder else None
            stack = parent if parent in ("encoder", "decoder") else "decoder" if has_decoder else "encoder"
            flops[stack] += 2 * model.count_module_runs(config, name) * linear.weight.numel()
    return {stack: flops[stack] for stack in ("encoder", "decoder") if stack in flops}


def _count_attention_flops(
    core: VariantAttention, key_value: tuple[nn.Linear, ...], num_attended_keys: int
) -> tuple[int, int]:
    """Return the FLOPs per key token (key and value projections) and per query token (scores and weighted sums).

    Args:
        core: The attention module.
        key_value: The key and value projections that are not counted elsewhere.
        num_attended_keys: The number of keys that a query attends to.
    """
    heads, flops_per_key = core.heads, 2 * sum(projection.weight.numel() for projection in key_value)
    if core.kernel is not None:
        key_features, query_features = core.kernel.count_flops(heads, num_attended_keys)
        return flops_per_key + heads.key * key_features, heads.query * query_features
    return flops_per_key, 2 * num_attended_keys * (heads.query * heads.head_dim + heads.output * heads.value_dim)


def attention_projection_flops(model: AttnVariantModelMixin) -> int:
    """Return the number of floating-point operations per token in the linear layers of all attention modules.

    Operations that depend on the sequence length are not counted. With latents, the keys and values of each token are
    counted once (expanded form).

    Args:
        model: A variant model. A multi-head model has the same count as the Transformers model.

    Example:
        >>> attention_projection_flops(convert(model, 4)) / attention_projection_flops(convert(model, 12))
    """
    flops: dict[int, int] = {}
    for site, path, module in model.named_attention_modules():
        runs = model.count_module_runs(model.config, path)
        for linear in _list_linear_layers(model, site, path, module):
            flops[id(linear)] = 2 * runs * linear.weight.numel()
    return sum(flops.values())


def count_attention_parameters(model: AttnVariantModelMixin) -> int:
    """Return the number of parameters in all attention modules.

    The count includes linear layers, latent projections, talking-heads projections and extensions. Shared parameters
    are counted once.
    """
    sizes: dict[int, int] = {}
    for site, path, module in model.named_attention_modules():
        linears = _list_linear_layers(model, site, path, module)
        parameters = [parameter for linear in linears for parameter in linear.parameters()]
        core = _get_core_module(module, site)
        parameters += core.parameters(recurse=False)
        for extension in get_extensions(core).values():
            parameters += extension.parameters()
        sizes |= {id(parameter): parameter.numel() for parameter in parameters}
    return sum(sizes.values())


def _list_linear_layers(model: AttnVariantModelMixin, site: AttentionSite, path: str, module: nn.Module) -> list[Any]:
    """Return the linear layers of an attention module, including its latent projection."""
    parent, _, name = site.get_latent_projection_path(path).rpartition(".")
    latent = getattr(model.base_model.get_submodule(parent), name, None) if name else None
    linears = [module.get_submodule(name) for name in site.projections.values()]
    return linears if latent is None else [*linears, latent]


def runs_once_per_sequence(model: nn.Module, name: str) -> bool:
    """Return whether the linear layer with this name runs once per sequence instead of once per token."""
    if name.split(".")[0] == "classifier":
        return not type(model).__name__.endswith("ForTokenClassification")
    return ONCE_PER_SEQUENCE_PATTERN.fullmatch(name) is not None
