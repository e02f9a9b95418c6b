"""Which linear maps become int8, and which stay in float32, with the reason."""

from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..modeling.attention.variant_mixins import AttnVariantModelMixin
from ..shared_memory.attention import SharesMemory

__all__ = ["LEAST_WEIGHTS", "int8_maps"]

# A map of fewer weights takes more time in int8 unless it maps hundreds of rows, and is little memory. (With AVX2
# 256 x 256 was slower up to 32 rows, 384 x 384 faster from there on.)
LEAST_WEIGHTS = 2**17


def int8_maps(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """Return the maps of a model that become int8, by their paths.

    Maps of a class of their own (those that make latents) stay, and so do:

    - those whose weight an attention reads beside a latent, or beside the encoder's outputs, in place of calling them
    - maps of fewer weights than `LEAST_WEIGHTS`
    """
    read = {id(each) for each in _read_maps(model)}
    return {
        path: module
        for path, module in model.named_modules(remove_duplicate=False)
        if type(module) is nn.Linear and id(module) not in read and module.weight.numel() >= LEAST_WEIGHTS
    }


def _read_maps(model: PreTrainedModel) -> Iterator[nn.Module]:
    for module in model.modules():
        if isinstance(module, SharesMemory):
            yield from module.key_and_value_maps()
        if isinstance(module, AttnVariantModelMixin):
            for site, _, attention in module.named_attentions():
                core: Any = attention.get_submodule(site.core)
                if core.heads.rank is not None:
                    yield from (attention.get_submodule(path) for path in (site.key, site.value))
