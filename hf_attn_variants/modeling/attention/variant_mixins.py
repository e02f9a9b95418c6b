"""What makes an upstream model a variant: a mixin for its classes, which turns what upstream built into ours."""

import re
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from ..fields.composition import check_implementation
from ..fields.kernel_fields import has_kernel
from ..fields.loading_checks import adds_talking_heads, warn_of_positions
from ..fields.used_mechanisms import used_mechanisms
from ..fields.variant_config import can_cache
from ..mechanisms.additive_score import score_of
from ..mechanisms.kernels.kernel_parameters import init_kernel, install_kernel
from ..mechanisms.kernels.kernel_table import drawn_names
from ..mechanisms.latents import add_latent_map
from ..mechanisms.patterns.compressed_pattern import compression_of
from ..mechanisms.sinusoidal_positions import EmbeddingsMixin
from ..mechanisms.talking_heads import DYNAMIC, PROJECTION_KEYS, beginning_of_talking_heads, keeps_cache
from ..ops.padded_rows import settle_padding
from ..remote_code import is_package_class
from ..transformers_trial import try_host
from ..upstream import cache_name, changed, check_attributes, refuse_two_caches
from ..upstream_checks import check_models, check_paths
from ..variant_names import EAGER, SDPA
from .attention_mixin import AttentionVariantMixin
from .attention_sites import AttentionSite, named_attentions, sites_root
from .decoder_caches import keep_window

__all__ = [
    "AttnVariantModelMixin",
]

check_models()

# Below transformers' own logger: its verbosity holds for what is said here too.
logger = logging.get_logger(f"transformers.{__name__}")

# Where the model that is being loaded adds talking heads to a checkpoint that has none there, by prefix and layer.
_added_heads: ContextVar[frozenset[tuple[str, int]]] = ContextVar("added_heads", default=frozenset())


# A mixin is no model before it stands beside upstream's class: the checker alone sees the two as one.
if TYPE_CHECKING:
    _Model = PreTrainedModel
else:
    _Model = object


class AttnVariantModelMixin(_Model):
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
        # Saving asks each class for its Auto class, also a class that somebody derives from ours; the configuration
        # has the list.
        names = {base.__name__ for base in cls.__mro__}
        auto_classes = getattr(cls.config_class, "auto_classes", {})
        if (auto_class := next((each for each, name in auto_classes.items() if name in names), None)) is not None:
            cls.register_for_auto_class(auto_class)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Register a class as upstream does, unless it is ours: upstream would copy its code, which we write."""
        if not is_package_class(cls):
            super().register_for_auto_class(auto_class)

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        if not hasattr(config, DYNAMIC):
            wanted: Any = self.config_class
            raise ValueError(
                f"{type(self).__name__} needs a variant configuration, got {type(config).__name__}: make one by "
                f"`{wanted.__name__}.from_upstream(config, num_key_value_heads=...)`."
            )
        config.check_variant()
        try_host(type(self))
        super().__init__(config, *args, **kwargs)
        self._generate_as_configured()

    def post_init(self) -> None:
        """Turn what upstream's constructor built into ours, then finish it as upstream does; constructors end here."""
        for module in self.modules():
            if type(module) in self.variant_classes:
                _change_class(module, self.variant_classes[type(module)], self.config)
        used = used_mechanisms(self.config)
        for site, path, module in list(self.named_attentions()):
            _install_variant(site, path, module, self, used)
        _check_installed(self)
        # Not missing: `from_pretrained` says in one line what they begin as.
        new = list(_added_keys(self, _added_heads.get()))
        # Random numbers that a checkpoint lacks are drawn again by the configuration's seed.
        drawn = [rf"\.{name}$" for name in drawn_names()] if has_kernel(self.config) else []
        self._keys_to_ignore_on_load_missing = [*(self._keys_to_ignore_on_load_missing or ()), *new, *drawn]
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

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any) -> Any:
        """Make a cache as Transformers does, and give it the layers of windows before a search prepares to go back."""
        upstreams: Any = super()
        result = upstreams._prepare_cache_for_generation(generation_config, model_kwargs, *args)
        cache = model_kwargs.get(cache_name())
        if cache is not None and not getattr(cache, "is_compileable", False):
            for site, _, module in self.named_attentions():
                attention: Any = module.get_submodule(site.core)
                if site.stack_of(self.config) == "decoder" and not site.is_cross_attention:
                    if attention.reach is not None:
                        keep_window(attention, cache)
            if getattr(generation_config, "is_assistant", False):
                cache.activate_past_recording()
        return result

    @property
    def stack_name(self) -> str | None:
        """The name that a whole model has for this class, if it is an encoder or a decoder; else None."""
        return None

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
        if (init_projections := getattr(module, "init_projections", None)) is not None:
            init_projections()
        if getattr(module, "kernel", None) is not None:
            init_kernel(module)

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
    def from_pretrained(
        cls, pretrained_model_name_or_path: Any, *model_args: Any, config: Any = None, **kwargs: Any
    ) -> Self:
        """Load a checkpoint, upstream's plain ones included; see `PreTrainedModel.from_pretrained`.

        Raises:
            ValueError: if the configuration asks for other heads than the checkpoint holds: that takes a conversion.
        """
        source = pretrained_model_name_or_path
        try_host(cls)  # before upstream gives tensors no memory
        adds = frozenset() if source is None else adds_talking_heads(cls.config_class, source, config, kwargs)
        token = _added_heads.set(adds)
        try:
            loaded: Any = super().from_pretrained(source, *model_args, config=config, **kwargs)
        finally:
            _added_heads.reset(token)
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
        upstreams: dict[str | None, str] = {EAGER: "eager", SDPA: "sdpa"}
        requested = upstreams.get(requested_attention, requested_attention)
        implementation = super().get_correct_attn_implementation(requested, is_init_check)
        return {"eager": EAGER, "sdpa": SDPA}.get(implementation, implementation)


