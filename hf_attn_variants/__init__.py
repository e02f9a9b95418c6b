"""Multi-query, grouped-query and talking-heads attention for the checkpoints of Hugging Face Transformers.

Importing the package registers its classes with transformers' Auto factories.
"""

import importlib
from typing import Any

from . import interrupts as _interrupts  # noqa: F401  (first: it is about Ctrl-C in the imports that follow)
from .modeling import modeling_attn_variant_albert as _albert
from .modeling import modeling_attn_variant_bert as _bert
from .modeling import modeling_attn_variant_t5 as _t5
from .modeling.configuration_attn_variants import ATTN_VARIANTS_VERSION as __version__
from .modeling.configuration_attn_variants import AttnVariantAlbertConfig, AttnVariantBertConfig, AttnVariantT5Config
from .modeling.modeling_attn_variant_albert import *  # noqa: F403
from .modeling.modeling_attn_variant_bert import *  # noqa: F403
from .modeling.modeling_attn_variant_t5 import *  # noqa: F403
from .registration import register

__all__ = [
    "AttnVariantAlbertConfig",
    "AttnVariantBertConfig",
    "AttnVariantT5Config",
    "__version__",
    "convert",  # noqa: F405 (lazy, below)
    *_albert.__all__,
    *_bert.__all__,
    *_t5.__all__,
]

register()

# Heavier rooms are imported when they are first used.
_LAZY = {"convert": ".conversion"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
