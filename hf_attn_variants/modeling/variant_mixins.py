"""What makes an upstream model a variant: one mixin for its attention classes, one for its model classes.

Letters as in `attention_variants`.
"""

from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from .additive_score import score_of
from .attention_kernels import has_kernel
from .attention_sites import AttentionHeads, AttentionSite, named_attentions
from .attention_variants import EAGER, SDPA, implementation_of, wants_weights
from .configuration_attn_variants import can_cache
from .decoder_caches import prepare_cache
from .global_tokens import check_global_mask
from .kernel_parameters import init_kernel, install_kernel
from .latent_attention import LatentProjection, attend_to_latent, shared_latent
from .loading_checks import (
    adds_talking_heads,
    beginning_of_talking_heads,
    check_implementation,
    warn_of_positions,
)
from .memory_compression import compression_of
from .new_parameters import NO_WEIGHT_DECAY, PROJECTION_KEYS, VECTOR_KEYS, projection_shapes, projection_std
from .sinusoidal_positions import EmbeddingsMixin
from .upstream import (
    CONFIG_ATTRIBUTES,
    Arguments,
    changed,
    check_attention_function,
    check_attributes,
    check_models,
    known_imports,
    refuse_two_caches,
    upstream_class,
)

with known_imports():
    from transformers import initialization as init

__all__ = [
    "NO_WEIGHT_DECAY",
    "AttentionHeads",
    "AttentionSite",
    "AttentionVariantMixin",
    "AttnVariantModelMixin",
    "named_attentions",
    "projection_shapes",
    "projection_std",
]

check_models()

# Below transformers' own logger: its verbosity holds for what is said here too.
logger = logging.get_logger(f"transformers.{__name__}")

# Whether the model that is being loaded adds talking heads to a checkpoint that has none.
_adds_talking_heads: ContextVar[bool] = ContextVar("adds_talking_heads", default=False)


