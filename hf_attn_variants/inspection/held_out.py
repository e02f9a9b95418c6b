"""Measures the loss of a variant on held-out text or audio, compared with its base model.

The measure depends on the task of the model:

- Encoder-decoders: the cross-entropy of the targets, or of the base model's transcripts.
- Language models: the cross-entropy of masked words, or of the next word.
- Classifiers: the divergence from the base model's predictions.
- Regression models and rerankers: the error in the scores.
- Encoders without a head: one minus the cosine similarity between the variant's and the base model's sentence
  embeddings (means of the last hidden states).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..conversion.calibration.batches import (
    IGNORE_INDEX,
    make_next_token_labels,
    set_length_statistics,
    with_known_encoder_outputs,
    without_known_encoder_outputs,
)
from ..conversion.calibration.examples import make_audio_batch, read_features
from ..conversion.calibration_settings import Calibration
from ..model_properties import DecoderInput, LogitsKind, get_decoder_input, get_logits_kind, ignore_saved_length_limits
from ..progress import progress_bar
from .scores import mean_pooled

MASKED_SHARE = 0.15
# {measure: description with the unit}.
MEASURES = {
    "targets": "cross-entropy of the targets, nats per token",
    "transcripts": "cross-entropy of the transcripts of the base model, nats per token",
    "masked words": "cross-entropy of masked words, nats per token",
    "next words": "cross-entropy of the next word, nats per token",
    "predictions": "divergence from the predictions of the base model, nats per prediction",
    "scores": "error of the scores, relative to the variance of those of the base model",
    "embeddings": "1 - cosine to the sentence embeddings of the base model",
}
# The measures that compare a variant's outputs with those of the base model.
COMPARED_MEASURES = ("predictions", "scores", "embeddings")
LOGITS_FIELDS = ("logits", "prediction_logits", "start_logits", "end_logits")

ModelInputs = dict[str, torch.Tensor]


@dataclass
class HeldOutSet:
    """Batches of held-out examples, with the base model's outputs if the measure needs them.

    Args:
        measure: A key of `MEASURES`.
        batches: The model inputs for each batch, including "labels" if the measure uses labels.
        source: The base model's outputs for each batch, if the measure is one of `COMPARED_MEASURES`.
        encoder: For audio, the base model's encoder. Variants with the same encoder reuse its outputs.
        is_multi_label: Whether the model predicts independent labels (multi-label classification).
    """

    measure: str
    batches: list[ModelInputs]
    source: list[list[torch.Tensor]] = field(default_factory=list)
    encoder: Any = None
    is_multi_label: bool = False

    @torch.inference_mode()
    def compute_losses(self, model: PreTrainedModel) -> torch.Tensor:
        """Return the summed loss and the number of words or predictions for each text, as float64 [texts, 2]."""
        losses, device = [], next(model.parameters()).device
        arguments = with_known_encoder_outputs if self._is_encoder_of(model) else without_known_encoder_outputs
        for i, batch in enumerate(progress_bar(self.batches, desc="held-out examples", unit="batch", leave=False)):
            inputs = arguments({name: tensor.to(device) for name, tensor in batch.items()})
            labels = inputs.get("labels") if self.measure == "targets" else inputs.pop("labels", None)
            output = model(**inputs)  # encoder-decoders compute the decoder inputs from the labels
            if labels is not None:
                losses.append(_cross_entropy(_get_logits(output)[0], labels, self.measure == "next words"))
            else:
                source = [answer.to(device) for answer in self.source[i]]
                losses.append(self._compute_difference(self.compute_answers(output, batch), source, batch))
        return torch.cat(losses).double().cpu()

    def compute_answers(self, output: Any, batch: ModelInputs) -> list[torch.Tensor]:
        """Compute the log-probabilities, scores [b, scores] or embeddings [b, D] from a model output."""
        if self.measure == "scores":
            return [output.logits.float()]
        if self.is_multi_label:  # log-probabilities that each label applies or not, [b, labels, 2]
            logits = output.logits.float()
            return [nn.functional.logsigmoid(torch.stack([logits, -logits], dim=-1))]
        if self.measure == "predictions":
            return [logits.float().log_softmax(-1) for logits in _get_logits(output)]
        states = output.last_hidden_state.float()
        mask = batch.get("attention_mask")  # audio has no padding
        mask = torch.ones_like(states[..., 0]) if mask is None else mask.to(states.device)
        return [mean_pooled(states, mask)]

    def _compute_difference(
        self, predictions: Sequence[torch.Tensor], source: Sequence[torch.Tensor], batch: ModelInputs
    ) -> torch.Tensor:
        """Return the summed difference from the base model and the number of predictions of each text, [b, 2]."""
        if self.measure == "embeddings":
            distance = 1 - nn.functional.cosine_similarity(predictions[0], source[0])
            return torch.stack([distance, torch.ones_like(distance)], 1)
        if self.measure == "scores":
            error = ((predictions[0] - source[0]).square() / self._variance.to(source[0])).mean(-1)
            return torch.stack([error, torch.ones_like(error)], 1)
        losses = []
        for actual, expected in zip(predictions, source, strict=True):
            # [b], or [b, n] for tokens or labels
            divergence = (expected.exp() * (expected - actual)).nan_to_num().sum(-1)
            if divergence.ndim == 1 or self.is_multi_label:
                divergence = divergence if divergence.ndim == 1 else divergence.mean(-1)
                losses.append(torch.stack([divergence, torch.ones_like(divergence)], 1))
                continue
            mask = batch["attention_mask"].to(divergence)  # only text models make predictions per token
            losses.append(torch.stack([(divergence * mask).sum(1), mask.sum(1)], 1))
        return torch.stack(losses).sum(0)

    @cached_property
    def _variance(self) -> torch.Tensor:
        """The variance of the base model's scores over all texts (a scalar)."""
        scores = torch.cat([batch[0] for batch in self.source])
        variance = scores.var(0, correction=0).mean()
        if not variance > torch.finfo(variance.dtype).eps * scores.square().mean():
            raise ValueError(
                "The base model gives the same score to all held-out texts, so scores cannot be compared. Use texts "
                "of the type that it was trained on (pairs of texts if it reads pairs)."
            )
        return variance

    def _is_encoder_of(self, model: Any) -> bool:
        """Return whether the encoder of a model has the same tensors and fields as the base model's encoder."""
        if self.encoder is None:
            return False
        contents = [
            (
                {name: tensor.data_ptr() for name, tensor in encoder.named_parameters()},
                {name: value for name, value in encoder.config.to_dict().items() if name.startswith("encoder_")},
            )
            for encoder in (self.encoder, model.get_encoder())
        ]
        return contents[0] == contents[1]


