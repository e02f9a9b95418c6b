"""The error for a model class of Transformers that is built with a configuration whose fields it ignores."""

import inspect
from typing import Any

from transformers import PreTrainedModel

from ..mechanisms.latents import rank_of_map
from ..mechanisms.mechanism import NONE
from .field_table import row_of

LIBRARY = "transformers.models."

__all__ = ["check_foreign_class", "fields_in_effect", "foreign_class"]


def foreign_class() -> type | None:
    """Return the model class of Transformers whose constructor is running, unless a class of this package runs it.

    A class that only holds other models, each with a constructor of its own, is not such a class.

    Remote code may load a configuration and its model from two copies of this module, so the call stack is searched:
    no variable of this module is in both, and Transformers does not tell a configuration which model it is for.
    """
    built: list[type] = []
    frame = inspect.currentframe()
    while frame is not None:
        model = frame.f_locals.get("self") if frame.f_code.co_name == "__init__" else None
        if isinstance(model, PreTrainedModel):
            built.append(type(model))
        frame = frame.f_back
    # A model of this package replaces the attentions of the models that it builds.
    if not built or any(hasattr(cls, "attention_sites") for cls in built):
        return None
    makes_layers = any(base.__module__.startswith(LIBRARY) and "__init__" in vars(base) for base in built[0].__mro__)
    return built[0] if makes_layers else None


def check_foreign_class(config: Any, model_class: type) -> None:
    """Check that a model class of Transformers computes what a configuration says.

    Raises:
        ValueError: if a field changes the outputs.
    """
    if not (in_effect := fields_in_effect(config)):
        return
    shown = ", ".join(f"{name}={getattr(config, name)!r}" for name in in_effect)
    known = list(dict.fromkeys(type(config).auto_classes.values()))
    same = [name for base in model_class.__mro__ if (name := f"AttnVariant{base.__name__}") in known]
    classes = same[0] if same else f"a class of hf_attn_variants ({', '.join(known)})"
    raise ValueError(
        f"{model_class.__name__} does not compute {shown} of this {type(config).__name__}, and its outputs would be "
        f"wrong. Use {classes}, or load the model with an Auto class."
    )


def fields_in_effect(config: Any) -> list[str]:
    """Return the variant fields whose values make a model differ from Transformers' own of the same sizes."""
    variant_fields = config.variant_fields()
    values = {name: value for name, value in config.to_dict().items() if name not in variant_fields}
    plain = type(config).from_dict(values | {"model_type": type(config).model_type})
    # Sizes and seeds change nothing without the mechanism that they belong to.
    own = {*config.kv_heads_fields(), *config.rank_fields(), "per_layer_values"}
    own |= {name for name in variant_fields if "not_in_transformers" in row_of(name)[1].facts}
    changed = [name for name in variant_fields if name in own and getattr(config, name) != getattr(plain, name)]
    # A latent as wide as its input takes no weights, and "absolute" names the architecture's own positions.
    idle = {name for name in config.rank_fields() if rank_of_map(getattr(config, name), config.hidden_size) is None}
    idle |= {name for name in own if getattr(config, name) in ("absolute", NONE)}
    return [name for name in changed if name not in idle]
