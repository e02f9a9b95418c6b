"""What a variant loses, measured on text or audio that no attention was fitted to, against the model it is made of.

The measure is what the model is for: the cross-entropy of an encoder-decoder's targets, of what a Whisper writes, of
masked words, of the next word; the divergence from what a classifier predicts; the error of scores, as a reranker
gives; and for an encoder without a head how far its sentence embeddings, the means of its last hidden states, turn:
one minus their cosine to the source's.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...conversion.calibration.batches import (
    IGNORED,
    add_text_lengths,
    drop_encoder_outputs,
    make_next_token_labels,
    reuse_encoder_outputs,
)
from ...conversion.calibration.examples import make_audio_batch, read_features
from ...conversion.calibration_settings import Calibration
from ...model_properties import Answer, DecoderInput, answer_of, decoder_input, limits_of_the_call
from ...progress import progress_bar
from ..sentence_similarity import mean_pooled

__all__ = ["MEASURES", "HeldOutText", "held_out_text"]

MASKED_SHARE = 0.15
# Each measure's name with what a number of it is.
MEASURES = {
    "targets": "cross-entropy of the targets, nats a token",
    "transcripts": "cross-entropy of the source's own transcripts, nats a token",
    "masked words": "cross-entropy of masked words, nats a token",
    "next words": "cross-entropy of the next word, nats a token",
    "predictions": "divergence from the source's predictions, nats a prediction",
    "scores": "error of the source's scores, as a share of their variance",
    "embeddings": "1 - cosine to the source's sentence embeddings",
}
# Of these what the source says is noted, and compared with.
COMPARED = ("predictions", "scores", "embeddings")
LOGITS = ("logits", "prediction_logits", "start_logits", "end_logits")

Batch = dict[str, torch.Tensor]


@dataclass
class HeldOutText:
    """Batches of held-out examples, and what the source makes of them where that is what a variant is compared with.

    Args:
        measure: one of `MEASURES`.
        batches: the model's arguments, with "labels" where the measure has some.
        source: of `COMPARED`, what the source says of each batch.
        encoder: of audio, the source's: a variant that has the same weights there reads what it made.
        gives_labels: whether "predictions" are several labels a text, each by itself.
    """

    measure: str
    batches: list[Batch]
    source: list[list[torch.Tensor]] = field(default_factory=list)
    encoder: nn.Module | None = None
    gives_labels: bool = False

    @torch.inference_mode()
    def losses(self, model: PreTrainedModel) -> torch.Tensor:
        """Return the summed loss of each text and over how many words or predictions, [texts, 2], in float64."""
        found, device = [], next(model.parameters()).device
        arguments = reuse_encoder_outputs if self._is_encoder_of(model) else drop_encoder_outputs
        for i, batch in enumerate(progress_bar(self.batches, desc="held-out examples", unit="batch", leave=False)):
            inputs = arguments({name: tensor.to(device) for name, tensor in batch.items()})
            labels = inputs.get("labels") if self.measure == "targets" else inputs.pop("labels", None)
            output = model(**inputs)  # an encoder-decoder makes its decoder's inputs of labels
            if labels is not None:
                found.append(_cross_entropy(_logits(output)[0], labels, self.measure == "next words"))
            else:
                source = [each.to(device) for each in self.source[i]]
                found.append(self._difference(self.answers(output, batch), source, batch))
        return torch.cat(found).double().cpu()

    def answers(self, output: Any, batch: Batch) -> list[torch.Tensor]:
        """Return the log-probabilities that a model gives, its scores [b, scores], or its embeddings [b, D]."""
        if self.measure == "scores":
            return [output.logits.float()]
        if self.gives_labels:  # [b, labels, 2]: that it is one, and that it is not
            logits = output.logits.float()
            return [nn.functional.logsigmoid(torch.stack([logits, -logits], dim=-1))]
        if self.measure == "predictions":
            return [logits.float().log_softmax(-1) for logits in _logits(output)]
        states = output.last_hidden_state.float()
        mask = batch.get("attention_mask")  # all of audio counts
        mask = torch.ones_like(states[..., 0]) if mask is None else mask.to(states.device)
        return [mean_pooled(states, mask)]

    def _difference(
        self, answers: Sequence[torch.Tensor], source: Sequence[torch.Tensor], batch: Batch
    ) -> torch.Tensor:
        if self.measure == "embeddings":
            turned = 1 - nn.functional.cosine_similarity(answers[0], source[0])
            return torch.stack([turned, torch.ones_like(turned)], 1)
        if self.measure == "scores":
            error = ((answers[0] - source[0]).square() / self._variance.to(source[0])).mean(-1)
            return torch.stack([error, torch.ones_like(error)], 1)
        losses = []
        for ours, theirs in zip(answers, source, strict=True):
            divergence = (theirs.exp() * (theirs - ours)).nan_to_num().sum(-1)  # [b] or, of tokens or labels, [b, n]
            if divergence.ndim == 1 or self.gives_labels:
                divergence = divergence if divergence.ndim == 1 else divergence.mean(-1)
                losses.append(torch.stack([divergence, torch.ones_like(divergence)], 1))
                continue
            mask = batch["attention_mask"].to(divergence)  # of tokens: no model predicts for each position of audio
            losses.append(torch.stack([(divergence * mask).sum(1), mask.sum(1)], 1))
        return torch.stack(losses).sum(0)

    @cached_property
    def _variance(self) -> torch.Tensor:
        """Of the source's scores, over all texts: a scalar."""
        scores = torch.cat([batch[0] for batch in self.source])
        variance = scores.var(0, correction=0).mean()
        if not variance > torch.finfo(variance.dtype).eps * scores.square().mean():
            raise ValueError(
                "the model gives all of these texts one score, with which nothing can be compared: give texts of the "
                "kind that it was trained on (pairs, if it reads pairs)"
            )
        return variance

    def _is_encoder_of(self, model: Any) -> bool:
        """Say whether a model's encoder is the source's own: the same tensors, under the same configuration."""
        if self.encoder is None:
            return False
        own, other = self.encoder, model.get_encoder()
        if own is other:
            return True
        tensors = [{name: each.data_ptr() for name, each in encoder.named_parameters()} for encoder in (own, other)]
        return tensors[0] == tensors[1] and not _encoder_fields(own.config) ^ _encoder_fields(other.config)


