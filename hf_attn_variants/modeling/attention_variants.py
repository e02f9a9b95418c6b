"""Attention with shared key/value heads and talking heads: the maths, and the two mixins that plug it into upstream models.

Letters used throughout: b batch, n query length, m memory (key/value) length, d head size, h_k heads of the queries,
h heads of the softmax, h_v heads of the values, k key/value heads, g = h_k / k query heads a group. Query head i reads
key/value head i // g. Multi-query attention (arXiv 1911.02150) is k = 1; grouped-query attention (2305.13245) 1 < k < h_k.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers import initialization as init
from transformers.masking_utils import eager_mask, sdpa_mask

from .configuration_attn_variants import ATTN_VARIANTS_VERSION

__all__ = [
    "EAGER",
    "NO_WEIGHT_DECAY",
    "SDPA",
    "AttentionSite",
    "AttentionVariantMixin",
    "AttnVariantModelMixin",
    "attention_with_weights",
    "fused_attention",
    "projection_shapes",
    "projection_std",
]

# Registered names carry the version: the installed package and a Hub repository of another version share one process.
EAGER = f"attn_variants_eager_{ATTN_VARIANTS_VERSION.replace('.', '_')}"
SDPA = f"attn_variants_sdpa_{ATTN_VARIANTS_VERSION.replace('.', '_')}"

# Weight decay would pull these away from the identity, towards heads that do not attend at all.
NO_WEIGHT_DECAY = ("logits_proj", "weights_proj")


@dataclass(frozen=True)
class AttentionSite:
    """Where one kind of attention lives in an architecture and what its projections are called.

    Args:
        name: what the attention is, for reports: "self", "cross", "encoder", "decoder".
        module: a regular expression for the attention's module path inside the base model.
        query, key, value, output: the paths of its linear maps, relative to that module.
        mixes: the relative path of the submodule that holds the talking-heads projections ("" = the module itself).
        kv_heads_field: the configuration field with its number of key/value heads.
    """

    name: str
    module: str
    query: str
    key: str
    value: str
    output: str
    mixes: str = ""
    kv_heads_field: str = "num_key_value_heads"


def attention_with_weights(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    *,
    scaling: float,
    is_causal: bool = False,
    dropout: float = 0.0,
    logits_proj: torch.Tensor | None = None,
    weights_proj: torch.Tensor | None = None,
    x2l: torch.Tensor | None = None,
    m2l: torch.Tensor | None = None,
    x2w: torch.Tensor | None = None,
    m2w: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention that materialises its weights: multi-head, multi-query, grouped-query and talking-heads alike.

    Args:
        query: [b, h_k, n, d]
        key: [b, k, m, d]
        value: [b, k, m, d]; or [b, h_v, m, d] where each query head has its own key head
        mask: boolean (True = attend) or additive, broadcastable to [b, h, n, m]. A query that may attend to nothing gets
            zeros under a boolean mask, and uniform weights under an additive one, as upstream's "sdpa" and "eager" do.
        position_bias: added to the logits of the softmax heads, broadcastable to [b, h, n, m]
        scaling: the factor of the dot products
        is_causal: query i attends to keys 0..i
        dropout: the probability that a weight is dropped
        logits_proj: P_l [h_k, h], mixes the heads before the softmax (arXiv 2003.02436, section 3)
        weights_proj: P_w [h, h_v], mixes them after it
        x2l, m2l: input-dependent terms of P_l, [b, n, h_k, h] and [b, m, h_k, h] (2003.02436, section 5)
        x2w, m2w: input-dependent terms of P_w, [b, n, h, h_v] and [b, m, h, h_v]

    Returns:
        The outputs [b, n, h_v, d] and the weights that multiply the values [b, h_v, n, m].
    """
    logits = _grouped_matmul(query * scaling, key.transpose(-1, -2))  # [b, h_k, n, m]
    logits = _mix_heads(logits, logits_proj, x2l, m2l)  # [b, h, n, m]
    if position_bias is not None:
        logits = logits + position_bias
    if is_causal:
        mask = _causal_mask(logits) if mask is None else mask & _causal_mask(logits)
    # Half precision would lose the small weights, so the softmax runs in at least float32, as fused kernels do.
    dtype = torch.promote_types(logits.dtype, torch.float32)
    if mask is None:
        weights = nn.functional.softmax(logits, dim=-1, dtype=dtype)
    elif mask.dtype == torch.bool:
        weights = nn.functional.softmax(logits.masked_fill(~mask, torch.finfo(logits.dtype).min), dim=-1, dtype=dtype)
        weights = weights * mask.any(-1, keepdim=True)
    else:
        weights = nn.functional.softmax(logits + mask, dim=-1, dtype=dtype)
    weights = _mix_heads(weights.to(value.dtype), weights_proj, x2w, m2w)  # [b, h_v, n, m]
    weights = nn.functional.dropout(weights, p=dropout, training=dropout > 0)
    return _grouped_matmul(weights, value).transpose(1, 2), weights


