"""The mixin that turns Transformers model classes into variants by changing the modules that Transformers builds."""

import re
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, Self

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from ..fields.composition import (
    EXTENSION_FIELDS,
    check_implementation,
    create_score_function,
    get_used_mechanisms,
    install_extensions,
)
from ..fields.mechanism_fields import has_kernel
from ..fields.saving_and_loading import find_added_talking_heads, warn_about_replaced_positions
from ..fields.variant_config import supports_decoder_cache
from ..mechanisms.attention_extension import WEIGHT_STAGE
from ..mechanisms.kernels.attention_kernel import init_kernel, install_kernel
from ..mechanisms.kernels.kernel_table import get_random_buffer_names
from ..mechanisms.latents import add_latent_projection
from ..mechanisms.patterns.compressed_pattern import create_compression
from ..mechanisms.talking_heads import DYNAMIC, PROJECTION_KEYS, describe_talking_heads_init, supports_cache
from ..ops.padded_rows import set_padding_rule
from ..remote_code import is_package_class
from ..transformers_internals import (
    build_change_error,
    check_attributes,
    check_model_internals,
    check_single_cache,
    check_submodule_paths,
    get_cache_name,
    guarded_imports,
)
from ..transformers_trial import compare_with_transformers
from ..variant_names import EAGER, SDPA, includes
from .attention_mixin import AttentionVariantMixin
from .attention_sites import (
    AttentionSite,
    create_kernel,
    get_key_range,
    get_root_module,
    named_attention_modules,
)
from .decoder_caches import limit_cache_to_window

with guarded_imports():
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

__all__ = ["AttnVariantModelMixin"]

check_model_internals()

# This is a child of the Transformers logger, so that the Transformers verbosity level also controls these messages.
logger = logging.get_logger(f"transformers.{__name__}")

# The places (prefix and layer) at which talking heads are added to the checkpoint that is being loaded.
_added_heads: ContextVar[frozenset[tuple[str, int]]] = ContextVar("added_heads", default=frozenset())


_Model: Any = object  # the type of the Transformers class with which the mixin is combined


