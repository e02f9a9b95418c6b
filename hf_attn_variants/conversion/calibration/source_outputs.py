"""Loads the original model for calibration, and compares converted models with it on held-out examples."""

import copy
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cosine_similarity, cross_entropy
from transformers import AutoFeatureExtractor, PreTrainedModel

from ...model_properties import DecoderInput, LogitsKind, get_decoder_input, get_logits_kind
from ...modeling.attention.model_mixin import AttnVariantModelMixin
from ...progress import progress_bar
from ..calibration_settings import Calibration
from ..checkpoint.models import (
    ModelReader,
    assemble_model,
    build_model_from_tensors,
    convert_loading_errors,
    load_checkpoint_tokenizer,
)
from ..checkpoint.tensor_files import CheckpointReader
from ..plan import ConversionPlan
from ..report import SHARE_MEASURES, TOLERANCES, Quality, compute_edit_distance, compute_ratio_confidence_interval
from ..writing import read_generation_config
from .batches import (
    ENCODER_OUTPUTS,
    IGNORE_INDEX,
    Batch,
    generate_decoder_inputs,
    get_generated_tokens,
    make_next_token_labels,
    with_known_encoder_outputs,
    without_known_encoder_outputs,
)
from .examples import make_audio_batch

# Function that loads a plan's original model in float32, and its tokenizer or feature extractor if there is one.
SourceLoader = Callable[[ConversionPlan], tuple[AttnVariantModelMixin, Any]]


def make_source_loader_for_model(reader: ModelReader, model: PreTrainedModel) -> SourceLoader:
    """Return a function that builds the original model for a plan from the tensors of a model in memory."""

    def load_source(plan: ConversionPlan) -> tuple[AttnVariantModelMixin, None]:
        tensors = {name: reader.read(name).float() for name in reader.entries}
        return assemble_model(plan.model_class, plan.source_config, tensors, model), None

    return load_source


def make_source_loader_for_folder(reader: CheckpointReader, folder: Path, calibration: Calibration) -> SourceLoader:
    """Return a function that loads the original model, and its processor unless `calibration` contains one.

    The function raises `OSError` if a file is missing or cannot be read, and `ValueError` if a file is invalid.
    """

    def load_source(plan: ConversionPlan) -> tuple[AttnVariantModelMixin, Any]:
        tensors = {name: reader.read(name) for name in reader.entries}
        tensors = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
        # float32 is used even if config.json has another dtype, because second moments overflow in half precision.
        config = copy.deepcopy(plan.source_config)
        model = build_model_from_tensors(plan.model_class, config, tensors, folder, dtype=torch.float32)
        if (generation := read_generation_config(plan, folder)) is not None:
            model.generation_config = generation
        return model, None if calibration.processor is not None else load_processor(folder, calibration)

    return load_source


def load_processor(folder: Path, calibration: Calibration) -> Any:
    """Load the tokenizer from a checkpoint folder, or the feature extractor for audio calibration.

    Raises:
        OSError: if the folder has no tokenizer or feature extractor.
        ValueError: if the tokenizer or feature extractor cannot be loaded.
    """
    if calibration.audio is not None:
        try:
            with convert_loading_errors(folder):
                return AutoFeatureExtractor.from_pretrained(folder)
        except OSError:
            raise FileNotFoundError(
                f"{folder} must contain preprocessor_config.json or processor_config.json for calibration on audio. "
                "Add one of them, or pass `Calibration(..., feature_extractor=feature_extractor)`."
            ) from None
    return load_checkpoint_tokenizer(folder, ". Add them, or pass `Calibration(..., tokenizer=tokenizer)`.")


