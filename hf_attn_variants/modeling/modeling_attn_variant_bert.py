"""BERT with multi-query, grouped-query and talking-heads attention: upstream's heads, our attention inside."""

from typing import Any

import torch
from transformers import (
    BertForMaskedLM,
    BertForMultipleChoice,
    BertForNextSentencePrediction,
    BertForPreTraining,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertLMHeadModel,
    BertModel,
    BertPreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.bert.modeling_bert import BertCrossAttention, BertSelfAttention

from .attention_sites import AttentionSite
from .configuration_attn_variants import AttnVariantBertConfig
from .latent_attention import attend_to_latent
from .variant_mixins import AttentionVariantMixin, AttnVariantModelMixin

__all__ = [
    "AttnVariantBertForMaskedLM",
    "AttnVariantBertForMultipleChoice",
    "AttnVariantBertForNextSentencePrediction",
    "AttnVariantBertForPreTraining",
    "AttnVariantBertForQuestionAnswering",
    "AttnVariantBertForSequenceClassification",
    "AttnVariantBertForTokenClassification",
    "AttnVariantBertLMHeadModel",
    "AttnVariantBertModel",
    "AttnVariantBertPreTrainedModel",
]

PROJECTIONS = {
    "query": "self.query",
    "key": "self.key",
    "value": "self.value",
    "output": "output.dense",
    "core": "self",
}


class AttnVariantBertSelfAttention(AttentionVariantMixin, BertSelfAttention):
    """BERT's self-attention with k key/value heads and, where asked for, talking heads."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend within `hidden_states` [b, n, hidden size]; see upstream's `BertSelfAttention.forward`."""
        dynamic = self.variant_inputs(hidden_states, None, past_key_values, kwargs)
        if self.heads.rank is None:
            return super().forward(hidden_states, attention_mask, past_key_values, **kwargs, **dynamic)
        query = self.query(hidden_states).unflatten(-1, (-1, self.attention_head_size)).transpose(1, 2)
        latent = self.own_latent(hidden_states, past_key_values)
        options = {"dropout": self.dropout.p if self.training else 0.0, "scaling": self.scaling} | kwargs | dynamic
        output, weights = attend_to_latent(self, query, latent, attention_mask, (self.key, self.value), **options)
        return output.flatten(2), weights


class AttnVariantBertCrossAttention(AttentionVariantMixin, BertCrossAttention):
    """BERT's cross-attention with k key/value heads and, where asked for, talking heads."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend from `hidden_states` to `encoder_hidden_states`; see upstream's `BertCrossAttention.forward`."""
        dynamic = self.variant_inputs(hidden_states, encoder_hidden_states, past_key_values, kwargs)
        return super().forward(
            hidden_states, encoder_hidden_states, attention_mask, past_key_values, **kwargs, **dynamic
        )


class AttnVariantBertPreTrainedModel(AttnVariantModelMixin, BertPreTrainedModel):
    """The base of every BERT model and head here; upstream's class without the prefix says what each does."""

    config_class = AttnVariantBertConfig
    attention_sites = (
        AttentionSite(
            "self",
            r"encoder\.layer\.(\d+)\.attention",
            rank_field="kv_lora_rank",
            latent="self.kv_a_proj",
            **PROJECTIONS,
        ),
        AttentionSite(
            "cross", r"encoder\.layer\.(\d+)\.crossattention", stack="decoder", is_cross_attention=True, **PROJECTIONS
        ),
    )


class AttnVariantBertModel(AttnVariantBertPreTrainedModel, BertModel):
    """`BertModel` with variant attention."""


AttnVariantBertPreTrainedModel.variant_classes = {
    BertModel: AttnVariantBertModel,
    BertSelfAttention: AttnVariantBertSelfAttention,
    BertCrossAttention: AttnVariantBertCrossAttention,
}


class AttnVariantBertForPreTraining(AttnVariantBertPreTrainedModel, BertForPreTraining):
    """`BertForPreTraining` (masked language modelling and next-sentence prediction) with variant attention."""


class AttnVariantBertForMaskedLM(AttnVariantBertPreTrainedModel, BertForMaskedLM):
    """`BertForMaskedLM` with variant attention."""


class AttnVariantBertLMHeadModel(AttnVariantBertPreTrainedModel, BertLMHeadModel):
    """`BertLMHeadModel` (the decoder, with cross-attention where the configuration says so) with variant attention."""


class AttnVariantBertForNextSentencePrediction(AttnVariantBertPreTrainedModel, BertForNextSentencePrediction):
    """`BertForNextSentencePrediction` with variant attention."""


class AttnVariantBertForSequenceClassification(AttnVariantBertPreTrainedModel, BertForSequenceClassification):
    """`BertForSequenceClassification` with variant attention."""


class AttnVariantBertForMultipleChoice(AttnVariantBertPreTrainedModel, BertForMultipleChoice):
    """`BertForMultipleChoice` with variant attention."""


class AttnVariantBertForTokenClassification(AttnVariantBertPreTrainedModel, BertForTokenClassification):
    """`BertForTokenClassification` with variant attention."""


class AttnVariantBertForQuestionAnswering(AttnVariantBertPreTrainedModel, BertForQuestionAnswering):
    """`BertForQuestionAnswering` with variant attention."""


# By the class names in this table, upstream's Trainer knows whose labels it has to shift (where it smooths them) and
# the text-generation pipeline which models generate.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[AttnVariantBertConfig.model_type] = AttnVariantBertLMHeadModel.__name__
