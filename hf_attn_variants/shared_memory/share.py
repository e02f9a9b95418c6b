"""The `share_memory` function, which lets beams share one cross-attention cache per sentence."""

from typing import Any, TypeVar

from torch import nn
from transformers import PreTrainedModel

from ..modeling.attention.attention_mixin import AttentionVariantMixin
from ..modeling.attention.model_mixin import AttnVariantModelMixin
from ..modeling.mechanisms.talking_heads import has_talking_heads
from .attention import ENCODER_OUTPUTS, KEYS_AND_VALUES, SharedMemoryMixin, iterate_cross_attentions
from .installation import check_architecture_and_implementation, check_sharing_support, install_sharing, remove_sharing

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
    modules = dict(iterate_cross_attentions(model))
    if not share:
        _check_replaced_forwards(modules)
        remove_sharing(model, modules.values())
        return model
    if any(isinstance(module, AttentionVariantMixin) for module in model.modules()):
        raise ValueError(
            f"{type(model).__name__} combines a Transformers class with attention modules from this package. This "
            "combination is not supported. Use an encoder-decoder class from this package."
        )
    check_sharing_support(model, modules)
    install_sharing(model, modules, cross_cache)
    return model


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


def _check_variant(model: Any, cross_cache: str) -> None:
    """Check that the beams of a model from this package can share the requested cache.

    Raises:
        ValueError: If the cross-attention has talking heads, or the cache stores keys and values instead of the
            requested encoder outputs.
    """
    name, config = type(model).__name__, model.config
    check_architecture_and_implementation(model)
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
