"""The base class of attention extensions, which add parameters or a formula to softmax attention.

An extension declares the stage of attention at which it is called. It returns a tensor of the same shape as its first
argument:

    HEAD_STAGE      (heads [b, h, n, d], role)    the queries, keys or values, before the cache
    WEIGHT_STAGE    (weights, logits, mask)       the weights [b, h, n, m] after the softmax, the logits without the
                                                  mask, and the mask or None
    OUTPUT_STAGE    (output, states)              the outputs of the heads [b, n, h_v, d_v], before the output
                                                  projection, and the inputs of the query projection [b, n, D]

Extensions have no effect when they are initialized, so that a model can continue from a trained checkpoint.
`fields/composition.py` lists the extensions. The symbols are defined in `softmax_attention`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn

from ..ops.softmax_attention import masked_softmax
from ..ops.variant_attention import AttentionHeads, VariantAttention
from .mechanism import Mechanism

__all__ = [
    "HEAD_STAGE",
    "OUTPUT_STAGE",
    "STAGES",
    "WEIGHT_STAGE",
    "AttentionExtension",
    "apply_extensions",
    "check_switch",
    "get_extensions",
    "get_normalization",
    "install_extension",
]

STAGES = HEAD_STAGE, WEIGHT_STAGE, OUTPUT_STAGE = "heads", "weights", "outputs"


class AttentionExtension(Mechanism, nn.Module):
    """An extension of one attention module.

    Args:
        value: the value of the configuration field.
        heads: the head counts of the attention module.
        query_dim: D, the input size of the query projection.
        like: a tensor whose dtype and device are used for the parameters.

    If a projection can express the extension, the class has a method `fold(role, projection)`. It returns an
    equivalent weight or bias of the projection with this role ("query", "key", "value" or "output").

    Class attributes:
        stage: the stage of attention at which `forward` is called.
    """

    inherits = True
    stage: ClassVar[str]

    def __init__(self, value: Any, heads: AttentionHeads, query_dim: int, like: Tensor) -> None:
        super().__init__()

    @classmethod
    def find_requesting_field(cls, config: Any, prefix: str) -> tuple[str, Any] | None:
        """Return the field that requests the extension at a place and its value, or None if no field requests it.

        Raises:
            ValueError: if the value is invalid.
        """
        requested = super().find_requesting_field(config, prefix)
        return None if requested is None else (requested[0], cls.validate(*requested))

    @classmethod
    def validate(cls, field: str, value: Any) -> Any:
        """Check the value of a field and return it.

        Raises:
            ValueError: if the value is invalid.
        """
        return value

    def init_variant_parameters(self) -> None:
        """Initialize the parameters so that the outputs of the attention module do not change."""

    def count_flops(self) -> tuple[int, int]:
        """Return the number of floating-point operations per key token and per query token."""
        return 0, 0


def check_switch(field: str, value: Any) -> bool:
    """Return the value of a field that switches an extension on.

    Raises:
        ValueError: if it is not True.
    """
    if value is not True:
        raise ValueError(f"`{field}` must be True or False, got {value!r}.")
    return value


def install_extension(module: VariantAttention, extension: AttentionExtension) -> None:
    """Add an extension to an attention module, which then computes its own projections if necessary."""
    module.add_module(extension.field, extension)
    names = module.extensions.get(extension.stage, ())
    module.extensions = module.extensions | {extension.stage: (*names, extension.field)}
    module.owns_projections |= extension.stage != WEIGHT_STAGE


def get_extensions(module: nn.Module) -> dict[str, AttentionExtension]:
    """Return the extensions of an attention module by their fields."""
    return {name: child for name, child in module.named_children() if isinstance(child, AttentionExtension)}


def apply_extensions(module: VariantAttention, stage: str, states: Tensor, *context: Any) -> Tensor:
    """Apply the extensions of an attention module that act at a stage to the arguments of this stage."""
    for name in module.extensions.get(stage, ()):
        states = getattr(module, name)(states, *context)
    return states


def get_normalization(module: VariantAttention) -> Callable[[Tensor, Tensor | None], Tensor] | None:
    """Return a function that computes the weights with extensions, or None if no extension changes the weights."""
    return partial(_normalize, module) if WEIGHT_STAGE in module.extensions else None


def _normalize(module: VariantAttention, logits: Tensor, mask: Tensor | None) -> Tensor:
    return apply_extensions(module, WEIGHT_STAGE, masked_softmax(logits, mask), logits, mask)
