"""Transformers internals that this code depends on, and checks that report changes in them.

This code depends on Transformers internals, such as the arguments of attention layers and the names of cache layers.
It ships with checkpoints, so it may be run with later Transformers releases. This file therefore lists internal
arguments by role, with the names that they have in different releases. Classes and signatures are checked when the
modeling file of an architecture is imported, attributes when a model is built, and arguments in each call.
"""

import dis
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from functools import lru_cache
from typing import Any

import transformers
from torch import nn

from .variant_names import ATTN_VARIANTS_VERSION, MODEL_FOLDERS, NEWEST_TESTED, OLDEST_TESTED

__all__ = [
    "MethodSignature",
    "TransformersChangedError",
    "build_change_error",
    "check_attention_function",
    "check_attributes",
    "check_cache_internals",
    "check_config_internals",
    "check_known_arguments",
    "check_mask_function",
    "check_method",
    "check_method_calls",
    "check_model_internals",
    "check_single_cache",
    "check_submodule_paths",
    "collect_variant_classes",
    "get_auto_class_names",
    "get_cache",
    "get_cache_name",
    "get_transformers_class",
    "guarded_imports",
]

# The names of arguments by role, starting with the newest name. The import fails if a Transformers method has no
# argument for a role.
ARGUMENT_ROLES: dict[str, tuple[str, ...]] = {
    "states": ("hidden_states",),
    "mask": ("attention_mask", "mask"),
    "encoder_outputs": ("key_value_states", "encoder_hidden_states"),
    "cache": ("cache", "past_key_values"),  # renamed in 5.24; the old name works until 5.40
    "bias": ("position_bias",),
    "ids": ("input_ids",),
    "types": ("token_type_ids",),
    "positions": ("position_ids",),
    "rotary": ("position_embeddings",),
    "embedded": ("inputs_embeds",),
    "cache_length": ("cache_length", "past_key_values_length"),
}
CACHE_ROLES = ("cache", "cache_length")

# Arguments of attention modules that do not affect their outputs. They select model outputs or are used by the
# Trainer. All other unknown arguments raise an error. Otherwise, packed sequences (`cu_seq_lens_q`), for instance,
# would be treated as a single text.
ARGUMENTS_WITHOUT_EFFECT = frozenset(
    {
        "labels",  # used by Seq2SeqTrainer; `generate` passes it to the encoder
        "num_items_in_batch",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",  # the embeddings already contain these positions
        "return_dict",
        "use_cache",
    }
)
# Arguments that this package and the layers of Transformers pass to attention functions.
VARIANT_ARGUMENTS = frozenset(
    "dropout global_attention_mask is_causal kernel_cache key_range m2l m2w position_bias scaling x2l x2w".split()
)


class TransformersChangedError(ImportError):
    """Raised if the installed Transformers release has changed internals that this code depends on."""


def build_change_error(change: str) -> TransformersChangedError:
    """Return an error that describes the change and how to solve the problem."""
    return TransformersChangedError(
        f"transformers {transformers.__version__} has changed a part that hf_attn_variants {ATTN_VARIANTS_VERSION} "
        f"uses, and outputs could be wrong: {change}. This code was tested with transformers {OLDEST_TESTED} to "
        f"{NEWEST_TESTED}. Install one of these releases, or install a newer hf_attn_variants and import it before "
        "you load the model. Its command `attn-variants refresh` updates the code of a repository."
    )


@contextmanager
def guarded_imports() -> Iterator[None]:
    """Convert failed imports of Transformers internals into `TransformersChangedError`."""
    try:
        yield
    except TransformersChangedError:
        raise
    except (ImportError, AttributeError) as error:
        raise build_change_error(str(error)) from error


