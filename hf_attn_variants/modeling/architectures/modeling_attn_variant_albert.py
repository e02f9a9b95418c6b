"""ALBERT models with attention variants."""

import re
from typing import Any

from torch import Tensor

from ..attention.attention_mixin import AttentionVariantMixin
from ..attention.attention_sites import AttentionSite
from ..attention.model_mixin import AttnVariantModelMixin
from ..mechanisms.sinusoidal_positions import PositionEmbeddingsMixin
from ..transformers_internals import collect_variant_classes, guarded_imports
from .configuration_attn_variants import AttnVariantAlbertConfig

with guarded_imports():
    from transformers import (
        AlbertForMaskedLM,
        AlbertForMultipleChoice,
        AlbertForPreTraining,
        AlbertForQuestionAnswering,
        AlbertForSequenceClassification,
        AlbertForTokenClassification,
        AlbertModel,
        AlbertPreTrainedModel,
    )
    from transformers.modeling_layers import GradientCheckpointingLayer
    from transformers.models.albert.modeling_albert import AlbertAttention, AlbertEmbeddings, AlbertLayer

__all__ = [
    "AttnVariantAlbertForMaskedLM",
    "AttnVariantAlbertForMultipleChoice",
    "AttnVariantAlbertForPreTraining",
    "AttnVariantAlbertForQuestionAnswering",
    "AttnVariantAlbertForSequenceClassification",
    "AttnVariantAlbertForTokenClassification",
    "AttnVariantAlbertModel",
    "AttnVariantAlbertPreTrainedModel",
]


class AttnVariantAlbertAttention(AttentionVariantMixin, AlbertAttention):
    """`AlbertAttention` with grouped key/value heads and, if configured, a latent or talking heads."""

    roles = ("states", "mask")
    dropout_name = "attention_dropout"
    transformers_attributes = ("LayerNorm", "attention_dropout", "is_causal", "output_dropout", "scaling")

    def compute_output(self, head_outputs: Tensor, states: Tensor) -> Tensor:
        """Apply the output projection, residual connection and layer norm to the head outputs [b, n, h_v d_v]."""
        return self.LayerNorm(states + self.output_dropout(self.dense(head_outputs)))


class AttnVariantAlbertLayer(GradientCheckpointingLayer, AlbertLayer):
    """`AlbertLayer` with gradient checkpointing, which the Transformers class does not support."""


class AttnVariantAlbertEmbeddings(PositionEmbeddingsMixin, AlbertEmbeddings):
    """ALBERT embeddings with learned or sinusoidal positions."""

    roles = ("ids", "embedded", "positions", "types")


class AttnVariantAlbertPreTrainedModel(AttnVariantModelMixin, AlbertPreTrainedModel):
    """Base class of ALBERT models with variant attention. It extends `AlbertPreTrainedModel`.

    All layers in a group share one attention module, which is therefore stored and converted only once.
    """

    config_class = AttnVariantAlbertConfig
    supports_gradient_checkpointing = True
    attention_sites = (
        AttentionSite(
            "self",
            r"encoder\.albert_layer_groups\.(\d+)\.albert_layers\.(\d+)\.attention",
            query="query",
            key="key",
            value="value",
            output="dense",
            rank_field="kv_lora_rank",
            latent="kv_a_proj",
        ),
    )

    @classmethod
    def count_module_runs(cls, config: Any, path: str) -> int:
        """Return how many times a forward pass runs a module: once for each layer that uses the module's group."""
        group = re.match(r"encoder\.albert_layer_groups\.(\d+)\.", path)
        if group is None:
            return 1
        layers_per_group = config.num_hidden_layers / config.num_hidden_groups
        return sum(int(layer / layers_per_group) == int(group[1]) for layer in range(config.num_hidden_layers))


class AttnVariantAlbertModel(AttnVariantAlbertPreTrainedModel, AlbertModel):
    """`AlbertModel` with variant attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantAlbertConfig, AttnVariantAlbertModel
    >>> config = AttnVariantAlbertConfig(hidden_size=64, num_attention_heads=8, num_key_value_heads=2)
    >>> model = AttnVariantAlbertModel(config)
    ```
    """


AttnVariantAlbertPreTrainedModel.variant_classes = collect_variant_classes(globals())


class AttnVariantAlbertForPreTraining(AttnVariantAlbertPreTrainedModel, AlbertForPreTraining):
    """`AlbertForPreTraining` (masked language modeling and sentence order) with variant attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantAlbertConfig, AttnVariantAlbertForPreTraining
    >>> config = AttnVariantAlbertConfig(hidden_size=64, num_attention_heads=8, num_key_value_heads=2)
    >>> model = AttnVariantAlbertForPreTraining(config)
    ```
    """


class AttnVariantAlbertForMaskedLM(AttnVariantAlbertPreTrainedModel, AlbertForMaskedLM):
    """`AlbertForMaskedLM` with variant attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantAlbertConfig, AttnVariantAlbertForMaskedLM
    >>> config = AttnVariantAlbertConfig(hidden_size=64, num_attention_heads=8, num_key_value_heads=2)
    >>> model = AttnVariantAlbertForMaskedLM(config)
    ```
    """


class AttnVariantAlbertForSequenceClassification(AttnVariantAlbertPreTrainedModel, AlbertForSequenceClassification):
    """`AlbertForSequenceClassification` with variant attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantAlbertConfig, AttnVariantAlbertForSequenceClassification
    >>> config = AttnVariantAlbertConfig(hidden_size=64, num_attention_heads=8, num_key_value_heads=2)
    >>> model = AttnVariantAlbertForSequenceClassification(config)
    ```
    """


class AttnVariantAlbertForMultipleChoice(AttnVariantAlbertPreTrainedModel, AlbertForMultipleChoice):
    """`AlbertForMultipleChoice` with variant attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantAlbertConfig, AttnVariantAlbertForMultipleChoice
    >>> config = AttnVariantAlbertConfig(hidden_size=64, num_attention_heads=8, num_key_value_heads=2)
    >>> model = AttnVariantAlbertForMultipleChoice(config)
    ```
    """


class AttnVariantAlbertForTokenClassification(AttnVariantAlbertPreTrainedModel, AlbertForTokenClassification):
    """`AlbertForTokenClassification` with variant attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantAlbertConfig, AttnVariantAlbertForTokenClassification
    >>> config = AttnVariantAlbertConfig(hidden_size=64, num_attention_heads=8, num_key_value_heads=2)
    >>> model = AttnVariantAlbertForTokenClassification(config)
    ```
    """


class AttnVariantAlbertForQuestionAnswering(AttnVariantAlbertPreTrainedModel, AlbertForQuestionAnswering):
    """`AlbertForQuestionAnswering` with variant attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantAlbertConfig, AttnVariantAlbertForQuestionAnswering
    >>> config = AttnVariantAlbertConfig(hidden_size=64, num_attention_heads=8, num_key_value_heads=2)
    >>> model = AttnVariantAlbertForQuestionAnswering(config)
    ```
    """