def _encoder_fields(config: Any) -> set[tuple[str, str]]:
    return {(name, str(value)) for name, value in config.to_dict().items() if name.startswith("encoder_")}


def held_out_text(model: PreTrainedModel, processor: Any, text: Calibration) -> HeldOutText:
    """Make batches of text or audio and note what the source says of them.

    Args:
        model: the source, in evaluation mode; it answers audio, and texts without targets, greedily.
        processor: its tokenizer or, of audio, its feature extractor.
        text: the texts, their targets, and how they are cut and batched; or files of audio.

    Raises:
        OSError, ValueError: for a model that plain text does not measure, a multiple choice for example, and files
            of audio that cannot be read.
    """
    measure = _measure(model)
    if text.audio is not None:
        return _held_out_audio(model, processor, text, measure)
    tokenizer: PreTrainedTokenizerBase = processor
    text = add_text_lengths(text, tokenizer, model.config)
    if measure == "masked words" and tokenizer.mask_token_id is None:
        raise ValueError(
            f"the tokenizer has no mask token, and what a {type(model).__name__} loses is measured on masked words: "
            "set its `mask_token`, or try the variants of another head"
        )
    order = sorted(range(len(text.texts)), key=lambda i: (len(str(text.texts[i])), i))
    chunks: Any = [order[start : start + text.batch_rows] for start in range(0, len(order), text.batch_rows)]
    if measure == "targets" and text.target_texts is None:
        chunks = progress_bar(chunks, desc="generating held-out targets", unit="batch", leave=False)
    held = HeldOutText(
        measure,
        [_batch(model, tokenizer, text, rows, measure) for rows in chunks],
        gives_labels=answer_of(model) is Answer.LABELS,
    )
    if measure in COMPARED:
        held.source = list(_said(model, held))
    return held


@torch.no_grad()
def _held_out_audio(model: Any, feature_extractor: Any, audio: Calibration, measure: str) -> HeldOutText:
    decodes = measure == "transcripts"
    batches = []
    starts = range(0, len(audio.examples), audio.batch_rows)
    for start in progress_bar(starts, desc="held-out recordings", unit="batch", leave=False):
        files = audio.examples[start : start + audio.batch_rows]
        features = [read_features(feature_extractor, path)[0] for path in files]
        batch = make_audio_batch(model, features, audio.length, decodes)
        if decodes:
            tokens = batch["decoder_input_ids"], batch["decoder_attention_mask"]
            batch["labels"] = make_next_token_labels(*tokens, model.generation_config)
        batches.append(batch)
    held = HeldOutText(measure, batches, encoder=model.get_encoder() if decodes else None)
    if not decodes:
        held.source = list(_said(model, held))
    return held


