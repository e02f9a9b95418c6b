"""M2M100 and NLLB models with attention variants."""

from ..attention.beam_shared_rows import SharedEncoderOutputsMixin
from ..attention.latent_attention import CrossLatentMixin
from ..attention.model_mixin import AttnVariantModelMixin
from ..transformers_internals import collect_variant_classes, guarded_imports
from .bart_family import BART_FAMILY_SITES, BartFamilyAttentionMixin
from .configuration_attn_variants import AttnVariantM2M100Config

with guarded_imports():
    from transformers import (
        M2M100ForConditionalGeneration,
        M2M100Model,
        M2M100PreTrainedModel,
    )
    from transformers.models.m2m_100.modeling_m2m_100 import M2M100Attention, M2M100Decoder, M2M100Encoder

__all__ = ["AttnVariantM2M100ForConditionalGeneration", "AttnVariantM2M100Model", "AttnVariantM2M100PreTrainedModel"]


class AttnVariantM2M100Attention(BartFamilyAttentionMixin, M2M100Attention):
    """`M2M100Attention` with grouped key/value heads and, if configured, a latent or talking heads."""


class AttnVariantM2M100PreTrainedModel(AttnVariantModelMixin, M2M100PreTrainedModel):
    """Base class of M2M100 models with variant attention. It extends `M2M100PreTrainedModel`."""

    config_class = AttnVariantM2M100Config
    attention_sites = BART_FAMILY_SITES


class AttnVariantM2M100Encoder(AttnVariantM2M100PreTrainedModel, M2M100Encoder):
    """`M2M100Encoder` with variant attention."""

    stack_name = "encoder"


class AttnVariantM2M100Decoder(CrossLatentMixin, AttnVariantM2M100PreTrainedModel, M2M100Decoder):
    """`M2M100Decoder` with variant attention."""

    stack_name = "decoder"


class AttnVariantM2M100Model(AttnVariantM2M100PreTrainedModel, M2M100Model):
    """`M2M100Model` with variant attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantM2M100Config, AttnVariantM2M100Model
    >>> config = AttnVariantM2M100Config(vocab_size=99, encoder_layers=1, decoder_layers=1, num_key_value_heads=4)
    >>> model = AttnVariantM2M100Model(config)
    ```
    """


AttnVariantM2M100PreTrainedModel.variant_classes = collect_variant_classes(globals())


class AttnVariantM2M100ForConditionalGeneration(
    SharedEncoderOutputsMixin, AttnVariantM2M100PreTrainedModel, M2M100ForConditionalGeneration
):
    """`M2M100ForConditionalGeneration` with variant attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantM2M100Config, AttnVariantM2M100ForConditionalGeneration
    >>> config = AttnVariantM2M100Config(vocab_size=99, encoder_layers=1, decoder_layers=1, num_key_value_heads=4)
    >>> model = AttnVariantM2M100ForConditionalGeneration(config)
    ```
    """