def make_held_out_set(model: PreTrainedModel, processor: Any, examples: Calibration) -> HeldOutSet:
    """Make batches of held-out text or audio, with the base model's outputs if the measure needs them.

    Args:
        model: The base model in evaluation mode, which generates missing targets and transcripts greedily.
        processor: The tokenizer, or the feature extractor for audio.
        examples: The texts with their targets and lengths, or the audio files.

    Returns:
        The batches. `HeldOutSet.compute_losses` evaluates any variant on them.

    Raises:
        OSError: If an audio file cannot be read.
        ValueError: If the loss of the model cannot be measured on plain text (multiple choice, for example).
    """
    measure = _select_measure(model)
    if examples.audio is not None:
        return _make_held_out_audio(model, processor, examples, measure)
    tokenizer: PreTrainedTokenizerBase = processor
    examples = set_length_statistics(examples, tokenizer, model.config)
    if measure == "masked words" and tokenizer.mask_token_id is None:
        raise ValueError(
            f"The tokenizer must have a `mask_token` because the loss of {type(model).__name__} is measured on masked "
            "words. Set it, or use a checkpoint with another head."
        )
    order = sorted(range(len(examples.texts)), key=lambda i: (len(str(examples.texts[i])), i))
    size = examples.resolved_batch_size
    chunks: Any = [order[start : start + size] for start in range(0, len(order), size)]
    if measure == "targets" and examples.target_texts is None:
        chunks = progress_bar(chunks, desc="generating held-out targets", unit="batch", leave=False)
    held_out_set = HeldOutSet(
        measure,
        [_make_batch(model, tokenizer, examples, rows, measure) for rows in chunks],
        is_multi_label=get_logits_kind(model) is LogitsKind.LABELS,
    )
    if measure in COMPARED_MEASURES:
        held_out_set.source = list(_compute_source_outputs(model, held_out_set))
    return held_out_set


@torch.no_grad()
def _make_held_out_audio(model: Any, feature_extractor: Any, examples: Calibration, measure: str) -> HeldOutSet:
    """Make batches of held-out audio (see `make_held_out_set`)."""
    decodes = measure == "transcripts"
    batches = []
    starts = range(0, len(examples.examples), examples.resolved_batch_size)
    for start in progress_bar(starts, desc="held-out recordings", unit="batch", leave=False):
        files = examples.examples[start : start + examples.resolved_batch_size]
        features = [read_features(feature_extractor, path)[0] for path in files]
        batch = make_audio_batch(model, features, examples.length, decodes)
        if decodes:
            tokens = batch["decoder_input_ids"], batch["decoder_attention_mask"]
            batch["labels"] = make_next_token_labels(*tokens, model.generation_config)
        batches.append(batch)
    held_out_set = HeldOutSet(measure, batches, encoder=model.get_encoder() if decodes else None)
    if not decodes:
        held_out_set.source = list(_compute_source_outputs(model, held_out_set))
    return held_out_set