class AttnVariantModelMixin(_Model):
    """A mixin that adds the attention variants to a Transformers model class.

    It must precede the Transformers class in the list of base classes. After the original constructor has built the
    model, this mixin changes the classes of the attention modules in place. In a model with a head, it also changes
    the class of the base model. torch's `fully_shard` changes classes in the same way. No module is built twice, and
    no Transformers constructor is copied.

    Class attributes:
        attention_sites: the declarations of all attention modules in the architecture. Conversion and inspection also
            use them.
        variant_classes: a dictionary that maps each Transformers class inside the model to its variant class.
    """

    attention_sites: tuple[AttentionSite, ...] = ()
    variant_classes: dict[type, type] = {}
    _keys_to_ignore_on_load_missing: Any
    _no_split_modules: Any

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # Saving requires the Auto class of each model class, including user-defined subclasses. The configuration
        # contains the list of Auto classes.
        names = {base.__name__ for base in cls.__mro__}
        auto_classes = getattr(cls.config_class, "auto_classes", {})
        auto_class = next((auto_name for auto_name, name in auto_classes.items() if name in names), None)
        if auto_class is not None:
            cls.register_for_auto_class(auto_class)
        if auto_class == "AutoModelForCausalLM":
            # With label smoothing, the Transformers Trainer shifts the labels for the model classes in this table. The
            # text-generation pipeline also accepts them.
            MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.setdefault(cls.config_class.model_type, cls.__name__)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Register the class as Transformers does.

        Classes of this package are skipped, because their code is saved separately.
        """
        if not is_package_class(cls):
            super().register_for_auto_class(auto_class)

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        if not hasattr(config, DYNAMIC):
            raise ValueError(
                f"The configuration of {type(self).__name__} must be a variant configuration, got "
                f"{type(config).__name__}. Use `{self.config_class.__name__}.from_upstream(config, "
                "num_key_value_heads=...)`."
            )
        config.check_variant()
        compare_with_transformers(type(self))
        super().__init__(config, *args, **kwargs)
        self._update_generation_settings()

    def post_init(self) -> None:
        """Convert the modules created by the original constructor to variants, and call the original `post_init`.

        Transformers constructors call this method last.
        """
        for module in self.modules():
            if type(module) in self.variant_classes:
                _change_class(module, self.variant_classes[type(module)], self.config)
        used_mechanisms = get_used_mechanisms(self.config)
        for site, path, module in list(self.named_attention_modules()):
            _install_variant(site, path, module, self, used_mechanisms)
        _check_all_variants_installed(self)
        # `from_pretrained` logs a single line about the initialization of these keys instead of reporting them as
        # missing.
        added_parameters = list(_yield_added_key_patterns(self, _added_heads.get()))
        # Random vectors that are not in the checkpoint are drawn again with the seed in the configuration.
        random_buffers = [rf"\.{name}$" for name in get_random_buffer_names()] if has_kernel(self.config) else []
        self._keys_to_ignore_on_load_missing = [
            *(self._keys_to_ignore_on_load_missing or ()),
            *added_parameters,
            *random_buffers,
        ]
        super().post_init()
        # Device maps use class names to identify modules that must not be split, and some of these names have changed.
        variant_names = {plain.__name__: variant.__name__ for plain, variant in self.variant_classes.items()}
        self._no_split_modules = {variant_names.get(name, name) for name in self._no_split_modules or ()}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model as in Transformers, after checking that only one cache was passed."""
        check_single_cache(kwargs)
        return super().__call__(*args, **kwargs)

    def _update_generation_settings(self) -> None:
        # For stateful models, Transformers rejects methods that remove tokens, such as assisted generation.
        self._is_stateful = has_kernel(self.config, is_causal=True)
        if getattr(self, "generation_config", None) is not None and not supports_decoder_cache(self.config):
            self.generation_config.use_cache = False

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any) -> Any:
        """Create a cache as in Transformers, and add layers for sliding windows.

        These layers must exist before assisted generation prepares the cache for the removal of tokens.
        """
        result = super()._prepare_cache_for_generation(generation_config, model_kwargs, *args)
        cache = model_kwargs.get(get_cache_name())
        if cache is not None and not getattr(cache, "is_compileable", False):
            for site, _, module in self.named_attention_modules():
                attention: Any = module.get_submodule(site.core)
                if site.get_stack_name(self.config) == "decoder" and not site.is_cross_attention:
                    if attention.key_range is not None:
                        limit_cache_to_window(attention, cache)
            if getattr(generation_config, "is_assistant", False):
                cache.activate_past_recording()
        return result

    @property
    def stack_name(self) -> str | None:
        """The name of this encoder or decoder in the complete model, or None if this class is neither of them."""
        return None

    @classmethod
    def count_module_runs(cls, config: Any, path: str) -> int:
        """Return how many times a forward pass runs the module at a path inside the base model."""
        return 1

    def named_attention_modules(self) -> Iterator[tuple[AttentionSite, str, nn.Module]]:
        """Yield the declaration, the path inside the base model, and the module itself for each attention module."""
        return named_attention_modules(self, self.attention_sites)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if (init_variant_parameters := getattr(module, "init_variant_parameters", None)) is not None:
            init_variant_parameters()
        if getattr(module, "kernel", None) is not None:
            init_kernel(module)

    def _initialize_weights(self, module: nn.Module, is_custom_code: bool = False) -> None:
        # For custom code, Transformers skips modules whose own parameters were loaded or that have none. This would
        # skip T5's attention modules, feed-forward layers and heads, which initialize the linear layers inside them.
        # The initialization of Transformers and of this package never changes loaded weights, so no module has to be
        # skipped. A subclass may have its own initialization. Its modules that contain loaded weights are skipped.
        skips_loaded_modules = is_custom_code and type(self)._init_weights is not AttnVariantModelMixin._init_weights
        super()._initialize_weights(
            module,
            skips_loaded_modules
            and any(getattr(weight, "_is_hf_initialized", False) for weight in module.parameters()),
        )

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: Any, *model_args: Any, config: Any = None, **kwargs: Any
    ) -> Self:
        """Load a variant checkpoint or a Transformers checkpoint. See `PreTrainedModel.from_pretrained`.

        Raises:
            ValueError: if the head counts in the configuration differ from those in the checkpoint, which must then be
                converted first.
        """
        source = pretrained_model_name_or_path
        compare_with_transformers(cls)  # must run before Transformers switches to the meta device
        adds: frozenset[tuple[str, int]] = frozenset()
        if source is not None and includes("linear_attention", "talking_heads"):
            adds = find_added_talking_heads(cls.config_class, source, config, kwargs)
        token = _added_heads.set(adds)
        try:
            loaded = super().from_pretrained(source, *model_args, config=config, **kwargs)
        finally:
            _added_heads.reset(token)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        # At this point, the checkpoint's generation_config.json has been loaded.
        model._update_generation_settings()
        if adds:
            description = describe_talking_heads_init(model.config)
            logger.warning(f"{source} has no talking heads. {cls.__name__} adds them. {description}.")
        if source is not None and "sinusoidal_positions" in get_used_mechanisms(model.config):
            warn_about_replaced_positions(model.config, source, kwargs)
        return loaded

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return True

    def set_attn_implementation(self, *args: Any, **kwargs: Any) -> None:
        """Set the attention implementation of the model and of the encoder and decoder inside it."""
        super().set_attn_implementation(*args, **kwargs)
        for module in self.modules():
            # Some Transformers releases (5.15 and 5.17) do not update the configurations of the encoder and decoder,
            # which are copies.
            if isinstance(module, AttnVariantModelMixin):
                module.config._attn_implementation = self.config._attn_implementation
            if isinstance(module, AttentionVariantMixin):
                module.resolve_attn_implementation()

    def _check_and_adjust_attn_implementation(self, attn_implementation: Any, *args: Any, **kwargs: Any) -> Any:
        # This check must run before Transformers looks for a kernel that the variant does not support.
        check_implementation(self.config, attn_implementation)
        return super()._check_and_adjust_attn_implementation(attn_implementation, *args, **kwargs)

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
        """Replace "eager" and "sdpa" (the default) with this package's functions, and leave other names unchanged."""
        plain_names: dict[str | None, str] = {EAGER: "eager", SDPA: "sdpa"}
        requested = plain_names.get(requested_attention, requested_attention)
        implementation = super().get_correct_attn_implementation(requested, is_init_check)
        return {"eager": EAGER, "sdpa": SDPA}.get(implementation, implementation)


