"""Base classes of all variant configurations, with the attention fields and their checks.

`AttnVariantConfigMixin` contains the fields for all architectures. Two subclasses add fields for cross-attention and
for encoder-decoders.

Sources: multi-query attention (arXiv 1911.02150), grouped-query attention (2305.13245), talking heads (2003.02436),
latent attention (MLA, 2405.04434) and its full rank (slim attention, 2503.05840), sliding windows (Longformer,
2004.05150).
"""

import sys
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

from transformers import PreTrainedConfig
from transformers.utils import logging

from ..mechanisms.head_sharing import get_kv_heads_field
from ..mechanisms.latents import get_projection_rank
from ..mechanisms.talking_heads import (
    DYNAMIC,
    OUTPUT,
    SOFTMAX,
    TalkingHeadsSettings,
    get_dynamic_terms,
    get_talking_heads_prefixes,
    has_talking_heads,
    supports_cache,
)
from ..transformers_internals import check_config_internals
from ..variant_names import ATTN_VARIANTS_VERSION, CONFIG_FORMAT, EAGER, SDPA
from .composition import check_combinations, check_mechanisms_included, get_used_mechanisms
from .field_checks import (
    MAX_HEADS,
    MAX_LABELS,
    MAX_LAYERS,
    check_integer_range,
    explain_type_errors,
    validate_kv_heads,
)
from .field_table import OPTIONAL_FIELDS, check_choice, make_dataclass_field, with_variant_fields
from .layer_values import LayerValue, merge_per_layer_config, validate_layer_values
from .mechanism_fields import (
    BlockPatternConfigMixin,
    KernelConfigMixin,
    check_kernels,
    check_patterns,
    check_talking_heads,
)
from .saving_and_loading import (
    CodeSavingConfigMixin,
    check_transformers_model_class,
    describe_misspelled_field,
    drop_replaced_values,
    find_model_class_under_construction,
)

__all__ = [
    "AttnVariantConfigMixin",
    "CrossAttentionConfigMixin",
    "EncoderDecoderConfigMixin",
    "supports_decoder_cache",
]


def register_with_peft(config_class: Any) -> None:
    """Give a variant's model type the same default target modules in PEFT as the original model type."""
    constants = sys.modules.get("peft.utils.constants")
    for name, table in list(vars(constants).items()) if constants else ():
        if isinstance(table, dict) and name.endswith("_MODULES_MAPPING") and config_class.model_type not in table:
            modules = next(
                (table[model_type] for model_type in config_class.transformers_model_types if model_type in table),
                None,
            )
            # PEFT has no row for ALBERT, whose query and value layers have the same names as in BERT.
            is_albert = "albert" in config_class.transformers_model_types
            if modules is None and is_albert and table.get("bert") == ["query", "value"]:
                modules = table["bert"]
            if modules is not None:
                table[config_class.model_type] = modules


# This logger is a child of the Transformers logger and therefore follows its verbosity level.
logger = logging.get_logger(f"transformers.{__name__}")

check_config_internals()


