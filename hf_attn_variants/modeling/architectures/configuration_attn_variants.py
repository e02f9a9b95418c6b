"""A configuration class an architecture: upstream's with the fields of `AttnVariantConfigMixin`."""

from typing import Any, ClassVar

from ..fields.encoder_decoder_config import CrossAttentionConfigMixin, EncoderDecoderConfigMixin
from ..fields.field_checks import check_buckets
from ..fields.variant_config import AttnVariantConfigMixin
from ..mechanisms.sinusoidal_positions import SinusoidalPositions, has_sinusoids
from ..mechanisms.talking_heads import KIND, talking_group, talks
from ..upstream import auto_class_names, known_imports

with known_imports():
    from transformers import (
        AlbertConfig,
        BartConfig,
        BertConfig,
        DistilBertConfig,
        ElectraConfig,
        M2M100Config,
        MarianConfig,
        MBartConfig,
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
    "AttnVariantPegasusConfig",
    "AttnVariantRobertaConfig",
    "AttnVariantT5Config",
    "AttnVariantUMT5Config",
    "AttnVariantWhisperConfig",
]

LEARNED_OR_SINUSOIDAL = (None, "absolute", SinusoidalPositions.name)
# What the names of an architecture's models end in.
ENCODER_HEADS = (
    "Model",
    "ForMaskedLM",
    "ForMultipleChoice",
    "ForQuestionAnswering",
    "ForSequenceClassification",
    "ForTokenClassification",
)
T5_HEADS = (
    "Model",
    "EncoderModel",
    "ForConditionalGeneration",
    "ForQuestionAnswering",
    "ForSequenceClassification",
    "ForTokenClassification",
)
BART_HEADS = ("Model", "ForCausalLM", "ForConditionalGeneration", "ForQuestionAnswering", "ForSequenceClassification")
BERT_HEADS = (*ENCODER_HEADS, "ForNextSentencePrediction", "ForPreTraining", "LMHeadModel")
WHISPER_HEADS = ("Model", "ForAudioClassification", "ForCausalLM", "ForConditionalGeneration")


def _auto_classes(model_type: str, name: str, heads: tuple[str, ...]) -> dict[str, str]:
    """Return the model here for each Auto class that upstream has one of this architecture for.

    Args:
        model_type: upstream's.
        name: what the names of upstream's models begin with.
        heads: what those of the models in the architecture's modeling file end in. A later release may have others,
            of which there is no variant.
    """
    here = {f"{name}{head}" for head in heads}
    return {auto: f"AttnVariant{model}" for auto, model in auto_class_names(model_type).items() if model in here}


class AttnVariantBertConfig(CrossAttentionConfigMixin, BertConfig):
    """BERT's configuration with the fields of `CrossAttentionConfigMixin`; without any of them multi-head."""

    model_type = "attn_variant_bert"
    upstream_model_types = ("bert",)
    modeling_file = "modeling_attn_variant_bert"
    position_types = LEARNED_OR_SINUSOIDAL
    auto_classes = _auto_classes("bert", "Bert", BERT_HEADS)


class AttnVariantAlbertConfig(AttnVariantConfigMixin, AlbertConfig):
    """ALBERT's configuration with the fields of `AttnVariantConfigMixin`; without any of them multi-head ALBERT."""

    model_type = "attn_variant_albert"
    upstream_model_types = ("albert",)
    modeling_file = "modeling_attn_variant_albert"
    position_types = LEARNED_OR_SINUSOIDAL
    layer_fields = ("num_hidden_layers", "num_hidden_groups", "inner_group_num")
    size_fields = ("vocab_size", "embedding_size", "hidden_size", "intermediate_size")
    auto_classes = _auto_classes("albert", "Albert", (*ENCODER_HEADS, "ForPreTraining"))

    def layer_count(self, name: str) -> int:
        """Return how many layers have a value of their own: those of a group are shared by the whole group."""
        return self.num_hidden_groups * self.inner_group_num


class AttnVariantRobertaConfig(CrossAttentionConfigMixin, RobertaConfig):
    """RoBERTa's configuration, which XLM-RoBERTa's and CamemBERT's are too, with the fields of the variants."""

    model_type = "attn_variant_roberta"
    upstream_model_types = ("roberta", "xlm-roberta", "camembert")
    modeling_file = "modeling_attn_variant_roberta"
    position_types = LEARNED_OR_SINUSOIDAL
    positions_after_padding = True
    auto_classes = _auto_classes("roberta", "Roberta", (*ENCODER_HEADS, "ForCausalLM"))


