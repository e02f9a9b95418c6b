"""What a checkpoint costs as each variant that it could be, from its config alone.

The variants: each possible number of key/value heads, latents of some ranks, talking heads.

The configuration of a checkpoint that is looked at: its config.json alone.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.utils import cached_file

from ..conversion.attention_tensors import rank_relation, relation
from ..conversion.checkpoint.source import check_whole_model, local_folder, read_config
from ..errors import as_value_error
from ..files import CONFIG_NAME
from ..modeling.fields.field_table import row_of
from ..modeling.fields.field_texts import PLACES
from ..modeling.fields.kernel_fields import has_kernel
from ..modeling.fields.layer_values import LayerValue
from ..modeling.fields.variant_config import can_cache
from ..modeling.mechanisms.additive_score import AdditiveScore
from ..modeling.mechanisms.head_sharing import GroupedQuery, HeadSharing, sharing_of
from ..modeling.mechanisms.kernels.kernel_table import KERNELS, kernel_class
from ..modeling.mechanisms.latents import rank_of_map
from ..modeling.mechanisms.patterns.pattern_table import PATTERNS, pattern_class
from ..modeling.mechanisms.talking_heads import BOTH, KIND, dynamic_terms, keeps_cache, talks
from ..registration import variant_config_class, variant_model_class
from .counting import (
    CacheSizes,
    attention_parameters,
    check_sizes,
    flops_per_token,
    itemsize_of,
    kv_cache_bytes,
    kv_cache_bytes_per_token,
    largest_batch,
    untie_head,
)
from .tables import places_of_stacks, talking_parts

if TYPE_CHECKING:
    from ..modeling.attention.variant_mixins import AttnVariantModelMixin

__all__ = [
    "CostTable",
    "VariantCost",
    "cost_table",
    "has_latents",
    "read_checkpoint_config",
    "score_parts",
    "source_window",
    "used_fields",
    "values_by_layer",
    "variant_config",
    "variant_name",
]


def read_checkpoint_config(checkpoint: str, revision: str | None = None, token: str | None = None) -> dict[str, Any]:
    """Return the config.json of a folder, or of a Hub repository, of which nothing else is downloaded.

    Raises:
        OSError: if there is none.
        ValueError: if it is no configuration of transformers.
    """
    folder = local_folder(checkpoint)
    if folder is None:
        try:
            found: Any = cached_file(checkpoint, CONFIG_NAME, revision=revision, token=token)
            folder = Path(found).parent
        except OSError as error:
            raise OSError(f"there is no folder {checkpoint!r}, and as a Hub id it cannot be read: {error}") from error
    elif revision is not None:
        raise ValueError(f"`revision` is for Hub ids; {checkpoint!r} is a folder.")
    check_whole_model(folder, allow_pickle=True)
    return read_config(folder)


WRONG_CONFIGURATION = "the configuration is wrong"


@dataclass(frozen=True)
class VariantCost:
    """One row: what the model would cost as this variant.

    Args:
        name: for people, "GQA-4" for example.
        fields: the configuration fields that make it.
        current: whether it is the checkpoint as it is.
        convertible: whether a conversion leads from the checkpoint to it (one head count must divide the other).
        parameters: elements of all parameters, tied ones once.
        attention_parameters: those of the attentions' projections among them.
        flops_per_token: by `flops_per_token`; a decoder's token is the next one of a generation.
        kv_cache_bytes_per_token: by `kv_cache_bytes_per_token`.
        kv_cache_bytes: of the whole batch at the given lengths and beams; None without a cache.
        largest_batch: sequences whose caches fit into the given memory beside the weights; None without either.
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
    """Every row with what the figures hold for.

    Args:
        checkpoint: its name, as given.
        architecture: the model's class.
        batch_size: sequences at once.
        length: tokens attended to: the sequence of an encoder, what a decoder has in its cache.
        source_length: tokens that the encoder of an encoder-decoder reads.
        dtype: of weights and cache.
        rows: the variants.
        num_beams: of each sequence's search.
        memory: bytes that the weights and the cache may take; None: nobody said.
        upstream_kv_cache_bytes: what transformers' own class keeps, which has the source for each beam; None: no more.
        upstream_largest_batch: its `largest_batch`.
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
        """The checkpoint's own row."""
        return next(row for row in self.rows if row.current)

    @property
    def kv_cache_bytes_as_it_is(self) -> int | None:
        """The cache of the checkpoint in the class that it is of: transformers' own keeps more where it has beams."""
        return self.upstream_kv_cache_bytes or self.current.kv_cache_bytes

    def weight_bytes(self, row: VariantCost) -> int:
        """The bytes of a row's parameters."""
        return row.parameters * itemsize_of(self.dtype)

    def savings(self, row: VariantCost) -> dict[str, int | None]:
        """What `row` saves against the checkpoint as it is; a negative number is what it costs more."""
        now, both = self.current, (self.kv_cache_bytes_as_it_is, row.kv_cache_bytes)
        cache = None if both[0] is None or both[1] is None else both[0] - both[1]
        saved = {"weight_bytes": self.weight_bytes(now) - self.weight_bytes(row), "kv_cache_bytes": cache}
        flops = {
            f"{stack}_flops_per_token": n - row.flops_per_token[stack] for stack, n in now.flops_per_token.items()
        }
        return saved | flops

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values: the fields, and each row with its `savings`."""
        values = asdict(self)
        values["rows"] = [asdict(row) | {"savings": self.savings(row)} for row in self.rows]
        return values


def variant_config(config: Mapping[str, Any], **fields: Any) -> Any:
    """Return the variant configuration that a config.json describes, with `fields` on top.

    Raises:
        ValueError: if it describes no model of an architecture here, or upstream's own unequal layers.
    """
    config_class = variant_config_class(config.get("model_type", ""))
    if config.get("per_layer_config") and config["model_type"] != config_class.model_type:
        raise ValueError("a plain checkpoint with a `per_layer_config` (unequal layers) has no table of its own.")
    with as_value_error(WRONG_CONFIGURATION):
        return config_class.from_upstream(dict(config), **fields)


def values_by_layer(config: Any, field: str) -> list[Any]:
    """Return the value that a field of a variant configuration has in each layer of its stack."""
    return [config.layer_value(field, layer) for layer in range(config.layer_count(field))]


def variant_name(config: Any, field: str = HeadSharing.field) -> str:
    """Return what the attention of a variant configuration is called, with latents, windows and kernels of its stack.

    For example "MHA", "GQA-4", "GQA-1..8 by layer", "MQA + talking heads", "MHA + cross latent 128 + latent 64"; a
    latent as wide as its input, which changes no output, is "exact".
    """
    counts = set(values_by_layer(config, field)) or {getattr(config, field)}
    sharing = sharing_of(counts, config.query_heads(field))
    number = str(max(counts)) if len(counts) == 1 else f"{min(counts)}..{max(counts)} by layer"
    parts = [f"{sharing.label}-{number}" if sharing is GroupedQuery else sharing.label]
    for name in _rank_fields(config, field):
        ranks = values_by_layer(config, name)
        if known := {rank for rank in ranks if rank is not None}:
            text = "..".join(map(str, sorted({min(known), max(known)})))
            text += " (exact)" if known == {config.hidden_size} else ""
            parts.append(f"{'cross ' if name.startswith('cross_') else ''}latent {text}{_in_layers(ranks)}")
    if config.value_head_dim is not None:
        parts.append(f"values of {config.value_head_dim}")
    parts += score_parts(config, (field,))
    parts += [
        "talking heads" + ("" if kind == BOTH else f" ({kind})") + where
        for kind, where in talking_parts(config, (field,))
    ]
    prefix = "encoder_" if field.startswith("encoder_") else ""
    pattern = getattr(config, f"{prefix}attention_pattern")
    if pattern is not None and "attention_block_size" in pattern_class(pattern).needed:
        parts.append(f"{pattern.replace('_', ' ')} {getattr(config, f'{prefix}attention_block_size')}")
    elif pattern is not None:
        windows = values_by_layer(config, f"{prefix}attention_window")
        parts.append("window " + "..".join(map(str, sorted({w for w in windows if w is not None}))))
    kernels = [prefix] if prefix else ["", "cross_"]
    for each in kernels:
        if (kernel := getattr(config, f"{each}attention_kernel", None)) is not None:
            window = f" {getattr(config, f'{each}attention_window')}" if kernel_class(kernel).reads_window else ""
            layers = _in_layers(values_by_layer(config, f"{each}attention_kernel"))
            parts.append(f"{'cross ' if each == 'cross_' else ''}{kernel}{window}{layers}")
    return " + ".join(parts)


def score_parts(config: Any, fields: Sequence[str]) -> list[str]:
    """Return what scores are called, where they are no dot products: "additive scores in cross-attention".

    Nothing is said of where, if it is everywhere in the stacks that some fields of key/value heads are of.
    """
    found = {prefix: score_name(config, prefix) for prefix in places_of_stacks(config, fields)}
    if len({*found.values()}) == 1:
        return [f"{score} scores" for score in {*found.values()} - {None}]
    return [f"{score} scores in {PLACES[prefix].here}" for prefix, score in found.items() if score is not None]


def _in_layers(values: list[LayerValue]) -> str:
    """Say how many layers have a value, where not all do."""
    return f" in {len(values) - values.count(None)} of {len(values)} layers" if None in values else ""


def _rank_fields(config: Any, field: str) -> list[str]:
    """Return the fields of ranks of the stack that a field of key/value heads is of, cross-attention's first."""
    found = [name for name in config.rank_fields() if name.startswith("encoder_") == field.startswith("encoder_")]
    return sorted(found, key=lambda name: not name.startswith("cross_"))


