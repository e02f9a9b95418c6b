"""ALBERT with multi-query, grouped-query and talking-heads attention: upstream's heads, our attention inside."""

import re
from typing import Any

from ..attention.attention_mixin import AttentionVariantMixin
from ..attention.attention_sites import AttentionSite
from ..attention.variant_mixins import AttnVariantModelMixin
from ..mechanisms.sinusoidal_positions import EmbeddingsMixin
from ..upstream import known_imports, variants_of
from .configuration_attn_variants import AttnVariantAlbertConfig

with known_imports():
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
    """ALBERT's attention with k key/value heads and, where asked for, talking heads."""

    roles = ("states", "mask")
    upstream_attributes = ("LayerNorm", "attention_dropout", "is_causal", "output_dropout", "scaling")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Attend within hidden states [b, n, hidden size]; arguments of upstream's `AlbertAttention.forward`."""
        states, mask = self.arguments.read(args, kwargs)
        dynamic = self.variant_inputs(states, None, None, kwargs)
        if not self.projects_itself:
            upstreams: Any = super()
            return upstreams.forward(*args, **kwargs, **dynamic)
        _, others = self.arguments.split(args, kwargs)
        maps, dropout = (self.query, self.key, self.value), self.attention_dropout.p
        output, weights = self.attend_by_maps(maps, states, mask, dropout, **others, **dynamic)
        output = self.output_dropout(self.dense(output))
        return self.LayerNorm(states + output), weights


class AttnVariantAlbertLayer(GradientCheckpointingLayer, AlbertLayer):
    """`AlbertLayer` that can be recomputed in the backward pass, which upstream's cannot."""


class AttnVariantAlbertEmbeddings(EmbeddingsMixin, AlbertEmbeddings):
    """ALBERT's embeddings, their positions learned or sinusoidal."""

    roles = ("ids", "embedded", "positions", "types")


class AttnVariantAlbertPreTrainedModel(AttnVariantModelMixin, AlbertPreTrainedModel):
    """The base of every ALBERT model and head here; upstream's class without the prefix says what each does.

    All layers of a group share one attention, so it stands in the model once and is converted once.
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
    def module_runs(cls, config: Any, path: str) -> int:
        """Return how often a forward pass goes through a module: once for each layer of its group, which share it."""
        group = re.match(r"encoder\.albert_layer_groups\.(\d+)\.", path)
        if group is None:
            return 1
        layers_per_group = config.num_hidden_layers / config.num_hidden_groups
        return sum(int(layer / layers_per_group) == int(group[1]) for layer in range(config.num_hidden_layers))


class AttnVariantAlbertModel(AttnVariantAlbertPreTrainedModel, AlbertModel):
    """`AlbertModel` with variant attention."""


AttnVariantAlbertPreTrainedModel.variant_classes = variants_of(globals())


class AttnVariantAlbertForPreTraining(AttnVariantAlbertPreTrainedModel, AlbertForPreTraining):
    """`AlbertForPreTraining` (masked language modelling and sentence order) with variant attention."""


class AttnVariantAlbertForMaskedLM(AttnVariantAlbertPreTrainedModel, AlbertForMaskedLM):
    """`AlbertForMaskedLM` with variant attention."""


class AttnVariantAlbertForSequenceClassification(AttnVariantAlbertPreTrainedModel, AlbertForSequenceClassification):
    """`AlbertForSequenceClassification` with variant attention."""


class AttnVariantAlbertForMultipleChoice(AttnVariantAlbertPreTrainedModel, AlbertForMultipleChoice):
    """`AlbertForMultipleChoice` with variant attention."""


class AttnVariantAlbertForTokenClassification(AttnVariantAlbertPreTrainedModel, AlbertForTokenClassification):
    """`AlbertForTokenClassification` with variant attention."""


class AttnVariantAlbertForQuestionAnswering(AttnVariantAlbertPreTrainedModel, AlbertForQuestionAnswering):
    """`AlbertForQuestionAnswering` with variant attention."""
