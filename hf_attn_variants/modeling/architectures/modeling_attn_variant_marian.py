"""Marian models with attention variants."""

from ..attention.beam_shared_rows import SharedEncoderOutputsMixin
from ..attention.latent_attention import CrossLatentMixin
from ..attention.model_mixin import AttnVariantModelMixin
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
    """`MarianAttention` with grouped key/value heads and, if configured, a latent or talking heads."""


class AttnVariantMarianPreTrainedModel(AttnVariantModelMixin, MarianPreTrainedModel):
    """Base class of Marian models with variant attention. It extends `MarianPreTrainedModel`."""

    config_class = AttnVariantMarianConfig
    attention_sites = BART_FAMILY_SITES


class AttnVariantMarianEncoder(AttnVariantMarianPreTrainedModel, MarianEncoder):
    """`MarianEncoder` with variant attention."""

    stack_name = "encoder"


class AttnVariantMarianDecoder(CrossLatentMixin, AttnVariantMarianPreTrainedModel, MarianDecoder):
    """`MarianDecoder` with variant attention."""

    stack_name = "decoder"


class AttnVariantMarianModel(AttnVariantMarianPreTrainedModel, MarianModel):
    """`MarianModel` with variant attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantMarianConfig, AttnVariantMarianModel
    >>> config = AttnVariantMarianConfig(d_model=64, encoder_layers=1, decoder_layers=1, num_key_value_heads=4)
    >>> model = AttnVariantMarianModel(config)
    ```
    """


class AttnVariantMarianDecoderWrapper(AttnVariantMarianPreTrainedModel, MarianDecoderWrapper):
    """`MarianDecoderWrapper` (which contains the decoder in `MarianForCausalLM`) with variant attention."""


AttnVariantMarianPreTrainedModel.variant_classes = collect_variant_classes(globals())


class AttnVariantMarianMTModel(SharedEncoderOutputsMixin, AttnVariantMarianPreTrainedModel, MarianMTModel):
    """`MarianMTModel` with variant attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantMarianConfig, AttnVariantMarianMTModel
    >>> config = AttnVariantMarianConfig(d_model=64, encoder_layers=1, decoder_layers=1, num_key_value_heads=4)
    >>> model = AttnVariantMarianMTModel(config)
    ```
    """


class AttnVariantMarianForCausalLM(AttnVariantMarianPreTrainedModel, MarianForCausalLM):
    """`MarianForCausalLM` (decoder only) with variant attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantMarianConfig, AttnVariantMarianForCausalLM
    >>> config = AttnVariantMarianConfig(d_model=64, encoder_layers=1, decoder_layers=1, num_key_value_heads=4)
    >>> model = AttnVariantMarianForCausalLM(config)
    ```
    """
