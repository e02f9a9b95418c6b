"""`share_memory`: beams, and optionally all layers, of a live Transformers model share the encoder outputs."""

from collections.abc import Iterable
from typing import Any, TypeVar

from torch import nn
from transformers import GenerationMixin, PreTrainedModel

from ..instance_attributes import OfModule
from ..modeling.attention.attention_mixin import AttentionVariantMixin
from ..modeling.attention.encoder_decoder_mixins import expand_and_mark
from ..modeling.attention.variant_mixins import AttnVariantModelMixin
from ..modeling.mechanisms.talking_heads import talks
from ..modeling.upstream import check_attributes
from ..modeling.variant_names import plain_implementation
from .attention import (
    ENCODER_OUTPUTS,
    IMPLEMENTATIONS,
    KEYS_AND_VALUES,
    KNOWN,
    SharesMemory,
    cross_attentions,
    kind_of,
    shared_class,
)

__all__ = ["EXPANSION", "SharedExpansion", "share_memory"]

# The method of upstream's that it stands for.
EXPANSION = "_expand_inputs_for_generation"


class SharedExpansion(OfModule):
    """Stands in one model for its method.

    Args:
        model: the one whose attribute it becomes.

    Attributes:
        former: an attribute of the same name that the model had of its own, if any.
    """

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.former = vars(model).get(EXPANSION)

    def __call__(
        self, expand_size: int = 1, is_encoder_decoder: bool = False, input_ids: Any = None, **kwargs: Any
    ) -> tuple[Any, dict[str, Any]]:
        """Repeat all inputs for each beam or sample, as Transformers does, and mark the encoder outputs."""
        shares = expand_size > 1 and self._can_share()
        return expand_and_mark(self._upstreams(), shares, expand_size, is_encoder_decoder, input_ids, kwargs)

    def _can_share(self) -> bool:
        found = [module for _, module in cross_attentions(self.module)]
        return self.module.config._attn_implementation_internal in IMPLEMENTATIONS and all(
            isinstance(module, SharesMemory) for module in found
        )

    def _upstreams(self) -> Any:
        if self.former is not None:
            return self.former
        # A static method in some releases, which `super` would need no instance for.
        cls = type(self.module)
        owner = next(each for each in cls.__mro__ if EXPANSION in vars(each))
        return vars(owner)[EXPANSION].__get__(self.module, cls)


Model = TypeVar("Model", bound=PreTrainedModel)


def share_memory(model: Model, share: bool = True, *, cross_cache: str = KEYS_AND_VALUES) -> Model:
    """Let the beams, or samples, of a sentence share its memory in an encoder-decoder's cross-attentions.

    In place, from the next call on: the model keeps its class, its weights and its `generate`. Keys and values are
    made once for each sentence, and stay where they are when beams change places; with a single beam each call is
    upstream's own. With `cross_cache="encoder_outputs"` all layers read the encoder's outputs y [b, m, D] themselves
    and the cache holds that one tensor: with W_k,i, W_v,i the maps of head i, logits are (q_i W_k,i) y^T and outputs
    (P_i y) W_v,i^T (slim attention, arXiv 2503.05840; MLA's absorbed form, 2405.04434, appendix C). That is the
    least memory; a step multiplies more. Training, and calls that record gradients, are upstream's own.

    An encoder-decoder of this package shares its memory as it is: it comes back unchanged, for either `share`.

    Args:
        model: a live model of upstream's own, or of a subclass (T5, mT5, UMT5, LongT5, BART, mBART, Marian, M2M100,
            PEGASUS, Whisper and relatives), with `attn_implementation` "sdpa" or "eager".
        share: False gives the model back as it was: its classes, and its own attributes.
        cross_cache: what a cache holds of a source: "keys_and_values" of each layer, or "encoder_outputs" once for all
            layers. A model of this package has that by its field `cross_kv_lora_rank`.

    Returns:
        The model.

    Raises:
        ValueError: for a model that cannot, before anything of it is changed; the message says what it has. For
            another `cross_cache`.
        UpstreamChanged: under a transformers whose attentions are not as they are known.
    """
    _check_kind(model)
    if cross_cache not in (KEYS_AND_VALUES, ENCODER_OUTPUTS):
        raise ValueError(f"`cross_cache` must be {KEYS_AND_VALUES!r} or {ENCODER_OUTPUTS!r}; got {cross_cache!r}.")
    if isinstance(model, AttnVariantModelMixin):
        if share:
            _check_variant(model, cross_cache)
        return model
    found = dict(cross_attentions(model))
    if not share:
        _check_hooks(found)
        _give_back(model, found.values())
        return model
    _check(model, found)
    classes = {path: _class_for(module, cross_cache) for path, module in found.items()}
    before = {path: type(module) for path, module in found.items()}
    try:
        for path, cls in classes.items():
            found[path].__class__ = cls
        if hasattr(type(model), EXPANSION) and not isinstance(vars(model).get(EXPANSION), SharedExpansion):
            setattr(model, EXPANSION, SharedExpansion(model))
    except BaseException:
        for path, cls in before.items():
            found[path].__class__ = cls
        raise
    return model


