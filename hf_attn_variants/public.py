"""Public classes of the package. Importing this module registers them with the Transformers Auto classes."""

from typing import TYPE_CHECKING

from .modeling.architectures.configuration_attn_variants import *
from .modeling.architectures.modeling_attn_variant_albert import *
from .modeling.architectures.modeling_attn_variant_bart import *
from .modeling.architectures.modeling_attn_variant_bert import *
from .modeling.architectures.modeling_attn_variant_distilbert import *
from .modeling.architectures.modeling_attn_variant_electra import *
from .modeling.architectures.modeling_attn_variant_m2m_100 import *
from .modeling.architectures.modeling_attn_variant_marian import *
from .modeling.architectures.modeling_attn_variant_mbart import *
from .modeling.architectures.modeling_attn_variant_modernbert import *
from .modeling.architectures.modeling_attn_variant_nomic_bert import *
from .modeling.architectures.modeling_attn_variant_pegasus import *
from .modeling.architectures.modeling_attn_variant_roberta import *
from .modeling.architectures.modeling_attn_variant_t5 import *
from .modeling.architectures.modeling_attn_variant_umt5 import *
from .modeling.architectures.modeling_attn_variant_whisper import *
from .modeling.variant_names import ATTN_VARIANTS_VERSION as __version__
from .registration import register

# `__all__` is hidden from type checkers, which cannot evaluate it and would treat the models as private.
if not TYPE_CHECKING:
    __all__ = [*sorted(name for name in globals() if name.startswith("AttnVariant")), "__version__"]

register()