# A generated __repr__ would override the one in Transformers and omit its fields.
@dataclass(kw_only=True, repr=False)
@with_variant_fields("", inherits=True)
class AttnVariantConfigMixin(CodeSavingConfigMixin, BlockPatternConfigMixin, KernelConfigMixin):
    """A mixin with the fields of the attention variants, which must precede the Transformers class in the bases.

    Args:
        num_key_value_heads: k, the number of key/value heads per layer. None means the number of query heads (MHA), 1
            means MQA, and numbers in between mean GQA.
        value_head_dim: d_v, the size of a value head in all attention modules (v in arXiv 1911.02150). None means d,
            the size of a query or key head. Other values require training from scratch.
        kv_lora_rank: r, the rank of the latent from which self-attention computes keys and values (arXiv 2405.04434,
            section 2.1.2). In an encoder-decoder, it applies to the decoder. If it is the same as the input width, the
            input itself is cached, without new parameters. None means that keys and values are cached.
        per_layer_values: the values of fields that differ between layers (heads, ranks, windows, kernels, talking
            heads), as {field: [one value per layer]}. `per_layer_config`, the format in Transformers, is converted to
            this format.
        talking_heads: the talking-heads projections: None, "logits" (P_l, before the softmax), "weights" (P_w, after
            the softmax) or "both".
        num_softmax_heads: h, the number of softmax heads (default: `num_attention_heads`).
        num_value_heads: h_v, the number of value heads, which the output projection combines. The default is
            `num_attention_heads`, or `num_softmax_heads` if P_l is the only projection.
        talking_heads_init: the initialization of a new P_l or P_w. "identity" is equivalent to multi-head attention,
            with input-dependent terms initialized to zero. "random" is fan-in variance scaling, the authors' default.
        talking_heads_dynamic: the input-dependent terms to add to P_l and P_w, a subset of "x2l", "m2l", "x2w" and
            "m2w".
        attention_pattern: None (each token attends to all tokens), "sliding_window" or a block pattern. In an
            encoder-decoder, it applies to the decoder's self-attention.
        attention_window: w, the window size, which must be even. Each token attends to itself and to w / 2 tokens on
            each side. Causal attention and its cache use the last w tokens. In `per_layer_values`, None means that a
            layer has no window.
        attention_dilation: the step between the tokens in a window.
        num_global_tokens: the number of global tokens at the beginning of the text (encoders only). They attend to all
            tokens, and all tokens attend to them.
        position_embedding_type: None selects the default positions of the architecture, as does "absolute" if they are
            learned. "sinusoidal" selects sines and cosines, which support texts of any length (arXiv 1706.03762,
            section 3.5).
        score_function: None for dot products, or "additive" for v^T tanh(W q + U k), with W, U and v per head (arXiv
            1409.0473, section A.1.2).
        attn_variants_format: the version number of the format of these fields, which is 5.

    Raises:
        ValueError: if a value is invalid, or if an unknown keyword resembles the name of a field. The message contains
            the rule, the field and the values.
    """

    transformers_model_types: ClassVar[tuple[str, ...]] = ()
    layer_fields: ClassVar[tuple[str, ...]] = ("num_hidden_layers",)
    size_fields: ClassVar[tuple[str, ...]] = ("vocab_size", "hidden_size", "intermediate_size")
    head_dim_field: ClassVar[str | None] = None
    # True if position ids start after the padding token id, as in RoBERTa.
    positions_after_padding: ClassVar[bool] = False
    makes_summaries: ClassVar[bool] = False  # True if the encoder supports block summaries (`transient_global`)
    # The allowed values of `position_embedding_type`. None selects the default positions of the architecture.
    position_types: ClassVar[tuple[str | None, ...]] = (None, "absolute")

    num_key_value_heads: int | None = make_dataclass_field("num_key_value_heads")
    value_head_dim: int | None = make_dataclass_field("value_head_dim")
    kv_lora_rank: int | None = make_dataclass_field("kv_lora_rank")
    per_layer_values: dict[str, list[LayerValue]] | None = make_dataclass_field("per_layer_values")
    talking_heads: str | None = make_dataclass_field("talking_heads")
    num_softmax_heads: int | None = make_dataclass_field("num_softmax_heads")
    num_value_heads: int | None = make_dataclass_field("num_value_heads")
    talking_heads_init: str = make_dataclass_field("talking_heads_init")
    talking_heads_dynamic: list[str] | tuple[str, ...] = make_dataclass_field("talking_heads_dynamic")
    attention_pattern: str | None = make_dataclass_field("attention_pattern")
    attention_window: int | None = make_dataclass_field("attention_window")
    attention_dilation: int = make_dataclass_field("attention_dilation")
    num_global_tokens: int = make_dataclass_field("num_global_tokens")
    position_embedding_type: str | None = make_dataclass_field("position_embedding_type")
    score_function: str | None = make_dataclass_field("score_function")

    attn_variants_format: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        # Only saved configurations contain a model type. In the configuration of a base checkpoint, it is that of the
        # Transformers model, which would hide the model type of this class. Unknown names in saved configurations do
        # not raise errors, because other tools may add entries.
        model_type = kwargs.pop("model_type", None)
        if self.attn_variants_format is None and model_type != type(self).model_type:
            self.attn_variants_format = CONFIG_FORMAT
        if type(self.attn_variants_format) is not int or self.attn_variants_format != CONFIG_FORMAT:
            raise ValueError(
                f"`attn_variants_format` must be {CONFIG_FORMAT} for hf_attn_variants {ATTN_VARIANTS_VERSION}, got "
                f"{self.attn_variants_format!r}. Load the model with the version that saved it, or convert the "
                "original model again."
            )
        reasons = [reason for name in sorted(kwargs) if (reason := describe_misspelled_field(type(self), name))]
        if reasons and model_type is None:
            raise ValueError(reasons[0])
        if reasons:
            logger.warning_once(f"Some names in the saved configuration have no effect. {' '.join(reasons)}")
        self._finish_init(**kwargs)

    def _finish_init(self, **kwargs: Any) -> None:
        per_layer_config = kwargs.pop("per_layer_config", None)  # Transformers would make these fields unreadable
        if kwargs.get("num_labels") is not None:
            check_integer_range("num_labels", kwargs["num_labels"], 0, MAX_LABELS)
        with explain_type_errors():
            super().__post_init__(**kwargs)
        if per_layer_config is not None:
            self.per_layer_values = merge_per_layer_config(self, per_layer_config)
        self.auto_map = self.build_auto_map() | (getattr(self, "auto_map", None) or {})
        self.check_variant()

    def check_variant(self) -> None:
        """Check that the variant fields are consistent, and set missing ones. Model constructors repeat this check.

        Raises:
            ValueError: if a value is invalid. The message contains the rule, the field and the values.
        """
        used = get_used_mechanisms(self)
        check_mechanisms_included(used)
        for name in self.layer_fields:
            check_integer_range(name, getattr(self, name), 0, MAX_LAYERS)
        for name in self.size_fields:
            check_integer_range(name, getattr(self, name), 1)
        for name in self.get_variant_fields():
            check_choice(name, getattr(self, name))
        check_integer_range("num_attention_heads", self.num_attention_heads, 1, MAX_HEADS)
        for heads in map(self.get_query_heads, self.get_kv_heads_fields() if self.head_dim_field is None else ()):
            if self.hidden_size % heads:
                raise ValueError(
                    f"`num_attention_heads` must divide `hidden_size`, got {heads} heads for a hidden size of "
                    f"{self.hidden_size}."
                )
        if self.per_layer_values is not None:
            self.per_layer_values = validate_layer_values(self)
        for name in self.get_kv_heads_fields():
            setattr(self, name, validate_kv_heads(name, getattr(self, name), self.get_query_heads(name)))
        for name in self.get_rank_fields():
            if (rank := getattr(self, name)) is not None:
                check_integer_range(name, rank, 1, self.hidden_size)
        if self.value_head_dim is not None:
            check_integer_range("value_head_dim", self.value_head_dim, 1, MAX_HEADS)
            if {self.get_attention_head_dim(name) for name in self.get_kv_heads_fields()} == {self.value_head_dim}:
                self.value_head_dim = None
        check_talking_heads(self)
        if not used.isdisjoint(("linear_attention", "patterns")):  # a hybrid kernel also has a window
            check_patterns(self)
        if self.position_embedding_type not in self.position_types:
            raise ValueError(
                f"`position_embedding_type` for {self.model_type!r} must be one of {self.position_types}, got "
                f"{self.position_embedding_type!r}."
            )
        if "linear_attention" in used:
            check_kernels(self)
        if used:
            check_combinations(self)
        if getattr(self, "use_cache", False) and not supports_decoder_cache(self):
            self.use_cache = False

    @classmethod
    def get_variant_fields(cls) -> tuple[str, ...]:
        """Return the fields that this package adds, starting with key/value heads and ranks."""
        added = [field for field in fields(cls) if "variant" in field.metadata]
        added.sort(key=lambda field: ("query_heads" not in field.metadata, "latent" not in field.metadata))
        return tuple(field.name for field in added)

    @classmethod
    def get_kv_heads_fields(cls) -> tuple[str, ...]:
        """Return the fields that contain a number of key/value heads."""
        return tuple(field.name for field in fields(cls) if "query_heads" in field.metadata)

    @classmethod
    def get_rank_fields(cls) -> tuple[str, ...]:
        """Return the fields that contain the rank of a latent."""
        return tuple(field.name for field in fields(cls) if "latent" in field.metadata)

    @classmethod
    def get_talking_heads_fields(cls) -> tuple[str, ...]:
        """Return the fields of the talking-heads projections."""
        return tuple(field.name for field in fields(cls) if "talking" in field.metadata)

    @classmethod
    def get_pattern_fields(cls) -> tuple[str, ...]:
        """Return the fields that select the keys of a query. Model weights do not depend on these fields."""
        return tuple(field.name for field in fields(cls) if "pattern" in field.metadata)

    @classmethod
    def get_from_scratch_fields(cls) -> tuple[str, ...]:
        """Return the fields that are not supported by conversion, because they require training from scratch."""
        return tuple(field.name for field in fields(cls) if "from_scratch" in field.metadata)

    @classmethod
    def get_per_layer_fields(cls) -> tuple[str, ...]:
        """Return the fields that may differ between layers (`per_layer_values`)."""
        return tuple(
            name for name in cls.get_variant_fields() if "by_layer" in cls.__dataclass_fields__[name].metadata
        )

    def get_num_layers(self, name: str) -> int:
        """Return the number of layers for which a field may have different values."""
        return self.num_hidden_layers

    def get_layer_value(self, name: str, layer: int) -> LayerValue:
        """Return the value of a field in one layer."""
        values = (self.per_layer_values or {}).get(name)
        return getattr(self, name) if values is None else values[layer]

    def get_head_count_fields(self, kv_heads_fields: Iterable[str] | None = None) -> tuple[str, ...]:
        """Return the fields with head counts, including softmax and value heads if the model has talking heads.

        Args:
            kv_heads_fields: the key/value heads fields to include (default: all). An encoder and a decoder with
                different numbers of query heads have one field each.
        """
        kv_fields = [name for name in self.get_kv_heads_fields() if kv_heads_fields is None or name in kv_heads_fields]
        query_fields = dict.fromkeys(self.get_query_heads_field(name) for name in kv_fields)
        if all(getattr(self, name) == self.num_attention_heads for name in query_fields):
            query_fields = {"num_attention_heads": None}
        places = [
            place for place in get_talking_heads_prefixes(self) if not place or get_kv_heads_field(place) in kv_fields
        ]
        names = [place + name for place in places if has_talking_heads(self, place) for name in (SOFTMAX, OUTPUT)]
        return (*query_fields, *kv_fields, *(name for name in names if getattr(self, name) is not None))

    def get_talking_heads(self, prefix: str, layer: int) -> TalkingHeadsSettings:
        """Return the talking-heads settings of a layer. The prefix "", "encoder_" or "cross_" selects the place."""
        return TalkingHeadsSettings.from_config(self, prefix, layer)

    def get_query_heads_field(self, kv_heads_field: str = "num_key_value_heads") -> str:
        """Return the name of the query heads field that corresponds to a key/value heads field."""
        return type(self).__dataclass_fields__[kv_heads_field].metadata["query_heads"]

    def get_query_heads(self, kv_heads_field: str = "num_key_value_heads") -> int:
        """Return the number of query heads in the attention modules that a key/value heads field applies to."""
        return getattr(self, self.get_query_heads_field(kv_heads_field))

    @classmethod
    def check_field_names(cls, names: Iterable[str]) -> None:
        """Check that no keyword is a misspelled variant field, because Transformers accepts any name.

        Raises:
            ValueError: if a keyword is not a field but resembles one. The message contains the name of this field.
        """
        for name in names:
            if (reason := describe_misspelled_field(cls, name)) is not None:
                raise ValueError(reason)

    @classmethod
    def get_config_dict(cls, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Read a configuration, and replace a Transformers model type with the model type of this class."""
        values, unused = super().get_config_dict(*args, **kwargs)
        return cls._with_variant_model_type(values), unused

    @classmethod
    def _with_variant_model_type(cls, values: dict[str, Any]) -> dict[str, Any]:
        # This class also loads base checkpoints, and Transformers would warn about their model type.
        is_from_transformers = values.get("model_type") in cls.transformers_model_types
        new_values = {"model_type": cls.model_type, "attn_variants_format": CONFIG_FORMAT}
        return values | new_values if is_from_transformers else values

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Create a configuration from a dictionary, and also check the variant fields in `kwargs`."""
        cls.check_field_names(kwargs.keys() - config_dict.keys())
        if "model_type" not in config_dict:  # old checkpoints of Transformers
            config_dict = {"model_type": cls.model_type, "attn_variants_format": CONFIG_FORMAT} | config_dict
        heads_field = cls.attribute_map.get("num_attention_heads", "num_attention_heads")
        names = {
            *cls.get_variant_fields(),
            "num_attention_heads",
            heads_field,
            "per_layer_config",
            "attn_variants_format",
        }
        names |= {"is_decoder", "add_cross_attention"} & {field.name for field in fields(cls)}
        # Transformers would set these fields after the checks of the configuration.
        new_values = {name: kwargs.pop(name) for name in names & kwargs.keys()}
        if "num_attention_heads" in new_values:
            new_values[heads_field] = new_values.pop("num_attention_heads")
        if heads_field in new_values:  # counts that were the same as the number of heads follow the new number
            counts = {*cls.get_kv_heads_fields(), *(name for name in cls.get_talking_heads_fields() if "num_" in name)}
            old = config_dict.get(heads_field)
            config_dict = {name: v for name, v in config_dict.items() if not (name in counts and v == old)}
        with explain_type_errors():  # Transformers logs the finished configuration
            return super().from_dict(drop_replaced_values(config_dict, new_values) | new_values, **kwargs)

    @classmethod
    def from_upstream(cls, config: "PreTrainedConfig | dict[str, Any]", **fields: Any) -> Self:
        """Create a configuration with the values of a Transformers or variant configuration, updated with `fields`.

        Raises:
            ValueError: if `config` is for another architecture.

        Example:

        ```py
        >>> from transformers import BertConfig
        >>> from hf_attn_variants import AttnVariantBertConfig
        >>> config = AttnVariantBertConfig.from_upstream(BertConfig(hidden_size=384), num_key_value_heads=4)
        >>> config.hidden_size, config.num_key_value_heads
        (384, 4)
        ```
        """
        cls.check_field_names(fields)
        values = dict(config) if isinstance(config, dict) else config.to_dict()
        model_type = values.get("model_type")
        if model_type not in (*cls.transformers_model_types, cls.model_type):
            expected = ", ".join(repr(name) for name in (*cls.transformers_model_types, cls.model_type))
            raise ValueError(
                f"The model type of a configuration for {cls.__name__} must be one of {expected}, got {model_type!r}."
            )
        for name in ("architectures", "auto_map", "transformers_version"):
            values.pop(name, None)
        return cls(**(drop_replaced_values(values, fields) | fields))

    def get_attention_head_dim(self, kv_heads_field: str = "num_key_value_heads") -> int:
        """Return d, the query and key head size in the attention modules that a key/value heads field applies to."""
        if self.head_dim_field is not None:  # the total size of the heads may differ from `hidden_size`
            return getattr(self, self.head_dim_field)
        return self.hidden_size // self.get_query_heads(kv_heads_field)

    def get_attention_value_dim(self, kv_heads_field: str = "num_key_value_heads") -> int:
        """Return d_v, the size of a value head, for the attention modules that a key/value heads field applies to."""
        return self.get_attention_head_dim(kv_heads_field) if self.value_head_dim is None else self.value_head_dim

    @property
    def _attn_implementation(self) -> Any:
        return self._attn_implementation_internal

    @_attn_implementation.setter
    def _attn_implementation(self, value: Any) -> None:
        # Transformers may write its own function names, which do not support talking heads, to the configuration of a
        # model.
        original_property: Any = PreTrainedConfig._attn_implementation
        original_property.fset(self, value)
        name: Any = self._attn_implementation_internal
        self._attn_implementation_internal = {"eager": EAGER, "sdpa": SDPA}.get(name, name)

    @property
    def _experts_implementation_internal(self) -> str | None:
        return vars(self).get("_experts_implementation_internal")

    @_experts_implementation_internal.setter
    def _experts_implementation_internal(self, value: str | None) -> None:
        # The constructors of all Transformers models set a name here, but a configuration itself sets None.
        if value is not None and (model_class := find_model_class_under_construction()) is not None:
            check_transformers_model_class(self, model_class)
            name: Any = self._attn_implementation_internal  # the configuration of a variant model has our names
            self._attn_implementation_internal = {EAGER: "eager", SDPA: "sdpa"}.get(name, name)
        self.__dict__["_experts_implementation_internal"] = value

    @property
    def output_attentions(self) -> bool | None:
        """True if the model should return its attention weights, with any attention implementation."""
        return self._output_attentions

    @output_attentions.setter
    def output_attentions(self, value: bool) -> None:
        # Transformers only allows this for "eager", but the functions in this package also return weights for "sdpa".
        self._output_attentions = value

    def validate(self) -> None:
        """Run the Transformers checks, except the one that limits `output_attentions` to "eager"."""
        output_attentions, self._output_attentions = self._output_attentions, False
        try:
            super().validate()
        finally:
            self._output_attentions = output_attentions

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as a dictionary, without optional fields that are not set."""
        # PEFT calls this method to get the model type before it looks up target modules in its tables.
        register_with_peft(type(self))
        values = super().to_dict()
        return {name: value for name, value in values.items() if value is not None or name not in OPTIONAL_FIELDS}


def supports_decoder_cache(config: Any) -> bool:
    """Return True if a decoder with this configuration supports a cache of past keys and values.

    The dynamic projections "m2l" and "m2w" also require past inputs, which are not in the cache. In cross-attention,
    these inputs are the encoder outputs, which are available unless the cache stores their latent.
    """
    if not hasattr(config, DYNAMIC):
        return True
    has_latent = get_projection_rank(getattr(config, "cross_kv_lora_rank", None), config.hidden_size) is not None
    return all(
        supports_cache(get_dynamic_terms(config, prefix)) for prefix in ("", *(("cross_",) if has_latent else ()))
    )


@dataclass(kw_only=True, repr=False)
@with_variant_fields("cross_", inherits=True)
class CrossAttentionConfigMixin(AttnVariantConfigMixin):
    """The fields of `AttnVariantConfigMixin` and additional fields for cross-attention.

    Args:
        cross_talking_heads, cross_num_softmax_heads, cross_num_value_heads, cross_talking_heads_init,
        cross_talking_heads_dynamic: the counterparts of the fields without `cross_`, for cross-attention. If any of
            these five fields is set, cross-attention ignores the fields without `cross_`. To disable talking heads in
            cross-attention, set `cross_talking_heads` to "none".
        cross_score_function: the `score_function` of cross-attention. None means the value of `score_function`, and
            "none" means dot products.
    """


@dataclass(kw_only=True, repr=False)
@with_variant_fields("encoder_", "cross_")
class EncoderDecoderConfigMixin(CrossAttentionConfigMixin):
    """The fields of `CrossAttentionConfigMixin` for the decoder, and additional fields for the encoder.

    The fields without a prefix apply to the decoder. `num_key_value_heads` applies to its self-attention and
    cross-attention, as in arXiv 2305.13245, section 2.2.

    Args:
        encoder_num_key_value_heads: the number of key/value heads per encoder layer. None means the number of query
            heads (MHA).
        encoder_kv_lora_rank: the `kv_lora_rank` of the encoder layers.
        cross_kv_lora_rank: the rank of the latent that is computed from the encoder outputs and shared by all decoder
            layers. If it is the width of the encoder outputs, the encoder outputs themselves are cached, and the model
            outputs do not change.
        encoder_attention_pattern, encoder_attention_window, encoder_attention_dilation, encoder_num_global_tokens,
        encoder_attention_block_size, encoder_num_random_blocks, encoder_attention_seed, encoder_num_summary_tokens,
        encoder_split_attention_heads: the pattern of the encoder. Cross-attention has no pattern and attends to all
            encoder outputs.
        encoder_talking_heads, encoder_num_softmax_heads, encoder_num_value_heads, encoder_talking_heads_init,
        encoder_talking_heads_dynamic, encoder_score_function: the counterparts of the fields with `cross_`, for the
            encoder.
        encoder_attention_kernel, cross_attention_kernel: the `attention_kernel` of the encoder and of cross-attention.
    """

    encoder_decoder_layers: ClassVar[tuple[str, str]] = ("num_hidden_layers", "num_hidden_layers")
    encoder_decoder_heads: ClassVar[tuple[str, str]] = ("num_attention_heads", "num_attention_heads")

    def get_query_heads_field(self, kv_heads_field: str = "num_key_value_heads") -> str:
        """Return the name of the query heads field that corresponds to a key/value heads field."""
        encoder, decoder = self.encoder_decoder_heads
        return encoder if kv_heads_field.startswith("encoder_") else decoder

    def get_num_layers(self, name: str) -> int:
        """Return the number of encoder or decoder layers for which a field may have different values."""
        encoder, decoder = self.encoder_decoder_layers
        return getattr(self, encoder if name.startswith("encoder_") else decoder)