class AttnVariantElectraConfig(CrossAttentionConfigMixin, ElectraConfig):
    """ELECTRA's configuration with the fields of `CrossAttentionConfigMixin`; without any multi-head ELECTRA."""

    model_type = "attn_variant_electra"
    upstream_model_types = ("electra",)
    modeling_file = "modeling_attn_variant_electra"
    position_types = LEARNED_OR_SINUSOIDAL
    size_fields = ("vocab_size", "embedding_size", "hidden_size", "intermediate_size")
    auto_classes = _auto_classes("electra", "Electra", (*ENCODER_HEADS, "ForCausalLM", "ForPreTraining"))


class AttnVariantDistilBertConfig(AttnVariantConfigMixin, DistilBertConfig):
    """DistilBERT's configuration with the fields of `AttnVariantConfigMixin`; without any of them multi-head."""

    model_type = "attn_variant_distilbert"
    upstream_model_types = ("distilbert",)
    modeling_file = "modeling_attn_variant_distilbert"
    position_types = LEARNED_OR_SINUSOIDAL
    layer_fields = ("n_layers",)
    size_fields = ("vocab_size", "dim", "hidden_dim")
    auto_classes = _auto_classes("distilbert", "DistilBert", ENCODER_HEADS)

    def check_variant(self) -> None:
        """Check the variant fields as all configurations do; upstream's own sinusoids are a table to begin with."""
        super().check_variant()
        if self.sinusoidal_pos_embds and has_sinusoids(self):
            raise ValueError(
                '`sinusoidal_pos_embds` and `position_embedding_type="sinusoidal"` cannot stand together: the first '
                "is a table of parameters that begins as sinusoids, the second has no parameters; got both."
            )


class T5FamilyConfigMixin(EncoderDecoderConfigMixin):
    """What T5 and UMT5 have in common: the names of their fields, and buckets of distances."""

    layer_fields = encoder_decoder_layers = ("num_layers", "num_decoder_layers")
    size_fields = ("vocab_size", "d_model", "d_kv", "d_ff")
    head_dim_field = "d_kv"
    position_types = (None, SinusoidalPositions.name)

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        check_buckets(self)

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> Any:
        """Return what upstream's does, for the decoder with the decoder's layers: generation makes a cache for each.

        Upstream looks for `decoder_layers`, which T5 has no field of: to it, both stacks are as deep as the encoder.
        """
        text_config = super().get_text_config(decoder=decoder, encoder=encoder)
        if decoder and not encoder and text_config is not self:
            text_config.num_layers = self.num_decoder_layers
        return text_config


class AttnVariantT5Config(T5FamilyConfigMixin, T5Config):
    """T5's and mT5's configuration with the fields of `EncoderDecoderConfigMixin`; without any multi-head T5."""

    model_type = "attn_variant_t5"
    upstream_model_types = ("t5", "mt5")
    modeling_file = "modeling_attn_variant_t5"
    makes_summaries = True
    auto_classes = _auto_classes("t5", "T5", T5_HEADS)

    def check_variant(self) -> None:
        """Check the variant fields as all configurations do; layers that share a position bias have equal heads."""
        super().check_variant()
        for prefix in ("", "encoder_") if self.position_embedding_type is None else ():
            layers = range(self.layer_count(prefix + KIND))
            counts = [self.talking_heads_of(prefix, layer).softmax for layer in layers]
            if len(set(counts)) > 1:
                raise ValueError(
                    f"`{prefix}num_softmax_heads` must be the same in all layers of a T5, which share a position bias "
                    f"with a column for each; got {counts}."
                )

    def __post_init__(self, **kwargs: Any) -> None:
        if kwargs.get("model_type") == "mt5":
            # mT5 never scales its decoder's outputs; its configuration has no field that says so.
            kwargs["scale_decoder_outputs"] = False
        super().__post_init__(**kwargs)

    @classmethod
    def _adopted(cls, values: dict[str, Any]) -> dict[str, Any]:
        unscaled = {"scale_decoder_outputs": False} if values.get("model_type") == "mt5" else {}
        return super()._adopted(values) | unscaled


class AttnVariantUMT5Config(T5FamilyConfigMixin, UMT5Config):
    """UMT5's configuration with the fields of `EncoderDecoderConfigMixin`; without any multi-head UMT5."""

    model_type = "attn_variant_umt5"
    upstream_model_types = ("umt5",)
    modeling_file = "modeling_attn_variant_umt5"
    auto_classes = _auto_classes("umt5", "UMT5", T5_HEADS)

    def __post_init__(self, **kwargs: Any) -> None:
        # As upstream from 5.24 on, whatever is installed: a checkpoint's untied head means unscaled outputs, though
        # the head is tied all the same. Earlier releases dropped the flag, and what they saved says "tied".
        scaled = kwargs.pop("scale_decoder_outputs", None)
        scaled = kwargs.get("tie_word_embeddings") is not False if scaled is None else scaled
        super().__post_init__(**kwargs)
        self.scale_decoder_outputs = scaled