def cost_table(
    config: Mapping[str, Any],
    checkpoint: str = "",
    batch_size: int = 1,
    length: int = 512,
    source_length: int | None = None,
    dtype: str | None = None,
    num_beams: int = 1,
    memory: int | None = None,
) -> CostTable:
    """Count what a checkpoint costs as each variant that it could be; no weight is read.

    Args:
        config: the checkpoint's config.json.
        checkpoint: its name, for the table.
        batch_size: sequences at once.
        length: tokens attended to (see `CostTable`).
        source_length: tokens that the encoder reads; None = `length`, for a Whisper its window.
        dtype: of weights and cache; None = the configuration's, or float32.
        num_beams: of each sequence's search; the beams of a sentence share its source.
        memory: bytes for the weights and the cache, without what a call computes besides.

    Raises:
        ValueError: for a configuration that makes no model here, a size below 1, or beams or memory without a cache.
    """
    current = variant_config(config)
    source_length = (source_window(current) or length) if source_length is None else source_length
    check_sizes(batch_size=batch_size, length=length, source_length=source_length, num_beams=num_beams, memory=memory)
    dtype = dtype or str(current.dtype or "float32").removeprefix("torch.")
    model_class = variant_model_class((config.get("architectures") or [current.auto_classes["AutoModel"]])[0])
    field = kv_heads_field(model_class, current)
    sizes = CacheSizes(itemsize_of(dtype), length, source_length, num_beams)
    rows, upstreams = [], None
    for fields in variant_rows(current, field, kv_head_counts(current, field)):
        made = variant_config(config, **fields)
        with as_value_error(WRONG_CONFIGURATION), torch.device("meta"):
            model = untie_head(model_class(made), config)
        is_current = _values(made) == _values(current)
        what = (variant_name(made, field), fields, is_current, _convertible(current, made))
        rows.append(VariantCost(*what, **_costs(model, sizes, batch_size, memory)))
        if is_current and config["model_type"] != type(current).model_type:
            upstreams = kv_cache_bytes(model, *sizes, repeats_source=True)
    architecture = (config.get("architectures") or [model_class.__name__])[0]
    table = CostTable(checkpoint, architecture, batch_size, length, source_length, dtype, rows, num_beams, memory)
    if table.current.kv_cache_bytes is None and (num_beams > 1 or memory is not None):
        given = "memory" if num_beams == 1 else "num_beams"
        raise ValueError(f"{architecture} has no key/value cache, which `{given}` is of: leave it out.")
    if upstreams is None or batch_size * upstreams == table.current.kv_cache_bytes:
        return table
    largest = largest_batch(memory, sizes.itemsize * table.current.parameters, upstreams)
    return replace(table, upstream_kv_cache_bytes=batch_size * upstreams, upstream_largest_batch=largest)