def _select_measure(model: PreTrainedModel) -> str:
    """Return the measure (a key of `MEASURES`) for a model.

    Raises:
        ValueError: If the loss of the model cannot be measured on plain text.
    """
    name = type(model).__name__
    reads = get_decoder_input(type(model), model.config)
    if reads is DecoderInput.OWN_TARGETS:
        return "transcripts" if model.main_input_name == "input_features" else "targets"
    # These are multiple-choice models, ELECTRA's discriminator, and encoder-decoders without a head.
    if reads is DecoderInput.TARGETS or name.endswith(("ForMultipleChoice", "ElectraForPreTraining")):
        raise ValueError(f"The loss of {name} cannot be measured on plain text. Use a checkpoint with another head.")
    if name.endswith(("ForMaskedLM", "ForPreTraining")):
        return "masked words"
    if name.endswith(("LMHeadModel", "ForCausalLM")):
        return "next words"
    if get_logits_kind(model) is LogitsKind.SCORES:
        return "scores"
    return "predictions" if "For" in name.removeprefix("AttnVariant") else "embeddings"


def _make_batch(
    model: PreTrainedModel, tokenizer: Any, examples: Calibration, indices: Sequence[int], measure: str
) -> ModelInputs:
    """Return the model inputs and labels for a batch of texts."""
    limit = {"truncation": True, "max_length": examples.evaluation_length, "padding": True, "return_tensors": "pt"}
    texts = [examples.texts[i] for i in indices]
    columns = [texts] if isinstance(texts[0], str) else zip(*texts, strict=True)
    encoded = tokenizer(*map(list, columns), return_special_tokens_mask=True, **limit)
    names = ["input_ids", "attention_mask"] + ["token_type_ids"] * (getattr(model.config, "type_vocab_size", 0) > 1)
    batch = {name: encoded[name] for name in names if name in encoded}
    if measure == "targets":
        batch["labels"] = _get_targets(model, tokenizer, examples, indices, batch, limit)
    elif measure == "next words":
        batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORE_INDEX)
    elif measure == "masked words":
        ids, generator = batch["input_ids"], torch.Generator().manual_seed(indices[0])
        is_special = encoded["special_tokens_mask"] == 1
        random_values = torch.rand(ids.shape, generator=generator).masked_fill(is_special, 2.0)
        # At least one word of each text is masked.
        masked = (random_values < MASKED_SHARE) | (random_values == random_values.min(1, keepdim=True).values)
        batch["labels"] = ids.masked_fill(~masked, IGNORE_INDEX)
        batch["input_ids"] = ids.masked_fill(masked, tokenizer.mask_token_id)
    return batch


@torch.no_grad()
def _get_targets(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    examples: Calibration,
    indices: Sequence[int],
    batch: ModelInputs,
    limit: dict[str, Any],
) -> torch.Tensor:
    """Return the token ids of the targets [b, t], which are the user's targets or the model's greedy outputs."""
    if examples.target_texts is not None:
        encoded = tokenizer(text_target=[examples.target_texts[i] for i in indices], **limit)
        return encoded["input_ids"].masked_fill(encoded["attention_mask"] == 0, IGNORE_INDEX)
    inputs = {name: tensor.to(model.device) for name, tensor in batch.items()}
    with ignore_saved_length_limits(model):
        generate: Any = model.generate
        ids = generate(**inputs, do_sample=False, num_beams=1, max_new_tokens=examples.generated_length)[:, 1:].cpu()
    return ids.masked_fill(ids == model.config.pad_token_id, IGNORE_INDEX)


@torch.no_grad()
def _compute_source_outputs(model: PreTrainedModel, held_out_set: HeldOutSet) -> Iterator[list[torch.Tensor]]:
    """Yield the base model's outputs for each batch, on the CPU."""
    for batch in held_out_set.batches:
        output = model(**{name: tensor.to(model.device) for name, tensor in batch.items()})
        yield [answer.cpu() for answer in held_out_set.compute_answers(output, batch)]


def _get_logits(output: Any) -> list[torch.Tensor]:
    """Return all logits in a model output."""
    return [output[name] for name in LOGITS_FIELDS if output.get(name) is not None]


def _cross_entropy(logits: torch.Tensor, labels: torch.Tensor, shifts: bool) -> torch.Tensor:
    """Return the summed cross-entropy and the number of labels for each text, [b, 2].

    Args:
        logits: [b, t, vocabulary].
        labels: [b, t], with `IGNORE_INDEX` for positions without a label.
        shifts: Whether each position predicts the label of the next position.
    """
    if shifts:
        logits, labels = logits[:, :-1], labels[:, 1:]
    options: dict[str, Any] = {"ignore_index": IGNORE_INDEX, "reduction": "none"}
    losses = nn.functional.cross_entropy(logits.float().transpose(1, 2), labels, **options)  # [b, t]
    return torch.stack([losses.sum(1), (labels != IGNORE_INDEX).sum(1).to(losses)], 1)