class MethodSignature:
    """The arguments of a Transformers method by role, regardless of their names and order in the installed release.

    Args:
        owner: the Transformers class.
        roles: the roles of the arguments that this package uses, in the order in which `read` and `split` return them.
        method: the name of the method.
        returns: the number of values that the method must return, or None to skip this check.

    Raises:
        TransformersChangedError: if the method has no argument for a role or returns a different number of values.
    """

    def __init__(
        self, owner: type, roles: tuple[str, ...], method: str = "forward", returns: int | None = None
    ) -> None:
        place = f"`{owner.__name__}.{method}`"
        parameters = _get_parameters(owner, method)
        self.order = tuple(name for name, parameter in parameters.items() if parameter.kind in _POSITIONAL)
        self.names: tuple[str, ...] = tuple(_find_argument_name(role, parameters, place) for role in roles)
        self.name_of = dict(zip(roles, self.names, strict=True))
        # Arguments that Transformers accepts under two names
        self.former = tuple(
            (old, name)
            for role, name in zip(roles, self.names, strict=True)
            if role in CACHE_ROLES
            for old in ARGUMENT_ROLES[role]
            if old != name
        )
        positions = {name: position for position, name in enumerate(self.order)}
        self.argument_positions = tuple((name, positions.get(name, len(self.order))) for name in self.names)
        self.other_positions = tuple(
            (name, position) for name, position in positions.items() if name not in self.names
        )
        if returns is not None:
            _check_return_count(getattr(owner, method), returns, place)

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Return the argument for each role, or None if it is missing. Former names in `kwargs` are replaced."""
        self._rename(kwargs)
        return [
            args[position] if position < len(args) else kwargs.get(name) for name, position in self.argument_positions
        ]

    def split(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return the argument for each role, and a dictionary with all other arguments."""
        self._rename(kwargs)
        values: list[Any] = []
        count = len(args)
        for name, position in self.argument_positions:  # in each decoding step, this is faster than a comprehension
            values += (args[position] if position < count else kwargs.pop(name, None),)
        for name, position in self.other_positions:
            if position < count:
                kwargs[name] = args[position]
        return values, kwargs

    def to_keywords(self, args: tuple[Any, ...], kwargs: dict[str, Any], **replacements: Any) -> dict[str, Any]:
        """Return all arguments of a call as keyword arguments, with the names that the installed release uses.

        Args:
            args, kwargs: the arguments of the call.
            replacements: replacements for arguments of the call, by role.
        """
        self._rename(kwargs)
        named = {**dict(zip(self.order, args, strict=False)), **kwargs} if args else dict(kwargs)
        return named | {self.name_of[role]: value for role, value in replacements.items()}

    def _rename(self, kwargs: dict[str, Any]) -> None:
        for old, name in self.former:
            if old in kwargs:
                value = kwargs.pop(old)
                if kwargs.get(name) is None:
                    kwargs[name] = value


def get_transformers_class(cls: type, mixin: type) -> type:
    """Return the Transformers class from which a class with a mixin inherits its `forward` method."""
    bases = (base for base in cls.__mro__ if issubclass(base, nn.Module) and not issubclass(base, mixin))
    return next(base for base in bases if "forward" in vars(base))


def collect_variant_classes(names: Mapping[str, Any]) -> dict[type, type]:
    """Return a dictionary that maps Transformers classes to the variant classes in a file.

    The Transformers class is the last base of its variant class.

    Args:
        names: the names that the file has defined so far, as returned by `globals()`.
    """
    classes = [member for member in names.values() if isinstance(member, type) and issubclass(member, nn.Module)]
    return {member.__bases__[-1]: member for member in classes if member.__module__ == names["__name__"]}


def get_auto_class_names(model_type: str) -> dict[str, str]:
    """Return a model type's Transformers classes as {name of the Auto class: name of the model class}.

    Raises:
        TransformersChangedError: if `AutoModel` has no class for the model type.
    """
    with guarded_imports():
        from transformers.models.auto import modeling_auto
    class_names: dict[str, str] = {}
    for name in sorted(auto_name for auto_name in vars(modeling_auto) if auto_name.startswith("AutoModel")):
        mapping = getattr(getattr(modeling_auto, name), "_model_mapping", None)
        classes = getattr(mapping, "_model_mapping", {}).get(model_type, ())
        if classes:
            class_names[name] = classes if isinstance(classes, str) else classes[0]
    if "AutoModel" not in class_names:
        raise build_change_error(f"`AutoModel` has no class for {model_type}")
    return class_names


