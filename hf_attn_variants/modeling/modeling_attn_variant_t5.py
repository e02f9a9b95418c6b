"""T5 and mT5 with multi-query, grouped-query and talking-heads attention: upstream's heads, our attention inside."""

from typing import Any

import torch
from torch import nn
from transformers import (
    T5EncoderModel,
    T5ForConditionalGeneration,
    T5ForQuestionAnswering,
    T5ForSequenceClassification,
    T5ForTokenClassification,
    T5Model,
    T5PreTrainedModel,
)
from transformers.cache_utils import EncoderDecoderCache
from transformers.models.t5.modeling_t5 import T5Attention, T5Stack

from .attention_sites import AttentionHeads, AttentionSite
from .attention_variants import attention_function
from .configuration_attn_variants import AttnVariantT5Config
from .encoder_decoder_mixins import BeamsShareMemory, MakesCrossLatent
from .latent_attention import attend_to_latent
from .variant_mixins import AttentionVariantMixin, AttnVariantModelMixin

__all__ = [
    "AttnVariantT5EncoderModel",
    "AttnVariantT5ForConditionalGeneration",
    "AttnVariantT5ForQuestionAnswering",
    "AttnVariantT5ForSequenceClassification",
    "AttnVariantT5ForTokenClassification",
    "AttnVariantT5Model",
    "AttnVariantT5PreTrainedModel",
]

PROJECTIONS = {"query": "q", "key": "k", "value": "v", "output": "o"}


