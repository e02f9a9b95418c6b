"""PEGASUS models with attention variants."""

from ..attention.beam_shared_rows import SharedEncoderOutputsMixin
from ..attention.latent_attention import CrossLatentMixin
from ..attention.model_mixin import AttnVariantModelMixin
from ..transformers_internals import collect_variant_classes, guarded_imports
from .bart_family import BART_FAMILY_SITES, BartFamilyAttentionMixin
from .configuration_attn_variants import AttnVariantPegasusConfig

with guarded_imports():
    from transformers import (
        PegasusForCausalLM,
        PegasusForConditionalGeneration,
        PegasusModel,
        PegasusPreTrainedModel,
    )
    from transformers.models.pegasus.modeling_pegasus import (
        PegasusAttention,
        PegasusDecoder,
        PegasusDecoderWrapper,
        PegasusEncoder,
    )

__all__ = [
    "AttnVariantPegasusForCausalLM",
    "AttnVariantPegasusForConditionalGeneration",
    "AttnVariantPegasusModel",
    "AttnVariantPegasusPreTrainedModel",
]


class AttnVariantPegasusAttention(BartFamilyAttentionMixin, PegasusAttention):
    """`PegasusAttention` with grouped key/value heads and, if configured, a latent or talking heads."""


class AttnVariantPegasusPreTrainedModel(AttnVariantModelMixin, PegasusPreTrainedModel):
    """Base class of PEGASUS models with variant attention. It extends `PegasusPreTrainedModel`."""

    config_class = AttnVariantPegasusConfig
    attention_sites = BART_FAMILY_SITES


class AttnVariantPegasusEncoder(AttnVariantPegasusPreTrainedModel, PegasusEncoder):
    """`PegasusEncoder` with variant attention."""

    stack_name = "encoder"


class AttnVariantPegasusDecoder(CrossLatentMixin, AttnVariantPegasusPreTrainedModel, PegasusDecoder):
    """`PegasusDecoder` with variant attention."""

    stack_name = "decoder"


class AttnVariantPegasusModel(AttnVariantPegasusPreTrainedModel, PegasusModel):
    """`PegasusModel` with variant attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantPegasusConfig, AttnVariantPegasusModel
    >>> config = AttnVariantPegasusConfig(d_model=64, encoder_layers=1, decoder_layers=1, num_key_value_heads=4)
    >>> model = AttnVariantPegasusModel(config)
    ```
    """


class AttnVariantPegasusDecoderWrapper(AttnVariantPegasusPreTrainedModel, PegasusDecoderWrapper):
    """`PegasusDecoderWrapper` (which contains the decoder in `PegasusForCausalLM`) with variant attention."""


AttnVariantPegasusPreTrainedModel.variant_classes = collect_variant_classes(globals())


class AttnVariantPegasusForConditionalGeneration(
    SharedEncoderOutputsMixin, AttnVariantPegasusPreTrainedModel, PegasusForConditionalGeneration
):
    """`PegasusForConditionalGeneration` with variant attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantPegasusConfig, AttnVariantPegasusForConditionalGeneration
    >>> config = AttnVariantPegasusConfig(d_model=64, encoder_layers=1, decoder_layers=1, num_key_value_heads=4)
    >>> model = AttnVariantPegasusForConditionalGeneration(config)
    ```
    """


class AttnVariantPegasusForCausalLM(AttnVariantPegasusPreTrainedModel, PegasusForCausalLM):
    """`PegasusForCausalLM` (decoder only) with variant attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantPegasusConfig, AttnVariantPegasusForCausalLM
    >>> config = AttnVariantPegasusConfig(d_model=64, encoder_layers=1, decoder_layers=1, num_key_value_heads=4)
    >>> model = AttnVariantPegasusForCausalLM(config)
    ```
    """