MASKED_FRACTION = 0.15  # share of masked tokens, as in arXiv 1810.04805
# Minimum number of embeddings required to subtract their mean.
MIN_CENTERED_EMBEDDINGS = 4
# Smaller relative differences between float32 embeddings are considered rounding errors.
ROUNDING_TOLERANCE = 1e-5
# A loss is considered worse than that of a random guess if it is larger by this factor. The loss of random weights is
# larger by only a few hundredths.
MAX_RANDOM_LOSS_RATIO = 1.05
# An output is only considered runaway if it has more than twice this number of tokens.
MIN_RUNAWAY_LENGTH = 8
# If the original model predicts one class for more than this share of the examples, examples for which both models
# predict this class are excluded. Otherwise, a model that always predicts it would be (almost) within tolerance. For
# taggers, the most frequent tag is always excluded.
COMMON_PREDICTION_SHARE = 0.75


class SourceOutputs:
    """The original model's outputs on held-out examples, with which converted models are compared.

    The original model itself is not kept in memory.
    """

    def __init__(self, model: PreTrainedModel, processor: Any, calibration: Calibration, batches: Sequence[Batch]):
        """Run the original model and store its outputs.

        Args:
            model: The original model.
            processor: The model's tokenizer or feature extractor.
            calibration: The calibration settings.
            batches: Model inputs for the held-out examples.
        """
        self._length, self.device = calibration.generated_length, next(model.parameters()).device
        self._generation = getattr(model, "generation_config", None)
        self._generates = get_decoder_input(type(model), model.config) is DecoderInput.OWN_TARGETS
        self._logits_kind = get_logits_kind(model)
        self._special = set(getattr(processor, "all_special_ids", [])) - {getattr(processor, "unk_token_id", None)}
        self._vocabulary = model.config.vocab_size
        name = type(model).__name__
        self._is_tagger = name.endswith("ForTokenClassification")
        self._is_multiple_choice = name.endswith("ForMultipleChoice")
        self._measure = _select_measure(model, self._logits_kind, self._generates)
        self._batches: Sequence[Batch] = batches
        self._targets: Sequence[Batch | None] = [None] * len(batches)
        if self._measure == "tokens" and calibration.audio is None:
            # The generated outputs are compared, and the loss is computed for the targets if there are any.
            self._targets = batches if calibration.target_texts is not None else self._targets
            bar = progress_bar(batches, desc="generating held-out outputs", unit="batch", leave=False)
            inputs = (_remove_decoder_inputs(batch) for batch in bar)
            self._batches = [batch | generate_decoder_inputs(model, batch, self._length) for batch in inputs]
        if self._measure == "loss":
            if (labelled := _add_labels(model, processor, batches)) is None:
                self._measure = "embeddings"
            else:
                self._batches = labelled
        try:
            self._source_outputs = self._compute_outputs(model, is_source=True)
        except ValueError:
            if self._measure not in ("predictions", "scores"):
                raise
            # BART's classifiers raise an error if the end-of-sequence token was truncated.
            self._measure = "embeddings"
            self._source_outputs = self._compute_outputs(model, is_source=True)
        if self._measure == "predictions" and self._logits_kind is LogitsKind.LABELS:
            # If most examples have a label, its absence is informative. If the predictions are the same for all
            # examples, the scores are compared instead.
            rows = torch.stack(self._source_outputs["predictions"])
            self._is_frequent = rows.float().mean(0) > 0.5
            if not (rows ^ self._is_frequent).any():
                self._measure = "scores"
                self._source_outputs = self._compute_outputs(model, is_source=True)

    @property
    def loss(self) -> float | None:
        """The original model's loss in nats per token, or None if it was not measured."""
        return _compute_loss(self._source_outputs)

    def compare_with(self, model: Any) -> Quality:
        """Measure the quality of a converted model, which must have the same class as the original model."""
        training, generation = model.training, getattr(model, "generation_config", None)
        model.generation_config = copy.deepcopy(self._generation)
        try:
            outputs = self._compute_outputs(model.eval())
        finally:
            model.generation_config = generation
        model.train(training)
        amounts, counts = self._compare(outputs)
        examples, total = len(amounts), float(counts.sum())
        are_all_equal = not total or (self._measure == "scores" and examples == 1)  # a single score has no variance
        if self._measure in ("embeddings", "scores"):
            are_all_equal = are_all_equal or _are_all_equal(torch.stack(self._source_outputs[self._measure]))
        value = math.nan if are_all_equal else float(amounts.sum()) / total
        is_finite = math.isfinite(value)
        source_loss, converted_loss = self.loss, _compute_loss(outputs)
        losses = None if source_loss is None or converted_loss is None else (source_loss, converted_loss)
        generated = [part.get("tokens", []) for part in (self._source_outputs, outputs)]
        interval = (
            compute_ratio_confidence_interval(amounts, counts, self._measure in SHARE_MEASURES) if is_finite else None
        )
        return Quality(
            self._measure,
            value if is_finite else None,
            TOLERANCES[self._measure],
            examples,
            losses=losses if losses is None or all(map(math.isfinite, losses)) else None,
            runaway=_count_runaway_generations(*generated),
            alike=are_all_equal,
            # A model that was not trained on this type of text cannot lose quality on it.
            unknown=source_loss is not None and source_loss > MAX_RANDOM_LOSS_RATIO * math.log(self._vocabulary),
            interval=interval,
            is_rare=self._measure == "predictions" and self._get_common_prediction() is not None,
        )

    def _compare(self, outputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each example's numerator and denominator. `Quality.value` is the ratio of their sums."""
        source, converted = self._source_outputs[self._measure], outputs[self._measure]
        if self._measure == "tokens":
            pairs = [(compute_edit_distance(a, b), len(a)) for a, b in zip(source, converted, strict=True)]
        elif self._measure == "predictions":
            rows = [
                (a, b, self._mask_counted_predictions(a) | self._mask_counted_predictions(b))
                for a, b in zip(source, converted, strict=True)
            ]
            pairs = [(int((a != b).sum()), int(counted.sum())) for a, b, counted in rows]
        else:
            outputs_by_example = torch.stack(source).double(), torch.stack(converted).double()
            return _compute_difference_terms(self._measure, *outputs_by_example)
        amounts, counts = torch.tensor(pairs, dtype=torch.float64).T
        return amounts, counts

    def _get_common_prediction(self) -> int | None:
        """Return the prediction that is excluded if both models make it, or None if all predictions are counted."""
        if self._logits_kind is LogitsKind.LABELS:
            return None
        values, counts = torch.cat(self._source_outputs["predictions"]).unique(return_counts=True)
        is_common = self._is_tagger or counts.max() > COMMON_PREDICTION_SHARE * counts.sum()
        return int(values[counts.argmax()]) if is_common else None

    def _mask_counted_predictions(self, predictions: torch.Tensor) -> torch.Tensor:
        """Return a boolean mask of the predictions that are counted."""
        if self._logits_kind is LogitsKind.LABELS:
            return predictions ^ self._is_frequent
        common = self._get_common_prediction()
        return torch.ones_like(predictions, dtype=torch.bool) if common is None else predictions != common

    @torch.no_grad()
    def _compute_outputs(self, model: PreTrainedModel, is_source: bool = False) -> dict[str, list[Any]]:
        """Return the outputs that are compared, {name: one item per example}."""
        outputs: dict[str, list[Any]] = {}
        prepare = with_known_encoder_outputs if is_source else without_known_encoder_outputs
        bar = progress_bar(self._batches, desc="held-out examples", unit="batch", leave=False)
        for batch, targets in zip(bar, self._targets, strict=True):
            arguments = {
                name: tensor.to(model.device, model.dtype if tensor.is_floating_point() else None)
                for name, tensor in batch.items()
                if name != "labels"
            }
            labels = batch.get("labels")
            results = self._compute_batch_outputs(model, prepare(arguments), labels, is_source, targets)
            for name, values in results.items():
                outputs.setdefault(name, []).extend(values)
        return outputs

    def _compute_batch_outputs(
        self, model: Any, batch: Batch, labels: torch.Tensor | None, is_source: bool, targets: Batch | None
    ) -> dict[str, Any]:
        """Return the outputs that are compared for one batch, {name: one item per example}."""
        if self._measure == "embeddings":
            return {"embeddings": _compute_embeddings(model.base_model(**batch, output_hidden_states=True), batch)}
        if self._is_multiple_choice:  # a multiple-choice model with a single choice returns its score
            batch = {name: tensor[:, None] for name, tensor in batch.items()}
        generated = None if is_source or self._measure != "tokens" else self._generate(model, batch)
        # For audio, `_generate` has already run the encoder.
        inputs: dict[str, Any] = batch
        if generated is not None and ENCODER_OUTPUTS in generated:
            inputs = with_known_encoder_outputs(batch | {ENCODER_OUTPUTS: generated[ENCODER_OUTPUTS].to(model.device)})
        if targets is not None:
            inputs = {name: tensor.to(model.device) for name, tensor in targets.items()}
        output = model(**inputs)
        if self._measure == "scores":
            return {"scores": output.logits.float().cpu()}
        if self._measure == "predictions":
            return {"predictions": self._get_predictions(output, batch)}
        if labels is None:
            labels = make_next_token_labels(inputs["decoder_input_ids"], inputs["decoder_attention_mask"])
        outputs: dict[str, Any] = {"loss": _sum_token_losses(output, labels)}
        if self._measure == "tokens":
            # The original model's own output is used as its decoder input.
            outputs["tokens"] = get_generated_tokens(batch if generated is None else generated, self._generation)
        return outputs

    def _generate(self, model: Any, batch: Batch) -> Batch:
        """Generate greedily, and return the output as decoder inputs (see `make_decoder_arguments`)."""
        if "input_features" in batch:
            return make_audio_batch(model, list(batch["input_features"]), self._length)
        return generate_decoder_inputs(model, _remove_decoder_inputs(batch), self._length)

    def _get_predictions(self, output: Any, batch: Batch) -> list[torch.Tensor]:
        """Return the predicted class, answer start and end, tags, or labels of each example."""
        if "start_logits" in output:
            is_read = batch["attention_mask"].bool()
            pair = [logits.masked_fill(~is_read, -math.inf) for logits in (output.start_logits, output.end_logits)]
            return list(torch.stack([logits.argmax(-1) for logits in pair], 1).cpu())
        logits = output.logits
        if self._logits_kind is LogitsKind.LABELS:
            return list((logits > 0).cpu())
        predicted = logits.argmax(-1).cpu()
        if not self._is_tagger:
            return list(predicted.reshape(len(predicted), -1))
        special = torch.tensor(sorted(self._special), dtype=torch.long)
        is_word = batch["attention_mask"].bool().cpu() & ~torch.isin(batch["input_ids"].cpu(), special)
        return [tags[words] for tags, words in zip(predicted, is_word, strict=True)]


def _remove_decoder_inputs(batch: Batch) -> Batch:
    """Return a batch without its decoder inputs."""
    return {name: tensor for name, tensor in batch.items() if not name.startswith("decoder_")}


def _select_measure(model: PreTrainedModel, kind: LogitsKind, generates: bool) -> str:
    """Select the measure (a key of `TOLERANCES`) for a model."""
    if generates:
        return "tokens"
    if model.get_output_embeddings() is not None:
        return "loss"
    name = type(model).__name__
    if kind is LogitsKind.SCORES or name.endswith("ForMultipleChoice"):
        return "scores"
    if kind is LogitsKind.LABELS:
        return "predictions"
    classifies = any(part in name for part in ("Classification", "QuestionAnswering", "NextSentence"))
    return "predictions" if classifies and getattr(model.config, "num_labels", 2) > 1 else "embeddings"


def _add_labels(model: PreTrainedModel, tokenizer: Any, batches: Sequence[Batch]) -> list[Batch] | None:
    """Add `labels` for masked tokens or next tokens to batches. All other tokens get the label `IGNORE_INDEX`.

    Returns None if the tokenizer has no mask token, or if no token is masked.
    """
    if getattr(model.config, "is_decoder", False):
        next_tokens = (make_next_token_labels(batch["input_ids"], batch["attention_mask"]) for batch in batches)
        return [batch | {"labels": ids} for batch, ids in zip(batches, next_tokens, strict=True)]
    mask_token = getattr(tokenizer, "mask_token_id", None)
    if mask_token is None or get_decoder_input(type(model), model.config) is not DecoderInput.NOTHING:
        return None
    generator, special = torch.Generator().manual_seed(0), torch.tensor(tokenizer.all_special_ids)
    masked = []
    for batch in batches:
        ids = batch["input_ids"]
        is_word = batch["attention_mask"].bool() & ~torch.isin(ids, special)
        chosen = is_word & (torch.rand(ids.shape, generator=generator) < MASKED_FRACTION)
        labels = ids.masked_fill(~chosen, IGNORE_INDEX)
        masked.append(batch | {"input_ids": ids.masked_fill(chosen, mask_token), "labels": labels})
    return masked if any((batch["labels"] >= 0).any() for batch in masked) else None


def _sum_token_losses(output: Any, labels: torch.Tensor) -> torch.Tensor:
    """Return the sum of the token losses and the number of labels for each example, [b, 2]."""
    logits = output.prediction_logits if "prediction_logits" in output else output.logits
    labels = labels.to(logits.device)
    chosen = labels >= 0
    losses = torch.zeros(labels.shape, device=logits.device)
    losses[chosen] = cross_entropy(logits[chosen].float(), labels[chosen], reduction="none")
    return torch.stack([losses.sum(1), chosen.sum(1)], 1).cpu()


def _compute_loss(outputs: dict[str, list[Any]]) -> float | None:
    """Return the mean loss over all labels, or None if there are no labels."""
    if "loss" not in outputs:
        return None
    total, count = torch.stack(outputs["loss"]).double().sum(0).tolist()
    return total / max(1, count)


def _compute_embeddings(output: Any, batch: Batch) -> torch.Tensor:
    """Return the mean last hidden state of each example, [b, D]."""
    states = output.get("last_hidden_state")
    if states is None:  # a model without a separate base model
        states = output.get("decoder_hidden_states", output.get("hidden_states"))[-1]
    states = states.float()
    mask = batch.get("decoder_attention_mask", batch.get("attention_mask"))
    mask = torch.ones_like(states[..., 0]) if mask is None or mask.shape != states.shape[:2] else mask.float()
    return ((states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).clamp_min(1)).cpu()


def _compute_difference_terms(
    measure: str, source: torch.Tensor, converted: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the numerator and denominator of the measure for each example.

    `source` and `converted` are the original and converted models' losses [b, 2], scores [b, s] or embeddings [b, D].
    """
    if measure == "loss":
        return converted[:, 0] - source[:, 0], source[:, 1]
    if measure == "scores":
        return (converted - source).square().sum(1), (source - source.mean(0)).square().sum(1)
    mean = source.mean(0) if len(source) >= MIN_CENTERED_EMBEDDINGS else torch.zeros_like(source[0])
    cosines = cosine_similarity(source - mean, converted - mean)
    return cosines, torch.ones_like(cosines)


def _are_all_equal(embeddings: torch.Tensor) -> bool:
    """Return whether all examples have the same embedding or scores [b, D], up to rounding errors."""
    spread = (embeddings - embeddings.mean(0)).norm()
    return len(embeddings) > 1 and bool(spread <= ROUNDING_TOLERANCE * embeddings.norm())


def _count_runaway_generations(source: Sequence[Sequence[int]], converted: Sequence[Sequence[int]]) -> int:
    """Return the number of examples for which the converted output has over twice as many tokens as the original."""
    return sum(len(b) > 2 * max(len(a), MIN_RUNAWAY_LENGTH) for a, b in zip(source, converted, strict=True))
