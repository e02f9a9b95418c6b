"""What `generate` does before a search: it repeats its inputs for each beam, the encoder's outputs left out."""

from typing import Any

from ..modeling.upstream import check_called, check_method, known_imports
from .attention import IMPLEMENTATIONS, SharesMemory
from .known_attentions import cross_attentions

with known_imports():
    from transformers import GenerationMixin

check_method(GenerationMixin, "_expand_inputs_for_generation", ("expand_size", "is_encoder_decoder", "input_ids"))
check_called(GenerationMixin, "generate", "_expand_inputs_for_generation")

__all__ = ["EXPANSION", "SharedExpansion"]

# The method of upstream's that it stands for.
EXPANSION = "_expand_inputs_for_generation"
# What has a row for each sentence, and keeps it.
ONCE = ("encoder_outputs", "attention_mask")


class SharedExpansion:
    """Stands in one model for its method; a plain object, which is copied and pickled with the model.

    Args:
        model: the one whose attribute it becomes.

    Attributes:
        former: an attribute of the same name that the model had of its own, if any.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.former = vars(model).get(EXPANSION)

    def __call__(
        self, expand_size: int = 1, is_encoder_decoder: bool = False, input_ids: Any = None, **kwargs: Any
    ) -> tuple[Any, dict[str, Any]]:
        """Repeat as upstream does, for each beam or sample, what is no memory."""
        kept = {}
        if is_encoder_decoder and expand_size > 1 and kwargs.get("encoder_outputs") is not None and self._can_share():
            kept = {name: kwargs.pop(name) for name in ONCE if name in kwargs}
            is_encoder_decoder = False  # else upstream asks for the outputs
        input_ids, kwargs = self._upstreams()(
            expand_size=expand_size, is_encoder_decoder=is_encoder_decoder, input_ids=input_ids, **kwargs
        )
        return input_ids, kwargs | kept

    def _can_share(self) -> bool:
        found = [module for _, module in cross_attentions(self.model)]
        return self.model.config._attn_implementation_internal in IMPLEMENTATIONS and all(
            isinstance(module, SharesMemory) for module in found
        )

    def _upstreams(self) -> Any:
        if self.former is not None:
            return self.former
        # A static method in some releases, which `super` would need no instance for.
        owner = next(cls for cls in type(self.model).__mro__ if EXPANSION in vars(cls))
        return vars(owner)[EXPANSION].__get__(self.model, type(self.model))
