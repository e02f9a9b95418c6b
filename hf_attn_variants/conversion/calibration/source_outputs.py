"""What a source makes of held-out examples, and how near another model is to it (`quality.Quality`)."""

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import cosine_similarity, cross_entropy
from transformers import PreTrainedModel

from ...answers import Answer, answer_of
from ...decoder_inputs import DecoderInput, decoder_input
from ...progress import progress_bar
from ..calibration_settings import Calibration
from ..quality import BOUNDS, Quality, edit_distance
from .audio import heard
from .batches import (
    ENCODER_OUTPUTS,
    IGNORED,
    Batch,
    continuations,
    own_targets,
    read_by_decoder,
    read_by_encoder,
    written_tokens,
)

__all__ = ["SourceOutputs"]

MASKED = 0.15  # of the tokens, as in arXiv 1810.04805
# With fewer embeddings than this no mean is subtracted.
LEAST_CENTRED = 4
# Of embeddings in float32 that are the same.
ROUNDING = 1e-5
# A loss of more than this times that of a guess is worse than one; random weights have a few hundredths more.
WORSE_THAN_A_GUESS = 1.05
# Tokens: twice as much as less than this is no text that does not end.
SHORT = 8


class SourceOutputs:
    """What a source makes of held-out examples, with which converted models are compared; no model is kept."""

    def __init__(self, model: PreTrainedModel, processor: Any, calibration: Calibration, batches: Sequence[Batch]):
        """Run the source.

        Args:
            model: the source.
            processor: its tokenizer, or its feature extractor.
            calibration: what the examples are of.
            batches: of the held-out ones, the model's arguments each.
        """
        self._length, self.device = calibration.length, next(model.parameters()).device
        self._generation = getattr(model, "generation_config", None)
        self._writes = model.can_generate() and "decoder_input_ids" in batches[0]
        self._answer = answer_of(model)
        self._vocabulary = model.config.vocab_size
        self._measure = _measure(model, self._answer, self._writes and calibration.target_texts is None)
        labelled = None
        if self._measure == "loss" and not self._writes:
            labelled = _with_labels(model, processor, batches)
            self._measure = "embeddings" if labelled is None else self._measure
        self._batches = batches if labelled is None else labelled
        try:
            self._own = self._outputs(model, is_source=True)
        except ValueError:
            if self._measure not in ("predictions", "scores"):
                raise
            # BART's classifiers read the state at the end token, and refuse texts that were cut before it.
            self._measure = "embeddings"
            self._own = self._outputs(model, is_source=True)
        if self._measure == "predictions" and self._answer is Answer.LABELS and not self._own["predictions"].any():
            # It gives these examples no label: what is left to compare is how far it was from giving one.
            self._measure = "scores"
            self._own = self._outputs(model, is_source=True)

    @property
    def loss(self) -> float | None:
        """The source's own loss, nats a token; None where it was not measured."""
        return float(self._own["loss"].mean()) if "loss" in self._own else None

    def compared_with(self, model: PreTrainedModel) -> Quality:
        """Return how near another model of the same class is; how it generates is the calibration's for that time."""
        training = model.training
        with self._generating_alike(model):
            outputs = self._outputs(model.eval())
        model.train(training)
        examples = sum(len(next(iter(batch.values()))) for batch in self._batches)
        value, losses = _compared(self._measure, self._own, outputs)
        if "loss" in self._own and "loss" in outputs:
            losses = _losses(self._own["loss"], outputs["loss"])
        runaway = _runaway(self._own["tokens"], outputs["tokens"]) if self._measure == "tokens" else 0
        alike = self._measure in ("embeddings", "scores") and _are_alike(self._own[self._measure])
        alike = alike or (self._measure == "scores" and len(self._own["scores"]) == 1)  # which has no variance
        value = None if alike else value
        # A model that knows nothing of a text loses nothing of it.
        guess = math.log(self._vocabulary)
        unknown = self._measure == "loss" and (self.loss or 0.0) > WORSE_THAN_A_GUESS * guess
        return Quality(self._measure, value, BOUNDS[self._measure], examples, losses, runaway, alike, unknown)

    @contextmanager
    def _generating_alike(self, model: PreTrainedModel) -> Iterator[None]:
        if self._generation is None:
            yield
            return
        own = model.generation_config
        model.generation_config = copy.deepcopy(self._generation)
        try:
            yield
        finally:
            model.generation_config = own

    @torch.no_grad()
    def _outputs(self, model: PreTrainedModel, is_source: bool = False) -> dict[str, Any]:
        """Return what is compared: tensors and lists with a row for each example, token or prediction."""
        outputs: dict[str, list[Any]] = {}
        device = next(model.parameters()).device
        for batch in progress_bar(self._batches, desc="held-out examples", unit="batch", leave=False):
            labels = batch.get("labels")
            arguments = {name: tensor.to(device) for name, tensor in batch.items() if name != "labels"}
            arguments = {
                name: each.to(model.dtype) if each.is_floating_point() else each for name, each in arguments.items()
            }
            arguments = read_by_decoder(arguments) if is_source else read_by_encoder(arguments)
            for name, value in self._of_batch(model, arguments, labels, is_source).items():
                outputs.setdefault(name, []).extend(value)
        return {name: rows if name == "tokens" else torch.stack(rows) for name, rows in outputs.items() if rows}

    def _of_batch(self, model: Any, batch: Batch, labels: torch.Tensor | None, is_source: bool) -> dict[str, Any]:
        if self._measure == "embeddings":
            return {"embeddings": _embeddings(model.base_model(**batch, output_hidden_states=True), batch)}
        written = None if is_source or self._measure != "tokens" else self._written(model, batch)
        # Of audio the encoder has run for that.
        output = model(**(batch if written is None else read_by_decoder(batch | _encoder_outputs(written, model))))
        if self._measure == "scores":
            return {"scores": output.logits.float().cpu()}
        if self._measure == "predictions":
            return {"predictions": _predictions(output, batch, self._answer)}
        if labels is None:
            labels = continuations(batch["decoder_input_ids"], batch["decoder_attention_mask"])
        outputs: dict[str, Any] = {"loss": _token_losses(output, labels)}
        if self._measure == "tokens":
            # What the source writes is what its decoder was given.
            outputs["tokens"] = written_tokens(batch if written is None else written, self._generation)
        return outputs

    def _written(self, model: Any, batch: Batch) -> Batch:
        """Return a decoder's arguments that lead to what a model writes of a batch."""
        if "input_features" in batch:
            return heard(model, list(batch["input_features"]), self._length)
        source = {name: tensor for name, tensor in batch.items() if not name.startswith("decoder_")}
        return own_targets(model, source, self._length)


