"""Configuration classes for all supported architectures."""

import sys
from typing import Any, ClassVar

from ..fields.field_checks import check_relative_position_buckets
from ..fields.variant_config import AttnVariantConfigMixin, CrossAttentionConfigMixin, EncoderDecoderConfigMixin
from ..mechanisms.sinusoidal_positions import SinusoidalPositions, has_sinusoids
from ..mechanisms.talking_heads import KIND, get_settings_prefix, has_talking_heads
from ..transformers_internals import get_auto_class_names, guarded_imports

with guarded_imports():
    from transformers import (
        AlbertConfig,
        BartConfig,
        BertConfig,
        DistilBertConfig,
        ElectraConfig,
        M2M100Config,
        MarianConfig,
        MBartConfig,
        ModernBertConfig,
        NomicBertConfig,
        PegasusConfig,
        RobertaConfig,
        T5Config,
        UMT5Config,
        WhisperConfig,
    )

__all__ = [
    "CONFIG_CLASSES",
    "AttnVariantAlbertConfig",
    "AttnVariantBartConfig",
    "AttnVariantBertConfig",
    "AttnVariantDistilBertConfig",
    "AttnVariantElectraConfig",
    "AttnVariantM2M100Config",
    "AttnVariantMBartConfig",
    "AttnVariantMarianConfig",
    "AttnVariantModernBertConfig",
    "AttnVariantNomicBertConfig",
    "AttnVariantPegasusConfig",
    "AttnVariantRobertaConfig",
    "AttnVariantT5Config",
    "AttnVariantUMT5Config",
    "AttnVariantWhisperConfig",
]

LEARNED_OR_SINUSOIDAL = (None, "absolute", SinusoidalPositions.name)
# The suffixes of the model class names in each architecture
LABEL_HEADS = ("ForQuestionAnswering", "ForSequenceClassification", "ForTokenClassification")
ENCODER_HEADS = ("Model", "ForMaskedLM", "ForMultipleChoice", *LABEL_HEADS)
T5_HEADS = ("Model", "EncoderModel", "ForConditionalGeneration", *LABEL_HEADS)
BART_HEADS = ("Model", "ForCausalLM", "ForConditionalGeneration", "ForQuestionAnswering", "ForSequenceClassification")
BERT_HEADS = (*ENCODER_HEADS, "ForNextSentencePrediction", "ForPreTraining", "LMHeadModel")
WHISPER_HEADS = ("Model", "ForAudioClassification", "ForCausalLM", "ForConditionalGeneration")


def _get_variant_auto_classes(model_type: str, class_prefix: str, class_suffixes: tuple[str, ...]) -> dict[str, str]:
    """Return the names of the variant model classes as {name of the Auto class: name of the model class}.

    Args:
        model_type: the model type in Transformers.
        class_prefix: the prefix of the Transformers model class names.
        class_suffixes: the suffixes of the model classes in the modeling file. Other Transformers classes are omitted,
            because later releases may add model classes that have no variant.
    """
    class_names = {f"{class_prefix}{head}" for head in class_suffixes}
    return {
        auto: f"AttnVariant{model}" for auto, model in get_auto_class_names(model_type).items() if model in class_names
    }


class AttnVariantBertConfig(CrossAttentionConfigMixin, BertConfig):
    """Configuration for BERT with the fields of `CrossAttentionConfigMixin`. The default is multi-head attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantBertConfig
    >>> config = AttnVariantBertConfig(num_key_value_heads=4)
    >>> config.num_key_value_heads
    4
    ```
    """

    model_type = "attn_variant_bert"
    transformers_model_types = ("bert",)
    modeling_file = "modeling_attn_variant_bert"
    position_types = LEARNED_OR_SINUSOIDAL
    auto_classes = _get_variant_auto_classes("bert", "Bert", BERT_HEADS)


