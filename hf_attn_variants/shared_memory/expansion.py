"""The step of `generate` that repeats the inputs for each beam, with a mark on encoder outputs that are repeated."""

from typing import Any

from ..instance_attributes import OfModule
from ..modeling.attention.encoder_decoder_mixins import expand_and_mark
from .attention import IMPLEMENTATIONS, SharesMemory
from .known_attentions import cross_attentions

__all__ = ["EXPANSION", "SharedExpansion"]

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
