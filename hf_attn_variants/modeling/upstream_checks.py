"""Checks of the internals of Transformers: classes and methods once per process, attributes when a model is built."""

import inspect
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from .upstream import changed, check_attributes, check_called, check_method, known_imports

__all__ = [
    "check_attention_function",
    "check_caches",
    "check_configurations",
    "check_mask_functions",
    "check_models",
    "check_paths",
]

# Methods of Transformers that this package overrides or calls, and their first arguments after `self`, in this order.
MODEL_METHODS = {
    "post_init": (),
    "_init_weights": ("module",),
    "_initialize_weights": ("module", "is_custom_code"),
    "_can_set_attn_implementation": (),
    "_check_and_adjust_attn_implementation": ("attn_implementation",),
    "get_correct_attn_implementation": ("requested_attention", "is_init_check"),
    "set_attn_implementation": ("attn_implementation",),
    "from_pretrained": ("pretrained_model_name_or_path",),
}
LAYER_METHODS = {
    "lazy_initialization": ("key_states", "value_states"),
    "update": ("key_states", "value_states"),
    "get_seq_length": (),
    "get_mask_sizes": ("query_length",),
    "reset": (),
    "reorder_cache": ("beam_idx",),
    "batch_repeat_interleave": ("repeats",),
    "batch_select_indices": ("indices",),
}
CACHE_METHODS = {
    "update": ("key_states", "value_states", "layer_idx"),
    "get_seq_length": ("layer_idx",),
    "reorder_cache": ("beam_idx",),
}
PAIR_METHODS = {"get_seq_length": ("layer_idx",), "reorder_cache": ("beam_idx",)}
# Attributes of model classes, configurations, cache layers and caches that this package reads or sets.
MODEL_ATTRIBUTES = ("_no_split_modules", "_keys_to_ignore_on_load_missing", "base_model", "register_for_auto_class")
CONFIG_METHODS = ("from_dict", "get_config_dict", "register_for_auto_class", "save_pretrained", "to_dict", "validate")
CONFIG_ATTRIBUTES = ("_attn_implementation", "_attn_implementation_internal", "_output_attentions")
LAYER_ATTRIBUTES = ("is_compileable", "is_initialized", "keys", "values", "crop", "offload", "prefetch")
CACHE_ATTRIBUTES = ("is_compileable", "layers")
PAIR_ATTRIBUTES = ("cross_attention_cache", "is_compileable", "is_updated", "self_attention_cache")
# The first arguments of an attention function, which are positional, and the arguments of a mask function.
ATTENTION_ARGUMENTS = ("module", "query", "key", "value", "attention_mask")
KNOWN_BY_NAME = {"dropout", "position_bias", "scaling"}  # a layer passes these as keyword arguments
MASK_ARGUMENTS = ("kv_length", "kv_offset", "mask_function", "attention_mask")
_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def check_models() -> None:
    """Check the internals of `PreTrainedModel` that every model uses. This runs once per process.

    Raises:
        UpstreamChanged: if a method or an attribute has changed.
    """
    with known_imports():
        from transformers import PreTrainedModel
    _check_methods(PreTrainedModel, MODEL_METHODS)
    # A variant configuration detects by this call that a model is being built (`fields/foreign_classes.py`).
    check_called(PreTrainedModel, "__init__", "_experts_implementation_internal")
    check_attributes(PreTrainedModel, MODEL_ATTRIBUTES)


def check_caches() -> None:
    """Check the caches of Transformers, their layers and `EncoderDecoderCache`. This runs once per process.

    Raises:
        UpstreamChanged: if a method or an attribute has changed.
    """
    with known_imports():
        from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, EncoderDecoderCache
    _check_methods(DynamicLayer, LAYER_METHODS)
    _check_methods(Cache, CACHE_METHODS)
    _check_methods(EncoderDecoderCache, PAIR_METHODS)
    check_attributes(DynamicLayer(), LAYER_ATTRIBUTES)
    check_attributes(DynamicCache(), CACHE_ATTRIBUTES)
    check_attributes(EncoderDecoderCache(DynamicCache(), DynamicCache()), PAIR_ATTRIBUTES)


def check_configurations() -> None:
    """Check the internals of `PreTrainedConfig` that variant configurations use. This runs once per process.

    Raises:
        UpstreamChanged: if a method or an attribute has changed.
    """
    with known_imports():
        from transformers import PreTrainedConfig
    check_attributes(PreTrainedConfig, CONFIG_METHODS)
    check_attributes(PreTrainedConfig(), CONFIG_ATTRIBUTES)


def check_attention_function(owner: type) -> None:
    """Check the arguments with which a layer of Transformers calls an attention function.

    The layer calls all attention functions in the same way, so the check reads the eager function of its file.

    Raises:
        UpstreamChanged: if the eager function takes other arguments.
    """
    function = getattr(sys.modules[owner.__module__], "eager_attention_forward", None)
    if function is None:
        raise changed(f"`{owner.__module__}` has no `eager_attention_forward`")
    parameters = inspect.signature(function).parameters
    taken = tuple(parameters)
    needed = {name for name, each in parameters.items() if each.default is each.empty and each.kind not in _VARIABLE}
    if taken[: len(ATTENTION_ARGUMENTS)] != ATTENTION_ARGUMENTS or needed - KNOWN_BY_NAME - {*ATTENTION_ARGUMENTS}:
        raise changed(f"`{owner.__module__}.eager_attention_forward` takes {', '.join(taken)}")


def check_mask_functions(*functions: Any) -> None:
    """Check that the mask functions of Transformers take the arguments that this package reads.

    Raises:
        UpstreamChanged: if a function lacks one of these arguments.
    """
    for function in functions:
        taken = inspect.signature(function).parameters
        for name in MASK_ARGUMENTS:
            if name not in taken:
                raise changed(f"`{function.__name__}` takes {', '.join(taken)}, and no {name}")


def check_paths(module: nn.Module, paths: Iterable[str]) -> None:
    """Check that a module has submodules at these paths.

    Raises:
        UpstreamChanged: if a submodule is missing.
    """
    for path in paths:
        part = module
        for name in path.split("."):
            check_attributes(part, (name,))
            part = getattr(part, name)


def _check_methods(owner: type, methods: Mapping[str, tuple[str, ...]]) -> None:
    for method, names in methods.items():
        check_method(owner, method, names)
