"""The public names of the package; importing them registers its classes with transformers' Auto factories."""

from typing import TYPE_CHECKING

from .modeling.hosts import modeling_attn_variant_albert as _albert
from .modeling.hosts import modeling_attn_variant_bart as _bart
from .modeling.hosts import modeling_attn_variant_bert as _bert
from .modeling.hosts import modeling_attn_variant_distilbert as _distilbert
from .modeling.hosts import modeling_attn_variant_electra as _electra
from .modeling.hosts import modeling_attn_variant_m2m_100 as _m2m_100
from .modeling.hosts import modeling_attn_variant_marian as _marian
from .modeling.hosts import modeling_attn_variant_mbart as _mbart
from .modeling.hosts import modeling_attn_variant_pegasus as _pegasus
from .modeling.hosts import modeling_attn_variant_roberta as _roberta
from .modeling.hosts import modeling_attn_variant_t5 as _t5
from .modeling.hosts import modeling_attn_variant_umt5 as _umt5
from .modeling.hosts import modeling_attn_variant_whisper as _whisper
from .modeling.hosts.configuration_attn_variants import (
    AttnVariantAlbertConfig,
    AttnVariantBartConfig,
    AttnVariantBertConfig,
    AttnVariantDistilBertConfig,
    AttnVariantElectraConfig,
    AttnVariantM2M100Config,
    AttnVariantMarianConfig,
    AttnVariantMBartConfig,
    AttnVariantPegasusConfig,
    AttnVariantRobertaConfig,
    AttnVariantT5Config,
    AttnVariantUMT5Config,
    AttnVariantWhisperConfig,
)
from .modeling.hosts.modeling_attn_variant_albert import *  # noqa: F403
from .modeling.hosts.modeling_attn_variant_bart import *  # noqa: F403
from .modeling.hosts.modeling_attn_variant_bert import *  # noqa: F403
from .modeling.hosts.modeling_attn_variant_distilbert import *  # noqa: F403
from .modeling.hosts.modeling_attn_variant_electra import *  # noqa: F403
from .modeling.hosts.modeling_attn_variant_m2m_100 import *  # noqa: F403
from .modeling.hosts.modeling_attn_variant_marian import *  # noqa: F403
from .modeling.hosts.modeling_attn_variant_mbart import *  # noqa: F403
from .modeling.hosts.modeling_attn_variant_pegasus import *  # noqa: F403
from .modeling.hosts.modeling_attn_variant_roberta import *  # noqa: F403
from .modeling.hosts.modeling_attn_variant_t5 import *  # noqa: F403
from .modeling.hosts.modeling_attn_variant_umt5 import *  # noqa: F403
from .modeling.hosts.modeling_attn_variant_whisper import *  # noqa: F403
from .modeling.variant_names import ATTN_VARIANTS_VERSION as __version__
from .registration import register

# A type checker cannot read such a sum, and would take the models for private.
if not TYPE_CHECKING:
    __all__ = [
        "AttnVariantAlbertConfig",
        "AttnVariantBartConfig",
        "AttnVariantBertConfig",
        "AttnVariantDistilBertConfig",
        "AttnVariantElectraConfig",
        "AttnVariantM2M100Config",
        "AttnVariantMBartConfig",
        "AttnVariantMarianConfig",
        "AttnVariantPegasusConfig",
        "AttnVariantRobertaConfig",
        "AttnVariantT5Config",
        "AttnVariantUMT5Config",
        "AttnVariantWhisperConfig",
        "__version__",
        *_albert.__all__,
        *_bart.__all__,
        *_bert.__all__,
        *_distilbert.__all__,
        *_electra.__all__,
        *_m2m_100.__all__,
        *_marian.__all__,
        *_mbart.__all__,
        *_pegasus.__all__,
        *_roberta.__all__,
        *_t5.__all__,
        *_umt5.__all__,
        *_whisper.__all__,
    ]

register()
