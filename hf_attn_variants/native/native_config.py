"""The mixin that gives a Transformers configuration the interface of variant configurations."""

from collections.abc import Iterable
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from ..modeling.attention.attention_sites import AttentionSite
from ..modeling.fields.composition import ROTARY_LATENT_REASON
from ..modeling.fields.field_table import VARIANT_FIELDS
from ..modeling.fields.variant_config import AttnVariantConfigMixin
from ..modeling.variant_names import CONFIG_FORMAT

# A variant configuration is saved with code and selects the attention functions of this package. A native one does
# neither.
_PlainProperties: Any = PreTrainedConfig


class NativeConfigMixin(AttnVariantConfigMixin):
    """A mixin for architectures whose Transformers configuration has a working `num_key_value_heads`.

    Conversion and inspection use these configurations like those of variants. Saved configurations and models are
    those of Transformers, without code. The mixin must precede `CrossAttentionConfigMixin` or
    `EncoderDecoderConfigMixin`, if any, and the Transformers class in the bases.

    Class attributes:
        transformers_class: the configuration class in Transformers.
        attention_sites: the declarations of all attention modules.
        auto_classes: the name of the Transformers model class for each Auto class.
    """

    transformers_class: ClassVar[type[PreTrainedConfig]]
    attention_sites: ClassVar[tuple[AttentionSite, ...]] = ()

    _attn_implementation = _PlainProperties._attn_implementation
    output_attentions = _PlainProperties.output_attentions
    _experts_implementation_internal = None  # an ordinary attribute, as in `PreTrainedConfig`

    def __post_init__(self, **kwargs: Any) -> None:
        self.attn_variants_format = CONFIG_FORMAT
        super().__post_init__(**kwargs)

    @classmethod
    def get_variant_fields(cls) -> tuple[str, ...]:
        """Return the key/value head fields, which are the only ones that the Transformers class supports."""
        return cls.get_kv_heads_fields()

    @classmethod
    def check_field_names(cls, names: Iterable[str]) -> None:
        """Check that no keyword is a field that the Transformers class does not support, or a misspelled field.

        Raises:
            ValueError: if there is such a keyword. The message contains the reason.
        """
        names, supported = list(names), " and ".join(f"`{field}`" for field in cls.get_variant_fields())
        for name in names:
            if any(site.rotary and name == f"{site.stack_prefix}kv_lora_rank" for site in cls.attention_sites):
                raise ValueError(f"`{name}` must not be set in a model with rotary positions. {ROTARY_LATENT_REASON}")
            if name not in cls.get_variant_fields() and any(name in row.names for row in VARIANT_FIELDS):
                raise ValueError(
                    f"`{name}` is not supported for {cls.model_type!r} models, whose Transformers class only supports "
                    f"{supported}. Architectures with a class in hf_attn_variants, such as BERT and T5, support it."
                )
        super().check_field_names(names)

    @classmethod
    def get_rank_fields(cls) -> tuple[str, ...]:
        """Return no fields because the Transformers class does not support latents."""
        return ()

    def get_window(self, site: AttentionSite, module: Any) -> int | None:
        """Return the window size of an attention module, or None if it attends to all tokens."""
        return None

    @classmethod
    def build_auto_map(cls) -> dict[str, str]:
        """Return an empty dictionary because no code is saved."""
        return {}

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as a dictionary without the fields that the Transformers class lacks."""
        added = self._list_added_fields()
        return {name: value for name, value in super().to_dict().items() if name not in added}

    def save_pretrained(self, save_directory: Any, push_to_hub: bool = False, **kwargs: Any) -> Any:
        """Save the configuration of the Transformers class."""
        plain = self.transformers_class.from_dict(self.to_dict())
        return plain.save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)

    def change_to_transformers_class(self) -> None:
        """Turn this object into an instance of the Transformers class.

        All modules of a model share its configuration, so replacing the object in the model would not be enough.
        """
        for name in self._list_added_fields() & vars(self).keys():
            del self.__dict__[name]
        object.__setattr__(self, "__class__", self.transformers_class)

    @classmethod
    def _list_added_fields(cls) -> set[str]:
        """Return the names of all values that the Transformers configuration does not have."""
        return {*cls.__dataclass_fields__, "auto_map"} - {*cls.transformers_class.__dataclass_fields__}