def fused_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    *,
    scaling: float,
    is_causal: bool = False,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Multi-head, multi-query or grouped-query attention by torch's fused kernels, K and V repeated only where they must be.

    Arguments and result are those of `attention_with_weights`, without talking heads and without the weights.
    """
    length, heads, kv_heads = query.shape[2], query.shape[1], key.shape[1]
    groups = heads // kv_heads
    if is_causal and key.shape[2] > length:
        # A static cache beyond the prompt: torch aligns its causal mask to the first key, so the rest is masked anyway.
        key, value = key[:, :, :length], value[:, :, :length]
        position_bias = position_bias[..., :length] if position_bias is not None else None
    if position_bias is not None:
        mask, is_causal = _biased_mask(position_bias, mask, is_causal, query), False
    enable_gqa = False
    if groups > 1 and length == 1:
        # One new token: the group's query heads are the rows of one attention over their shared key/value head.
        query = query.reshape(-1, kv_heads, groups, query.shape[-1])
        if mask is not None and mask.shape[1] == heads:
            mask = mask.reshape(-1, kv_heads, groups, mask.shape[-1])
    elif groups > 1:
        # On CUDA a mask would send grouped attention to the slow math kernel; the CPU kernel takes both.
        enable_gqa = mask is None or query.device.type == "cpu"
        if not enable_gqa:
            key, value = (states.repeat_interleave(groups, dim=1) for states in (key, value))
    output = nn.functional.scaled_dot_product_attention(
        query, key, value, mask, dropout, is_causal, scale=scaling, enable_gqa=enable_gqa
    )
    return output.reshape(output.shape[0], heads, length, value.shape[-1]).transpose(1, 2)


def projection_shapes(config: Any, query_dim: int, memory_dim: int) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of each talking-heads parameter that an attention of this configuration has.

    Args:
        config: a configuration with the fields of `AttnVariantConfigMixin`.
        query_dim: the size of the inputs that queries are made from.
        memory_dim: the size of the inputs that keys and values are made from.
    """
    heads = {
        "logits": (config.num_attention_heads, config.num_softmax_heads),
        "weights": (config.num_softmax_heads, config.num_value_heads),
    }
    static = [name for name in heads if config.talking_heads in (name, "both")]
    shapes = {f"{name}_proj": heads[name] for name in static}
    for name in config.talking_heads_dynamic:
        input_dim = query_dim if name.startswith("x") else memory_dim
        shapes[f"{name}_proj"] = (input_dim, *heads["logits" if name.endswith("l") else "weights"])
    return shapes


def projection_std(shape: tuple[int, ...]) -> float:
    """Return the standard deviation of a random talking-heads parameter: fan-in scaling, as in the authors' code.

    A dynamic projection [input size, h_in, h_out] has variance scale 0.01 / h_in; larger values made training hard.
    """
    return shape[0] ** -0.5 if len(shape) == 2 else (1e-2 / shape[1] / shape[0]) ** 0.5