def check_method_calls(owner: type, method: str, called_method: str) -> None:
    """Check that a Transformers method still calls a method that a class in this package overrides.

    Raises:
        TransformersChangedError: if the code of the method does not contain the name.
    """
    check_attributes(owner, (method,))
    code = inspect.unwrap(getattr(owner, method)).__code__
    if called_method not in code.co_names and called_method not in code.co_consts:
        raise build_change_error(f"`{owner.__name__}.{method}` no longer calls `{called_method}`")


def check_method(owner: type, method: str, names: tuple[str, ...]) -> None:
    """Check that a Transformers method exists, starts with the given arguments and does not require any others.

    Args:
        owner: the Transformers class.
        method: the name of the method that this package overrides or calls.
        names: the first arguments after `self`, in order.

    Raises:
        TransformersChangedError: if the method is missing or has other arguments.
    """
    parameters = _get_parameters(owner, method)
    first = tuple(name for name, parameter in parameters.items() if parameter.kind in _POSITIONAL)[: len(names)]
    needed = [name for name, parameter in parameters.items() if _is_required(parameter) and name not in names]
    if first != names or needed:
        parameter_names = ", ".join(parameters) or "nothing"
        raise build_change_error(
            f"`{owner.__name__}.{method}` takes {parameter_names}, but this code expects "
            f"{', '.join(names) or 'nothing'}"
        )


def check_attributes(obj: Any, names: tuple[str, ...]) -> None:
    """Check that a Transformers object has the attributes that this package uses.

    Raises:
        TransformersChangedError: if an attribute is missing.
    """
    for name in names:
        if not hasattr(obj, name):
            kind = obj if isinstance(obj, type) else type(obj)
            raise build_change_error(f"`{kind.__name__}` has no `{name}`")


