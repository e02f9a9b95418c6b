"""Declarations of the attention modules in an architecture, with their paths, kinds and head counts."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypedDict

from torch import nn
from transformers import PreTrainedModel

from ..mechanisms.head_sharing import KV_HEADS
from ..mechanisms.kernels.attention_kernel import AttentionKernel
from ..mechanisms.kernels.kernel_table import get_kernel_class
from ..mechanisms.patterns.pattern_table import get_pattern_class
from ..ops.key_ranges import KeyRange
from ..ops.variant_attention import AttentionHeads

__all__ = [
    "AttentionSite",
    "ProjectionPaths",
    "create_kernel",
    "get_key_range",
    "get_root_module",
    "is_local_layer",
    "named_attention_modules",
]


class ProjectionPaths(TypedDict):
    """The paths of the linear layers in an attention module, relative to the module."""

    query: str
    key: str
    value: str
    output: str


@dataclass(frozen=True)
class AttentionSite:
    """The declaration of one kind of attention module in an architecture, with the names of its projections.

    Args:
        name: the name of this kind of attention in reports: "self", "cross", "encoder" or "decoder".
        module: a regular expression that matches the path of the attention module inside the base model. Its groups
            capture the layer numbers.
        query, key, value, output: the paths of the linear layers, relative to the attention module. If the first three
            are the same, one fused layer computes the queries, keys and values, in this order of its rows.
        core: the relative path of the submodule that calls the attention function and contains the talking-heads
            projections ("" for the attention module itself).
        stack: "encoder" or "decoder" in an encoder-decoder, or None if the model has only one of them. Such a model is
            a decoder if `is_decoder` is set in the configuration.
        is_cross_attention: True if the keys and values are computed from the encoder outputs.
        kv_heads_field: the configuration field with the number of key/value heads.
        rank_field: the configuration field with the rank of the latent, or None if the module does not support
            latents.
        latent: the path of the linear layer that computes the latent, relative to the attention module. If
            `shares_latent` is True, it is relative to the base model instead.
        shares_latent: True if the attention modules in all layers share one latent.
        rotary: the pairs of dimensions that rotary positions rotate: "half" for (i, i + d/2), "interleaved" for
            (2i, 2i + 1), or None if there are no rotary positions.
    """

    name: str
    module: str
    query: str
    key: str
    value: str
    output: str
    core: str = ""
    stack: str | None = None
    is_cross_attention: bool = False
    kv_heads_field: str = KV_HEADS
    rank_field: str | None = None
    latent: str = ""
    shares_latent: bool = False
    rotary: str | None = None

    @property
    def is_fused(self) -> bool:
        """True if one linear layer computes the queries, keys and values."""
        return self.query == self.key == self.value

    @property
    def projections(self) -> dict[str, str]:
        """The paths of the linear layers by role: "query", "key", "value" and "output"."""
        return {role: getattr(self, role) for role in ("query", "key", "value", "output")}

    @property
    def stack_prefix(self) -> str:
        """The prefix of the fields for this stack: "encoder_" for the encoder in an encoder-decoder, otherwise ""."""
        return "encoder_" if self.kv_heads_field.startswith("encoder_") else ""

    @property
    def field_prefix(self) -> str:
        """The prefix of the per-place fields: "cross_" for cross-attention, otherwise `stack_prefix`."""
        return "cross_" if self.is_cross_attention else self.stack_prefix

    def get_stack_name(self, config: Any) -> str:
        """Return the name of the stack that contains the attention module, "encoder" or "decoder"."""
        return self.stack or ("decoder" if getattr(config, "is_decoder", False) else "encoder")

    def get_heads(self, config: Any, path: str) -> AttentionHeads:
        """Return the head counts, the rank and the talking-heads settings of the attention module at a path."""
        layer = self.get_layer_index(config, path)
        query, key = config.get_query_heads(self.kv_heads_field), config.get_layer_value(self.kv_heads_field, layer)
        talking = config.get_talking_heads(self.field_prefix, layer)
        value = talking.output if key == query else key
        rank = None if self.rank_field is None else config.get_layer_value(self.rank_field, layer)
        sizes = (
            config.get_attention_head_dim(self.kv_heads_field),
            config.get_attention_value_dim(self.kv_heads_field),
        )
        counts = (query, key, value, talking.softmax, talking.output, *sizes, rank)
        return AttentionHeads(*counts, talking.kind, talking.init, talking.dynamic)

    def get_layer_index(self, config: Any, path: str) -> int:
        """Return the index of the layer that contains the attention module at a path.

        The groups in the regular expression `module` capture the index. ALBERT has two indices, one for the layer
        group and one for the layer inside the group.
        """
        match: Any = re.fullmatch(self.module, path)  # callers only pass matching paths
        first_index, *inner_indices = map(int, match.groups())
        return first_index * config.inner_group_num + inner_indices[0] if inner_indices else first_index

    def get_latent_projection_path(self, path: str) -> str:
        """Return the path (inside the base model) of the linear layer that computes a module's latent."""
        return self.latent if self.shares_latent else f"{path}.{self.latent}"

    def get_latent_projection(self, base_model: nn.Module, path: str) -> nn.Module | None:
        """Return the linear layer that computes the latent of the module at a path, if there is a latent."""
        if self.rank_field is None:
            return None
        owner, _, name = self.get_latent_projection_path(path).rpartition(".")
        return getattr(base_model.get_submodule(owner), name, None)