def _costs(model: "AttnVariantModelMixin", sizes: CacheSizes, batch_size: int, memory: int | None) -> dict[str, Any]:
    """Return the counted fields of a `VariantCost`."""
    parameters, cache = sum(parameter.numel() for parameter in model.parameters()), kv_cache_bytes(model, *sizes)
    lengths = (sizes.length, sizes.source_length)
    return {
        "parameters": parameters,
        "attention_parameters": attention_parameters(model),
        "flops_per_token": flops_per_token(model, *lengths, decodes=True, batch_size=batch_size),
        "kv_cache_bytes_per_token": kv_cache_bytes_per_token(model, sizes.itemsize),
        "kv_cache_bytes": None if cache is None else batch_size * cache,
        "largest_batch": largest_batch(memory, sizes.itemsize * parameters, cache),
    }


def source_window(config: Any) -> int | None:
    """Return how many positions an encoder of audio always reads, silence among them; None for text."""
    return getattr(config, "max_source_positions", None)


def variant_rows(
    current: Any, field: str, counts: Iterable[int], talking_heads: bool = True, latents: bool = True
) -> Iterator[dict[str, Any]]:
    """Yield the fields of each variant, the multi-head one first.

    They are these counts of key/value heads (with the latents that the model has), the model as it is where layers
    differ in that, and, for one that has none, latents and talking heads.

    Args:
        current: the model's configuration.
        field: the one of the heads.
        counts: the numbers of them.
        talking_heads, latents: whether these are among the variants.
    """
    ranks = _rank_fields(current, field)
    if has_latents(current, field):
        yield {field: current.query_heads(field)} | dict.fromkeys(ranks)
    yield from ({field: count} for count in counts)
    if field in (current.per_layer_values or {}):
        yield {"per_layer_values": current.per_layer_values}
    if has_kernel(current) or _is_as_trained(current):  # neither stands beside these, or no conversion gives it
        return
    keeps_memory = keeps_cache(dynamic_terms(current, "cross_"))  # whose terms are made of a latent otherwise
    if latents and can_cache(current) and keeps_memory and not has_latents(current, field):
        yield from latent_rows(current, ranks)
    # Stacks of unequal numbers of heads cannot have them.
    is_even = len({current.query_heads(name) for name in current.kv_heads_fields()}) == 1
    if talking_heads and not talks(current) and is_even:
        yield {KIND: BOTH}