class AttnVariantT5Attention(AttentionVariantMixin, T5Attention):
    """T5's self- or cross-attention with k key/value heads and, where asked for, talking heads.

    The relative position bias belongs to the softmax heads: it is added after P_l (arXiv 2003.02436, section 3).
    """

    def install_variant(self, config: Any, heads: AttentionHeads, query_dim: int, memory_dim: int) -> None:
        """Note the head counts, add the talking-heads parameters and give the position bias the softmax heads."""
        super().install_variant(config, heads, query_dim, memory_dim)
        if self.has_relative_attention_bias and heads.softmax != heads.query:
            like = self.relative_attention_bias.weight
            self.relative_attention_bias = nn.Embedding(
                like.shape[0], heads.softmax, dtype=like.dtype, device=like.device
            )

    def forward(
        self,
        hidden_states: torch.Tensor,
        mask: torch.Tensor | None = None,
        key_value_states: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Attend within `hidden_states` [b, n, d_model], or from them to `key_value_states` [b, m, d_model].

        As upstream's `T5Attention.forward`, except that an attention without relative positions has no position bias,
        where upstream builds a bias of zeros and adds it in every layer and decoding step.

        Returns:
            The outputs [b, n, d_model], the position bias [1, h, n, m] or None, and the weights or None.
        """
        dynamic = self.variant_inputs(hidden_states, key_value_states, past_key_values, kwargs)
        makes_bias = position_bias is None and self.has_relative_attention_bias
        past_length = _past_length(past_key_values, self.layer_idx) if makes_bias else 0
        query = self._heads(self.q(hidden_states))  # [b, h_k, n, d]
        if self.heads.rank is None:
            key, value = self._keys_and_values(hidden_states, key_value_states, past_key_values)  # [b, k, m, d]
            memory_length = key.shape[2]
        else:
            latent, layer = self.latent_of(hidden_states, key_value_states, past_key_values)  # [b, 1, m, r]
            memory_length = latent.shape[2]
        if makes_bias:
            # Heads are its last axis in memory; fused kernels on CUDA want keys to be, and all layers share it.
            position_bias = self.compute_bias(query.shape[2], memory_length, query.device, past_length).contiguous()
        bias = position_bias
        if bias is not None and not self.is_own:
            # Upstream's flex attention indexes the bias by the batch: one row of it would be read out of bounds.
            bias = bias.expand(query.shape[0], -1, -1, -1)
        options = {"dropout": self.dropout if self.training else 0.0, "scaling": self.scaling, "position_bias": bias}
        options |= kwargs | dynamic
        if self.heads.rank is None:
            attend = attention_function(self.implementation)
            output, weights = attend(self, query, key, value, mask, **options)
        else:
            output, weights = attend_to_latent(self, query, latent, mask, (self.k, self.v), layer, **options)
        return self.o(output.flatten(2)), position_bias, weights

    def _heads(self, states: torch.Tensor) -> torch.Tensor:
        batch, length, _ = states.shape
        return states.view(batch, length, -1, self.key_value_proj_dim).transpose(1, 2)

    def _keys_and_values(
        self, states: torch.Tensor, memory: torch.Tensor | None, cache: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        is_cross_attention, seen = memory is not None, {}
        if isinstance(cache, EncoderDecoderCache):
            seen = cache.is_updated if is_cross_attention else seen
            cache = cache.cross_attention_cache if is_cross_attention else cache.self_attention_cache
        if seen.get(self.layer_idx):
            # The memory does not change between decoding steps.
            return cache.layers[self.layer_idx].keys, cache.layers[self.layer_idx].values
        memory = states if memory is None else memory
        key, value = self._heads(self.k(memory)), self._heads(self.v(memory))
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
            seen[self.layer_idx] = True
        return key, value


class AttnVariantT5PreTrainedModel(AttnVariantModelMixin, T5PreTrainedModel):
    """The base of every T5 model and head here; upstream's class without the prefix says what each does."""

    config_class = AttnVariantT5Config
    attention_sites = (
        AttentionSite(
            "encoder",
            r"encoder\.block\.(\d+)\.layer\.0\.SelfAttention",
            stack="encoder",
            kv_heads_field="encoder_num_key_value_heads",
            rank_field="encoder_kv_lora_rank",
            latent="kv_a_proj",
            **PROJECTIONS,
        ),
        AttentionSite(
            "decoder",
            r"decoder\.block\.(\d+)\.layer\.0\.SelfAttention",
            stack="decoder",
            rank_field="kv_lora_rank",
            latent="kv_a_proj",
            **PROJECTIONS,
        ),
        AttentionSite(
            "cross",
            r"decoder\.block\.(\d+)\.layer\.1\.EncDecAttention",
            stack="decoder",
            is_cross_attention=True,
            rank_field="cross_kv_lora_rank",
            latent="decoder.cross_kv_a_proj",
            shares_latent=True,
            **PROJECTIONS,
        ),
    )


class AttnVariantT5Stack(MakesCrossLatent, AttnVariantT5PreTrainedModel, T5Stack):
    """`T5Stack`, the encoder or decoder inside the models below, with variant attention."""


class AttnVariantT5Model(AttnVariantT5PreTrainedModel, T5Model):
    """`T5Model` with variant attention."""


class AttnVariantT5EncoderModel(AttnVariantT5PreTrainedModel, T5EncoderModel):
    """`T5EncoderModel` with variant attention."""


AttnVariantT5PreTrainedModel.variant_classes = {
    T5Model: AttnVariantT5Model,
    T5EncoderModel: AttnVariantT5EncoderModel,
    T5Stack: AttnVariantT5Stack,
    T5Attention: AttnVariantT5Attention,
}


class AttnVariantT5ForConditionalGeneration(
    BeamsShareMemory, AttnVariantT5PreTrainedModel, T5ForConditionalGeneration
):
    """`T5ForConditionalGeneration` with variant attention, from T5 and mT5 checkpoints alike."""


class AttnVariantT5ForSequenceClassification(AttnVariantT5PreTrainedModel, T5ForSequenceClassification):
    """`T5ForSequenceClassification` with variant attention."""


class AttnVariantT5ForTokenClassification(AttnVariantT5PreTrainedModel, T5ForTokenClassification):
    """`T5ForTokenClassification` (the encoder with a classifier) with variant attention."""


class AttnVariantT5ForQuestionAnswering(AttnVariantT5PreTrainedModel, T5ForQuestionAnswering):
    """`T5ForQuestionAnswering` with variant attention."""


def _past_length(cache: Any, layer: int) -> int | torch.Tensor:
    if cache is None:
        return 0
    length = cache.get_seq_length(layer)
    # A static cache counts in place, and the bias is made after the update.
    return length.clone() if isinstance(length, torch.Tensor) else length