class AttnVariantAlbertConfig(AttnVariantConfigMixin, AlbertConfig):
    """Configuration for ALBERT with the fields of `AttnVariantConfigMixin`. The default is multi-head attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantAlbertConfig
    >>> config = AttnVariantAlbertConfig(num_key_value_heads=8)
    >>> config.num_key_value_heads
    8
    ```
    """

    model_type = "attn_variant_albert"
    transformers_model_types = ("albert",)
    modeling_file = "modeling_attn_variant_albert"
    position_types = LEARNED_OR_SINUSOIDAL
    layer_fields = ("num_hidden_layers", "num_hidden_groups", "inner_group_num")
    size_fields = ("vocab_size", "embedding_size", "hidden_size", "intermediate_size")
    auto_classes = _get_variant_auto_classes("albert", "Albert", (*ENCODER_HEADS, "ForPreTraining"))

    def get_num_layers(self, name: str) -> int:
        """Return the number of layers that can have different values. Repetitions of a layer have the same values."""
        return self.num_hidden_groups * self.inner_group_num


class AttnVariantRobertaConfig(CrossAttentionConfigMixin, RobertaConfig):
    """Configuration for RoBERTa, XLM-RoBERTa and CamemBERT with the fields of `CrossAttentionConfigMixin`.

    The default is multi-head attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantRobertaConfig
    >>> config = AttnVariantRobertaConfig(attention_pattern="sliding_window", attention_window=64)
    >>> config.attention_pattern
    'sliding_window'
    ```
    """

    model_type = "attn_variant_roberta"
    transformers_model_types = ("roberta", "xlm-roberta", "camembert")
    modeling_file = "modeling_attn_variant_roberta"
    position_types = LEARNED_OR_SINUSOIDAL
    positions_after_padding = True
    auto_classes = _get_variant_auto_classes("roberta", "Roberta", (*ENCODER_HEADS, "ForCausalLM"))


class AttnVariantElectraConfig(CrossAttentionConfigMixin, ElectraConfig):
    """Configuration for ELECTRA with the fields of `CrossAttentionConfigMixin`.

    The default is multi-head attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantElectraConfig
    >>> config = AttnVariantElectraConfig(num_key_value_heads=1)
    >>> config.num_key_value_heads
    1
    ```
    """

    model_type = "attn_variant_electra"
    transformers_model_types = ("electra",)
    modeling_file = "modeling_attn_variant_electra"
    position_types = LEARNED_OR_SINUSOIDAL
    size_fields = ("vocab_size", "embedding_size", "hidden_size", "intermediate_size")
    auto_classes = _get_variant_auto_classes("electra", "Electra", (*ENCODER_HEADS, "ForCausalLM", "ForPreTraining"))


class AttnVariantDistilBertConfig(AttnVariantConfigMixin, DistilBertConfig):
    """Configuration for DistilBERT with the fields of `AttnVariantConfigMixin`.

    The default is multi-head attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantDistilBertConfig
    >>> config = AttnVariantDistilBertConfig(kv_lora_rank=256)
    >>> config.kv_lora_rank
    256
    ```
    """

    model_type = "attn_variant_distilbert"
    transformers_model_types = ("distilbert",)
    modeling_file = "modeling_attn_variant_distilbert"
    position_types = LEARNED_OR_SINUSOIDAL
    layer_fields = ("n_layers",)
    size_fields = ("vocab_size", "dim", "hidden_dim")
    auto_classes = _get_variant_auto_classes("distilbert", "DistilBert", ENCODER_HEADS)

    def check_variant(self) -> None:
        """Check the variant fields, and check that sinusoidal positions are not enabled in two ways.

        Raises:
            ValueError: if `sinusoidal_pos_embds`, which selects a table of parameters, is combined with
                `position_embedding_type="sinusoidal"`.
        """
        super().check_variant()
        if self.sinusoidal_pos_embds and has_sinusoids(self):
            raise ValueError(
                '`sinusoidal_pos_embds` must be False with `position_embedding_type="sinusoidal"`, got True. '
                "The former is a table of parameters that is initialized with sinusoids, and the latter has "
                "no parameters."
            )


