"""What this code knows of transformers' inner parts, and the one line that stops it where these have changed.

This code leans on parts of transformers that promise nothing: what a layer hands to its attention, what a cache's
layer is called. It travels inside of repositories, and is run under releases that came after it. So all of that is
named here once, by role, with every name that a release had; and it is checked, classes and signatures when a host's
file is imported, attributes when a model is built, arguments in each call.
"""

import dis
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from functools import lru_cache
from typing import Any

import transformers
from torch import nn

from .variant_names import ATTN_VARIANTS_VERSION, NEWEST_RUN, OLDEST_RUN

__all__ = [
    "Arguments",
    "UpstreamChanged",
    "auto_class_names",
    "cache_name",
    "cache_of",
    "changed",
    "check_attributes",
    "check_called",
    "check_method",
    "known_imports",
    "refuse_two_caches",
    "refuse_unknown",
    "upstream_class",
    "variants_of",
]

# What arguments are called, by role; the newest name first. A role that a method of upstream's lacks stops the import.
ROLES: dict[str, tuple[str, ...]] = {
    "states": ("hidden_states",),
    "mask": ("attention_mask", "mask"),
    "memory": ("key_value_states", "encoder_hidden_states"),
    "cache": ("cache", "past_key_values"),  # renamed in 5.24, which takes the old name until 5.40
    "bias": ("position_bias",),
    "ids": ("input_ids",),
    "types": ("token_type_ids",),
    "positions": ("position_ids",),
    "embedded": ("inputs_embeds",),
    "cache_length": ("cache_length", "past_key_values_length"),
}
CACHE_ROLES = ("cache", "cache_length")

# Arguments that reach an attention and change nothing in it: they say what a model returns, and how Trainer counts.
# All others that are not known stop a call: packed sequences (`cu_seq_lens_q`) for one would be read as a single text.
UNCHANGING = frozenset(
    {
        "labels",  # Seq2SeqTrainer's, which `generate` hands to the encoder
        "num_items_in_batch",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",  # of positions that were added to the words already
        "return_dict",
        "use_cache",
    }
)
# Arguments that our own code hands to the attention functions.
OWN = frozenset({"global_attention_mask", "kernel_cache", "m2l", "m2w", "position_bias", "reach", "x2l", "x2w"})


class UpstreamChanged(ImportError):
    """transformers' inner parts have changed in a way that this code does not know."""


def changed(what: str) -> UpstreamChanged:
    """Return the error that says what has changed, in one line with the ways out."""
    return UpstreamChanged(
        f"transformers {transformers.__version__} has changed where hf_attn_variants {ATTN_VARIANTS_VERSION} leans on "
        f"it, and outputs could be wrong: {what}. This code was run with transformers {OLDEST_RUN} to {NEWEST_RUN}. "
        f"Install one of these, or a newer hf_attn_variants and import it before loading; its command "
        "`attn-variants refresh` puts newer code into a repository."
    )


@contextmanager
def known_imports() -> Iterator[None]:
    """Around imports of upstream's inner parts: one that fails becomes the error of this file."""
    try:
        yield
    except UpstreamChanged:
        raise
    except (ImportError, AttributeError) as error:
        raise changed(str(error)) from error


