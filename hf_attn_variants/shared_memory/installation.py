"""Replaces the cross-attention classes of a loaded model, so that its beams share memory, and restores them."""

from collections.abc import Iterable
from typing import Any

from torch import nn
from transformers import GenerationMixin, PreTrainedModel

from ..model_properties import WeakModuleAttribute
from ..modeling.attention.beam_shared_rows import expand_and_mark_encoder_outputs
from ..modeling.transformers_internals import check_attributes
from ..modeling.variant_names import get_plain_implementation
from .attention import (
    LAYOUTS_BY_CLASS,
    SUPPORTED_IMPLEMENTATIONS,
    SharedMemoryMixin,
    get_cross_attention_layout,
    iterate_cross_attentions,
    make_cache_sharing_class,
)

# The Transformers method that repeats the inputs for each beam. `SharedInputExpansion` replaces it.
EXPANSION_METHOD = "_expand_inputs_for_generation"


class SharedInputExpansion(WeakModuleAttribute):
    """A replacement for the `_expand_inputs_for_generation` method of one model.

    Args:
        model: The model that has this object as an attribute.

    Attributes:
        replaced_attribute: The instance attribute that this object replaces, or None if the model did not have one.
    """

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.replaced_attribute = vars(model).get(EXPANSION_METHOD)

    def __call__(
        self, expand_size: int = 1, is_encoder_decoder: bool = False, input_ids: Any = None, **kwargs: Any
    ) -> tuple[Any, dict[str, Any]]:
        """Repeat the inputs for each beam or sample like Transformers, and mark the encoder outputs as shared."""
        shares = expand_size > 1 and self._can_share()
        return expand_and_mark_encoder_outputs(
            self._get_original_method(), shares, expand_size, is_encoder_decoder, input_ids, kwargs
        )

    def _can_share(self) -> bool:
        """Return whether all cross-attention modules can share memory with the current attention implementation."""
        return self.module.config._attn_implementation_internal in SUPPORTED_IMPLEMENTATIONS and all(
            isinstance(module, SharedMemoryMixin) for _, module in iterate_cross_attentions(self.module)
        )

    def _get_original_method(self) -> Any:
        """Return the bound method that this object replaces."""
        if self.replaced_attribute is not None:
            return self.replaced_attribute
        # `super()` cannot be used because the method is static in some Transformers releases.
        cls = type(self.module)
        owner = next(base for base in cls.__mro__ if EXPANSION_METHOD in vars(base))
        return vars(owner)[EXPANSION_METHOD].__get__(self.module, cls)


def install_sharing(model: PreTrainedModel, modules: dict[str, nn.Module], cross_cache: str) -> None:
    """Replace the classes of the cross-attention modules, and the method that repeats the inputs.

    Args:
        model: The model.
        modules: Its cross-attention modules by path.
        cross_cache: The content of the cross-attention cache (see `share_memory`).
    """
    # A module may already have a class that shares memory, with another cache.
    transformers_classes: dict[str, Any] = {
        path: getattr(type(module), "original_class", type(module)) for path, module in modules.items()
    }
    classes = {path: make_cache_sharing_class(cls, cross_cache) for path, cls in transformers_classes.items()}
    original_classes = {path: type(module) for path, module in modules.items()}
    try:
        _assign_classes(modules, classes)
        is_expanded = isinstance(vars(model).get(EXPANSION_METHOD), SharedInputExpansion)
        if hasattr(type(model), EXPANSION_METHOD) and not is_expanded:
            setattr(model, EXPANSION_METHOD, SharedInputExpansion(model))
    except BaseException:
        _assign_classes(modules, original_classes)
        raise


def _assign_classes(modules: dict[str, nn.Module], classes: dict[str, type]) -> None:
    for path, cls in classes.items():
        modules[path].__class__ = cls


def remove_sharing(model: PreTrainedModel, modules: Iterable[nn.Module]) -> None:
    """Restore the classes of the cross-attention modules and the attributes of the model."""
    for module in modules:
        if isinstance(module, SharedMemoryMixin):
            module.__class__ = module.original_class
    expansion = vars(model).get(EXPANSION_METHOD)
    if isinstance(expansion, SharedInputExpansion):
        vars(model).pop(EXPANSION_METHOD)
        if expansion.replaced_attribute is not None:
            setattr(model, EXPANSION_METHOD, expansion.replaced_attribute)


def check_sharing_support(model: PreTrainedModel, modules: dict[str, nn.Module]) -> None:
    """Check that a Transformers model and its cross-attention modules are supported.

    Raises:
        ValueError: If they are not supported.
    """
    name = type(model).__name__
    check_architecture_and_implementation(model)
    if not modules:
        is_part = not isinstance(model, GenerationMixin)
        advice = " Load the whole encoder-decoder with `AutoModelForSeq2SeqLM`." if is_part else ""
        raise ValueError(
            f"{name} has no supported cross-attention.{advice} Supported classes are "
            f"{', '.join(sorted(LAYOUTS_BY_CLASS))}."
        )
    for path, module in modules.items():
        if not isinstance(module, SharedMemoryMixin):
            _check_cross_attention(path, module)


def check_architecture_and_implementation(model: PreTrainedModel) -> None:
    """Raise `ValueError` if a model is not an encoder-decoder, or its attention implementation is not supported."""
    if not getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(
            f"`model` must be an encoder-decoder (T5, BART, Marian, Whisper or a related model), got "
            f"{type(model).__name__}. Other models do not need `share_memory`."
        )
    implementation = model.config._attn_implementation
    if get_plain_implementation(implementation) not in SUPPORTED_IMPLEMENTATIONS:
        raise ValueError(
            f'`attn_implementation` must be "sdpa" or "eager", got "{implementation}". Call '
            '`model.set_attn_implementation("sdpa")` first.'
        )


def _check_cross_attention(path: str, module: nn.Module) -> None:
    """Check that a cross-attention module is supported.

    Raises:
        ValueError: If its class is unknown, or its `forward` was replaced.
    """
    kind = get_cross_attention_layout(type(module))
    if kind is None:
        raise ValueError(
            f"`{path}` must be one of {', '.join(sorted(LAYOUTS_BY_CLASS))} or a subclass with the same `forward`, "
            f"got {type(module).__name__}."
        )
    if "forward" in vars(module):
        raise ValueError(
            f"`{path}.forward` was replaced (by Accelerate offloading, for example). Call `share_memory` first."
        )
    check_attributes(module, kind.attributes)
