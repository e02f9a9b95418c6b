"""Model classes with the interface of variants for architectures that Transformers itself supports."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import transformers
from torch import nn
from transformers import PreTrainedModel

from ..modeling.attention.attention_sites import AttentionSite, named_attention_modules
from ..modeling.ops.key_ranges import KeyRange

_Model: Any = object  # the type of the Transformers class with which the mixin is combined
# The attributes of a variant's attention module that inspection reads, with the values of plain attention.
_NO_MECHANISMS = dict.fromkeys(("kernel", "compression", "score"))


class NativeModelMixin(_Model):
    """A mixin that gives a Transformers model class the interface that conversion and inspection use."""

    attention_sites: tuple[AttentionSite, ...] = ()
    transformers_class: type[PreTrainedModel]
    stack_name: str | None = None

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        for site, path, module in self.named_attention_modules():
            window, is_causal = config.get_window(site, module), bool(getattr(module, "is_causal", False))
            # A causal window includes the query's own token. Other windows have this size on both sides.
            key_range = None if window is None else KeyRange(window - is_causal, 0 if is_causal else window)
            vars(module).update(_NO_MECHANISMS, heads=site.get_heads(config, path), key_range=key_range)

    @classmethod
    def count_module_runs(cls, config: Any, path: str) -> int:
        """Return 1 because no layers share their weights."""
        return 1

    def named_attention_modules(self) -> Iterator[tuple[AttentionSite, str, nn.Module]]:
        """Yield the declaration, the path inside the base model, and the module itself for each attention module."""
        return named_attention_modules(self, self.attention_sites)

    def _update_generation_settings(self) -> None:
        """Do nothing because the attention does not restrict generation."""


@cache
def get_native_model_class(config_class: Any, name: str) -> Any:
    """Return the class with the interface of a variant for the Transformers model class with the given name.

    Args:
        config_class: a `NativeConfigMixin`.
        name: the name of the Transformers class.
    """
    plain = getattr(transformers, name)
    attributes = {
        "config_class": config_class,
        "attention_sites": config_class.attention_sites,
        "transformers_class": plain,
        # Transformers stores the outputs to record by the name of the class.
        "__module__": plain.__module__,
        "__qualname__": plain.__qualname__,
    }
    return type(name, (NativeModelMixin, plain), attributes)


def change_to_transformers_class(model: PreTrainedModel) -> PreTrainedModel:
    """Turn a model with a native class into an instance of the Transformers class. Return other models unchanged."""
    if isinstance(model, NativeModelMixin):
        native: Any = model
        for _, _, module in native.named_attention_modules():
            for name in (*_NO_MECHANISMS, "heads", "key_range"):
                del vars(module)[name]
        native.config.change_to_transformers_class()
        native.__class__ = native.transformers_class
    return model
