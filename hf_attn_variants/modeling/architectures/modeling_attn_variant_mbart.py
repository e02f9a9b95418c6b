"""mBART models with attention variants."""

from ..attention.beam_shared_rows import SharedEncoderOutputsMixin
from ..attention.latent_attention import CrossLatentMixin
from ..attention.model_mixin import AttnVariantModelMixin
from ..transformers_internals import collect_variant_classes, guarded_imports
from .bart_family import BART_FAMILY_SITES, BartFamilyAttentionMixin
from .configuration_attn_variants import AttnVariantMBartConfig

with guarded_imports():
    from transformers import (
        MBartForCausalLM,
        MBartForConditionalGeneration,
        MBartForQuestionAnswering,
        MBartForSequenceClassification,
        MBartModel,
        MBartPreTrainedModel,
    )
    from transformers.models.mbart.modeling_mbart import (
        MBartAttention,
        MBartDecoder,
        MBartDecoderWrapper,
        MBartEncoder,
    )

__all__ = [
    "AttnVariantMBartForCausalLM",
    "AttnVariantMBartForConditionalGeneration",
    "AttnVariantMBartForQuestionAnswering",
    "AttnVariantMBartForSequenceClassification",
    "AttnVariantMBartModel",
    "AttnVariantMBartPreTrainedModel",
]


class AttnVariantMBartAttention(BartFamilyAttentionMixin, MBartAttention):
    """`MBartAttention` with grouped key/value heads and, if configured, a latent or talking heads."""


class AttnVariantMBartPreTrainedModel(AttnVariantModelMixin, MBartPreTrainedModel):
    """Base class of mBART models with variant attention. It extends `MBartPreTrainedModel`."""

    config_class = AttnVariantMBartConfig
    attention_sites = BART_FAMILY_SITES


class AttnVariantMBartEncoder(AttnVariantMBartPreTrainedModel, MBartEncoder):
    """`MBartEncoder` with variant attention."""

    stack_name = "encoder"


class AttnVariantMBartDecoder(CrossLatentMixin, AttnVariantMBartPreTrainedModel, MBartDecoder):
    """`MBartDecoder` with variant attention."""

    stack_name = "decoder"


class AttnVariantMBartModel(AttnVariantMBartPreTrainedModel, MBartModel):
    """`MBartModel` with variant attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantMBartConfig, AttnVariantMBartModel
    >>> config = AttnVariantMBartConfig(vocab_size=99, encoder_layers=1, decoder_layers=1, num_key_value_heads=4)
    >>> model = AttnVariantMBartModel(config)
    ```
    """


class AttnVariantMBartDecoderWrapper(AttnVariantMBartPreTrainedModel, MBartDecoderWrapper):
    """`MBartDecoderWrapper` (which contains the decoder in `MBartForCausalLM`) with variant attention."""


AttnVariantMBartPreTrainedModel.variant_classes = collect_variant_classes(globals())


class AttnVariantMBartForConditionalGeneration(
    SharedEncoderOutputsMixin, AttnVariantMBartPreTrainedModel, MBartForConditionalGeneration
):
    """`MBartForConditionalGeneration` with variant attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantMBartConfig, AttnVariantMBartForConditionalGeneration
    >>> config = AttnVariantMBartConfig(vocab_size=99, encoder_layers=1, decoder_layers=1, num_key_value_heads=4)
    >>> model = AttnVariantMBartForConditionalGeneration(config)
    ```
    """


class AttnVariantMBartForSequenceClassification(AttnVariantMBartPreTrainedModel, MBartForSequenceClassification):
    """`MBartForSequenceClassification` with variant attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantMBartConfig, AttnVariantMBartForSequenceClassification
    >>> config = AttnVariantMBartConfig(vocab_size=99, encoder_layers=1, decoder_layers=1, num_key_value_heads=4)
    >>> model = AttnVariantMBartForSequenceClassification(config)
    ```
    """


class AttnVariantMBartForQuestionAnswering(AttnVariantMBartPreTrainedModel, MBartForQuestionAnswering):
    """`MBartForQuestionAnswering` with variant attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantMBartConfig, AttnVariantMBartForQuestionAnswering
    >>> config = AttnVariantMBartConfig(vocab_size=99, encoder_layers=1, decoder_layers=1, num_key_value_heads=4)
    >>> model = AttnVariantMBartForQuestionAnswering(config)
    ```
    """


class AttnVariantMBartForCausalLM(AttnVariantMBartPreTrainedModel, MBartForCausalLM):
    """`MBartForCausalLM` (decoder only) with variant attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantMBartConfig, AttnVariantMBartForCausalLM
    >>> config = AttnVariantMBartConfig(vocab_size=99, encoder_layers=1, decoder_layers=1, num_key_value_heads=4)
    >>> model = AttnVariantMBartForCausalLM(config)
    ```
    """