def has_latents(config: Any, field: str | None = None) -> bool:
    """Say whether a variant configuration has latents: in the stack of a field of key/value heads; None: anywhere."""
    names = config.rank_fields() if field is None else _rank_fields(config, field)
    return any(getattr(config, name) is not None for name in names)


def latent_rows(current: Any, ranks: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield some latents: of cross-attention the exact one, a quarter, and that beside a self-attention as MQA's."""
    width, as_multi_query = current.hidden_size, 2 * current.attention_head_dim()
    quarter = max(1, width // 4)
    if "cross_kv_lora_rank" in ranks:
        yield {"cross_kv_lora_rank": width}
        yield {"cross_kv_lora_rank": quarter}
        yield {"cross_kv_lora_rank": quarter, "kv_lora_rank": min(width, as_multi_query)}
    else:
        yield from ({name: quarter} for name in ranks)


def used_fields(model_class: "type[AttnVariantModelMixin]", config: Any) -> tuple[str, ...]:
    """Return the fields of key/value heads and ranks that a class has attentions for; of T5's, an encoder has two."""
    with as_value_error(WRONG_CONFIGURATION), torch.device("meta"):
        sites = [site for site, _, _ in model_class(config).named_attentions()]
    used = {site.kv_heads_field for site in sites} | {site.rank_field for site in sites}
    return tuple(name for name in (*config.kv_heads_fields(), *config.rank_fields()) if name in used)


def kv_heads_field(model_class: "type[AttnVariantModelMixin]", config: Any) -> str:
    """Return the field of the heads that the table varies: the decoder's, but for an encoder alone."""
    return next(iter(used_fields(model_class, config)), HeadSharing.field)


def kv_head_counts(config: Any, field: str) -> list[int]:
    """Return the numbers of key/value heads that fit; fewer than query heads must divide the value heads as well."""
    heads = config.query_heads(field)
    value_heads = {
        config.talking_heads_of(prefix, layer).output
        for prefix in places_of_stacks(config, (field,))
        for layer in range(config.layer_count(prefix + KIND))
    }
    divisors = (k for k in range(heads, 0, -1) if heads % k == 0)
    return [k for k in divisors if k == heads or not any(count % k for count in value_heads)]


def _values(config: Any) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.variant_fields()}


def _convertible(source: Any, target: Any) -> bool:
    if _values(source) != _values(target) and _is_as_trained(source):
        return False
    width = source.hidden_size
    try:
        checks: list[tuple[str, Any]] = [
            *((name, relation) for name in source.kv_heads_fields()),
            *((name, rank_relation) for name in source.rank_fields()),
        ]
        for field, check in checks:
            for pair in zip(values_by_layer(source, field), values_by_layer(target, field), strict=True):
                old, new = (rank_of_map(value, width) if check is rank_relation else value for value in pair)
                check(old, new)
    except ValueError:
        return False
    return True


def _is_as_trained(config: Any) -> bool:
    """Say whether no conversion leads from it: its values have a size of their own, or its heads other parameters."""
    values = {getattr(config, name) for name in (*config.kernel_fields(), *config.pattern_fields())}
    by_head = [name for name in KERNELS if kernel_class(name).of_key_heads]
    by_head += [name for name in PATTERNS if pattern_class(name).learned]
    has_own = has_scores(config) or config.value_head_dim is not None
    return has_own or not values.isdisjoint(by_head)


def score_name(config: Any, prefix: str) -> str | None:
    """Return the score function of a place; None is the dot product."""
    requested = AdditiveScore.asked_for(config, prefix)
    return None if requested is None else requested[1]


def has_scores(config: Any) -> bool:
    """Return whether any attention of a configuration has other scores than dot products."""
    field = AdditiveScore.field
    prefixes = [prefix for prefix in row_of(field)[1].prefixes if hasattr(config, prefix + field)]
    return any(score_name(config, prefix) is not None for prefix in prefixes)
