"""The public names of the package; importing them registers its classes with transformers' Auto factories."""

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
    *_albert.__all__,
    *_bert.__all__,
    *_t5.__all__,
]

register()
