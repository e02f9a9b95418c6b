"""Which linear maps become int8, which bfloat16, and which stay in float32, with the reason."""

import contextlib
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..modeling.attention.variant_mixins import AttnVariantModelMixin
from ..shared_memory.attention import ENCODER_OUTPUTS, SharesMemory

__all__ = ["LEAST_WEIGHTS", "bfloat16_maps", "int8_maps", "is_named"]

# A map of fewer weights takes more time in int8 unless it maps hundreds of rows, and is little memory. (With AVX2
# 256 x 256 was slower up to 32 rows, 384 x 384 faster from there on.)
LEAST_WEIGHTS = 2**17
# `self.<path>.weight`, and the same where the code asks whether it is a tensor.
READ = re.compile(r"\bself\.([\w.]+)\.(weight|bias)\b")
GUARDED_READ = re.compile(r"\bisinstance\(self\.([\w.]+)\.(weight|bias), torch\.Tensor\)")
# Methods that are over before a model is quantized: `_init_weights`, `post_init`, `tie_weights`, `reset_parameters`.
MAKING = re.compile(r"init|tie_|reset")


def int8_maps(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """Return the maps of a model that become int8, by their paths.

    Maps of a class of their own (those that make latents) stay, and so do:

    - those whose weight an attention reads beside a latent, or beside the encoder's outputs, in place of calling them
    - those whose weight or bias their model's own code reads (`self.out_proj.weight`, as Mamba's and WavLM's do)
    - those that upstream keeps in float32 where all else is float16 (`bfloat16_maps`)
    - maps of fewer weights than `LEAST_WEIGHTS`
    """
    return _large_maps(model, lambda path: not is_named(path, _kept(model)))


def bfloat16_maps(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """Return the maps that upstream keeps in float32 where all else is float16, by their paths.

    They are T5's `wo`, whose inputs have a few large numbers: too large for float16, and of int8's values they would
    leave the others few. bfloat16 has float32's range, and upstream keeps them in it.
    """
    return _large_maps(model, lambda path: is_named(path, _kept(model)))


def _kept(model: PreTrainedModel) -> Iterable[str]:
    return getattr(model, "_keep_in_fp32_modules", None) or ()


def _large_maps(model: PreTrainedModel, is_meant: Callable[[str], bool]) -> dict[str, nn.Linear]:
    read = {id(each) for each in _read_maps(model)}
    return {
        path: module
        for path, module in model.named_modules(remove_duplicate=False)
        if type(module) is nn.Linear
        and id(module) not in read
        and module.weight.numel() >= LEAST_WEIGHTS
        and is_meant(path)
    }


@functools.cache
def _read_paths(cls: type) -> frozenset[str]:
    """Return the paths of the submodules whose weight or bias the methods of a class read in a call.

    A read that asks first whether there is a tensor (T5's of `wo.weight`) is none.
    """
    found: set[str] = set()
    for owner in cls.__mro__:
        if owner.__module__.startswith("torch.") or owner is PreTrainedModel:
            continue
        for name, method in vars(owner).items():
            if inspect.isfunction(method) and not MAKING.search(name):
                with contextlib.suppress(OSError):  # code that was not read from a file
                    source = inspect.getsource(method)
                    guarded = set(GUARDED_READ.findall(source))
                    found |= {path for path, _ in set(READ.findall(source)) - guarded}
    return frozenset(found)


def is_named(path: str, names: Iterable[str]) -> bool:
    """Say whether a path of a module or parameter has one of some names among its parts."""
    return any(re.search(rf"(^|\.){name}(\.|$)", path) for name in names)


def _read_maps(model: PreTrainedModel) -> Iterator[nn.Module]:
    for module in model.modules():
        cls: Any = type(module)
        for path in _read_paths(cls):
            with contextlib.suppress(AttributeError):  # a path that this configuration does not have
                yield module.get_submodule(path)
        if isinstance(module, SharesMemory) and module.cross_cache == ENCODER_OUTPUTS:
            yield from module.key_and_value_maps()
        if isinstance(module, AttnVariantModelMixin):
            for site, _, attention in module.named_attentions():
                core: Any = attention.get_submodule(site.core)
                if core.heads.rank is not None:
                    yield from (attention.get_submodule(path) for path in (site.key, site.value))
