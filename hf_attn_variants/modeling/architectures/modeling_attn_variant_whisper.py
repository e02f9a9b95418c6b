"""Whisper models with attention variants."""

from typing import Any

from ..attention.beam_shared_rows import SharedEncoderOutputsMixin
from ..attention.latent_attention import CrossLatentMixin
from ..attention.model_mixin import AttnVariantModelMixin
from ..transformers_internals import (
    MethodSignature,
    check_attention_function,
    collect_variant_classes,
    guarded_imports,
)
from .bart_family import BART_FAMILY_SITES, BartFamilyAttentionMixin
from .configuration_attn_variants import AttnVariantWhisperConfig

with guarded_imports():
    from transformers import (
        WhisperForAudioClassification,
        WhisperForCausalLM,
        WhisperForConditionalGeneration,
        WhisperModel,
        WhisperPreTrainedModel,
    )
    from transformers.models.bart.modeling_bart import BartAttention
    from transformers.models.whisper.modeling_whisper import (
        WhisperAttention,
        WhisperDecoder,
        WhisperDecoderWrapper,
        WhisperEncoder,
    )

__all__ = [
    "AttnVariantWhisperForAudioClassification",
    "AttnVariantWhisperForCausalLM",
    "AttnVariantWhisperForConditionalGeneration",
    "AttnVariantWhisperModel",
    "AttnVariantWhisperPreTrainedModel",
]


class WhisperGroupedHeadsMixin:
    """Mixin that lets `WhisperAttention` have fewer key/value heads than query heads.

    `WhisperAttention.forward` assumes that these numbers are the same. `BartAttention` computes the same attention
    without this assumption. It scales the dot products, whereas Whisper scales the queries.
    """

    arguments: MethodSignature

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute attention as `BartAttention` does. See `WhisperAttention.forward` for the arguments."""
        values, other_arguments = self.arguments.split(args, kwargs)
        return BartAttention.forward(self, **dict(zip(BART_ARGUMENTS.names, values, strict=True)), **other_arguments)


class AttnVariantWhisperAttention(BartFamilyAttentionMixin, WhisperGroupedHeadsMixin, WhisperAttention):
    """`WhisperAttention` with grouped key/value heads and, if configured, a latent or talking heads."""

    transformers_attributes = (*BartFamilyAttentionMixin.transformers_attributes, "head_dim")


BART_ARGUMENTS = MethodSignature(BartAttention, AttnVariantWhisperAttention.roles, returns=2)
check_attention_function(BartAttention)


class AttnVariantWhisperPreTrainedModel(AttnVariantModelMixin, WhisperPreTrainedModel):
    """Base class of Whisper models with variant attention. It extends `WhisperPreTrainedModel`."""

    config_class = AttnVariantWhisperConfig
    attention_sites = BART_FAMILY_SITES


class AttnVariantWhisperEncoder(AttnVariantWhisperPreTrainedModel, WhisperEncoder):
    """`WhisperEncoder` with variant attention."""

    stack_name = "encoder"


class AttnVariantWhisperDecoder(CrossLatentMixin, AttnVariantWhisperPreTrainedModel, WhisperDecoder):
    """`WhisperDecoder` with variant attention."""

    stack_name = "decoder"


class AttnVariantWhisperModel(AttnVariantWhisperPreTrainedModel, WhisperModel):
    """`WhisperModel` with variant attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantWhisperConfig, AttnVariantWhisperModel
    >>> config = AttnVariantWhisperConfig(encoder_layers=1, decoder_layers=1, num_key_value_heads=2)
    >>> model = AttnVariantWhisperModel(config)
    ```
    """


class AttnVariantWhisperDecoderWrapper(AttnVariantWhisperPreTrainedModel, WhisperDecoderWrapper):
    """`WhisperDecoderWrapper` (which contains the decoder in `WhisperForCausalLM`) with variant attention."""


AttnVariantWhisperPreTrainedModel.variant_classes = collect_variant_classes(globals())


class AttnVariantWhisperForConditionalGeneration(
    SharedEncoderOutputsMixin, AttnVariantWhisperPreTrainedModel, WhisperForConditionalGeneration
):
    """`WhisperForConditionalGeneration` with variant attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantWhisperConfig, AttnVariantWhisperForConditionalGeneration
    >>> config = AttnVariantWhisperConfig(encoder_layers=1, decoder_layers=1, num_key_value_heads=2)
    >>> model = AttnVariantWhisperForConditionalGeneration(config)
    ```
    """


class AttnVariantWhisperForCausalLM(AttnVariantWhisperPreTrainedModel, WhisperForCausalLM):
    """`WhisperForCausalLM` (decoder only) with variant attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantWhisperConfig, AttnVariantWhisperForCausalLM
    >>> config = AttnVariantWhisperConfig(encoder_layers=1, decoder_layers=1, num_key_value_heads=2)
    >>> model = AttnVariantWhisperForCausalLM(config)
    ```
    """


class AttnVariantWhisperForAudioClassification(AttnVariantWhisperPreTrainedModel, WhisperForAudioClassification):
    """`WhisperForAudioClassification` (encoder only) with variant attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantWhisperConfig, AttnVariantWhisperForAudioClassification
    >>> config = AttnVariantWhisperConfig(encoder_layers=1, decoder_layers=1, num_key_value_heads=2)
    >>> model = AttnVariantWhisperForAudioClassification(config)
    ```
    """