class AttentionVariantMixin:
    """What a variant attention adds to upstream's attention class; listed before it among the bases.

    Class attributes:
        roles: the arguments of upstream's forward that ours reads (`upstream.ROLES`).
        returns: how many values it returns.
        upstream_attributes: what our code reads of upstream's module, its linear maps apart.
        arguments: those of upstream's forward by role; made for each class.
    """

    roles: tuple[str, ...] = ()
    returns = 2
    upstream_attributes: tuple[str, ...] = ()
    arguments: Arguments

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if issubclass(cls, nn.Module):
            owner = upstream_class(cls, AttentionVariantMixin)
            cls.arguments = Arguments(owner, cls.roles, returns=cls.returns)
            check_attention_function(owner)

    def install_variant(self, config: Any, heads: AttentionHeads, query_dim: int, memory_dim: int) -> None:
        """Note the head counts and add the talking-heads parameters; the model initialises them.

        Args:
            config: the model's.
            heads: the attention's head counts and the rank of its latent.
            query_dim: the size of the inputs that queries are made from.
            memory_dim: the size of the memory-side inputs as the attention gets them.
        """
        check_attributes(self, ("config", *self.upstream_attributes))
        check_attributes(self.config, CONFIG_ATTRIBUTES)
        self.heads = heads
        self.num_key_value_groups = heads.query // heads.key
        like = next(self.parameters())
        shapes = projection_shapes(config, heads, query_dim, memory_dim)
        self.projection_names = tuple(shapes)
        self.dynamic_names = tuple(config.talking_heads_dynamic)
        self.keeps_cache = can_cache(config)
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=like.dtype, device=like.device)))
        if shapes:
            # Upstream has initialised this module already; the new parameters have not been.
            self._is_hf_initialized = False
        self.settle_implementation()

    def settle_implementation(self) -> None:
        """Note which attention implementation the configuration names, once it is seen to fit this attention.

        `variant_inputs` asks again only where somebody has written another name into the configuration since.

        Raises:
            ValueError: where the implementation cannot compute talking heads or a pattern.
        """
        implementation = implementation_of(self)
        check_implementation(self.config, implementation)
        self.implementation, self.is_own = implementation, implementation in (EAGER, SDPA)

    def init_projections(self) -> None:
        """Initialise the talking-heads parameters as `talking_heads_init` says."""
        for name in self.projection_names:
            parameter = getattr(self, name)
            std = projection_std(name, parameter.shape, self.config.talking_heads_init)
            if std is None:
                init.copy_(parameter, torch.eye(*parameter.shape, dtype=parameter.dtype, device=parameter.device))
            else:
                init.normal_(parameter, mean=0.0, std=std)

    def variant_inputs(
        self, states: torch.Tensor, memory: torch.Tensor | None, cache: Any, kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """Return what the attention function is to know of one call beside its operands; check what it asks for.

        Args:
            states: the query-side inputs x [b, n, query size].
            memory: the memory-side inputs [b, m, memory size]; None for self-attention, where they are `states`.
            cache: the cache that this call reads and writes, if any.
            kwargs: the call's further arguments.

        Returns:
            The terms of P_l and P_w by name, [b, n or m, heads in, heads out]; of a kernel, where it keeps states.

        Raises:
            ValueError: where the attention implementation or the cache cannot do what the variant needs.
        """
        if implementation_of(self) != self.implementation:
            self.settle_implementation()
        if not self.is_own and wants_weights(self, kwargs):
            raise ValueError(
                f'attn_implementation="{self.implementation}" computes no attention weights; '
                'for `output_attentions=True` use "sdpa" or "eager".'
            )
        if cache is not None:
            prepare_cache(self, cache, memory)
        check_global_mask(self, states, kwargs)
        if self.kernel is not None and cache is not None:
            name = "self_attention_cache" if memory is None else "cross_attention_cache"
            return {"kernel_cache": getattr(cache, name, cache)}
        if not self.dynamic_names:
            return {}
        inputs = {"x": states, "m": states if memory is None else memory}
        return {
            name: torch.einsum("bld,dij->blij", inputs[name[0]], getattr(self, f"{name}_proj"))
            for name in self.dynamic_names
        }

    def from_latent(
        self,
        maps: tuple[nn.Module, nn.Module, nn.Module],
        states: torch.Tensor,
        mask: torch.Tensor | None,
        dropout: float,
        memory: torch.Tensor | None = None,
        cache: Any = None,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the outputs of all heads [b, n, h_v d], and the weights if asked for, of an attention with a latent.

        Args:
            maps: those of queries, keys and values.
            mask: as in `attention_with_weights`.
            dropout: the probability that a weight is dropped in training.
            states, memory, cache: as for `latent_of`.
            options: further arguments of the attention function.
        """
        query_map, key_map, value_map = maps
        query = query_map(states).unflatten(-1, (-1, self.heads.head_dim)).transpose(1, 2)  # [b, h_k, n, d]
        latent, layer = self.latent_of(states, memory, cache)
        options |= {"dropout": dropout if self.training else 0.0, "scaling": self.scaling}
        output, weights = attend_to_latent(self, query, latent, mask, (key_map, value_map), layer, **options)
        return output.flatten(2), weights

    def latent_of(self, states: torch.Tensor, memory: torch.Tensor | None, cache: Any) -> tuple[torch.Tensor, Any]:
        """Return c [b, 1, m, r] and, in cross-attention, the cache's layer that holds it.

        Args:
            states: the inputs of self-attention [b, n, D].
            memory: those of cross-attention, the latent that `MakesCrossLatent` has made of them; else None.
            cache: the cache that this call reads and writes, if any.
        """
        if memory is not None:
            return shared_latent(cache, memory, self.layer_idx)
        return self.own_latent(states, cache), None

    def own_latent(self, states: torch.Tensor, cache: Any) -> torch.Tensor:
        """Return the latent c [b, 1, m, r] of self-attention: of these inputs [b, n, D] after those in the cache.

        The cache's keys are c, its values have no width.

        Raises:
            ValueError: for a cache that keeps something else (keys and values, such as a prefix of peft's).
        """
        latent = self.kv_a_proj(states) if hasattr(self, "kv_a_proj") else states
        latent = latent[:, None]
        if cache is None:
            return latent
        cache = getattr(cache, "self_attention_cache", cache)
        kept = cache.layers[self.layer_idx].keys if self.layer_idx < len(cache.layers) else None
        if kept is not None and kept.shape[1::2] != latent.shape[1::2]:
            raise ValueError(
                f"This attention keeps {latent.shape[-1]} numbers a token, its latent (`kv_lora_rank`); the cache "
                f"handed over has {kept.shape[1]} heads of {kept.shape[-1]}."
            )
        return cache.update(latent, latent[..., :0], self.layer_idx)[0]


class AttnVariantModelMixin:
    """What a variant model adds to upstream's model class; listed before it among the bases.

    Upstream builds itself; then its attentions (and the base model inside a head) become ours in place, by their
    class, as torch's `fully_shard` does. So nothing is built twice, and no upstream constructor is copied.

    Class attributes:
        attention_sites: every kind of attention that the architecture has: conversion and inspection read it too.
        variant_classes: for each upstream class inside the model, ours.
    """

    attention_sites: tuple[AttentionSite, ...] = ()
    variant_classes: dict[type, type] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # Saving needs to know which Auto class each class answers to; the configuration says so once.
        for auto_class, name in getattr(cls.config_class, "auto_classes", {}).items():
            if name == cls.__name__:
                cls.register_for_auto_class(auto_class)

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        if not hasattr(config, "talking_heads_dynamic"):
            raise ValueError(
                f"{type(self).__name__} needs a variant configuration, got {type(config).__name__}: make one by "
                f"`{self.config_class.__name__}.from_upstream(config, num_key_value_heads=...)`."
            )
        config.check_variant()
        super().__init__(config, *args, **kwargs)
        self._generate_as_configured()

    def post_init(self) -> None:
        """Turn what upstream's constructor built into ours, then finish it as upstream does; constructors end here."""
        for module in self.modules():
            if type(module) in self.variant_classes:
                _change_class(module, self.variant_classes[type(module)], self.config)
        for site, path, module in list(self.named_attentions()):
            _install_variant(site, path, module, self)
        _check_installed(self)
        if _adds_talking_heads.get():
            # Not missing: `from_pretrained` says in one line what they begin as.
            self._keys_to_ignore_on_load_missing = [*(self._keys_to_ignore_on_load_missing or ()), PROJECTION_KEYS]
        # Drawn again by the configuration's seed, where a checkpoint has none.
        self._keys_to_ignore_on_load_missing = [*(self._keys_to_ignore_on_load_missing or ()), VECTOR_KEYS]
        super().post_init()
        # A device map keeps modules whole by the names of their classes, some of which are ours now.
        ours = {plain.__name__: variant.__name__ for plain, variant in self.variant_classes.items()}
        self._no_split_modules = {ours.get(name, name) for name in self._no_split_modules or ()}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model as upstream's, with one cache."""
        refuse_two_caches(kwargs)
        return super().__call__(*args, **kwargs)

    def _generate_as_configured(self) -> None:
        # Upstream then refuses what takes tokens back, such as assisted generation.
        self._is_stateful = has_kernel(self.config, is_causal=True)
        if getattr(self, "generation_config", None) is not None and not can_cache(self.config):
            self.generation_config.use_cache = False

    @classmethod
    def module_runs(cls, config: Any, path: str) -> int:
        """Return how often a forward pass goes through the module at this path inside the base model."""
        return 1

    def named_attentions(self) -> Iterator[tuple[AttentionSite, str, nn.Module]]:
        """Yield each attention with its site and its path inside the base model."""
        return named_attentions(self, self.attention_sites)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if hasattr(module, "init_projections"):
            module.init_projections()
        init_kernel(module)
        if isinstance(module, LatentProjection):
            # Keys and values then have the spread that upstream's rule means them to have.
            init.normal_(module.weight, mean=0.0, std=module.out_features**-0.5)

    def _initialize_weights(self, module: nn.Module, is_custom_code: bool = False) -> None:
        # Of foreign code, upstream leaves out each module whose own parameters are loaded, lest its rule writes over
        # them. Modules without any count as well, and so the rules of T5's attentions, feed-forward layers and heads
        # for the Linears inside them would be skipped. Upstream's rules and ours leave loaded weights alone; those of
        # a subclass may not, so there modules with a loaded weight below them are left out.
        guarded = is_custom_code and type(self)._init_weights is not AttnVariantModelMixin._init_weights
        super()._initialize_weights(
            module, guarded and any(getattr(weight, "_is_hf_initialized", False) for weight in module.parameters())
        )

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *model_args: Any, config: Any = None, **kwargs: Any):
        """Load a checkpoint, upstream's plain ones included; see `PreTrainedModel.from_pretrained`.

        Raises:
            ValueError: if the configuration asks for other heads than the checkpoint holds: that takes a conversion.
        """
        source = pretrained_model_name_or_path
        adds = source is not None and adds_talking_heads(cls.config_class, source, config, kwargs)
        token = _adds_talking_heads.set(adds)
        try:
            loaded = super().from_pretrained(source, *model_args, config=config, **kwargs)
        finally:
            _adds_talking_heads.reset(token)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        # By now a generation_config.json of the checkpoint has been read.
        model._generate_as_configured()
        if adds:
            begin = beginning_of_talking_heads(model.config)
            logger.warning(f"{source} has no talking heads, {cls.__name__} adds them: {begin}.")
        warn_of_positions(model.config, source, kwargs)
        return loaded

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return True

    def set_attn_implementation(self, *args: Any, **kwargs: Any) -> None:
        """Switch the attention implementation of the model and of the encoder and decoder inside it."""
        super().set_attn_implementation(*args, **kwargs)
        for module in self.modules():
            # Some releases (5.15, 5.17) do not reach the copies of the configuration that encoder and decoder keep.
            if isinstance(module, AttnVariantModelMixin):
                module.config._attn_implementation = self.config._attn_implementation
            if isinstance(module, AttentionVariantMixin):
                module.settle_implementation()

    def _check_and_adjust_attn_implementation(self, attn_implementation: Any, *args: Any, **kwargs: Any) -> Any:
        # Before upstream looks for a kernel that could not be used.
        check_implementation(self.config, attn_implementation)
        return super()._check_and_adjust_attn_implementation(attn_implementation, *args, **kwargs)

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
        """Route "eager" and "sdpa" (the default) to this package's functions; leave the other kernels as they are."""
        requested = {EAGER: "eager", SDPA: "sdpa"}.get(requested_attention, requested_attention)
        implementation = super().get_correct_attn_implementation(requested, is_init_check)
        return {"eager": EAGER, "sdpa": SDPA}.get(implementation, implementation)


def _change_class(module: nn.Module, variant: type, config: Any) -> None:
    module.__class__ = variant
    if isinstance(module, EmbeddingsMixin):
        module.install_positions(config)
    if isinstance(module, PreTrainedModel):
        # Upstream's constructor notes facts by the class's name (what its outputs record, for one): run it for ours.
        PreTrainedModel.__init__(variant.__new__(variant), module.config)


def _check_installed(model: PreTrainedModel) -> None:
    """Check that each attention of ours was found where the sites say.

    Raises:
        UpstreamChanged: where one was not, or an attention there is none of ours.
    """
    for path, module in model.named_modules():
        if isinstance(module, AttentionVariantMixin) and not hasattr(module, "projection_names"):
            raise changed(f"`{type(module).__name__}` stands at `{path}` of `{type(model).__name__}`")


def _install_variant(site: AttentionSite, path: str, module: nn.Module, model: PreTrainedModel) -> None:
    """Give an attention its heads and new parameters, once: it may stand in a model inside another."""
    check_attributes(module, (site.core,) if site.core else ())
    core = module.get_submodule(site.core)
    if not isinstance(core, AttentionVariantMixin):
        raise changed(f"`{type(core).__name__}` stands at `{path}` of `{type(model).__name__}`")
    if hasattr(core, "projection_names"):
        return
    for attribute in site.projections.values():
        check_attributes(module, (attribute.partition(".")[0],))
    heads, width = site.heads(model.config, path), module.get_submodule(site.key).in_features
    rank = width if heads.rank is None else heads.rank
    resized = [
        _resize(module, site.key, rank, heads.key * heads.head_dim),
        _resize(module, site.value, rank, heads.value * heads.head_dim),
        _resize(module, site.output, in_features=heads.output * heads.head_dim),
    ]
    if any(resized):
        # T5's rule for new projections is that of the attention around them.
        module._is_hf_initialized = False
    if rank < width and site.latent_map(model.base_model, path) is None:  # a shared one is there after the first
        _add_latent(model.base_model, site.latent_path(path), width, rank)
    query = module.get_submodule(site.query)
    core.install_variant(model.config, heads, query.in_features, rank if site.shares_latent else width)
    core.score, core.compression = score_of(core, heads, model.config), compression_of(core, heads, site, model.config)
    is_causal = getattr(core, "is_causal", False)
    core.reach = site.reach(model.config, path, is_causal)
    install_kernel(core, site.kernel(model.config, path, is_causal), heads)


def _add_latent(base_model: nn.Module, path: str, width: int, rank: int) -> None:
    parent, _, name = path.rpartition(".")
    owner = base_model.get_submodule(parent)
    like = next(owner.parameters())
    owner.add_module(name, LatentProjection(width, rank, dtype=like.dtype, device=like.device))


def _resize(module: nn.Module, path: str, in_features: int | None = None, out_features: int | None = None) -> bool:
    old = module.get_submodule(path)
    size = (in_features or old.in_features, out_features or old.out_features)
    if size == (old.in_features, old.out_features):
        return False
    like = {"dtype": old.weight.dtype, "device": old.weight.device}
    module.set_submodule(path, nn.Linear(*size, bias=old.bias is not None, **like))
    return True
