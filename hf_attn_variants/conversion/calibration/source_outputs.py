"""The original model of a calibration, and how close a converted model is to its outputs on held-out examples."""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cosine_similarity, cross_entropy
from transformers import AutoFeatureExtractor, PreTrainedModel

from ...model_properties import DecoderInput, LogitsKind, decoder_input, logits_kind
from ...modeling.attention.variant_mixins import AttnVariantModelMixin
from ...progress import progress_bar
from ..calibration_settings import Calibration
from ..checkpoint.models import ModelReader, assemble, load_tokenizer_of, model_of_tensors, reading_checkpoint
from ..checkpoint.tensor_files import CheckpointReader
from ..plan import ConversionPlan
from ..report import BOUNDS, SHARES, Quality, edit_distance, ratio_interval
from ..writing import generation_config
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
from .examples import heard

__all__ = [
    "SourceModel",
    "SourceOutputs",
    "check_has_processor",
    "load_processor",
    "source_in_memory",
    "source_of_folder",
]

# Loads a plan's source, in float32, and what lies beside it to make its inputs; None where nothing does.
SourceModel = Callable[[ConversionPlan], tuple[AttnVariantModelMixin, Any]]


def source_in_memory(reader: ModelReader, model: PreTrainedModel) -> SourceModel:
    """Return the function that gives a model in memory as a plan's source."""

    def source(plan: ConversionPlan) -> tuple[AttnVariantModelMixin, None]:
        tensors = {name: reader.read(name).float() for name in reader.entries}
        return assemble(plan.model_class, plan.source_config, tensors, model), None

    return source


def source_of_folder(reader: CheckpointReader, folder: Path, calibration: Calibration | None) -> SourceModel:
    """Return the function that loads the model in a folder, and what makes its inputs where the calibration has none.

    Its errors are an OSError for a file that is missing or cannot be read, and a ValueError for one that is wrong.
    """

    def source(plan: ConversionPlan) -> tuple[AttnVariantModelMixin, Any]:
        tensors = {name: reader.read(name) for name in reader.entries}
        tensors = {name: each.float() if each.is_floating_point() else each for name, each in tensors.items()}
        # Whatever config.json says: in half precision second moments overflow and the fit finds no numbers.
        config = deepcopy(plan.source_config)
        model = model_of_tensors(plan.model_class, config, tensors, folder, dtype=torch.float32)
        if (generation := generation_config(plan, folder)) is not None:
            model.generation_config = generation
        is_given = calibration is not None and calibration.processor is not None
        return model, None if is_given else load_processor(folder, calibration)

    return source


def check_has_processor(calibration: Calibration) -> None:
    """Raise ValueError if a calibration of a model in memory, beside which no files lie, brings none."""
    if calibration.processor is not None:
        return
    if calibration.audio is not None:
        raise ValueError(
            "a model in memory has no feature extractor beside it, and a calibration needs the model's: give "
            "`calibration=Calibration(audio=files, feature_extractor=feature_extractor)`."
        )
    raise ValueError(
        "a model in memory has no tokenizer beside it, and a calibration needs the model's: give "
        "`calibration=Calibration(texts, tokenizer=tokenizer)`, or `read_calibration(path, tokenizer=tokenizer)`."
    )


def load_processor(folder: Path, calibration: Calibration | None) -> Any:
    """Return the tokenizer in a checkpoint's folder, or the feature extractor where the calibration is of audio.

    Raises:
        OSError: if it is not there.
        ValueError: if it cannot be read.
    """
    if calibration is not None and calibration.audio is not None:
        try:
            with reading_checkpoint(folder):
                return AutoFeatureExtractor.from_pretrained(folder)
        except OSError:
            raise FileNotFoundError(
                f"{folder} has no preprocessor_config.json or processor_config.json, and a calibration on audio needs "
                "one: put it there, or give `Calibration(..., feature_extractor=feature_extractor)`."
            ) from None
    return load_tokenizer_of(
        folder, ", and a calibration needs them: put them there, or give `Calibration(..., tokenizer=tokenizer)`."
    )


