"""The architectures that the model tests run over: a new architecture is one row of this table."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

import hf_attn_variants

BATCH, LENGTH, CHOICES, VOCABULARY = 3, 9, 2, 60

# Every kind of variant, with head counts that suit the twelve heads of the tiny configurations.
VARIANTS: dict[str, dict[str, Any]] = {
    "mha": {},
    "gqa": {"num_key_value_heads": 4},
    "mqa": {"num_key_value_heads": 1},
    "talking": {"talking_heads": "both"},
    "logits": {"talking_heads": "logits", "talking_heads_init": "random", "num_softmax_heads": 8},
    "weights": {"talking_heads": "weights", "talking_heads_init": "random", "num_value_heads": 8},
    "gqa_talking": {
        "num_key_value_heads": 4,
        "talking_heads": "both",
        "talking_heads_init": "random",
        "num_softmax_heads": 6,
        "num_value_heads": 8,
    },
    "dynamic": {"talking_heads": "both", "talking_heads_dynamic": ["x2l", "m2l", "x2w", "m2w"]},
    "latent": {"num_key_value_heads": 4, "kv_lora_rank": 16},
    "values": {"num_key_value_heads": 4, "value_head_dim": 6},
}


@dataclass(frozen=True)
class Head:
    """A model class of an architecture, with its labels, additional configuration fields and inputs."""

    labels: Callable[[], dict[str, torch.Tensor]] = dict
    config: dict[str, Any] = field(default_factory=dict)
    inputs: Callable[[], dict[str, torch.Tensor]] | None = None


@dataclass(frozen=True)
class Architecture:
    """One architecture: its configuration classes, a tiny configuration and its heads by Transformers' class name."""

    name: str
    config_class: type
    upstream_config_class: type
    tiny: dict[str, Any]
    heads: dict[str, Head]
    inputs: Callable[[], dict[str, torch.Tensor]]
    variants: dict[str, dict[str, Any]] = field(default_factory=dict)  # additional fields of a variant

    def make_config(self, variant: str = "mha", head: str | None = None, **fields: Any) -> Any:
        """Return a tiny configuration of a variant, with the fields that the head requires."""
        extra = self.heads[head].config if head else {}
        variant_fields = self.variants.get(variant, {})
        return self.config_class(**{**self.tiny, **extra, **VARIANTS[variant], **variant_fields, **fields})

    def make_model(self, head: str, variant: str = "mha", seed: int = 0, **fields: Any) -> Any:
        """Return a tiny model in evaluation mode whose attention parameters differ from their initial values."""
        torch.manual_seed(seed)
        model = getattr(hf_attn_variants, f"AttnVariant{head}")(self.make_config(variant, head, **fields)).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
        model.tie_weights()
        return model

    def make_upstream_model(self, head: str, seed: int = 0, **fields: Any) -> Any:
        """Return Transformers' tiny model of the same shape in evaluation mode."""
        torch.manual_seed(seed)
        config = self.upstream_config_class(**{**self.tiny, **self.heads[head].config, **fields})
        return getattr(transformers, head)(config).eval()

    def make_batch(self, head: str, labels: bool = False) -> dict[str, torch.Tensor]:
        """Return inputs for a head, padded on the right, with labels if `labels` is set."""
        torch.manual_seed(1)
        inputs = (self.heads[head].inputs or self.inputs)()
        return inputs | (self.heads[head].labels() if labels else {})


def make_token_ids(*shape: int) -> torch.Tensor:
    """Return random ids that are not special ones."""
    return torch.randint(5, VOCABULARY, shape or (BATCH, LENGTH))


def make_padding_mask() -> torch.Tensor:
    """Return a mask [b, n] whose first row is full; the other rows are padded on the right."""
    return (torch.arange(LENGTH) < torch.tensor([LENGTH, LENGTH - 3, 2])[:, None]).long()


def make_text_inputs() -> dict[str, torch.Tensor]:
    """Return token ids and their mask."""
    return {"input_ids": make_token_ids(), "attention_mask": make_padding_mask()}


def with_latents(model: Any, **ranks: int) -> Any:
    """Return a copy of a model whose keys and values come from latents as wide as the input, with equal outputs."""
    config = model.config_class.from_upstream(model.config, **ranks)
    exact = type(model)(config).eval()
    exact.load_state_dict(model.state_dict())
    return exact


def make_source_and_target() -> dict[str, torch.Tensor]:
    """Return token ids for the encoder and the decoder, and the mask of the encoder's ids."""
    return make_text_inputs() | {"decoder_input_ids": make_token_ids()}


def _make_text_with_end() -> dict[str, torch.Tensor]:
    # T5 classifies a text by the hidden state of its end token, so each row contains one end token.
    inputs = make_text_inputs()
    inputs["input_ids"][:, 1] = 1
    return inputs