def get_root_module(model: PreTrainedModel) -> nn.Module:
    """Return the base model, to which the paths of attention modules are relative.

    If the model is only an encoder or a decoder, return a new module that contains it under its `stack_name`.
    """
    name = getattr(model, "stack_name", None)
    if name is None or model.base_model is not model:
        return model.base_model
    root = nn.Module()
    root.add_module(name, model)
    return root


def named_attention_modules(
    model: PreTrainedModel, sites: Iterable[AttentionSite]
) -> Iterator[tuple[AttentionSite, str, nn.Module]]:
    """Yield the declaration, the path inside the base model, and the module itself for each attention module.

    The model can be a variant or a Transformers model.
    """
    for path, module in get_root_module(model).named_modules():
        for site in sites:
            if re.fullmatch(site.module, path):
                yield site, path, module


def is_local_layer(config: Any, layer: int) -> bool:
    """Return True if Transformers gives a layer its own window (`layer_types`), as in the local layers of ModernBERT.

    Patterns and kernels only apply to the other layers.
    """
    layer_types = getattr(config, "layer_types", None)
    return layer_types is not None and layer_types[layer] == "sliding_attention"


def get_key_range(site: AttentionSite, config: Any, path: str, is_causal: bool) -> Any:
    """Return the key range of an attention module, or None if it attends to all keys that its mask allows.

    Args:
        site: the declaration of the attention module.
        config: a variant configuration.
        path: the path of the attention module inside the base model.
        is_causal: True if queries do not attend to later keys.
    """
    prefix, layer = site.stack_prefix, site.get_layer_index(config, path)
    if site.is_cross_attention or is_local_layer(config, layer):
        return None
    if is_causal and getattr(config, f"{prefix}attention_kernel") is not None:
        # In a decoder with kernels, masks only cover padding, so softmax layers must exclude later keys themselves.
        has_kernel = create_kernel(site, config, path, is_causal) is not None
        return None if has_kernel else KeyRange.from_window(None, 1, 0, is_causal)
    if (pattern := getattr(config, f"{prefix}attention_pattern")) is None:
        return None
    heads = site.get_heads(config, path).softmax
    return get_pattern_class(pattern).get_key_range(config, prefix, heads, layer, is_causal)


def create_kernel(site: AttentionSite, config: Any, path: str, is_causal: bool) -> AttentionKernel | None:
    """Create the kernel of an attention module, or return None if the module uses a softmax.

    See `get_key_range` for the arguments.
    """
    prefix, layer = site.field_prefix, site.get_layer_index(config, path)
    if getattr(config, field := f"{prefix}attention_kernel", None) is None or is_local_layer(config, layer):
        return None
    if (name := config.get_layer_value(field, layer)) is None:
        return None
    head_dim, is_causal = config.get_attention_head_dim(site.kv_heads_field), is_causal and not site.is_cross_attention
    return get_kernel_class(name).from_config(config, prefix, head_dim, path, is_causal, layer)
