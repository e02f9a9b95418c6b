"""The `share_memory` function, which lets beams share one cross-attention cache per sentence."""

from collections.abc import Iterable
from typing import Any, TypeVar

from torch import nn
from transformers import GenerationMixin, PreTrainedModel

from ..model_properties import WeakModuleAttribute
from ..modeling.attention.attention_mixin import AttentionVariantMixin
from ..modeling.attention.shared_rows import expand_and_mark_encoder_outputs
from ..modeling.attention.variant_mixins import AttnVariantModelMixin
from ..modeling.mechanisms.talking_heads import has_talking_heads
from ..modeling.transformers_internals import check_attributes
from ..modeling.variant_names import get_plain_implementation
from .attention import (
    ENCODER_OUTPUTS,
    IMPLEMENTATIONS,
    KEYS_AND_VALUES,
    SUPPORTED_KINDS,
    SharedMemoryMixin,
    cross_attentions,
    get_cross_attention_layout,
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
        return self.module.config._attn_implementation_internal in IMPLEMENTATIONS and all(
            isinstance(module, SharedMemoryMixin) for _, module in cross_attentions(self.module)
        )

    def _get_original_method(self) -> Any:
        """Return the bound method that this object replaces."""
        if self.replaced_attribute is not None:
            return self.replaced_attribute
        # `super()` cannot be used because the method is static in some Transformers releases.
        cls = type(self.module)
        owner = next(base for base in cls.__mro__ if EXPANSION_METHOD in vars(base))
        return vars(owner)[EXPANSION_METHOD].__get__(self.module, cls)


ModelT = TypeVar("ModelT", bound=PreTrainedModel)


def share_memory(model: ModelT, share: bool = True, *, cross_cache: str = KEYS_AND_VALUES) -> ModelT:
    """Let all beams or samples for a sentence share one cross-attention cache in an encoder-decoder model.

    The model is modified in place. It keeps its class, its weights and its `generate` method. Keys and values are
    computed once per sentence, and are not copied when beams are reordered. With a single beam, or if gradients are
    recorded, the Transformers code runs unchanged.

    With `cross_cache="encoder_outputs"`, the cache stores only the encoder outputs y [b, m, D] for all layers. For
    head i with the queries q_i, the attention weights P_i, and the key and value projections W_k,i and W_v,i, the
    logits are (q_i W_k,i) y^T and the outputs are (P_i y) W_v,i^T (slim attention, arXiv 2503.05840; absorbed form of
    MLA, arXiv 2405.04434, appendix C). This requires the least memory, but more multiplications per step.

    Encoder-decoder models from this package always share their cache, and are returned unchanged.

    Args:
        model: A loaded Transformers encoder-decoder (T5, mT5, UMT5, LongT5, BART, mBART, Marian, M2M100, PEGASUS,
            Whisper and related models, or a subclass) with `attn_implementation` "sdpa" or "eager".
        share: Whether to share the cache. False restores the original classes and attributes of the model.
        cross_cache: The content of the cross-attention cache, either "keys_and_values" for each layer, or
            "encoder_outputs" once for all layers. For models from this package, the field `cross_kv_lora_rank` enables
            the latter.

    Returns:
        The same model.

    Raises:
        ValueError: If the model is not supported, or `cross_cache` is not valid. The model is then left unchanged.
        TransformersChangedError: If the attention classes of the installed Transformers release are not supported.

    Example:
        >>> model = AutoModelForSeq2SeqLM.from_pretrained("google-t5/t5-small")
        >>> share_memory(model).generate(**inputs, num_beams=4)
    """
    _check_model_type(model)
    if cross_cache not in (KEYS_AND_VALUES, ENCODER_OUTPUTS):
        raise ValueError(f"`cross_cache` must be {KEYS_AND_VALUES!r} or {ENCODER_OUTPUTS!r}, got {cross_cache!r}.")
    if isinstance(model, AttnVariantModelMixin):
        if share:
            _check_variant(model, cross_cache)
        return model
    modules = dict(cross_attentions(model))
    if not share:
        _check_replaced_forwards(modules)
        _restore_original_classes(model, modules.values())
        return model
    _check_model(model, modules)
    # A module may already have a class that shares memory, with another cache.
    plain: dict[str, Any] = {path: getattr(type(module), "plain", type(module)) for path, module in modules.items()}
    classes = {path: make_cache_sharing_class(cls, cross_cache) for path, cls in plain.items()}
    original_classes = {path: type(module) for path, module in modules.items()}
    try:
        _assign_classes(modules, classes)
        is_expanded = isinstance(vars(model).get(EXPANSION_METHOD), SharedInputExpansion)
        if hasattr(type(model), EXPANSION_METHOD) and not is_expanded:
            setattr(model, EXPANSION_METHOD, SharedInputExpansion(model))
    except BaseException:
        _assign_classes(modules, original_classes)
        raise
    return model


def _assign_classes(modules: dict[str, nn.Module], classes: dict[str, type]) -> None:
    for path, cls in classes.items():
        modules[path].__class__ = cls


def _restore_original_classes(model: PreTrainedModel, modules: Iterable[nn.Module]) -> None:
    """Restore the classes of the cross-attention modules and the attributes of the model."""
    for module in modules:
        if isinstance(module, SharedMemoryMixin):
            module.__class__ = module.plain
    expansion = vars(model).get(EXPANSION_METHOD)
    if isinstance(expansion, SharedInputExpansion):
        vars(model).pop(EXPANSION_METHOD)
        if expansion.replaced_attribute is not None:
            setattr(model, EXPANSION_METHOD, expansion.replaced_attribute)


def _check_replaced_forwards(modules: dict[str, nn.Module]) -> None:
    """Check that no `forward` was replaced after `share_memory` was called.

    Raises:
        ValueError: If a `forward` was replaced.
    """
    for path, module in modules.items():
        if isinstance(module, SharedMemoryMixin) and "forward" in vars(module):
            raise ValueError(
                f"`{path}.forward` was replaced after `share_memory` (by Accelerate offloading, for example). "
                "Restore it first."
            )


def _check_model_type(model: Any) -> None:
    """Raise `ValueError` if an object is not a Transformers model."""
    if isinstance(model, PreTrainedModel):
        return
    raise ValueError(
        f"`model` must be a Transformers model, got {type(model).__name__}. Load the model first, compile it "
        "afterwards, and extract the base model of a PEFT model with `get_base_model()`."
    )


def _check_model(model: PreTrainedModel, modules: dict[str, nn.Module]) -> None:
    """Check that a Transformers model and its cross-attention modules are supported.

    Raises:
        ValueError: If they are not supported.
    """
    name = type(model).__name__
    _check_architecture_and_implementation(model)
    if any(isinstance(module, AttentionVariantMixin) for module in model.modules()):
        raise ValueError(
            f"{name} combines a Transformers class with attention modules from this package. This combination is not "
            "supported. Use an encoder-decoder class from this package."
        )
    if not modules:
        is_part = not isinstance(model, GenerationMixin)
        advice = " Load the whole encoder-decoder with `AutoModelForSeq2SeqLM`." if is_part else ""
        raise ValueError(
            f"{name} has no supported cross-attention.{advice} Supported classes are "
            f"{', '.join(sorted(SUPPORTED_KINDS))}."
        )
    for path, module in modules.items():
        if not isinstance(module, SharedMemoryMixin):
            _check_cross_attention(path, module)


def _check_architecture_and_implementation(model: PreTrainedModel) -> None:
    """Raise `ValueError` if a model is not an encoder-decoder, or its attention implementation is not supported."""
    if not getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(
            f"`model` must be an encoder-decoder (T5, BART, Marian, Whisper or a related model), got "
            f"{type(model).__name__}. Other models do not need `share_memory`."
        )
    implementation = model.config._attn_implementation
    if get_plain_implementation(implementation) not in IMPLEMENTATIONS:
        raise ValueError(
            f'`attn_implementation` must be "sdpa" or "eager", got "{implementation}". Call '
            '`model.set_attn_implementation("sdpa")` first.'
        )


def _check_variant(model: Any, cross_cache: str) -> None:
    """Check that the beams of a model from this package can share the requested cache.

    Raises:
        ValueError: If the cross-attention has talking heads, or the cache stores keys and values instead of the
            requested encoder outputs.
    """
    name, config = type(model).__name__, model.config
    _check_architecture_and_implementation(model)
    if has_talking_heads(config, "cross_"):
        raise ValueError(
            f"{name} has talking heads in its cross-attention, so its beams cannot share a cache. Use a "
            'checkpoint converted with `cross_talking_heads="none"`.'
        )
    if cross_cache == ENCODER_OUTPUTS and config.cross_kv_lora_rank is None:
        raise ValueError(
            f"The cache of {name} stores keys and values. To cache the encoder outputs, convert the checkpoint with "
            f"`cross_kv_lora_rank={config.d_model}`, which does not change the model outputs."
        )


def _check_cross_attention(path: str, module: nn.Module) -> None:
    """Check that a cross-attention module is supported.

    Raises:
        ValueError: If its class is unknown, or its `forward` was replaced.
    """
    kind = get_cross_attention_layout(type(module))
    if kind is None:
        raise ValueError(
            f"`{path}` must be one of {', '.join(sorted(SUPPORTED_KINDS))} or a subclass with the same `forward`, got "
            f"{type(module).__name__}."
        )
    if "forward" in vars(module):
        raise ValueError(
            f"`{path}.forward` was replaced (by Accelerate offloading, for example). Call `share_memory` first."
        )
    check_attributes(module, kind.attributes)
