"""A configuration class an architecture: upstream's with the fields of `AttnVariantConfigMixin`."""

from dataclasses import field
from typing import Any

from transformers import AlbertConfig, BertConfig, T5Config

from .variant_config import AttnVariantConfigMixin, can_cache
from .variant_names import ATTN_VARIANTS_VERSION, EAGER, SDPA

__all__ = [
    "ATTN_VARIANTS_VERSION",
    "EAGER",
    "SDPA",
    "AttnVariantAlbertConfig",
    "AttnVariantBertConfig",
    "AttnVariantConfigMixin",
    "AttnVariantT5Config",
    "can_cache",
]


class AttnVariantBertConfig(AttnVariantConfigMixin, BertConfig):
    """BERT's configuration with the fields of `AttnVariantConfigMixin`; without any of them plain multi-head BERT."""

    model_type = "attn_variant_bert"
    upstream_model_types = ("bert",)
    modeling_file = "modeling_attn_variant_bert"
    auto_classes = {
        "AutoModel": "AttnVariantBertModel",
        "AutoModelForCausalLM": "AttnVariantBertLMHeadModel",
        "AutoModelForMaskedLM": "AttnVariantBertForMaskedLM",
        "AutoModelForMultipleChoice": "AttnVariantBertForMultipleChoice",
        "AutoModelForNextSentencePrediction": "AttnVariantBertForNextSentencePrediction",
        "AutoModelForPreTraining": "AttnVariantBertForPreTraining",
        "AutoModelForQuestionAnswering": "AttnVariantBertForQuestionAnswering",
        "AutoModelForSequenceClassification": "AttnVariantBertForSequenceClassification",
        "AutoModelForTextEncoding": "AttnVariantBertModel",
        "AutoModelForTokenClassification": "AttnVariantBertForTokenClassification",
    }


class AttnVariantAlbertConfig(AttnVariantConfigMixin, AlbertConfig):
    """ALBERT's configuration with the fields of `AttnVariantConfigMixin`; without any of them multi-head ALBERT."""

    model_type = "attn_variant_albert"
    upstream_model_types = ("albert",)
    modeling_file = "modeling_attn_variant_albert"
    layer_fields = ("num_hidden_layers", "num_hidden_groups", "inner_group_num")
    size_fields = ("vocab_size", "embedding_size", "hidden_size", "intermediate_size")
    auto_classes = {
        "AutoModel": "AttnVariantAlbertModel",
        "AutoModelForMaskedLM": "AttnVariantAlbertForMaskedLM",
        "AutoModelForMultipleChoice": "AttnVariantAlbertForMultipleChoice",
        "AutoModelForPreTraining": "AttnVariantAlbertForPreTraining",
        "AutoModelForQuestionAnswering": "AttnVariantAlbertForQuestionAnswering",
        "AutoModelForSequenceClassification": "AttnVariantAlbertForSequenceClassification",
        "AutoModelForTextEncoding": "AttnVariantAlbertModel",
        "AutoModelForTokenClassification": "AttnVariantAlbertForTokenClassification",
    }

    def layer_count(self, name: str) -> int:
        """Return how many layers have a value of their own: those of a group are shared by the whole group."""
        return self.num_hidden_groups * self.inner_group_num


class AttnVariantT5Config(AttnVariantConfigMixin, T5Config):
    """T5's and mT5's configuration with the fields of `AttnVariantConfigMixin`; without any of them multi-head T5.

    `num_key_value_heads` is the decoder's, in self- and cross-attention, the recipe of arXiv 2305.13245, section 2.2.

    Args:
        encoder_num_key_value_heads: the key/value heads of an encoder layer. None = as many as query heads (MHA).
        encoder_kv_lora_rank: `kv_lora_rank` of an encoder layer.
        cross_kv_lora_rank: the same of cross-attention: one latent of the encoder's outputs for all layers of the
            decoder. `d_model` = the encoder's outputs themselves, by which any checkpoint decodes as it is.
    """

    model_type = "attn_variant_t5"
    upstream_model_types = ("t5", "mt5")
    modeling_file = "modeling_attn_variant_t5"
    layer_fields = ("num_layers", "num_decoder_layers")
    size_fields = ("vocab_size", "d_model", "d_kv", "d_ff")
    head_dim_field = "d_kv"
    auto_classes = {
        "AutoModel": "AttnVariantT5Model",
        "AutoModelForPreTraining": "AttnVariantT5ForConditionalGeneration",
        "AutoModelForQuestionAnswering": "AttnVariantT5ForQuestionAnswering",
        "AutoModelForSeq2SeqLM": "AttnVariantT5ForConditionalGeneration",
        "AutoModelForSequenceClassification": "AttnVariantT5ForSequenceClassification",
        "AutoModelForTextEncoding": "AttnVariantT5EncoderModel",
        "AutoModelForTokenClassification": "AttnVariantT5ForTokenClassification",
    }

    encoder_num_key_value_heads: int | None = field(
        default=None,
        metadata={
            "variant": "key/value heads of an encoder layer",
            "query_heads": "num_attention_heads",
            "by_layer": True,
        },
    )
    encoder_kv_lora_rank: int | None = field(
        default=None,
        metadata={
            "variant": "numbers a token that an encoder layer makes its keys and values from",
            "latent": True,
            "by_layer": True,
        },
    )
    cross_kv_lora_rank: int | None = field(
        default=None,
        metadata={
            "variant": "numbers a source token that all decoder layers make their keys and values from",
            "latent": True,
        },
    )

    def layer_count(self, name: str) -> int:
        """Return how many layers of its stack have a value of their own of a field."""
        return self.num_layers if name.startswith("encoder_") else self.num_decoder_layers

    def __post_init__(self, **kwargs: Any) -> None:
        if kwargs.get("model_type") == "mt5":
            # mT5 never scales its decoder's outputs; its configuration has no field that says so.
            kwargs["scale_decoder_outputs"] = False
        super().__post_init__(**kwargs)

    @classmethod
    def _adopted(cls, values: dict[str, Any]) -> dict[str, Any]:
        unscaled = {"scale_decoder_outputs": False} if values.get("model_type") == "mt5" else {}
        return super()._adopted(values) | unscaled


for _config_class in (AttnVariantAlbertConfig, AttnVariantBertConfig, AttnVariantT5Config):
    _config_class.register_for_auto_class()