def _class_for(module: nn.Module, cross_cache: str) -> type:
    plain: Any = module.plain if isinstance(module, SharesMemory) else type(module)
    return shared_class(plain, cross_cache)


def _is_shared(module: nn.Module) -> bool:
    return isinstance(module, SharesMemory)


def _give_back(model: PreTrainedModel, modules: Iterable[nn.Module]) -> None:
    for module in modules:
        if isinstance(module, SharesMemory):
            module.__class__ = module.plain
    hook = vars(model).get(EXPANSION)
    if isinstance(hook, SharedExpansion):
        vars(model).pop(EXPANSION)
        if hook.former is not None:
            setattr(model, EXPANSION, hook.former)


def _check_hooks(found: dict[str, nn.Module]) -> None:
    for path, module in found.items():
        if _is_shared(module) and "forward" in vars(module):
            raise ValueError(
                f"`{path}.forward` was replaced on this object after it shared memory (accelerate's offloading does "
                "so), and calls what it replaced: take that back before."
            )


def _check_kind(model: Any) -> None:
    if isinstance(model, PreTrainedModel):
        return
    raise ValueError(
        f"`model` must be a model of Transformers, got {type(model).__name__}. Load the model first, compile it "
        "afterwards, and take a peft model apart with `get_base_model()`."
    )


def _check(model: PreTrainedModel, found: dict[str, nn.Module]) -> None:
    """Check that a model can share, before anything of it is changed.

    Raises:
        ValueError: with what it has and what is asked.
    """
    name = type(model).__name__
    _check_encoder_decoder(model)
    if any(isinstance(module, AttentionVariantMixin) for module in model.modules()):
        raise ValueError(
            f"{name} is a class of transformers around attentions of this package, whose beams share no memory there."
        )
    if not found:
        is_part = not isinstance(model, GenerationMixin)
        advice = ": give the whole encoder-decoder, as `AutoModelForSeq2SeqLM` loads it" if is_part else ""
        raise ValueError(
            f"{name} has no cross-attention that is known here{advice}. Known are {', '.join(sorted(KNOWN))}."
        )
    _check_implementation(model, IMPLEMENTATIONS)
    for path, module in found.items():
        if not _is_shared(module):
            _check_attention(path, module)


def _check_encoder_decoder(model: PreTrainedModel) -> None:
    if not getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(
            f"{type(model).__name__} is no encoder-decoder: `share_memory` takes these alone (T5, BART, Marian, "
            "Whisper and their relatives)."
        )


def _check_variant(model: Any, cross_cache: str) -> None:
    """Check that the beams of a model of this package share what is asked.

    Raises:
        ValueError: where its heads talk in cross-attention, or its cache holds keys and values and must not.
    """
    name, config = type(model).__name__, model.config
    _check_encoder_decoder(model)
    _check_implementation(model, IMPLEMENTATIONS)
    if talks(config, "cross_"):
        raise ValueError(
            f"The heads of this {name} talk in its cross-attentions, so that each beam keeps a memory of its own. "
            'Beams share where these do not talk: a checkpoint converted with `cross_talking_heads="none"`.'
        )
    if cross_cache == ENCODER_OUTPUTS and config.cross_kv_lora_rank is None:
        raise ValueError(
            f"The cache of this {name} holds keys and values, once for all beams. To hold the encoder's outputs: "
            f"convert with `cross_kv_lora_rank={config.d_model}`, which changes no output."
        )


def _check_implementation(model: PreTrainedModel, known: Iterable[str]) -> None:
    implementation = model.config._attn_implementation
    if plain_implementation(implementation) not in known:
        raise ValueError(
            f'`share_memory` computes by "sdpa" or "eager"; this model has attn_implementation="{implementation}": '
            'call `model.set_attn_implementation("sdpa")` before.'
        )


def _check_attention(path: str, module: nn.Module) -> None:
    kind = kind_of(type(module))
    if kind is None:
        raise ValueError(
            f"`{path}` is a {type(module).__name__} whose forward is not known here; known are those of "
            f"{', '.join(sorted(KNOWN))}, and of subclasses that leave `forward` as it is."
        )
    if "forward" in vars(module):
        raise ValueError(
            f"`{path}.forward` was replaced on this object (accelerate's offloading does so): share memory before."
        )
    check_attributes(module, kind.attributes)