def _encoder_outputs(batch: Batch, model: PreTrainedModel) -> Batch:
    return {name: states.to(model.device) for name, states in batch.items() if name == ENCODER_OUTPUTS}


def _measure(model: PreTrainedModel, answer: Answer, writes: bool) -> str:
    """Return which of `BOUNDS` a model is measured by."""
    if writes:
        return "tokens"
    if model.get_output_embeddings() is not None:
        return "loss"
    if answer in (Answer.SCORES, Answer.LABELS):
        return "scores" if answer is Answer.SCORES else "predictions"
    name = type(model).__name__
    classifies = any(kind in name for kind in ("Classification", "QuestionAnswering", "NextSentence"))
    return "predictions" if classifies and getattr(model.config, "num_labels", 2) > 1 else "embeddings"


def _with_labels(model: PreTrainedModel, tokenizer: Any, batches: Sequence[Batch]) -> list[Batch] | None:
    """Return the batches with `labels`, `IGNORED` = none: of tokens that are masked, or of each next one.

    None where there is nothing to mask with.
    """
    if getattr(model.config, "is_decoder", False):
        return [batch | {"labels": continuations(batch["input_ids"], batch["attention_mask"])} for batch in batches]
    mask_token = getattr(tokenizer, "mask_token_id", None)
    if mask_token is None or decoder_input(type(model), model.config) is not DecoderInput.NOTHING:
        return None
    generator, special = torch.Generator().manual_seed(0), torch.tensor(tokenizer.all_special_ids)
    masked = []
    for batch in batches:
        ids = batch["input_ids"]
        is_word = batch["attention_mask"].bool() & ~torch.isin(ids, special)
        chosen = is_word & (torch.rand(ids.shape, generator=generator) < MASKED)
        labels = ids.masked_fill(~chosen, IGNORED)
        masked.append(batch | {"input_ids": ids.masked_fill(chosen, mask_token), "labels": labels})
    return masked if any((batch["labels"] >= 0).any() for batch in masked) else None