def eager_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attention_with_weights` behind upstream's attention interface ("eager")."""
    return attention_with_weights(
        query,
        key,
        value,
        attention_mask,
        position_bias,
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        is_causal=_is_causal(module, is_causal, attention_mask, query),
        dropout=dropout,
        logits_proj=getattr(module, "logits_proj", None),
        weights_proj=getattr(module, "weights_proj", None),
        **{name: kwargs.get(name) for name in ("x2l", "m2l", "x2w", "m2w")},
    )


def sdpa_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The fastest exact path behind upstream's attention interface ("sdpa").

    Talking heads, and calls that ask for the attention weights, take `attention_with_weights`.
    """
    wants_weights = _wants_weights(module, kwargs)
    if wants_weights or getattr(module.config, "talking_heads", None) is not None:
        output, weights = eager_attention_forward(
            module, query, key, value, attention_mask, scaling, dropout, is_causal, position_bias, **kwargs
        )
        return output, weights if wants_weights else None
    output = fused_attention(
        query,
        key,
        value,
        attention_mask,
        position_bias,
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        is_causal=_is_causal(module, is_causal, attention_mask, query),
        dropout=dropout,
    )
    return output, None


class AttentionVariantMixin:
    """What a variant attention adds to upstream's attention class; listed before it among the bases."""

    def install_variant(self, config: Any, kv_heads: int, query_dim: int, memory_dim: int) -> None:
        """Note the head counts and add the talking-heads parameters; the model initialises them."""
        self.num_key_value_groups = config.num_attention_heads // kv_heads
        self.equal_cache_heads = kv_heads != config.num_attention_heads or kv_heads == config.num_value_heads
        like = next(self.parameters())
        for name, shape in projection_shapes(config, query_dim, memory_dim).items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=like.dtype, device=like.device)))
        # Upstream has initialised this module already; the new parameters have not been.
        self._is_hf_initialized = False

    def init_projections(self) -> None:
        """Initialise the talking-heads parameters as `talking_heads_init` says."""
        for name, parameter in self.named_parameters(recurse=False):
            if name in NO_WEIGHT_DECAY and self.config.talking_heads_init == "identity":
                init.copy_(parameter, torch.eye(*parameter.shape, dtype=parameter.dtype, device=parameter.device))
            elif name.endswith("_proj"):
                init.normal_(parameter, mean=0.0, std=projection_std(parameter.shape))

    def variant_inputs(
        self, states: torch.Tensor, memory: torch.Tensor | None, cache: Any, kwargs: dict[str, Any]
    ) -> dict[str, torch.Tensor]:
        """Return the dynamic projections of one call, for the attention function, after checking what the call asks for.

        Args:
            states: the query-side inputs x [b, n, query size].
            memory: the memory-side inputs [b, m, memory size]; None for self-attention, where they are `states`.
            cache: the cache that this call reads and writes, if any.
            kwargs: the call's further arguments.

        Returns:
            The terms of P_l and P_w by name, [b, n or m, heads in, heads out].

        Raises:
            ValueError: where the attention implementation or the cache cannot do what the variant needs.
        """
        config = self.config
        if config._attn_implementation not in (EAGER, SDPA):
            _check_implementation(config, config._attn_implementation)
            if _wants_weights(self, kwargs):
                raise ValueError(
                    f'attn_implementation="{config._attn_implementation}" computes no attention weights; '
                    'for `output_attentions=True` use "sdpa" or "eager".'
                )
        if cache is not None and not self.equal_cache_heads and getattr(cache, "is_compileable", False):
            raise ValueError(
                f"A static cache needs as many key heads as value heads; this attention has {config.num_attention_heads} "
                f"and {config.num_value_heads} (`num_value_heads`). Use the default dynamic cache."
            )
        if not config.talking_heads_dynamic:
            return {}
        if cache is not None and memory is None and any(name[0] == "m" for name in config.talking_heads_dynamic):
            raise ValueError(
                "`talking_heads_dynamic` m2l and m2w need the inputs of all past tokens, which a key/value cache does not "
                "keep: pass `use_cache=False`."
            )
        inputs = {"x": states, "m": states if memory is None else memory}
        return {
            name: torch.einsum("bld,dij->blij", inputs[name[0]], getattr(self, f"{name}_proj"))
            for name in config.talking_heads_dynamic
        }


class AttnVariantModelMixin:
    """What a variant model adds to upstream's model class; listed before it among the bases.

    Upstream builds itself; then its attentions (and the base model inside a head) become ours in place, by their class,
    as torch's `fully_shard` does. So nothing is built twice, and no upstream constructor is copied.

    Class attributes:
        attention_sites: every kind of attention that the architecture has: conversion and inspection read it too.
        variant_classes: for each upstream class inside the model, ours.
    """

    attention_sites: tuple[AttentionSite, ...] = ()
    variant_classes: dict[type, type] = {}

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        if not hasattr(config, "talking_heads_dynamic"):
            raise ValueError(
                f"{type(self).__name__} needs a variant configuration, got {type(config).__name__}: make one by "
                f"`{self.config_class.__name__}.from_upstream(config, num_key_value_heads=...)`."
            )
        super().__init__(config, *args, **kwargs)
        for module in self.modules():
            if type(module) in self.variant_classes:
                _become(module, self.variant_classes[type(module)])
        for site, _, module in self.named_attentions():
            _install_variant(site, module, config)
        self.post_init()

    def named_attentions(self) -> Iterator[tuple[AttentionSite, str, nn.Module]]:
        """Yield each attention with its site and its path inside the base model."""
        for name, module in self.base_model.named_modules():
            for site in self.attention_sites:
                if re.fullmatch(site.module, name):
                    yield site, name, module

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if hasattr(module, "init_projections"):
            module.init_projections()

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *model_args: Any, config: Any = None, **kwargs: Any):
        """Load a checkpoint, upstream's plain ones included; see `PreTrainedModel.from_pretrained`.

        Raises:
            ValueError: if the configuration asks for other heads than the checkpoint holds, which only a conversion gives.
        """
        if pretrained_model_name_or_path is not None:
            _check_same_heads(cls, pretrained_model_name_or_path, config, kwargs)
        return super().from_pretrained(pretrained_model_name_or_path, *model_args, config=config, **kwargs)

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return True

    def _check_and_adjust_attn_implementation(self, attn_implementation: Any, *args: Any, **kwargs: Any) -> Any:
        # Before upstream looks for a kernel that could not be used.
        _check_implementation(self.config, attn_implementation)
        return super()._check_and_adjust_attn_implementation(attn_implementation, *args, **kwargs)

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
        """Route "eager" and "sdpa" (the default) to this package's functions; leave the other kernels as they are."""
        requested = {EAGER: "eager", SDPA: "sdpa"}.get(requested_attention, requested_attention)
        implementation = super().get_correct_attn_implementation(requested, is_init_check)
        return {"eager": EAGER, "sdpa": SDPA}.get(implementation, implementation)


def _become(module: nn.Module, variant: type) -> None:
    module.__class__ = variant
    if isinstance(module, PreTrainedModel):
        # Upstream's constructor notes facts under the class's name (what its outputs record, for one): run it for ours too.
        PreTrainedModel.__init__(variant.__new__(variant), module.config)


def _install_variant(site: AttentionSite, module: nn.Module, config: Any) -> None:
    head_dim, heads, kv_heads = config.attention_head_dim, config.num_attention_heads, getattr(config, site.kv_heads_field)
    kv_value_heads = config.num_value_heads if kv_heads == heads else kv_heads
    _resize(module, site.key, out_features=kv_heads * head_dim)
    _resize(module, site.value, out_features=kv_value_heads * head_dim)
    _resize(module, site.output, in_features=config.num_value_heads * head_dim)
    attention = module.get_submodule(site.mixes)
    query, key = module.get_submodule(site.query), module.get_submodule(site.key)
    attention.install_variant(config, kv_heads, query.in_features, key.in_features)


def _resize(module: nn.Module, path: str, in_features: int | None = None, out_features: int | None = None) -> None:
    old = module.get_submodule(path)
    size = (in_features or old.in_features, out_features or old.out_features)
    if size != (old.in_features, old.out_features):
        like = {"dtype": old.weight.dtype, "device": old.weight.device}
        module.set_submodule(path, nn.Linear(*size, bias=old.bias is not None, **like))


def _check_implementation(config: Any, implementation: Any) -> None:
    talking_heads = getattr(config, "talking_heads", None)
    if talking_heads is not None and implementation not in (None, "eager", "sdpa", EAGER, SDPA):
        raise ValueError(
            f'talking_heads="{talking_heads}" cannot run under attn_implementation="{implementation}", which would ignore '
            'it: use "sdpa" or "eager".'
        )


def _check_same_heads(cls: type, source: Any, config: Any, kwargs: dict[str, Any]) -> None:
    fields = ("talking_heads", *cls.config_class.kv_heads_fields())
    wanted = {name: kwargs[name] for name in fields if name in kwargs}
    if hasattr(config, "talking_heads_dynamic"):
        wanted = {name: getattr(config, name) for name in fields} | wanted
    if not wanted:
        return
    hub_arguments = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")
    held, _ = cls.config_class.get_config_dict(source, **{k: kwargs[k] for k in hub_arguments if k in kwargs})
    heads = held.get("num_attention_heads", held.get("num_heads"))
    for name, value in wanted.items():
        found = held.get(name) if name == "talking_heads" else held.get(name) or heads
        # Adding talking heads to a plain checkpoint is what their initialisation is for; dropping learned ones is not.
        if value != found and not (name == "talking_heads" and found is None):
            raise ValueError(
                f"The checkpoint {str(source)!r} has {name}={found!r}, the configuration asks for {value!r}: convert it "
                f"first, by `python scripts/convert_checkpoint.py --model_name_or_path {source} --{name} {value} "
                f"--output_dir OUTPUT_DIR` or by `hf_attn_variants.convert({str(source)!r}, {name}={value!r})`."
            )


