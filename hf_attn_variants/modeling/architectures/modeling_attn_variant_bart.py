"""BART models with attention variants."""

from ..attention.beam_shared_rows import SharedEncoderOutputsMixin
from ..attention.latent_attention import CrossLatentMixin
from ..attention.model_mixin import AttnVariantModelMixin
from ..transformers_internals import collect_variant_classes, guarded_imports
from .bart_family import BART_FAMILY_SITES, BartFamilyAttentionMixin
from .configuration_attn_variants import AttnVariantBartConfig

with guarded_imports():
    from transformers import (
        BartForCausalLM,
        BartForConditionalGeneration,
        BartForQuestionAnswering,
        BartForSequenceClassification,
        BartModel,
        BartPreTrainedModel,
    )
    from transformers.models.bart.modeling_bart import BartAttention, BartDecoder, BartDecoderWrapper, BartEncoder

__all__ = [
    "AttnVariantBartForCausalLM",
    "AttnVariantBartForConditionalGeneration",
    "AttnVariantBartForQuestionAnswering",
    "AttnVariantBartForSequenceClassification",
    "AttnVariantBartModel",
    "AttnVariantBartPreTrainedModel",
]


class AttnVariantBartAttention(BartFamilyAttentionMixin, BartAttention):
    """`BartAttention` with grouped key/value heads and, if configured, a latent or talking heads."""


class AttnVariantBartPreTrainedModel(AttnVariantModelMixin, BartPreTrainedModel):
    """Base class of BART models with variant attention. It extends `BartPreTrainedModel`."""

    config_class = AttnVariantBartConfig
    attention_sites = BART_FAMILY_SITES


class AttnVariantBartEncoder(AttnVariantBartPreTrainedModel, BartEncoder):
    """`BartEncoder` with variant attention."""

    stack_name = "encoder"


class AttnVariantBartDecoder(CrossLatentMixin, AttnVariantBartPreTrainedModel, BartDecoder):
    """`BartDecoder` with variant attention."""

    stack_name = "decoder"


class AttnVariantBartModel(AttnVariantBartPreTrainedModel, BartModel):
    """`BartModel` with variant attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantBartConfig, AttnVariantBartModel
    >>> config = AttnVariantBartConfig(vocab_size=99, encoder_layers=1, decoder_layers=1, num_key_value_heads=4)
    >>> model = AttnVariantBartModel(config)
    ```
    """


class AttnVariantBartDecoderWrapper(AttnVariantBartPreTrainedModel, BartDecoderWrapper):
    """`BartDecoderWrapper` (which contains the decoder in `BartForCausalLM`) with variant attention."""


AttnVariantBartPreTrainedModel.variant_classes = collect_variant_classes(globals())


class AttnVariantBartForConditionalGeneration(
    SharedEncoderOutputsMixin, AttnVariantBartPreTrainedModel, BartForConditionalGeneration
):
    """`BartForConditionalGeneration` with variant attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantBartConfig, AttnVariantBartForConditionalGeneration
    >>> config = AttnVariantBartConfig(vocab_size=99, encoder_layers=1, decoder_layers=1, num_key_value_heads=4)
    >>> model = AttnVariantBartForConditionalGeneration(config)
    ```
    """


class AttnVariantBartForSequenceClassification(AttnVariantBartPreTrainedModel, BartForSequenceClassification):
    """`BartForSequenceClassification` with variant attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantBartConfig, AttnVariantBartForSequenceClassification
    >>> config = AttnVariantBartConfig(vocab_size=99, encoder_layers=1, decoder_layers=1, num_key_value_heads=4)
    >>> model = AttnVariantBartForSequenceClassification(config)
    ```
    """


class AttnVariantBartForQuestionAnswering(AttnVariantBartPreTrainedModel, BartForQuestionAnswering):
    """`BartForQuestionAnswering` with variant attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantBartConfig, AttnVariantBartForQuestionAnswering
    >>> config = AttnVariantBartConfig(vocab_size=99, encoder_layers=1, decoder_layers=1, num_key_value_heads=4)
    >>> model = AttnVariantBartForQuestionAnswering(config)
    ```
    """


class AttnVariantBartForCausalLM(AttnVariantBartPreTrainedModel, BartForCausalLM):
    """`BartForCausalLM` (decoder only) with variant attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantBartConfig, AttnVariantBartForCausalLM
    >>> config = AttnVariantBartConfig(vocab_size=99, encoder_layers=1, decoder_layers=1, num_key_value_heads=4)
    >>> model = AttnVariantBartForCausalLM(config)
    ```
    """
