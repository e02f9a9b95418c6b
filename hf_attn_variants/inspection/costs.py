"""What a checkpoint costs with each possible number of key/value heads, and with talking heads, from its config alone.

Letters: h_k query heads, h softmax heads, h_v value heads, k key/value heads, d head dim, m the tokens attended to.
FLOPs count two for each multiplication and addition of a matrix product; softmax, norms and biases are left out.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from ..conversion.grouping import relation
from ..errors import as_value_error
from ..kv_cache import cache_bytes_per_token
from ..modeling.attention_sites import AttentionSite
from ..modeling.variant_mixins import AttnVariantModelMixin, projection_shapes
from ..registration import variant_config_class, variant_model_class

__all__ = [
    "CostTable",
    "VariantCost",
    "attention_projection_flops",
    "cost_table",
    "flops_per_token",
    "kv_cache_bytes_per_token",
    "used_kv_heads_fields",
    "variant_config",
    "variant_name",
]

WRONG_CONFIGURATION = "the configuration is wrong"
# Linear maps that run once a sequence, whatever its length.
ONCE_A_SEQUENCE = re.compile(r"(.*\.)?pooler(\..*)?|cls\.seq_relationship|sop_classifier\..*|classification_head\..*")


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
        flops_per_token: by `flops_per_token`.
        kv_cache_bytes_per_token: by `kv_cache_bytes_per_token`.
        kv_cache_bytes: of the whole batch at the given lengths; None without a cache.
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
    """

    checkpoint: str
    architecture: str
    batch_size: int
    length: int
    source_length: int
    dtype: str
    rows: list[VariantCost]

    @property
    def current(self) -> VariantCost:
        """The checkpoint's own row."""
        return next(row for row in self.rows if row.current)

    def savings(self, row: VariantCost) -> dict[str, int | None]:
        """What `row` saves against the checkpoint as it is; a negative number is what it costs more."""
        now, size = self.current, getattr(torch, self.dtype).itemsize
        cache = None if row.kv_cache_bytes is None else now.kv_cache_bytes - row.kv_cache_bytes
        saved = {"weight_bytes": (now.parameters - row.parameters) * size, "kv_cache_bytes": cache}
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
        ValueError: if it describes no model of an architecture here, or layers of unequal heads.
    """
    if config.get("per_layer_config"):
        raise ValueError("a checkpoint with a `per_layer_config` (unequal layers) has no table of its own.")
    with as_value_error(WRONG_CONFIGURATION):
        return variant_config_class(config.get("model_type", "")).from_upstream(dict(config), **fields)


def variant_name(config: Any, field: str = "num_key_value_heads") -> str:
    """Return what the attention of a variant configuration is called: "MHA", "GQA-4", "MQA + talking heads"..."""
    heads, kv_heads = config.query_heads(field), getattr(config, field)
    name = "MHA" if kv_heads == heads else "MQA" if kv_heads == 1 else f"GQA-{kv_heads}"
    if config.talking_heads is None:
        return name
    return f"{name} + talking heads" + ("" if config.talking_heads == "both" else f" ({config.talking_heads})")


def cost_table(
    config: Mapping[str, Any],
    checkpoint: str = "",
    batch_size: int = 1,
    length: int = 512,
    source_length: int | None = None,
    dtype: str | None = None,
) -> CostTable:
    """Count what a checkpoint costs as each variant that it could be; no weight is read.

    Args:
        config: the checkpoint's config.json.
        checkpoint: its name, for the table.
        batch_size: sequences at once.
        length: tokens attended to (see `CostTable`).
        source_length: tokens that the encoder reads; None = `length`.
        dtype: of weights and cache; None = the configuration's, or float32.

    Raises:
        ValueError: for a configuration that makes no model here, or a size below 1.
    """
    source_length = length if source_length is None else source_length
    check_sizes(batch_size=batch_size, length=length, source_length=source_length)
    current = variant_config(config)
    dtype = dtype or str(current.dtype or "float32").removeprefix("torch.")
    itemsize = _itemsize(dtype)
    model_class = variant_model_class((config.get("architectures") or [current.auto_classes["AutoModel"]])[0])
    field = kv_heads_field(model_class, current)
    rows = []
    for fields in variant_rows(current, field, kv_head_counts(current, field)):
        made = variant_config(config, **fields)
        with as_value_error(WRONG_CONFIGURATION), torch.device("meta"):
            model = model_class(made)
        cache = kv_cache_bytes_per_token(model, itemsize)
        lengths = {site.name: source_length if site.is_cross_attention else length for site in model.attention_sites}
        rows.append(
            VariantCost(
                name=variant_name(made, field),
                fields=fields,
                current=all(getattr(current, name) == value for name, value in fields.items()),
                convertible=_convertible(current, made),
                parameters=sum(parameter.numel() for parameter in model.parameters()),
                attention_parameters=_attention_parameters(model),
                flops_per_token=flops_per_token(model, length, source_length),
                kv_cache_bytes_per_token=cache,
                kv_cache_bytes=None if cache is None else batch_size * sum(lengths[s] * n for s, n in cache.items()),
            )
        )
    architecture = (config.get("architectures") or [model_class.__name__])[0]
    return CostTable(checkpoint, architecture, batch_size, length, source_length, dtype, rows)


def check_sizes(**sizes: int | None) -> None:
    """Raise ValueError unless each of these sizes, where it is given, is at least 1."""
    for name, value in sizes.items():
        if value is not None and value < 1:
            raise ValueError(f"`{name}` must be at least 1; got {value}.")


def variant_rows(
    current: Any, field: str, counts: Iterable[int], talking_heads: bool = True
) -> Iterator[dict[str, Any]]:
    """Yield the fields of each variant: these counts of key/value heads and, for a plain model, talking heads."""
    yield from ({field: count} for count in counts)
    if talking_heads and current.talking_heads is None:
        yield {field: getattr(current, field), "talking_heads": "both"}


def kv_cache_bytes_per_token(model: AttnVariantModelMixin, itemsize: int) -> dict[str, int] | None:
    """Return `cache_bytes_per_token` of a variant model, on the meta device too, with `itemsize` bytes a number."""
    sizes = (
        (site, itemsize * sum(module.get_submodule(path).out_features for path in (site.key, site.value)))
        for site, _, module in model.named_attentions()
    )
    return cache_bytes_per_token(model.config, sizes)


def flops_per_token(model: AttnVariantModelMixin, length: int, source_length: int) -> dict[str, int]:
    """Return the floating-point operations that one token takes in the forward pass.

    Args:
        model: a variant model, on the meta device too.
        length: tokens that each token attends to in an encoder-only or a decoder stack.
        source_length: the same in the encoder of an encoder-decoder, and in cross-attention.

    Returns:
        {"encoder": ..., "decoder": ...}, the stacks that the model has. The encoder's includes what a token of it
        costs in the cross-attentions' keys and values; a head that reads a sequence once is left out.
    """
    config, flops = model.config, Counter()
    prefix = f"{model.base_model_prefix}." if model.base_model is not model else ""
    linears = {name.removeprefix(prefix): each for name, each in model.named_modules() if isinstance(each, nn.Linear)}
    has_decoder = any(site.stack_of(config) == "decoder" for site, _, _ in model.named_attentions())
    for site, path, module in model.named_attentions():
        runs, stack, heads = model.module_runs(config, path), site.stack_of(config), site.heads(config, path)
        memory_stack = "encoder" if site.is_cross_attention else stack
        for role, linear in site.projections.items():
            where = memory_stack if role in ("key", "value") else stack
            flops[where] += 2 * runs * linears.pop(f"{path}.{linear}").weight.numel()
        attended = source_length if site.is_cross_attention or site.stack == "encoder" else length
        query_dim, memory_dim = (module.get_submodule(name).in_features for name in (site.query, site.key))
        flops[stack] += 2 * runs * attended * heads.head_dim * (heads.query + heads.output)
        for name, shape in projection_shapes(config, heads, query_dim, memory_dim).items():
            flops[stack] += 2 * runs * attended * shape[-2] * shape[-1]
            if len(shape) == 3:  # a dynamic one is first computed from each token of its side
                flops[stack if name.startswith("x") else memory_stack] += 2 * runs * shape[0] * shape[1] * shape[2]
    for name, linear in linears.items():
        if not _once_a_sequence(model, name):
            inside = name.split(".")[0] if config.is_encoder_decoder else None
            where = inside if inside in ("encoder", "decoder") else "decoder" if has_decoder else "encoder"
            flops[where] += 2 * model.module_runs(config, name) * linear.weight.numel()
    return {stack: flops[stack] for stack in ("encoder", "decoder") if stack in flops}


def attention_projection_flops(model: AttnVariantModelMixin) -> int:
    """Return the floating-point operations a token that the query, key, value and output maps of all layers take.

    What depends on the sequence length is not in it.

    Args:
        model: a variant model; the multi-head one counts as upstream's does.
    """
    return sum(
        2 * model.module_runs(model.config, path) * linear.weight.numel()
        for site, path, module in model.named_attentions()
        for linear in _projections(site, module)
    )


def _projections(site: AttentionSite, module: nn.Module) -> list[Any]:
    return [module.get_submodule(path) for path in site.projections.values()]


def _once_a_sequence(model: nn.Module, name: str) -> bool:
    if name == "classifier":
        return not type(model).__name__.endswith("ForTokenClassification")
    return ONCE_A_SEQUENCE.fullmatch(name) is not None


def _attention_parameters(model: AttnVariantModelMixin) -> int:
    total = 0
    for site, _, module in model.named_attentions():
        total += sum(parameter.numel() for each in _projections(site, module) for parameter in each.parameters())
        total += sum(parameter.numel() for parameter in module.get_submodule(site.core).parameters(recurse=False))
    return total


def used_kv_heads_fields(model_class: type[nn.Module], config: Any) -> tuple[str, ...]:
    """Return the fields of key/value heads that a class has attentions for: of T5's two, an encoder alone has one."""
    with as_value_error(WRONG_CONFIGURATION), torch.device("meta"):
        used = {site.kv_heads_field for site, _, _ in model_class(config).named_attentions()}
    return tuple(name for name in config.kv_heads_fields() if name in used)


def kv_heads_field(model_class: type[nn.Module], config: Any) -> str:
    """Return the field of the heads that the table varies: the decoder's, but for an encoder alone."""
    return next(iter(used_kv_heads_fields(model_class, config)), "num_key_value_heads")


def kv_head_counts(config: Any, field: str) -> list[int]:
    """Return the numbers of key/value heads that fit; fewer than query heads must divide the value heads as well."""
    heads = config.query_heads(field)
    divisors = (k for k in range(heads, 0, -1) if heads % k == 0)
    return [k for k in divisors if k == heads or config.num_value_heads % k == 0]


def _convertible(source: Any, target: Any) -> bool:
    try:
        for field in source.kv_heads_fields():
            relation(getattr(source, field), getattr(target, field))
    except ValueError:
        return False
    return True


def _itemsize(dtype: str) -> int:
    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(
            f"`dtype` must be the name of a floating-point type of torch, float32 for example; got {dtype!r}."
        )
    return found.itemsize