def _measure(model: PreTrainedModel) -> str:
    name = type(model).__name__
    reads = decoder_input(type(model), model.config)
    if reads is DecoderInput.OWN_TARGETS:
        return "transcripts" if model.main_input_name == "input_features" else "targets"
    # Of a discriminator, or of both stacks without a head.
    if reads is DecoderInput.TARGETS or name.endswith(("ForMultipleChoice", "ElectraForPreTraining")):
        raise ValueError(f"{name} has nothing that plain text measures: try the variants of another head of it.")
    if name.endswith(("ForMaskedLM", "ForPreTraining")):
        return "masked words"
    if name.endswith(("LMHeadModel", "ForCausalLM")):
        return "next words"
    if answer_of(model) is Answer.SCORES:
        return "scores"
    return "predictions" if "For" in name.removeprefix("AttnVariant") else "embeddings"


def _batch(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: Calibration, rows: Sequence[int], measure: str
) -> Batch:
    limit = {"truncation": True, "max_length": text.measured_length, "padding": True, "return_tensors": "pt"}
    chosen = [text.texts[i] for i in rows]
    columns = [chosen] if isinstance(chosen[0], str) else zip(*chosen, strict=True)
    found = tokenizer(*map(list, columns), return_special_tokens_mask=True, **limit)
    names = ["input_ids", "attention_mask"] + ["token_type_ids"] * (getattr(model.config, "type_vocab_size", 0) > 1)
    batch = {name: found[name] for name in names if name in found}
    if measure == "targets":
        batch["labels"] = _targets(model, tokenizer, text, rows, batch, limit)
    elif measure == "next words":
        batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORED)
    elif measure == "masked words":
        ids, generator = batch["input_ids"], torch.Generator().manual_seed(rows[0])
        drawn = torch.rand(ids.shape, generator=generator).masked_fill(found["special_tokens_mask"] == 1, 2.0)
        # The words of the lowest numbers: of each text one at least.
        hidden = (drawn < MASKED_SHARE) | (drawn == drawn.min(1, keepdim=True).values)
        batch["labels"] = ids.masked_fill(~hidden, IGNORED)
        batch["input_ids"] = ids.masked_fill(hidden, tokenizer.mask_token_id)
    return batch


@torch.no_grad()
def _targets(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: Calibration,
    rows: Sequence[int],
    batch: Batch,
    limit: dict[str, Any],
) -> torch.Tensor:
    """Return the targets [b, t]: those given, or the model's own greedy outputs."""
    if text.target_texts is not None:
        found = tokenizer(text_target=[text.target_texts[i] for i in rows], **limit)
        return found["input_ids"].masked_fill(found["attention_mask"] == 0, IGNORED)
    inputs = {name: tensor.to(model.device) for name, tensor in batch.items()}
    with limits_of_the_call(model):
        generate: Any = model.generate
        ids = generate(**inputs, do_sample=False, num_beams=1, max_new_tokens=text.written_length)[:, 1:].cpu()
    return ids.masked_fill(ids == model.config.pad_token_id, IGNORED)


@torch.no_grad()
def _said(model: PreTrainedModel, held: HeldOutText) -> Iterator[list[torch.Tensor]]:
    for batch in held.batches:
        output = model(**{name: tensor.to(model.device) for name, tensor in batch.items()})
        yield [each.cpu() for each in held.answers(output, batch)]


def _logits(output: Any) -> list[torch.Tensor]:
    return [output[name] for name in LOGITS if output.get(name) is not None]


def _cross_entropy(logits: torch.Tensor, labels: torch.Tensor, shifts: bool) -> torch.Tensor:
    """Return the sum and the number of labels of each text, [b, 2]; with `shifts` they are of the next position."""
    if shifts:
        logits, labels = logits[:, :-1], labels[:, 1:]
    losses = nn.functional.cross_entropy(
        logits.float().transpose(1, 2), labels, ignore_index=IGNORED, reduction="none"
    )  # [b, t]
    return torch.stack([losses.sum(1), (labels != IGNORED).sum(1).to(losses)], 1)
