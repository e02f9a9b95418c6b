"""The declaration of EuroBERT."""

from transformers import EuroBertConfig

from ..modeling.attention.attention_sites import AttentionSite
from ..modeling.transformers_internals import get_auto_class_names
from .native_config import NativeConfigMixin


class NativeEuroBertConfig(NativeConfigMixin, EuroBertConfig):
    """Configuration for EuroBERT with the interface of variant configurations."""

    transformers_class = EuroBertConfig
    transformers_model_types = ("eurobert",)
    head_dim_field = "head_dim"
    auto_classes = get_auto_class_names("eurobert")
    attention_sites = (
        AttentionSite("self", r"layers\.(\d+)\.self_attn", "q_proj", "k_proj", "v_proj", "o_proj", rotary="half"),
    )