class BartFamilyConfigMixin(EncoderDecoderConfigMixin):
    """What BART's relatives have in common: the names of their fields, and a number of heads for each stack."""

    layer_fields = encoder_decoder_layers = ("encoder_layers", "decoder_layers")
    size_fields: ClassVar[tuple[str, ...]] = ("vocab_size", "d_model", "encoder_ffn_dim", "decoder_ffn_dim")
    encoder_decoder_heads = ("encoder_attention_heads", "decoder_attention_heads")

    def check_variant(self) -> None:
        """Check the variant fields as all configurations do; one field for two stacks needs as many heads in both."""
        super().check_variant()
        heads = [getattr(self, name) for name in self.encoder_decoder_heads]
        if len(set(heads)) > 1 and talks(self, "") and not talking_group(self, "encoder_"):
            raise ValueError(
                f"`encoder_talking_heads` must be given as well if the encoder and the decoder have different numbers "
                f"of heads; got encoder_attention_heads={heads[0]} and decoder_attention_heads={heads[1]}."
            )


class AttnVariantBartConfig(BartFamilyConfigMixin, BartConfig):
    """BART's configuration with the fields of `EncoderDecoderConfigMixin`; without any of them multi-head."""

    model_type = "attn_variant_bart"
    upstream_model_types = ("bart",)
    modeling_file = "modeling_attn_variant_bart"
    auto_classes = _auto_classes("bart", "Bart", BART_HEADS)


class AttnVariantMBartConfig(BartFamilyConfigMixin, MBartConfig):
    """mBART's configuration with the fields of `EncoderDecoderConfigMixin`; without any of them multi-head."""

    model_type = "attn_variant_mbart"
    upstream_model_types = ("mbart",)
    modeling_file = "modeling_attn_variant_mbart"
    auto_classes = _auto_classes("mbart", "MBart", BART_HEADS)


class AttnVariantMarianConfig(BartFamilyConfigMixin, MarianConfig):
    """Marian's configuration with the fields of `EncoderDecoderConfigMixin`; without any of them multi-head."""

    model_type = "attn_variant_marian"
    upstream_model_types = ("marian",)
    modeling_file = "modeling_attn_variant_marian"
    auto_classes = _auto_classes("marian", "Marian", ("Model", "ForCausalLM", "MTModel"))


class AttnVariantM2M100Config(BartFamilyConfigMixin, M2M100Config):
    """M2M100's and NLLB's configuration with the fields of `EncoderDecoderConfigMixin`; without any multi-head."""

    model_type = "attn_variant_m2m_100"
    upstream_model_types = ("m2m_100",)
    modeling_file = "modeling_attn_variant_m2m_100"
    auto_classes = _auto_classes("m2m_100", "M2M100", ("Model", "ForConditionalGeneration"))


class AttnVariantPegasusConfig(BartFamilyConfigMixin, PegasusConfig):
    """PEGASUS's configuration with the fields of `EncoderDecoderConfigMixin`; without any of them multi-head."""

    model_type = "attn_variant_pegasus"
    upstream_model_types = ("pegasus",)
    modeling_file = "modeling_attn_variant_pegasus"
    auto_classes = _auto_classes("pegasus", "Pegasus", ("Model", "ForCausalLM", "ForConditionalGeneration"))


class AttnVariantWhisperConfig(BartFamilyConfigMixin, WhisperConfig):
    """Whisper's configuration with the fields of `EncoderDecoderConfigMixin`; without any of them multi-head."""

    model_type = "attn_variant_whisper"
    upstream_model_types = ("whisper",)
    modeling_file = "modeling_attn_variant_whisper"
    size_fields = (*BartFamilyConfigMixin.size_fields, "num_mel_bins", "max_source_positions")
    # Upstream has the key/value heads be a name of the encoder's heads; here they are a field.
    attribute_map = {name: meant for name, meant in WhisperConfig.attribute_map.items() if "key_value" not in name}
    auto_classes = _auto_classes("whisper", "Whisper", WHISPER_HEADS)
    # AutoProcessor asks a configuration that it does not know; it would give the tokenizer alone.
    processor_class = "WhisperProcessor"

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        # By this name, asked of a live model, upstream's `generate` lets a prompt begin as it does, and its pipeline
        # transcribes long audio and gives timestamps. What is saved is the class's.
        vars(self)["model_type"] = "whisper"


# A new architecture is one class and one row.
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
)