def _wants_weights(module: nn.Module, kwargs: dict[str, Any]) -> bool:
    asked = kwargs.get("output_attentions")
    return bool(module.config.output_attentions if asked is None else asked)


def _is_causal(module: nn.Module, is_causal: bool | None, mask: torch.Tensor | None, query: torch.Tensor) -> bool:
    # The mask, where there is one, says what is causal; a single query is the last token and sees all of the cache.
    asked = getattr(module, "is_causal", False) if is_causal is None else is_causal
    return query.shape[2] > 1 and mask is None and asked


def _causal_mask(logits: torch.Tensor) -> torch.Tensor:
    return torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).tril()  # [n, m]


def _biased_mask(
    position_bias: torch.Tensor, mask: torch.Tensor | None, is_causal: bool, query: torch.Tensor
) -> torch.Tensor:
    position_bias = position_bias.to(query.dtype)
    if is_causal:
        mask = _causal_mask(position_bias)
    if mask is None:
        return position_bias
    if mask.dtype == torch.bool:
        return position_bias.masked_fill(~mask, torch.finfo(query.dtype).min)
    return position_bias + mask


def _grouped_matmul(states: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
    # [b, h, n, x] by [b, k, x, y] to [b, h, n, y]: the rows of a group's heads stand below each other, nothing is repeated.
    batch, heads, length, _ = states.shape
    if heads == shared.shape[1]:
        return states @ shared
    return (states.reshape(batch, shared.shape[1], -1, states.shape[-1]) @ shared).view(batch, heads, length, -1)


def _mix_heads(
    heads: torch.Tensor, proj: torch.Tensor | None, by_query: torch.Tensor | None, by_memory: torch.Tensor | None
) -> torch.Tensor:
    # [b, i, n, m] by [i, j] (+ [b, n, i, j] + [b, m, i, j]) to [b, j, n, m]: one small matmul over all positions.
    if proj is None:
        return heads
    mixed = (proj.transpose(0, 1) @ heads.flatten(2)).unflatten(2, heads.shape[2:])
    if by_query is not None:
        mixed = mixed + torch.einsum("binm,bnij->bjnm", heads, by_query)
    if by_memory is not None:
        mixed = mixed + torch.einsum("binm,bmij->bjnm", heads, by_memory)
    return mixed


AttentionInterface.register(EAGER, eager_attention_forward)
AttentionInterface.register(SDPA, sdpa_attention_forward)
# Without a mask function of the same name upstream would hand over no mask, and padding would be ignored.
AttentionMaskInterface.register(EAGER, eager_mask)
AttentionMaskInterface.register(SDPA, sdpa_mask)
