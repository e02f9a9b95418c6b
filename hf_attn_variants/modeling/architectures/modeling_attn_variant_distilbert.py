"""DistilBERT models with attention variants."""

from typing import Any

from ..attention.attention_mixin import AttentionVariantMixin
from ..attention.attention_sites import AttentionSite
from ..attention.variant_mixins import AttnVariantModelMixin
from ..mechanisms.sinusoidal_positions import PositionEmbeddingsMixin
from ..transformers_internals import collect_variant_classes, guarded_imports
from .configuration_attn_variants import AttnVariantDistilBertConfig

with guarded_imports():
    from transformers import (
        DistilBertForMaskedLM,
        DistilBertForMultipleChoice,
        DistilBertForQuestionAnswering,
        DistilBertForSequenceClassification,
        DistilBertForTokenClassification,
        DistilBertModel,
        DistilBertPreTrainedModel,
    )
    from transformers.models.distilbert.modeling_distilbert import DistilBertSelfAttention, Embeddings

__all__ = [
    "AttnVariantDistilBertForMaskedLM",
    "AttnVariantDistilBertForMultipleChoice",
    "AttnVariantDistilBertForQuestionAnswering",
    "AttnVariantDistilBertForSequenceClassification",
    "AttnVariantDistilBertForTokenClassification",
    "AttnVariantDistilBertModel",
    "AttnVariantDistilBertPreTrainedModel",
]


class AttnVariantDistilBertSelfAttention(AttentionVariantMixin, DistilBertSelfAttention):
    """DistilBERT attention with k key/value heads and, if configured, a latent or talking heads."""

    roles = ("states", "mask")
    transformers_attributes = ("dropout", "is_causal", "scaling")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Attend within hidden states [b, n, dim]; see `DistilBertSelfAttention.forward` for the arguments."""
        states, mask = self.arguments.read(args, kwargs)
        dynamic = self.prepare_variant_inputs(states, None, None, kwargs)
        if not self.owns_projections:
            parent: Any = super()
            return parent.forward(*args, **kwargs, **dynamic)
        _, others = self.arguments.split(args, kwargs)
        linears, dropout = (self.q_lin, self.k_lin, self.v_lin), self.dropout.p
        output, weights = self.attend_with_projections(linears, states, mask, dropout, **others, **dynamic)
        return self.out_lin(output), weights


class AttnVariantDistilBertEmbeddings(PositionEmbeddingsMixin, Embeddings):
    """DistilBERT embeddings with learned or sinusoidal positions."""

    roles = ("ids", "embedded", "positions")


class AttnVariantDistilBertPreTrainedModel(AttnVariantModelMixin, DistilBertPreTrainedModel):
    """Base class of the DistilBERT models with variant attention. See Transformers for the original models."""

    config_class = AttnVariantDistilBertConfig
    attention_sites = (
        AttentionSite(
            "self",
            r"transformer\.layer\.(\d+)\.attention",
            query="q_lin",
            key="k_lin",
            value="v_lin",
            output="out_lin",
            rank_field="kv_lora_rank",
            latent="kv_a_proj",
        ),
    )


class AttnVariantDistilBertModel(AttnVariantDistilBertPreTrainedModel, DistilBertModel):
    """`DistilBertModel` with variant attention."""


AttnVariantDistilBertPreTrainedModel.variant_classes = collect_variant_classes(globals())


class AttnVariantDistilBertForMaskedLM(AttnVariantDistilBertPreTrainedModel, DistilBertForMaskedLM):
    """`DistilBertForMaskedLM` with variant attention."""


class AttnVariantDistilBertForSequenceClassification(
    AttnVariantDistilBertPreTrainedModel, DistilBertForSequenceClassification
):
    """`DistilBertForSequenceClassification` with variant attention."""


class AttnVariantDistilBertForMultipleChoice(AttnVariantDistilBertPreTrainedModel, DistilBertForMultipleChoice):
    """`DistilBertForMultipleChoice` with variant attention."""


class AttnVariantDistilBertForTokenClassification(
    AttnVariantDistilBertPreTrainedModel, DistilBertForTokenClassification
):
    """`DistilBertForTokenClassification` with variant attention."""


class AttnVariantDistilBertForQuestionAnswering(AttnVariantDistilBertPreTrainedModel, DistilBertForQuestionAnswering):
    """`DistilBertForQuestionAnswering` with variant attention."""