def make_choices() -> dict[str, torch.Tensor]:
    """Return several texts per example."""
    return {name: value.unsqueeze(1).repeat(1, CHOICES, 1) for name, value in make_text_inputs().items()}


def make_class_labels() -> dict[str, torch.Tensor]:
    """Return one label per text."""
    return {"labels": torch.tensor([0, 1, 1])}


def make_token_labels() -> dict[str, torch.Tensor]:
    """Return one token id per token as labels."""
    return {"labels": make_token_ids()}


def make_token_class_labels() -> dict[str, torch.Tensor]:
    """Return one of two class labels per token."""
    return {"labels": make_token_ids() % 2}


def make_span_labels() -> dict[str, torch.Tensor]:
    """Return the first and the last token of an answer."""
    return {"start_positions": torch.tensor([1, 2, 0]), "end_positions": torch.tensor([3, 4, 1])}


BERT = Architecture(
    name="bert",
    config_class=hf_attn_variants.AttnVariantBertConfig,
    upstream_config_class=transformers.BertConfig,
    tiny={
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 12,
        "intermediate_size": 37,
        "max_position_embeddings": 32,
    },
    inputs=make_text_inputs,
    heads={
        "BertModel": Head(),
        "BertForPreTraining": Head(lambda: make_token_labels() | {"next_sentence_label": torch.tensor([0, 1, 1])}),
        "BertForMaskedLM": Head(make_token_labels),
        "BertLMHeadModel": Head(make_token_labels, config={"is_decoder": True}),
        "BertForNextSentencePrediction": Head(make_class_labels),
        "BertForSequenceClassification": Head(make_class_labels),
        "BertForMultipleChoice": Head(make_class_labels, inputs=make_choices),
        "BertForTokenClassification": Head(make_token_class_labels),
        "BertForQuestionAnswering": Head(make_span_labels),
    },
)

ALBERT = Architecture(
    name="albert",
    config_class=hf_attn_variants.AttnVariantAlbertConfig,
    upstream_config_class=transformers.AlbertConfig,
    tiny={
        "vocab_size": VOCABULARY,
        "embedding_size": 16,
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 12,
        "intermediate_size": 37,
        "max_position_embeddings": 32,
    },
    inputs=make_text_inputs,
    heads={
        "AlbertModel": Head(),
        "AlbertForPreTraining": Head(lambda: make_token_labels() | {"sentence_order_label": torch.tensor([0, 1, 1])}),
        "AlbertForMaskedLM": Head(make_token_labels),
        "AlbertForSequenceClassification": Head(make_class_labels),
        "AlbertForMultipleChoice": Head(make_class_labels, inputs=make_choices),
        "AlbertForTokenClassification": Head(make_token_class_labels),
        "AlbertForQuestionAnswering": Head(make_span_labels),
    },
)

T5 = Architecture(
    name="t5",
    config_class=hf_attn_variants.AttnVariantT5Config,
    upstream_config_class=transformers.T5Config,
    # The heads together (12 x 8) are wider than the model.
    tiny={
        "vocab_size": VOCABULARY,
        "d_model": 40,
        "d_kv": 8,
        "d_ff": 37,
        "num_layers": 2,
        "num_heads": 12,
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 10,
        "decoder_start_token_id": 0,
        # T5 does not scale its logits. With a factor of 1.0, the softmax of this small model saturates, and float32
        # rounding errors exceed the tolerances.
        "initializer_factor": 0.5,
    },
    inputs=make_text_inputs,
    variants={"latent": {"cross_kv_lora_rank": 24, "encoder_kv_lora_rank": 20}},
    heads={
        "T5Model": Head(inputs=make_source_and_target),
        "T5ForConditionalGeneration": Head(make_token_labels, inputs=make_source_and_target),
        "T5EncoderModel": Head(),
        "T5ForSequenceClassification": Head(make_class_labels, inputs=_make_text_with_end),
        "T5ForTokenClassification": Head(make_token_class_labels),
        "T5ForQuestionAnswering": Head(make_span_labels),
    },
)

ARCHITECTURES: list[Architecture] = [BERT, ALBERT, T5]

# (architecture, head) pairs for parametrised tests.
HEADS = [(architecture, head) for architecture in ARCHITECTURES for head in architecture.heads]
HEAD_IDS = [head for _, head in HEADS]

# The first head of each architecture is tested with every variant. The other heads are tested with two variants that
# together change everything that a variant can change.
BASE_HEADS = {architecture.name: next(iter(architecture.heads)) for architecture in ARCHITECTURES}
HEADS_AND_VARIANTS = [
    (architecture, head, variant)
    for architecture, head in HEADS
    for variant in VARIANTS
    if head == BASE_HEADS[architecture.name] or variant in ("gqa_talking", "dynamic")
]
HEAD_AND_VARIANT_IDS = [f"{head}-{variant}" for _, head, variant in HEADS_AND_VARIANTS]
