"""Marian models with attention variants."""

from ..attention.latent_attention import CrossLatentMixin
from ..attention.shared_rows import SharedEncoderOutputsMixin
from ..attention.variant_mixins import AttnVariantModelMixin
from ..transformers_internals import collect_variant_classes, guarded_imports
from .bart_family import BART_FAMILY_SITES, BartFamilyAttentionMixin
from .configuration_attn_variants import AttnVariantMarianConfig

with guarded_imports():
    from transformers import (
        MarianForCausalLM,
        MarianModel,
        MarianMTModel,
        MarianPreTrainedModel,
    )
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from transformers.models.marian.modeling_marian import (
        MarianAttention,
        MarianDecoder,
        MarianDecoderWrapper,
        MarianEncoder,
    )

__all__ = [
    "AttnVariantMarianForCausalLM",
    "AttnVariantMarianMTModel",
    "AttnVariantMarianModel",
    "AttnVariantMarianPreTrainedModel",
]


class AttnVariantMarianAttention(BartFamilyAttentionMixin, MarianAttention):
    """`MarianAttention` with k key/value heads and, if configured, a latent or talking heads."""


class AttnVariantMarianPreTrainedModel(AttnVariantModelMixin, MarianPreTrainedModel):
    """Base class of the Marian models with variant attention. See Transformers for the original models."""

    config_class = AttnVariantMarianConfig
    attention_sites = BART_FAMILY_SITES


class AttnVariantMarianEncoder(AttnVariantMarianPreTrainedModel, MarianEncoder):
    """`MarianEncoder` with variant attention."""

    stack_name = "encoder"


class AttnVariantMarianDecoder(CrossLatentMixin, AttnVariantMarianPreTrainedModel, MarianDecoder):
    """`MarianDecoder` with variant attention."""

    stack_name = "decoder"


class AttnVariantMarianModel(AttnVariantMarianPreTrainedModel, MarianModel):
    """`MarianModel` with variant attention."""


class AttnVariantMarianDecoderWrapper(AttnVariantMarianPreTrainedModel, MarianDecoderWrapper):
    """The decoder wrapper in `MarianForCausalLM`, with variant attention."""


AttnVariantMarianPreTrainedModel.variant_classes = collect_variant_classes(globals())


class AttnVariantMarianMTModel(SharedEncoderOutputsMixin, AttnVariantMarianPreTrainedModel, MarianMTModel):
    """`MarianMTModel` with variant attention."""


class AttnVariantMarianForCausalLM(AttnVariantMarianPreTrainedModel, MarianForCausalLM):
    """`MarianForCausalLM` (decoder only) with variant attention."""


# With label smoothing, the Transformers Trainer shifts the labels for the model classes in this table.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[AttnVariantMarianConfig.model_type] = AttnVariantMarianForCausalLM.__name__
