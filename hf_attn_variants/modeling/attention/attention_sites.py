"""Declarations of the attention modules of an architecture: their paths, their kinds and their numbers of heads."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypedDict

from torch import nn
from transformers import PreTrainedModel

from ..mechanisms.head_sharing import HeadSharing
from ..mechanisms.kernels.attention_kernel import AttentionKernel
from ..mechanisms.kernels.kernel_table import create_kernel
from ..mechanisms.patterns.pattern_table import get_pattern_class
from ..ops.key_ranges import KeyRange
from ..ops.variant_attention import AttentionHeads

__all__ = ["AttentionSite", "Projections", "get_sites_root", "named_attentions"]


class Projections(TypedDict):
    """The paths of the linear layers of an attention, relative to its module."""

    query: str
    key: str
    value: str
    output: str


@dataclass(frozen=True)
class AttentionSite:
    """One kind of attention module of an architecture, with the names of its projections.

    Args:
        name: the name in reports: "self", "cross", "encoder" or "decoder".
        module: a regular expression for the path of the attention module inside the base model. Its groups capture
            the layer numbers.
        query, key, value, output: the paths of the linear layers, relative to the attention module.
        core: the relative path of the submodule that calls the attention function and holds the talking-heads
            projections ("" = the attention module itself).
        stack: "encoder" or "decoder" in an encoder-decoder. None = the only stack of the model, which is a decoder if
            `is_decoder` of the configuration is true.
        is_cross_attention: True if the keys and values are computed from the encoder outputs.
        kv_heads_field: the configuration field with the number of key/value heads.
        rank_field: the configuration field with the rank of the latent. None = the attention does not support latents.
        latent: the path of the linear layer that computes the latent, relative to the attention module. It is
            relative to the base model if `shares_latent` is true.
        shares_latent: True if the attention modules of all layers share one latent.
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
    kv_heads_field: str = HeadSharing.field
    rank_field: str | None = None
    latent: str = ""
    shares_latent: bool = False

    @property
    def projections(self) -> dict[str, str]:
        """The paths of the linear layers by their role: "query", "key", "value" and "output"."""
        return {role: getattr(self, role) for role in ("query", "key", "value", "output")}

    @property
    def stack_prefix(self) -> str:
        """The prefix of the fields of the stack: "encoder_" in the encoder of an encoder-decoder, otherwise ""."""
        return "encoder_" if self.kv_heads_field.startswith("encoder_") else ""

    @property
    def place_prefix(self) -> str:
        """The prefix of the per-place fields: "cross_" for cross-attention, otherwise the prefix of the stack."""
        return "cross_" if self.is_cross_attention else self.stack_prefix

    def get_stack_name(self, config: Any) -> str:
        """Return the stack that contains the attention in a model of this configuration, "encoder" or "decoder"."""
        return self.stack or ("decoder" if getattr(config, "is_decoder", False) else "encoder")

    def get_heads(self, config: Any, path: str) -> AttentionHeads:
        """Return the head counts, the rank and the talking-heads settings of the attention at this path."""
        layer = self.get_layer_index(config, path)
        query, key = config.query_heads(self.kv_heads_field), config.layer_value(self.kv_heads_field, layer)
        talking = config.get_talking_heads(self.place_prefix, layer)
        value = talking.output if key == query else key
        rank = None if self.rank_field is None else config.layer_value(self.rank_field, layer)
        sizes = (config.attention_head_dim(self.kv_heads_field), config.attention_value_dim(self.kv_heads_field))
        counts = (query, key, value, talking.softmax, talking.output, *sizes, rank)
        return AttentionHeads(*counts, talking.kind, talking.init, talking.dynamic)

    def get_key_range(self, config: Any, path: str, is_causal: bool) -> Any:
        """Return the key range of the attention at this path, or None if it has no pattern and reads all keys.

        Args:
            config: a variant configuration.
            path: the path of the attention module.
            is_causal: True if the queries do not read later keys.
        """
        prefix, layer = self.stack_prefix, self.get_layer_index(config, path)
        pattern = getattr(config, f"{prefix}attention_pattern")
        if is_causal and not self.is_cross_attention and getattr(config, f"{prefix}attention_kernel") is not None:
            # This is a softmax layer in a stack with kernels. Masks cover only padding there, so the layer itself
            # must leave out later keys.
            return (
                None
                if self.get_kernel(config, path, is_causal) is not None
                else KeyRange.from_window(None, 1, 0, is_causal)
            )
        if self.is_cross_attention or pattern is None:
            return None
        return get_pattern_class(pattern).get_key_range(
            config, prefix, self.get_heads(config, path).softmax, layer, is_causal
        )

    def get_kernel(self, config: Any, path: str, is_causal: bool) -> AttentionKernel | None:
        """Return the kernel of the attention at this path, or None for a softmax.

        The arguments are those of `key_range`.
        """
        head_dim = config.attention_head_dim(self.kv_heads_field)
        is_causal = is_causal and not self.is_cross_attention
        return create_kernel(config, self.place_prefix, head_dim, path, is_causal, self.get_layer_index(config, path))

    def get_layer_index(self, config: Any, path: str) -> int:
        """Return the number of the layer that contains the attention at this path.

        The groups of `module` capture it. ALBERT has two numbers: a group of layers, and a layer inside this group.
        """
        match: Any = re.fullmatch(self.module, path)  # callers pass only paths that match
        outer, *inner = map(int, match.groups())
        return outer * config.inner_group_num + inner[0] if inner else outer

    def get_latent_path(self, path: str) -> str:
        """Return the path, inside the base model, of the linear layer that computes the latent of this attention."""
        return self.latent if self.shares_latent else f"{path}.{self.latent}"

    def get_latent_projection(self, base_model: nn.Module, path: str) -> nn.Module | None:
        """Return the linear layer that computes the latent of the attention at this path, or None without a latent."""
        if self.rank_field is None:
            return None
        owner, _, name = self.get_latent_path(path).rpartition(".")
        return getattr(base_model.get_submodule(owner), name, None)


def get_sites_root(model: PreTrainedModel) -> nn.Module:
    """Return the module that the paths of attention modules start from: the base model.

    For an encoder or decoder that is built by itself, return a new module that holds it under its `stack_name`.
    """
    name = getattr(model, "stack_name", None)
    if name is None or model.base_model is not model:
        return model.base_model
    root = nn.Module()
    root.add_module(name, model)
    return root


def named_attentions(
    model: PreTrainedModel, sites: Iterable[AttentionSite]
) -> Iterator[tuple[AttentionSite, str, nn.Module]]:
    """Yield the site, the path inside the base model and the module of each attention.

    The model is a variant or a model of Transformers.
    """
    for path, module in get_sites_root(model).named_modules():
        for site in sites:
            if re.fullmatch(site.module, path):
                yield site, path, module