MASKED = 0.15  # of the tokens, as in arXiv 1810.04805
# With fewer embeddings than this no mean is subtracted.
LEAST_CENTRED = 4
# Of embeddings in float32 that are the same.
ROUNDING = 1e-5
# A loss of more than this times that of a guess is worse than one; random weights have a few hundredths more.
WORSE_THAN_A_GUESS = 1.05
# Tokens: twice as much as less than this is no text that does not end.
SHORT = 8
# A class that the source gives to more of the examples is left out where neither model gives another one: a model
# that always answers it would be within the bound, or near. Of tags the most frequent one is always left out.
COMMON = 0.75


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
        self._length, self.device = calibration.written_length, next(model.parameters()).device
        self._generation = getattr(model, "generation_config", None)
        self._writes = decoder_input(type(model), model.config) is DecoderInput.OWN_TARGETS
        self._answer = logits_kind(model)
        self._special = set(getattr(processor, "all_special_ids", [])) - {getattr(processor, "unk_token_id", None)}
        self._vocabulary = model.config.vocab_size
        name = type(model).__name__
        self._is_tagger, self._chooses = name.endswith("ForTokenClassification"), name.endswith("ForMultipleChoice")
        self._measure = _measure(model, self._answer, self._writes)
        self._batches: Sequence[Batch] = batches
        self._targets: Sequence[Batch | None] = [None] * len(batches)
        if self._measure == "tokens" and calibration.audio is None:
            # What the model writes by itself is compared; its loss is that of targets, where there are some.
            self._targets = batches if calibration.target_texts is not None else self._targets
            bar = progress_bar(batches, desc="generating held-out outputs", unit="batch", leave=False)
            self._batches = [_text_of(batch) | own_targets(model, _text_of(batch), self._length) for batch in bar]
        if self._measure == "loss":
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
        if self._measure == "predictions" and self._answer is LogitsKind.LABELS:
            # A label that most examples have says something where it is missing. Without either, what is left to
            # compare is how far the source was from another answer.
            rows = torch.stack(self._own["predictions"])
            self._has_most = rows.float().mean(0) > 0.5
            if not (rows ^ self._has_most).any():
                self._measure = "scores"
                self._own = self._outputs(model, is_source=True)

    @property
    def loss(self) -> float | None:
        """The source's own loss, nats a token; None where it was not measured."""
        return _loss(self._own)

    def compared_with(self, model: PreTrainedModel) -> Quality:
        """Return how near another model of the same class is; how it generates is the calibration's for that time."""
        training = model.training
        with self._generating_alike(model):
            outputs = self._outputs(model.eval())
        model.train(training)
        found, counts = self._compared(outputs)
        examples, total = len(found), float(counts.sum())
        alike = not total or (self._measure == "scores" and examples == 1)  # which has no variance
        if self._measure in ("embeddings", "scores"):
            alike = alike or _are_alike(torch.stack(self._own[self._measure]))
        value = math.nan if alike else float(found.sum()) / total
        known = math.isfinite(value)
        before, after = self.loss, _loss(outputs)
        losses = None if before is None or after is None else (before, after)
        return Quality(
            self._measure,
            value if known else None,
            BOUNDS[self._measure],
            examples,
            losses=losses if losses is None or all(map(math.isfinite, losses)) else None,
            runaway=_runaway(self._own["tokens"], outputs["tokens"]) if self._measure == "tokens" else 0,
            alike=alike,
            # A model that knows nothing of a text loses nothing of it.
            unknown=before is not None and before > WORSE_THAN_A_GUESS * math.log(self._vocabulary),
            interval=ratio_interval(found, counts, self._measure in SHARES) if known else None,
            is_rare=self._measure == "predictions" and self._common() is not None,
        )

    def _compared(self, outputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return for each example what differs and of how much: the value of a `Quality` is the ratio of the sums."""
        own, others = self._own[self._measure], outputs[self._measure]
        if self._measure == "tokens":
            pairs = [(edit_distance(a, b), len(a)) for a, b in zip(own, others, strict=True)]
        elif self._measure == "predictions":
            rows = [(a, b, self._counts(a) | self._counts(b)) for a, b in zip(own, others, strict=True)]
            pairs = [(int((a != b).sum()), int(counted.sum())) for a, b, counted in rows]
        else:
            return _differences(self._measure, torch.stack(own).double(), torch.stack(others).double())
        found, counts = torch.tensor(pairs, dtype=torch.float64).T
        return found, counts

    def _common(self) -> int | None:
        """Return the prediction that is left out where neither model gives another one; None if all count."""
        if self._answer is LogitsKind.LABELS:
            return None
        values, counts = torch.cat(self._own["predictions"]).unique(return_counts=True)
        is_common = self._is_tagger or counts.max() > COMMON * counts.sum()
        return int(values[counts.argmax()]) if is_common else None

    def _counts(self, predictions: torch.Tensor) -> torch.Tensor:
        if self._answer is LogitsKind.LABELS:
            return predictions ^ self._has_most
        common = self._common()
        return torch.ones_like(predictions, dtype=torch.bool) if common is None else predictions != common

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
    def _outputs(self, model: PreTrainedModel, is_source: bool = False) -> dict[str, list[Any]]:
        """Return what is compared, an item for each example."""
        outputs: dict[str, list[Any]] = {}
        device = next(model.parameters()).device
        for batch, targets in zip(
            progress_bar(self._batches, desc="held-out examples", unit="batch", leave=False),
            self._targets,
            strict=True,
        ):
            labels = batch.get("labels")
            arguments = {name: tensor.to(device) for name, tensor in batch.items() if name != "labels"}
            arguments = {
                name: each.to(model.dtype) if each.is_floating_point() else each for name, each in arguments.items()
            }
            arguments = read_by_decoder(arguments) if is_source else read_by_encoder(arguments)
            for name, value in self._of_batch(model, arguments, labels, is_source, targets).items():
                outputs.setdefault(name, []).extend(value)
        return outputs

    def _of_batch(
        self, model: Any, batch: Batch, labels: torch.Tensor | None, is_source: bool, targets: Batch | None
    ) -> dict[str, Any]:
        if self._measure == "embeddings":
            return {"embeddings": _embeddings(model.base_model(**batch, output_hidden_states=True), batch)}
        if self._chooses:  # a choice of one: its score
            batch = {name: tensor[:, None] for name, tensor in batch.items()}
        written = None if is_source or self._measure != "tokens" else self._written(model, batch)
        # Of audio the encoder has run for that.
        read = batch if written is None else read_by_decoder(batch | _encoder_outputs(written, model))
        if targets is not None:
            read = {name: tensor.to(model.device) for name, tensor in targets.items()}
        output = model(**read)
        if self._measure == "scores":
            return {"scores": output.logits.float().cpu()}
        if self._measure == "predictions":
            return {"predictions": self._predictions(output, batch)}
        if labels is None:
            labels = continuations(read["decoder_input_ids"], read["decoder_attention_mask"])
        outputs: dict[str, Any] = {"loss": _token_losses(output, labels)}
        if self._measure == "tokens":
            # What the source writes is what its decoder was given.
            outputs["tokens"] = written_tokens(batch if written is None else written, self._generation)
        return outputs

    def _written(self, model: Any, batch: Batch) -> Batch:
        """Return a decoder's arguments that lead to what a model writes of a batch."""
        if "input_features" in batch:
            return heard(model, list(batch["input_features"]), self._length)
        return own_targets(model, _text_of(batch), self._length)

    def _predictions(self, output: Any, batch: Batch) -> list[torch.Tensor]:
        """Return of each example the class, the begin and end of its answer, the tags of its words, or its labels."""
        if "start_logits" in output:
            is_read = batch["attention_mask"].bool()
            pair = [each.masked_fill(~is_read, -math.inf) for each in (output.start_logits, output.end_logits)]
            return list(torch.stack([logits.argmax(-1) for logits in pair], 1).cpu())
        logits = output.logits
        if self._answer is LogitsKind.LABELS:
            return list((logits > 0).cpu())
        predicted = logits.argmax(-1).cpu()
        if not self._is_tagger:
            return list(predicted.reshape(len(predicted), -1))
        special = torch.tensor(sorted(self._special), dtype=torch.long)
        is_word = batch["attention_mask"].bool().cpu() & ~torch.isin(batch["input_ids"].cpu(), special)
        return [tags[words] for tags, words in zip(predicted, is_word, strict=True)]


def _text_of(batch: Batch) -> Batch:
    return {name: tensor for name, tensor in batch.items() if not name.startswith("decoder_")}


def _encoder_outputs(batch: Batch, model: PreTrainedModel) -> Batch:
    return {name: states.to(model.device) for name, states in batch.items() if name == ENCODER_OUTPUTS}


def _measure(model: PreTrainedModel, answer: LogitsKind, writes: bool) -> str:
    """Return which of `BOUNDS` a model is measured by."""
    if writes:
        return "tokens"
    if model.get_output_embeddings() is not None:
        return "loss"
    name = type(model).__name__
    if answer is LogitsKind.SCORES or name.endswith("ForMultipleChoice"):
        return "scores"
    if answer is LogitsKind.LABELS:
        return "predictions"
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
    """Return of each example the summed loss of its labels and their number, [b, 2]."""
    logits = output.prediction_logits if "prediction_logits" in output else output.logits
    labels = labels.to(logits.device)
    chosen = labels >= 0
    losses = torch.zeros(labels.shape, device=logits.device)
    losses[chosen] = cross_entropy(logits[chosen].float(), labels[chosen], reduction="none")
    return torch.stack([losses.sum(1), chosen.sum(1)], 1).cpu()


def _loss(outputs: dict[str, list[Any]]) -> float | None:
    """Return the mean loss of all labels; None where there is none."""
    if "loss" not in outputs:
        return None
    total, count = torch.stack(outputs["loss"]).double().sum(0).tolist()
    return total / max(1, count)


def _embeddings(output: Any, batch: Batch) -> torch.Tensor:
    """Return the mean of the last hidden states of each example, [b, D]."""
    states = output.get("last_hidden_state")
    if states is None:  # a model that is one with its head
        states = output.get("decoder_hidden_states", output.get("hidden_states"))[-1]
    states = states.float()
    mask = batch.get("decoder_attention_mask", batch.get("attention_mask"))
    mask = torch.ones_like(states[..., 0]) if mask is None or mask.shape != states.shape[:2] else mask.float()
    return ((states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).clamp_min(1)).cpu()


def _differences(measure: str, own: torch.Tensor, others: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return for each example what differs and of how much: of losses [b, 2], scores [b, s] or embeddings [b, D]."""
    if measure == "loss":
        return others[:, 0] - own[:, 0], own[:, 1]
    if measure == "scores":
        return (others - own).square().sum(1), (own - own.mean(0)).square().sum(1)
    mean = own.mean(0) if len(own) >= LEAST_CENTRED else torch.zeros_like(own[0])
    cosines = cosine_similarity(own - mean, others - mean)
    return cosines, torch.ones_like(cosines)


def _are_alike(embeddings: torch.Tensor) -> bool:
    """Say whether several examples have the same embedding, or scores [b, D], but for rounding."""
    spread = (embeddings - embeddings.mean(0)).norm()
    return len(embeddings) > 1 and bool(spread <= ROUNDING * embeddings.norm())


def _runaway(source: Sequence[Sequence[int]], converted: Sequence[Sequence[int]]) -> int:
    """Return the number of examples of which more than twice as many tokens are written as by the source."""
    return sum(len(b) > 2 * max(len(a), SHORT) for a, b in zip(source, converted, strict=True))