class AttnVariantModernBertConfig(AttnVariantConfigMixin, ModernBertConfig):
    """Configuration for ModernBERT with the fields of `AttnVariantConfigMixin`. The default is multi-head attention.

    Patterns and kernels apply to the global layers ("full_attention" in `layer_types`). The local layers keep the
    window of `local_attention` tokens.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantModernBertConfig
    >>> config = AttnVariantModernBertConfig(num_key_value_heads=4)
    >>> config.num_key_value_heads
    4
    ```
    """

    model_type = "attn_variant_modernbert"
    transformers_model_types = ("modernbert",)
    modeling_file = "modeling_attn_variant_modernbert"
    auto_classes = _get_variant_auto_classes("modernbert", "ModernBert", ENCODER_HEADS)

    @classmethod
    def get_rank_fields(cls) -> tuple[str, ...]:
        """Return no fields, because latents do not support rotary positions (see `check_combinations`)."""
        return ()


class AttnVariantNomicBertConfig(AttnVariantConfigMixin, NomicBertConfig):
    """Configuration for NomicBERT with the fields of `AttnVariantConfigMixin`. The default is multi-head attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantNomicBertConfig
    >>> config = AttnVariantNomicBertConfig(num_key_value_heads=4)
    >>> config.num_key_value_heads
    4
    ```
    """

    model_type = "attn_variant_nomic_bert"
    transformers_model_types = ("nomic_bert",)
    modeling_file = "modeling_attn_variant_nomic_bert"
    head_dim_field = "head_dim"
    auto_classes = _get_variant_auto_classes(
        "nomic_bert", "NomicBert", ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
    )

    @classmethod
    def get_rank_fields(cls) -> tuple[str, ...]:
        """Return no fields, because latents do not support rotary positions (see `check_combinations`)."""
        return ()


def _register_with_sentence_transformers(config_class: Any) -> None:
    """If sentence-transformers is imported, make it load T5 and UMT5 encoders with their Auto class.

    A table in this library selects the Transformers encoder for all subclasses of `T5Config`. This function inserts a
    new first row that selects the Auto class, because the Auto class also finds the encoder in remote code.
    """
    library = sys.modules.get("sentence_transformers.base.modules.transformer")
    table = getattr(library, "_ENCODER_ONLY_MODELS", None)
    if isinstance(table, list) and all(row[0] is not config_class for row in table):
        table.insert(0, (config_class, "transformers", "AutoModelForTextEncoding"))


class T5FamilyConfigMixin(EncoderDecoderConfigMixin):
    """Mixin for T5 and UMT5 configurations."""

    layer_fields = encoder_decoder_layers = ("num_layers", "num_decoder_layers")
    size_fields = ("vocab_size", "d_model", "d_kv", "d_ff")
    head_dim_field = "d_kv"
    position_types = (None, SinusoidalPositions.name)

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        check_relative_position_buckets(self)
        # Sentence Transformers creates a configuration before it looks up the class in its table.
        _register_with_sentence_transformers(type(self))

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> Any:
        """Return the text configuration. For a decoder, set `num_layers` in it to the number of decoder layers.

        `generate` creates one cache layer per decoder layer. Transformers reads the number from `decoder_layers`,
        which T5 does not have, and would therefore use the number of encoder layers.
        """
        text_config = super().get_text_config(decoder=decoder, encoder=encoder)
        if decoder and not encoder and text_config is not self:
            text_config.num_layers = self.num_decoder_layers
        return text_config


class AttnVariantT5Config(T5FamilyConfigMixin, T5Config):
    """Configuration for T5 and mT5 with the fields of `EncoderDecoderConfigMixin`.

    The default is multi-head attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantT5Config
    >>> config = AttnVariantT5Config(num_key_value_heads=2, cross_kv_lora_rank=128)
    >>> config.num_key_value_heads
    2
    ```
    """

    model_type = "attn_variant_t5"
    transformers_model_types = ("t5", "mt5")
    modeling_file = "modeling_attn_variant_t5"
    makes_summaries = True
    auto_classes = _get_variant_auto_classes("t5", "T5", T5_HEADS)

    def check_variant(self) -> None:
        """Check the variant fields. Layers that share a position bias must have the same number of softmax heads.

        Raises:
            ValueError: if layers have different numbers of softmax heads.
        """
        super().check_variant()
        for prefix in ("", "encoder_") if self.position_embedding_type is None else ():
            layers = range(self.get_num_layers(prefix + KIND))
            counts = [self.get_talking_heads(prefix, layer).softmax for layer in layers]
            if len(set(counts)) > 1:
                raise ValueError(
                    f"`{prefix}num_softmax_heads` must be the same in all layers of T5 models, got {counts}. All "
                    "layers share a position bias with one column per softmax head."
                )

    def __post_init__(self, **kwargs: Any) -> None:
        if kwargs.get("model_type") == "mt5":
            # mT5 never scales the decoder outputs, but its configuration has no field for this.
            kwargs["scale_decoder_outputs"] = False
        super().__post_init__(**kwargs)

    @classmethod
    def _with_variant_model_type(cls, values: dict[str, Any]) -> dict[str, Any]:
        unscaled = {"scale_decoder_outputs": False} if values.get("model_type") == "mt5" else {}
        return super()._with_variant_model_type(values) | unscaled