def _yield_added_key_patterns(model: AttnVariantModelMixin, added: frozenset[tuple[str, int]]) -> Iterator[str]:
    """Yield a regular expression for each module that receives talking heads during loading.

    The expression matches the names of the module's new parameters.
    """
    for site, path, _ in model.named_attention_modules() if added else ():
        if (site.field_prefix, site.get_layer_index(model.config, path)) in added:
            yield re.escape(f"{path}.{site.core}".rstrip(".")) + PROJECTION_KEYS


def _change_class(module: Any, variant_class: Any, config: Any) -> None:
    """Convert a module created by Transformers to an instance of its variant class.

    Assigning `__class__` only changes the methods of the object. Its parameters, hooks and attributes, and all
    references to it, stay the same:

        before   BertSelfAttention              query, key, value, dropout
        after    AttnVariantBertSelfAttention   the same query, key, value and dropout, with the methods of the variant

    A variant class only adds methods and has the Transformers class as its last base class, so that both classes have
    the same layout. The constructor of the variant class is not called. `_install_variant` adds the attributes
    instead.
    """
    module.__class__ = variant_class
    if not isinstance(module, AttentionVariantMixin):  # `install_variant` checks attention modules
        check_attributes(module, getattr(variant_class, "transformers_attributes", ()))
    if hasattr(module, "install_positions"):
        module.install_positions(config)
    if isinstance(module, PreTrainedModel):
        # Transformers' constructor also stores values by class name, such as the recorded outputs. It is run for the
        # new class to store them. The instance itself is not used.
        PreTrainedModel.__init__(variant_class.__new__(variant_class), module.config)


