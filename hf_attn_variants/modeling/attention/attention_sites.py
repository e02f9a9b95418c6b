"""Where the attentions of an architecture live, what they are and how many heads each has: declared once, as sites."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypedDict

from torch import nn
from transformers import PreTrainedModel

from ..mechanisms.head_sharing import HeadSharing
from ..mechanisms.kernels.attention_kernel import AttentionKernel
from ..mechanisms.kernels.kernel_table import kernel_of
from ..mechanisms.patterns.pattern_table import pattern_class
from ..ops.reach import Reach
from ..ops.variant_attention import AttentionHeads

__all__ = ["AttentionSite", "Projections", "named_attentions", "sites_root"]


class Projections(TypedDict):
    """The paths of an attention's linear maps, relative to its module."""

    query: str
    key: str
    value: str
    output: str


@dataclass(frozen=True)
class AttentionSite:
    """Where one kind of attention lives in an architecture, what it is and what its projections are called.

    Args:
        name: for reports: "self", "cross", "encoder", "decoder".
        module: a regular expression for the attention's module path inside the base model; its groups number layers.
        query, key, value, output: the paths of its linear maps, relative to that module.
        core: the relative path of the submodule that calls the attention function and holds the talking-heads
            projections ("" = the module itself).
        stack: of an encoder-decoder, "encoder" or "decoder"; None = the model's only one, which is a decoder where
            `is_decoder` of the configuration says so.
        is_cross_attention: whether its keys and values are made from the encoder's outputs.
        kv_heads_field: the configuration field with its number of key/value heads.
        rank_field: the configuration field with the rank of its latent; None = it cannot have one.
        latent: the path of the linear map that makes the latent, relative to the module; where the attentions of all
            layers share one, relative to the base model.
        shares_latent: whether they do.
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
        """The paths of its linear maps by their role: "query", "key", "value", "output"."""
        return {role: getattr(self, role) for role in ("query", "key", "value", "output")}

    @property
    def stack_prefix(self) -> str:
        """What the names of its stack's fields begin with: "encoder_" in an encoder-decoder's encoder, else ""."""
        return "encoder_" if self.kv_heads_field.startswith("encoder_") else ""

    @property
    def place_prefix(self) -> str:
        """What the names of its place's fields begin with: "cross_" for cross-attention, else its stack's prefix."""
        return "cross_" if self.is_cross_attention else self.stack_prefix

    def stack_of(self, config: Any) -> str:
        """Return the stack that it is a part of in a model of this configuration, "encoder" or "decoder"."""
        return self.stack or ("decoder" if getattr(config, "is_decoder", False) else "encoder")

    def heads(self, config: Any, path: str) -> AttentionHeads:
        """Return the heads that a configuration gives the attention at this path, its rank and how its heads talk."""
        layer = self.layer(config, path)
        query, key = config.query_heads(self.kv_heads_field), config.layer_value(self.kv_heads_field, layer)
        talking = config.talking_heads_of(self.place_prefix, layer)
        value = talking.output if key == query else key
        rank = None if self.rank_field is None else config.layer_value(self.rank_field, layer)
        sizes = (config.attention_head_dim(self.kv_heads_field), config.attention_value_dim(self.kv_heads_field))
        counts = (query, key, value, talking.softmax, talking.output, *sizes, rank)
        return AttentionHeads(*counts, talking.kind, talking.init, talking.dynamic)

    def reach(self, config: Any, path: str, is_causal: bool) -> Any:
        """Return which keys the queries of the attention at this path read; None: all, and no pattern says so.

        Args:
            config: a variant configuration.
            path: the attention's.
            is_causal: whether its queries read no later keys.
        """
        prefix, layer = self.stack_prefix, self.layer(config, path)
        pattern = getattr(config, f"{prefix}attention_pattern")
        if is_causal and not self.is_cross_attention and getattr(config, f"{prefix}attention_kernel") is not None:
            # A layer with a softmax in a stack with kernels: masks are of padding alone there, so the layer itself
            # leaves out later keys.
            return None if self.kernel(config, path, is_causal) is not None else Reach.of(None, 1, 0, is_causal)
        if self.is_cross_attention or pattern is None:
            return None
        return pattern_class(pattern).reach(config, prefix, self.heads(config, path).softmax, layer, is_causal)

    def kernel(self, config: Any, path: str, is_causal: bool) -> AttentionKernel | None:
        """Return the kernel of the attention at this path; None: a softmax. Arguments as for `reach`."""
        head_dim = config.attention_head_dim(self.kv_heads_field)
        is_causal = is_causal and not self.is_cross_attention
        return kernel_of(config, self.place_prefix, head_dim, path, is_causal, self.layer(config, path))

    def layer(self, config: Any, path: str) -> int:
        """Return the layer that the attention at this path is in: the numbers that `module` has groups for.

        Of two (a group of ALBERT, and the layer in it) the second counts within the first.
        """
        match: Any = re.fullmatch(self.module, path)  # a site is asked for paths that it has found
        outer, *inner = map(int, match.groups())
        return outer * config.inner_group_num + inner[0] if inner else outer

    def latent_path(self, path: str) -> str:
        """Return the path inside the base model of the map that makes the latent of the attention at this path."""
        return self.latent if self.shares_latent else f"{path}.{self.latent}"

    def latent_map(self, base_model: nn.Module, path: str) -> nn.Module | None:
        """Return the map that makes the latent of the attention at this path, if it has one."""
        if self.rank_field is None:
            return None
        owner, _, name = self.latent_path(path).rpartition(".")
        return getattr(base_model.get_submodule(owner), name, None)


def sites_root(model: PreTrainedModel) -> nn.Module:
    """Return the module that paths of sites begin at: the base model.

    Of an encoder or decoder that is built alone (`stack_name` says which) it is one that holds it by that name.
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
    """Yield each attention of a model, ours or upstream's, with its site and its path inside the base model."""
    for path, module in sites_root(model).named_modules():
        for site in sites:
            if re.fullmatch(site.module, path):
                yield site, path, module