class AttnVariantUMT5Config(T5FamilyConfigMixin, UMT5Config):
    """Configuration for UMT5 with the fields of `EncoderDecoderConfigMixin`. The default is multi-head attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantUMT5Config
    >>> config = AttnVariantUMT5Config(num_key_value_heads=2)
    >>> config.num_key_value_heads
    2
    ```
    """

    model_type = "attn_variant_umt5"
    transformers_model_types = ("umt5",)
    modeling_file = "modeling_attn_variant_umt5"
    auto_classes = _get_variant_auto_classes("umt5", "UMT5", T5_HEADS)

    def __post_init__(self, **kwargs: Any) -> None:
        # Transformers 5.24 and later handle scaling in this way, which is applied to all releases here. If the
        # checkpoint's configuration says that the head is untied, the outputs are not scaled, although the head is
        # tied. Earlier releases dropped the flag and saved a tied head.
        scaled = kwargs.pop("scale_decoder_outputs", None)
        scaled = kwargs.get("tie_word_embeddings") is not False if scaled is None else scaled
        super().__post_init__(**kwargs)
        self.scale_decoder_outputs = scaled


class BartFamilyConfigMixin(EncoderDecoderConfigMixin):
    """Mixin for the configurations of BART and related models, which have separate encoder and decoder head counts."""

    layer_fields = encoder_decoder_layers = ("encoder_layers", "decoder_layers")
    size_fields: ClassVar[tuple[str, ...]] = ("vocab_size", "d_model", "encoder_ffn_dim", "decoder_ffn_dim")
    encoder_decoder_heads = ("encoder_attention_heads", "decoder_attention_heads")

    def check_variant(self) -> None:
        """Check the variant fields. Shared talking-heads fields require equal head counts in the encoder and decoder.

        Raises:
            ValueError: if the encoder and the decoder share talking-heads fields but have different numbers of heads.
        """
        super().check_variant()
        heads = [getattr(self, name) for name in self.encoder_decoder_heads]
        if len(set(heads)) > 1 and has_talking_heads(self, "") and not get_settings_prefix(self, "encoder_"):
            raise ValueError(
                "`encoder_talking_heads` must be set if the encoder and the decoder have different numbers "
                f"of heads, got encoder_attention_heads={heads[0]} and decoder_attention_heads={heads[1]}. "
                'Use "none" for an encoder without talking heads.'
            )


class AttnVariantBartConfig(BartFamilyConfigMixin, BartConfig):
    """Configuration for BART with the fields of `EncoderDecoderConfigMixin`. The default is multi-head attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantBartConfig
    >>> config = AttnVariantBartConfig(num_key_value_heads=4, encoder_num_key_value_heads=4)
    >>> config.num_key_value_heads
    4
    ```
    """

    model_type = "attn_variant_bart"
    transformers_model_types = ("bart",)
    modeling_file = "modeling_attn_variant_bart"
    auto_classes = _get_variant_auto_classes("bart", "Bart", BART_HEADS)


class AttnVariantMBartConfig(BartFamilyConfigMixin, MBartConfig):
    """Configuration for mBART with the fields of `EncoderDecoderConfigMixin`. The default is multi-head attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantMBartConfig
    >>> config = AttnVariantMBartConfig(num_key_value_heads=4)
    >>> config.num_key_value_heads
    4
    ```
    """

    model_type = "attn_variant_mbart"
    transformers_model_types = ("mbart",)
    modeling_file = "modeling_attn_variant_mbart"
    auto_classes = _get_variant_auto_classes("mbart", "MBart", BART_HEADS)