def _check_all_variants_installed(model: PreTrainedModel) -> None:
    """Check that all attention modules from this package are at declared paths.

    Raises:
        TransformersChangedError: if an attention module is at an undeclared path.
    """
    for path, module in model.named_modules():
        if isinstance(module, AttentionVariantMixin) and not hasattr(module, "projection_names"):
            raise build_change_error(f"`{type(module).__name__}` is at `{path}` of `{type(model).__name__}`")


def _install_variant(
    site: AttentionSite, path: str, module: nn.Module, model: PreTrainedModel, used_mechanisms: frozenset[str]
) -> None:
    """Set the head counts of an attention module and add its new parameters.

    A second call has no effect. It occurs if the model contains another model that has already called this function.
    """
    check_submodule_paths(module, (site.core,) if site.core else ())
    core = module.get_submodule(site.core)
    if not isinstance(core, AttentionVariantMixin):
        raise build_change_error(f"`{type(core).__name__}` is at `{path}` of `{type(model).__name__}`")
    if hasattr(core, "projection_names"):
        return
    check_submodule_paths(module, site.projections.values())
    key_linear: Any = module.get_submodule(site.key)
    query_linear: Any = module.get_submodule(site.query)
    heads, width = site.get_heads(model.config, path), key_linear.in_features
    rank = width if heads.rank is None else heads.rank
    resized = [_resize_linear_layer(module, site.output, in_features=heads.output * heads.value_dim)]
    if site.is_fused:
        resized.append(_resize_linear_layer(module, site.query, out_features=sum(heads.fused_rows)))
    else:
        resized.append(_resize_linear_layer(module, site.key, rank, heads.key * heads.head_dim))
        resized.append(_resize_linear_layer(module, site.value, rank, heads.value * heads.value_dim))
    if any(resized):
        # In T5, the projections are initialized by the attention module that contains them.
        vars(module)["_is_hf_initialized"] = False
    root = get_root_module(model)
    if rank < width and site.get_latent_projection(root, path) is None:  # shared by all layers
        add_latent_projection(root, site.get_latent_projection_path(path), width, rank)
    core.install_variant(model.config, heads, query_linear.in_features, rank if site.shares_latent else width)
    # Cross-attention computes its dynamic terms from the encoder outputs, which are available in each step. With a
    # smaller latent, the terms are computed from the latent, which is only in the cache after the first step.
    core.supports_cache = supports_cache(heads.dynamic) or (site.is_cross_attention and rank == width)
    core.score = core.compression = core.key_range = core.kernel = None
    is_causal = getattr(core, "is_causal", False)
    if "additive_score" in used_mechanisms:
        core.score = create_score_function(core, model.config, site.field_prefix)
    if "patterns" in used_mechanisms:
        core.compression = create_compression(core, heads, site, model.config)
    if "linear_attention" in used_mechanisms:
        install_kernel(core, create_kernel(site, model.config, path, is_causal))
    if not used_mechanisms.isdisjoint(("linear_attention", "patterns")):
        core.key_range = get_key_range(site, model.config, path, is_causal)
    if not used_mechanisms.isdisjoint(EXTENSION_FIELDS):
        install_extensions(core, model.config, site.field_prefix, query_linear.in_features)
    mechanisms = (heads.talking, core.score, core.compression, core.key_range, core.kernel)
    core.is_plain = all(mechanism is None for mechanism in mechanisms) and WEIGHT_STAGE not in core.extensions
    if not core.is_plain:
        set_padding_rule(core)


def _resize_linear_layer(
    module: nn.Module, path: str, in_features: int | None = None, out_features: int | None = None
) -> bool:
    old: Any = module.get_submodule(path)
    size = (in_features or old.in_features, out_features or old.out_features)
    if size == (old.in_features, old.out_features):
        return False
    weight = old.weight
    new = nn.Linear(*size, bias=old.bias is not None, dtype=weight.dtype, device=weight.device)
    module.set_submodule(path, new)
    return True