def _added_keys(model: AttnVariantModelMixin, added: frozenset[tuple[str, int]]) -> Iterator[str]:
    """Yield a regular expression for the talking-heads parameters of each attention that a loading model adds."""
    for site, path, _ in model.named_attentions() if added else ():
        if (site.place_prefix, site.layer(model.config, path)) in added:
            yield re.escape(f"{path}.{site.core}".rstrip(".")) + PROJECTION_KEYS


def _change_class(module: nn.Module, variant: Any, config: Any) -> None:
    module.__class__ = variant
    if not isinstance(module, AttentionVariantMixin):  # those are checked with their heads
        check_attributes(module, getattr(variant, "upstream_attributes", ()))
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


def _install_variant(
    site: AttentionSite, path: str, module: nn.Module, model: PreTrainedModel, used: frozenset[str]
) -> None:
    """Give an attention its heads and new parameters, once: it may stand in a model inside another."""
    check_paths(module, (site.core,) if site.core else ())
    core = module.get_submodule(site.core)
    if not isinstance(core, AttentionVariantMixin):
        raise changed(f"`{type(core).__name__}` stands at `{path}` of `{type(model).__name__}`")
    if hasattr(core, "projection_names"):
        return
    check_paths(module, site.projections.values())
    key_map: Any = module.get_submodule(site.key)
    query_map: Any = module.get_submodule(site.query)
    heads, width = site.heads(model.config, path), key_map.in_features
    rank = width if heads.rank is None else heads.rank
    resized = [
        _resize(module, site.key, rank, heads.key * heads.head_dim),
        _resize(module, site.value, rank, heads.value * heads.value_dim),
        _resize(module, site.output, in_features=heads.output * heads.value_dim),
    ]
    if any(resized):
        # T5's rule has the attention initialise the projections inside it.
        vars(module)["_is_hf_initialized"] = False
    root = sites_root(model)
    if rank < width and site.latent_map(root, path) is None:  # a shared one is there after the first
        add_latent_map(root, site.latent_path(path), width, rank)
    core.install_variant(model.config, heads, query_map.in_features, rank if site.shares_latent else width)
    # Cross-attention makes its terms from the encoder's outputs, which are there in each step. Where it has a smaller
    # latent it makes them from that, which is in the cache alone after the first step.
    core.keeps_cache = keeps_cache(heads.dynamic) or (site.is_cross_attention and rank == width)
    core.score = score_of(core, heads, model.config, site.place_prefix) if "additive_score" in used else None
    core.compression = compression_of(core, heads, site, model.config) if "patterns" in used else None
    is_causal = getattr(core, "is_causal", False)
    core.reach = site.reach(model.config, path, is_causal)
    core.kernel = None
    if "linear_attention" in used:
        install_kernel(core, site.kernel(model.config, path, is_causal))
    others = (heads.talking, core.score, core.compression, core.reach, core.kernel)
    core.is_plain = all(mechanism is None for mechanism in others)
    if not core.is_plain:
        settle_padding(core)


def _resize(module: nn.Module, path: str, in_features: int | None = None, out_features: int | None = None) -> bool:
    old: Any = module.get_submodule(path)
    size = (in_features or old.in_features, out_features or old.out_features)
    if size == (old.in_features, old.out_features):
        return False
    weight = old.weight
    new = nn.Linear(*size, bias=old.bias is not None, dtype=weight.dtype, device=weight.device)
    module.set_submodule(path, new)
    return True