def check_known_arguments(kwargs: Mapping[str, Any]) -> None:
    """Check that an attention function does not receive unknown arguments, which it would ignore.

    Raises:
        ValueError: if an unknown argument is not None.
    """
    for name, value in kwargs.items():
        if value is not None and name not in ARGUMENTS_WITHOUT_EFFECT and name not in VARIANT_ARGUMENTS:
            raise ValueError(
                f"`{name}` is not supported by attention functions and would be ignored. Remove it. If you did not "
                f"pass it, it was added by transformers {transformers.__version__}. In this case, use transformers "
                f"{OLDEST_TESTED} to {NEWEST_TESTED}, or a newer hf_attn_variants."
            )


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _is_required(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty and parameter.kind not in _VARIABLE


def _get_parameters(owner: type, method: str) -> dict[str, inspect.Parameter]:
    """Return the parameters of a method, without `self`, `*args` and `**kwargs`."""
    check_attributes(owner, (method,))
    static = inspect.getattr_static(owner, method)
    parameters = dict(inspect.signature(getattr(owner, method)).parameters)
    if not isinstance(static, staticmethod | classmethod):
        parameters.pop(next(iter(parameters)), None)
    return {name: parameter for name, parameter in parameters.items() if parameter.kind not in _VARIABLE}


def _find_argument_name(role: str, parameters: Mapping[str, Any], place: str) -> str:
    for name in ARGUMENT_ROLES[role]:
        if name in parameters:
            return name
    raise build_change_error(f"{place} takes {', '.join(parameters)}, but none of {', '.join(ARGUMENT_ROLES[role])}")


def _check_return_count(function: Any, returns: int, place: str) -> None:
    """Check in the bytecode that a function returns this number of values, starting with the outputs."""
    code = inspect.unwrap(function).__code__
    steps = [
        step for step in zip(code.co_code[::2], code.co_code[1::2], strict=True) if step[0] not in _IGNORED_OPCODES
    ]
    ends = [position for position, (operation, _) in enumerate(steps) if operation in _RETURN_OPCODES]
    sizes = {steps[position - 1][1] if steps[position - 1][0] == dis.opmap["BUILD_TUPLE"] else 0 for position in ends}
    if sizes != {returns}:
        counts = " or ".join(str(count or "no tuple") for count in sorted(sizes))
        raise build_change_error(f"{place} returns {counts} values, but this code expects {returns}")
    loads = list(dis.get_instructions(code.replace(co_code=code.co_code[-2 * (returns + 2) :])))
    names = [name for step in loads for name in _get_loaded_variable_names(step)][-returns:]
    if names and any(part in names[0] for part in ("weight", "bias", "prob")):
        raise build_change_error(f"{place} returns {', '.join(names)}, but this code expects outputs first")


def _get_loaded_variable_names(step: dis.Instruction) -> tuple[str, ...]:
    if not step.opname.startswith("LOAD_FAST"):
        return ()
    return step.argval if isinstance(step.argval, tuple) else (str(step.argval),)  # or two names in Python 3.13


_IGNORED_OPCODES = {dis.opmap[name] for name in ("CACHE", "NOP") if name in dis.opmap}
_RETURN_OPCODES = {dis.opmap[name] for name in ("RETURN_VALUE", "RETURN_CONST") if name in dis.opmap}


@lru_cache(maxsize=1)
def get_cache_name() -> str:
    """Return the name that the installed Transformers release uses for the cache in model arguments and outputs."""
    with guarded_imports():
        from transformers.modeling_outputs import BaseModelOutputWithPast
    parts = {field.name: field for field in fields(BaseModelOutputWithPast)}
    return _find_argument_name("cache", parts, "`BaseModelOutputWithPast`")


def get_cache(output: Any) -> Any:
    """Return the cache from a model output."""
    return getattr(output, get_cache_name())


def check_single_cache(kwargs: Mapping[str, Any]) -> None:
    """Check that a call does not pass caches under both the old and the new argument name.

    Transformers would ignore the cache under the old name.

    Raises:
        ValueError: if a call contains both.
    """
    names = [name for name in ARGUMENT_ROLES["cache"] if kwargs.get(name) is not None]
    if len(names) > 1:
        raise ValueError(
            f"A call must have only one cache, got `{names[1]}` and `{names[0]}`, of which transformers "
            f"{transformers.__version__} would ignore the first one. peft before 0.22 passes both. Use a newer peft, "
            "or transformers before 5.24."
        )


# Transformers methods that this package overrides or calls, with their first arguments after `self`, in order.
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
# Attributes of model classes, configurations, cache layers and caches that this package uses.
MODEL_ATTRIBUTES = ("_no_split_modules", "_keys_to_ignore_on_load_missing", "base_model", "register_for_auto_class")
CONFIG_METHODS = ("from_dict", "get_config_dict", "register_for_auto_class", "save_pretrained", "to_dict", "validate")
CONFIG_ATTRIBUTES = ("_attn_implementation", "_attn_implementation_internal", "_output_attentions")
LAYER_ATTRIBUTES = ("is_compileable", "is_initialized", "keys", "values", "crop", "offload", "prefetch")
CACHE_ATTRIBUTES = ("is_compileable", "layers")
PAIR_ATTRIBUTES = ("cross_attention_cache", "is_compileable", "is_updated", "self_attention_cache")
# The first (positional) arguments of attention functions, and the arguments of mask functions
ATTENTION_ARGUMENTS = ("module", "query", "key", "value", "attention_mask")
KEYWORD_ARGUMENTS = {"dropout", "position_bias", "scaling"}  # layers pass these as keyword arguments
MASK_ARGUMENTS = ("kv_length", "kv_offset", "mask_function", "attention_mask")


def check_model_internals() -> None:
    """Check the internals of `PreTrainedModel` that all models use. This runs once per process.

    Raises:
        TransformersChangedError: if a method or an attribute has changed.
    """
    with guarded_imports():
        from transformers import PreTrainedModel
    _check_methods(PreTrainedModel, MODEL_METHODS)
    # Variant configurations use this call to detect that a model is being built (see `fields/saving_and_loading.py`).
    check_method_calls(PreTrainedModel, "__init__", "_experts_implementation_internal")
    check_attributes(PreTrainedModel, MODEL_ATTRIBUTES)


def check_cache_internals() -> None:
    """Check the caches in Transformers, their layers and `EncoderDecoderCache`. This runs once per process.

    Raises:
        TransformersChangedError: if a method or an attribute has changed.
    """
    with guarded_imports():
        from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, EncoderDecoderCache
    _check_methods(DynamicLayer, LAYER_METHODS)
    _check_methods(Cache, CACHE_METHODS)
    _check_methods(EncoderDecoderCache, PAIR_METHODS)
    check_attributes(DynamicLayer(), LAYER_ATTRIBUTES)
    check_attributes(DynamicCache(), CACHE_ATTRIBUTES)
    check_attributes(EncoderDecoderCache(DynamicCache(), DynamicCache()), PAIR_ATTRIBUTES)


def check_config_internals() -> None:
    """Check the internals of `PreTrainedConfig` that variant configurations use. This runs once per process.

    Raises:
        TransformersChangedError: if a method or an attribute has changed.
    """
    with guarded_imports():
        from transformers import PreTrainedConfig
    check_attributes(PreTrainedConfig, CONFIG_METHODS)
    check_attributes(PreTrainedConfig(), CONFIG_ATTRIBUTES)


def check_attention_function(owner: type) -> None:
    """Check the arguments with which a Transformers layer calls attention functions.

    Layers call all attention functions in the same way, so the eager function in the same file is checked.

    Raises:
        TypeError: if the class is from a new architecture that does not use Transformers' attention interface.
        TransformersChangedError: if the eager function is missing or has other arguments.
    """
    function = getattr(sys.modules[owner.__module__], "eager_attention_forward", None)
    if function is None:
        missing = f"`{owner.__module__}` has no `eager_attention_forward`"
        if {*MODEL_FOLDERS}.isdisjoint(owner.__module__.split(".")):
            raise TypeError(
                f"`{owner.__name__}` must use Transformers' attention interface, but {missing}. Choose an "
                "architecture whose attention class calls an attention function from `ALL_ATTENTION_FUNCTIONS`."
            )
        raise build_change_error(missing)
    parameters = inspect.signature(function).parameters
    parameter_names = tuple(parameters)
    needed = {name for name, parameter in parameters.items() if _is_required(parameter)}
    if parameter_names[: len(ATTENTION_ARGUMENTS)] != ATTENTION_ARGUMENTS or needed - KEYWORD_ARGUMENTS - {
        *ATTENTION_ARGUMENTS
    }:
        raise build_change_error(f"`{owner.__module__}.eager_attention_forward` takes {', '.join(parameter_names)}")


def check_mask_function(function: Any) -> None:
    """Check that a Transformers mask function has the arguments that this package uses.

    Raises:
        TransformersChangedError: if an argument is missing.
    """
    parameters = inspect.signature(function).parameters
    for name in MASK_ARGUMENTS:
        if name not in parameters:
            raise build_change_error(f"`{function.__name__}` takes {', '.join(parameters)}, but not {name}")


def check_submodule_paths(module: nn.Module, paths: Iterable[str]) -> None:
    """Check that a module has submodules at these paths.

    Raises:
        TransformersChangedError: if a submodule is missing.
    """
    for path in paths:
        part = module
        for name in path.split("."):
            check_attributes(part, (name,))
            part = getattr(part, name)


def _check_methods(owner: type, methods: Mapping[str, tuple[str, ...]]) -> None:
    for method, names in methods.items():
        check_method(owner, method, names)