def _token_losses(output: Any, labels: torch.Tensor) -> torch.Tensor:
    logits = output.prediction_logits if "prediction_logits" in output else output.logits
    labels = labels.to(logits.device)
    chosen = labels >= 0
    return cross_entropy(logits[chosen].float(), labels[chosen], reduction="none").cpu()


def _predictions(output: Any, batch: Batch, answer: Answer) -> torch.Tensor:
    """Return the predicted classes or places: of each token where there is one, else of each example.

    Of a model that gives several labels, whether it gives each: [b, labels].
    """
    if "start_logits" in output:
        pair = output.start_logits, output.end_logits
        return torch.stack([logits.argmax(-1) for logits in pair], 1).flatten().cpu()
    logits = output.logits
    if answer is Answer.LABELS:
        return (logits > 0).cpu()
    if logits.ndim == 3:
        return logits.argmax(-1)[batch["attention_mask"].bool()].cpu()
    return logits.argmax(-1).cpu()


def _embeddings(output: Any, batch: Batch) -> torch.Tensor:
    """Return the mean of the last hidden states of each example, [b, D]."""
    states = output.get("last_hidden_state")
    if states is None:  # a model that is one with its head
        states = output.get("decoder_hidden_states", output.get("hidden_states"))[-1]
    states = states.float()
    mask = batch.get("decoder_attention_mask", batch.get("attention_mask"))
    mask = torch.ones_like(states[..., 0]) if mask is None or mask.shape != states.shape[:2] else mask.float()
    return ((states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).clamp_min(1)).cpu()


def _compared(
    measure: str, source: dict[str, Any], converted: dict[str, Any]
) -> tuple[float | None, tuple[float, float] | None]:
    """Return the value of a `Quality`, and the losses, by its measure."""
    if measure == "tokens":
        pairs = list(zip(source["tokens"], converted["tokens"], strict=True))
        changed = sum(edit_distance(a, b) for a, b in pairs)
        return changed / max(1, sum(len(a) for a, _ in pairs)), None
    if measure == "loss":
        losses = _losses(source["loss"], converted["loss"])
        return (None, None) if losses is None else (losses[1] - losses[0], losses)
    if measure == "predictions":
        return _changed(source["predictions"], converted["predictions"]), None
    if measure == "scores":
        own, others = source["scores"], converted["scores"]  # [b, scores]
        error = float((others - own).square().sum() / (own - own.mean(0)).square().sum())
        return (error if math.isfinite(error) else None), None
    own, others = source["embeddings"], converted["embeddings"]
    mean = own.mean(0) if len(own) >= LEAST_CENTRED else torch.zeros_like(own[0])
    cosine = float(cosine_similarity(own - mean, others - mean).mean())
    return (cosine if math.isfinite(cosine) else None), None


def _changed(source: torch.Tensor, converted: torch.Tensor) -> float:
    """Return the share of predictions that change; of labels [b, labels], of those that either model gives."""
    different = source != converted
    if source.dtype is not torch.bool:
        return float(different.float().mean())
    return float(different.sum() / (source | converted).sum())


def _are_alike(embeddings: torch.Tensor) -> bool:
    """Say whether several examples have the same embedding, or scores [b, D], but for rounding."""
    spread = (embeddings - embeddings.mean(0)).norm()
    return len(embeddings) > 1 and bool(spread <= ROUNDING * embeddings.norm())


def _runaway(source: Sequence[Sequence[int]], converted: Sequence[Sequence[int]]) -> int:
    """Return the number of examples of which more than twice as many tokens are written as by the source."""
    return sum(len(b) > 2 * max(len(a), SHORT) for a, b in zip(source, converted, strict=True))


def _losses(source: torch.Tensor, converted: torch.Tensor) -> tuple[float, float] | None:
    before, after = float(source.mean()), float(converted.mean())
    return (before, after) if math.isfinite(before) and math.isfinite(after) else None