class Arguments:
    """The arguments of a method of upstream's by their roles, however this release calls and orders them.

    Args:
        owner: upstream's class.
        roles: those that our own method reads, in the order of `read` and `split`.
        method: its name.
        returns: how many values it returns, where ours returns as many in its place.

    Raises:
        UpstreamChanged: where it lacks a role or returns another number of values.
    """

    def __init__(
        self, owner: type, roles: tuple[str, ...], method: str = "forward", returns: int | None = None
    ) -> None:
        place = f"`{owner.__name__}.{method}`"
        parameters = _parameters(owner, method)
        self.order = tuple(name for name, each in parameters.items() if each.kind in _POSITIONAL)
        self.names: tuple[str, ...] = tuple(_name_of(role, parameters, place) for role in roles)
        self.name_of = dict(zip(roles, self.names, strict=True))
        # What upstream takes under its other name as well.
        self.former = tuple(
            (old, name)
            for role, name in zip(roles, self.names, strict=True)
            if role in CACHE_ROLES
            for old in ROLES[role]
            if old != name
        )
        positions = {name: at for at, name in enumerate(self.order)}
        self.places = tuple((name, positions.get(name, len(self.order))) for name in self.names)
        self.others = tuple((name, at) for name, at in positions.items() if name not in self.names)
        if returns is not None:
            _check_returned(getattr(owner, method), returns, place)

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Return the values of the roles, None for what was not given; puts this release's names into `kwargs`."""
        self._rename(kwargs)
        return [args[at] if at < len(args) else kwargs.get(name) for name, at in self.places]

    def split(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return the values of the roles, and all other arguments by name: what is left of `kwargs`."""
        self._rename(kwargs)
        values: list[Any] = []
        count = len(args)
        for name, at in self.places:  # no comprehension: this is a part of each decoding step
            values += (args[at] if at < count else kwargs.pop(name, None),)
        for name, at in self.others:
            if at < count:
                kwargs[name] = args[at]
        return values, kwargs

    def by_name(self, args: tuple[Any, ...], kwargs: dict[str, Any], **instead: Any) -> dict[str, Any]:
        """Return all arguments of a call by upstream's names.

        Args:
            args, kwargs: the call's.
            instead: values by role that take the place of the call's own.
        """
        self._rename(kwargs)
        named = {**dict(zip(self.order, args, strict=False)), **kwargs} if args else dict(kwargs)
        return named | {self.name_of[role]: value for role, value in instead.items()}

    def _rename(self, kwargs: dict[str, Any]) -> None:
        for old, name in self.former:
            if old in kwargs:
                value = kwargs.pop(old)
                if kwargs.get(name) is None:
                    kwargs[name] = value


def upstream_class(cls: type, ours: type) -> type:
    """Return upstream's class that a class of ours, with the mixin `ours` among its bases, takes its forward from."""
    upstreams = (base for base in cls.__mro__ if issubclass(base, nn.Module) and not issubclass(base, ours))
    return next(base for base in upstreams if "forward" in vars(base))


def variants_of(names: Mapping[str, Any]) -> dict[type, type]:
    """Return, for each class of upstream's that a file derives one of ours from, ours: its last base is upstream's.

    Args:
        names: what the file has defined so far, its `globals()`.
    """
    classes = [each for each in names.values() if isinstance(each, type) and issubclass(each, nn.Module)]
    return {each.__bases__[-1]: each for each in classes if each.__module__ == names["__name__"]}


def auto_class_names(model_type: str) -> dict[str, str]:
    """Return the name of upstream's class for a model type by the Auto class that makes it.

    Raises:
        UpstreamChanged: if not even `AutoModel` has one.
    """
    with known_imports():
        from transformers.models.auto import modeling_auto
    found: dict[str, str] = {}
    for name in sorted(each for each in vars(modeling_auto) if each.startswith("AutoModel")):
        mapping = getattr(getattr(modeling_auto, name), "_model_mapping", None)
        classes = getattr(mapping, "_model_mapping", {}).get(model_type, ())
        if classes:
            found[name] = classes if isinstance(classes, str) else classes[0]
    if "AutoModel" not in found:
        raise changed(f"`AutoModel` has no class for {model_type}")
    return found


def check_called(owner: type, method: str, name: str) -> None:
    """Check that a method of upstream's still calls the one that a class of ours gives it.

    Raises:
        UpstreamChanged: if its code does not name it.
    """
    check_attributes(owner, (method,))
    code = inspect.unwrap(getattr(owner, method)).__code__
    if name not in code.co_names and name not in code.co_consts:
        raise changed(f"`{owner.__name__}.{method}` no longer calls `{name}`")


def check_method(owner: type, method: str, names: tuple[str, ...]) -> None:
    """Check that a method of upstream's is there, takes these arguments first, and asks for no others.

    Args:
        owner: upstream's class.
        method: what our code overrides or calls.
        names: its first arguments behind `self`, in their order.

    Raises:
        UpstreamChanged: if not.
    """
    parameters = _parameters(owner, method)
    first = tuple(name for name, each in parameters.items() if each.kind in _POSITIONAL)[: len(names)]
    needed = [name for name, each in parameters.items() if _is_needed(each) and name not in names]
    if first != names or needed:
        taken = ", ".join(parameters) or "nothing"
        raise changed(f"`{owner.__name__}.{method}` takes {taken}, where {', '.join(names) or 'nothing'} is known")


def check_attributes(thing: Any, names: tuple[str, ...]) -> None:
    """Check that one of upstream's objects has the attributes that our code reads.

    Raises:
        UpstreamChanged: if it lacks one.
    """
    for name in names:
        if not hasattr(thing, name):
            kind = thing if isinstance(thing, type) else type(thing)
            raise changed(f"`{kind.__name__}` has no `{name}`")


def refuse_unknown(kwargs: Mapping[str, Any]) -> None:
    """Refuse arguments that an attention function would swallow.

    Raises:
        ValueError: for one that it does not know and that is not None.
    """
    for name, value in kwargs.items():
        if value is not None and name not in UNCHANGING and name not in OWN:
            raise ValueError(
                f"Attention got `{name}`, which it does not know: it would be ignored, and outputs could be wrong. "
                f"Leave it out. If you did not pass it, transformers {transformers.__version__} did: use one of "
                f"{OLDEST_RUN} to {NEWEST_RUN}, with which this code was run, or a newer hf_attn_variants."
            )


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _is_needed(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty and parameter.kind not in _VARIABLE


def _parameters(owner: type, method: str) -> dict[str, inspect.Parameter]:
    """Return the parameters of a method behind `self`, those of functions that collect the rest left out."""
    check_attributes(owner, (method,))
    static = inspect.getattr_static(owner, method)
    parameters = dict(inspect.signature(getattr(owner, method)).parameters)
    if not isinstance(static, staticmethod | classmethod):
        parameters.pop(next(iter(parameters)), None)
    return {name: each for name, each in parameters.items() if each.kind not in _VARIABLE}


def _name_of(role: str, parameters: Mapping[str, Any], place: str) -> str:
    for name in ROLES[role]:
        if name in parameters:
            return name
    raise changed(f"{place} takes {', '.join(parameters)}, and none of {', '.join(ROLES[role])}")


def _check_returned(function: Any, returns: int, place: str) -> None:
    """Check by its bytecode that each `return` of a function has so many values, the outputs first."""
    code = inspect.unwrap(function).__code__
    steps = [step for step in zip(code.co_code[::2], code.co_code[1::2], strict=True) if step[0] not in _IDLE]
    ends = [at for at, (operation, _) in enumerate(steps) if operation in _RETURNS]
    sizes = {steps[at - 1][1] if steps[at - 1][0] == dis.opmap["BUILD_TUPLE"] else 0 for at in ends}
    if sizes != {returns}:
        counts = " or ".join(str(count or "no tuple") for count in sorted(sizes))
        raise changed(f"{place} returns {counts} values, where {returns} are known")
    loads = list(dis.get_instructions(code.replace(co_code=code.co_code[-2 * (returns + 2) :])))
    names = [name for step in loads for name in _names_loaded(step)][-returns:]
    if names and any(part in names[0] for part in ("weight", "bias", "prob")):
        raise changed(f"{place} returns {', '.join(names)}, where outputs are first")


def _names_loaded(step: dis.Instruction) -> tuple[str, ...]:
    if not step.opname.startswith("LOAD_FAST"):
        return ()
    return step.argval if isinstance(step.argval, tuple) else (str(step.argval),)  # 3.13 loads two at once


_IDLE = {dis.opmap[name] for name in ("CACHE", "NOP") if name in dis.opmap}
_RETURNS = {dis.opmap[name] for name in ("RETURN_VALUE", "RETURN_CONST") if name in dis.opmap}


@lru_cache(maxsize=1)
def cache_name() -> str:
    """Return what this release calls the cache in a model's calls and in its outputs."""
    with known_imports():
        from transformers.modeling_outputs import BaseModelOutputWithPast
    parts = {each.name: each for each in fields(BaseModelOutputWithPast)}
    return _name_of("cache", parts, "`BaseModelOutputWithPast`")


def cache_of(output: Any) -> Any:
    """Return the cache in a model's output, by this release's name."""
    return getattr(output, cache_name())


def refuse_two_caches(kwargs: Mapping[str, Any]) -> None:
    """Refuse a cache by its former name beside one by this release's: upstream would drop the first.

    Raises:
        ValueError: if a call has both.
    """
    names = [name for name in ROLES["cache"] if kwargs.get(name) is not None]
    if len(names) > 1:
        raise ValueError(
            f"Got a cache as `{names[1]}` beside one as `{names[0]}`, as transformers {transformers.__version__} has "
            "it, and which would drop the first without an error. Before 0.22, peft hands over its prefixes so: "
            "generate with a newer peft, or with transformers before 5.24."
        )