class AttnVariantMarianConfig(BartFamilyConfigMixin, MarianConfig):
    """Configuration for Marian with the fields of `EncoderDecoderConfigMixin`. The default is multi-head attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantMarianConfig
    >>> config = AttnVariantMarianConfig(num_key_value_heads=4)
    >>> config.num_key_value_heads
    4
    ```
    """

    model_type = "attn_variant_marian"
    transformers_model_types = ("marian",)
    modeling_file = "modeling_attn_variant_marian"
    auto_classes = _get_variant_auto_classes("marian", "Marian", ("Model", "ForCausalLM", "MTModel"))


class AttnVariantM2M100Config(BartFamilyConfigMixin, M2M100Config):
    """Configuration for M2M100 and NLLB with the fields of `EncoderDecoderConfigMixin`.

    The default is multi-head attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantM2M100Config
    >>> config = AttnVariantM2M100Config(num_key_value_heads=4)
    >>> config.num_key_value_heads
    4
    ```
    """

    model_type = "attn_variant_m2m_100"
    transformers_model_types = ("m2m_100",)
    modeling_file = "modeling_attn_variant_m2m_100"
    auto_classes = _get_variant_auto_classes("m2m_100", "M2M100", ("Model", "ForConditionalGeneration"))


class AttnVariantPegasusConfig(BartFamilyConfigMixin, PegasusConfig):
    """Configuration for PEGASUS with the fields of `EncoderDecoderConfigMixin`.

    The default is multi-head attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantPegasusConfig
    >>> config = AttnVariantPegasusConfig(num_key_value_heads=4)
    >>> config.num_key_value_heads
    4
    ```
    """

    model_type = "attn_variant_pegasus"
    transformers_model_types = ("pegasus",)
    modeling_file = "modeling_attn_variant_pegasus"
    auto_classes = _get_variant_auto_classes(
        "pegasus", "Pegasus", ("Model", "ForCausalLM", "ForConditionalGeneration")
    )


class AttnVariantWhisperConfig(BartFamilyConfigMixin, WhisperConfig):
    """Configuration for Whisper with the fields of `EncoderDecoderConfigMixin`.

    The default is multi-head attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantWhisperConfig
    >>> config = AttnVariantWhisperConfig(num_key_value_heads=2)
    >>> config.num_key_value_heads
    2
    ```
    """

    model_type = "attn_variant_whisper"
    transformers_model_types = ("whisper",)
    modeling_file = "modeling_attn_variant_whisper"
    size_fields = (*BartFamilyConfigMixin.size_fields, "num_mel_bins", "max_source_positions")
    # In Transformers, `num_key_value_heads` is an alias for the number of encoder heads. Here, it is a separate field.
    attribute_map = {name: target for name, target in WhisperConfig.attribute_map.items() if "key_value" not in name}
    auto_classes = _get_variant_auto_classes("whisper", "Whisper", WHISPER_HEADS)
    # AutoProcessor reads this attribute for unknown configurations. Without it, AutoProcessor would only return the
    # tokenizer.
    processor_class = "WhisperProcessor"

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        # `generate` chooses the prompt based on the model type of the instance, which the speech pipeline also checks
        # for long audio and for timestamps. Saved configurations contain the model type of the class.
        self.__dict__["model_type"] = "whisper"


# Each new architecture requires a class and a row in this table.
CONFIG_CLASSES: tuple[type[AttnVariantConfigMixin], ...] = (
    AttnVariantBertConfig,
    AttnVariantAlbertConfig,
    AttnVariantT5Config,
    AttnVariantUMT5Config,
    AttnVariantBartConfig,
    AttnVariantMBartConfig,
    AttnVariantMarianConfig,
    AttnVariantM2M100Config,
    AttnVariantPegasusConfig,
    AttnVariantWhisperConfig,
    AttnVariantRobertaConfig,
    AttnVariantDistilBertConfig,
    AttnVariantElectraConfig,
    AttnVariantModernBertConfig,
    AttnVariantNomicBertConfig,
)
