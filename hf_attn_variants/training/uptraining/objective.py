"""Losses for uptraining, which combine distillation from a teacher with the model's own training objective.

In shapes, b is the number of texts, n is the number of tokens, and D is the hidden size.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel

from ...inspection.scores import mean_pooled
from ...model_properties import DecoderInput, LogitsKind, get_decoder_input, get_logits_kind
from ...registration import get_max_input_length
from ..engine.models import iterate_attention_modules
from ..engine.optimization import LossTerm, compute_token_cross_entropy, sum_values_per_example
from . import SPAN_CORRUPTION, UptrainingSettings

logger = logging.getLogger(__name__)

ENCODER, DECODER = "encoder", "decoder"
PADDING_LOGIT = -1e4
LAYER_KINDS = ("hidden_states", "attention_outputs")
# The key of the teacher's scores in `variances`. All other keys are pairs of a layer kind and a side.
SCORE_STATISTICS = ("logits", ENCODER)


@dataclass
class Activations:
    """The outputs of a forward pass that are compared between student and teacher.

    Attributes:
        logits: The logits [b, n, vocabulary] or [b, labels], or None for models without such a head.
        span_logits: The logits for the start and end of an answer [b, 2, n], with a low value for padding. None unless
            the model is a question answering model.
        hidden_states: Maps "encoder" and, for encoder-decoder models, "decoder" to the output of each layer [b, n, D].
        attention_outputs: Maps the same keys to the output of each attention module [b, n, D].
    """

    logits: Tensor | None = None
    span_logits: Tensor | None = None
    hidden_states: dict[str, list[Tensor]] = field(default_factory=dict)
    attention_outputs: dict[str, list[Tensor]] = field(default_factory=dict)


class ActivationRecorder:
    """Runs a model and records its `Activations`.

    Args:
        model: The model. If `attention_outputs` is True, hooks are added to its attention modules and are not removed.
            The model may be wrapped for data-parallel training afterwards.
        attention_outputs: Whether to record the outputs of the attention modules.

    Raises:
        ValueError: If this package does not support the architecture.
    """

    def __init__(self, model: PreTrainedModel, attention_outputs: bool = False):
        self.has_encoder_and_decoder = get_decoder_input(type(model), model.config) is not DecoderInput.NOTHING
        self.answer = get_logits_kind(model)
        self._outputs: dict[str, list[Tensor]] | None = None  # None while no forward pass is recorded
        if attention_outputs:
            for site, _, module in iterate_attention_modules(model):
                side = site.get_stack_name(model.config) if self.has_encoder_and_decoder else ENCODER
                self._add_output_hook(module.get_submodule(site.output), side)

    def _add_output_hook(self, module: nn.Module, stack: str) -> None:
        """Add a hook that records the outputs of a module."""

        def record_output(_: nn.Module, inputs: Any, output: Tensor) -> None:
            # Gradient checkpointing also calls the module during the backward pass.
            if self._outputs is not None:
                self._outputs.setdefault(stack, []).append(output)  # ALBERT's layers share one module

        module.register_forward_hook(record_output)

    def run(self, model: nn.Module, inputs: dict[str, Tensor], hidden_states: bool = False) -> Activations:
        """Run the model on a batch.

        Args:
            model: The model passed to the constructor, or its wrapper.
            inputs: The model inputs.
            hidden_states: Whether to record the outputs of the layers.
        """
        self._outputs = {}
        # A decoder's cache would never be read. Encoder-only models do not have this argument.
        options = {"use_cache": False} if self.has_encoder_and_decoder else {}
        outputs = model(**inputs, output_hidden_states=hidden_states, **options)
        attention_outputs, self._outputs = self._outputs, None
        fields = {ENCODER: "hidden_states"}
        if self.has_encoder_and_decoder:
            fields = {ENCODER: "encoder_hidden_states", DECODER: "decoder_hidden_states"}
        # The first hidden states are the embeddings.
        layers = {side: list(outputs[name][1:]) for side, name in fields.items() if hidden_states}
        span_logits = _get_span_logits(inputs, outputs)
        return Activations(getattr(outputs, "logits", None), span_logits, layers, attention_outputs)


def _get_span_logits(inputs: dict[str, Tensor], outputs: Any) -> Tensor | None:
    """Return the start and end logits [b, 2, n] of a question answering model, or None for other models."""
    if getattr(outputs, "start_logits", None) is None:
        return None
    logits = torch.stack([outputs.start_logits, outputs.end_logits], dim=1)
    # With this value, padding has no weight at usual temperatures. The value can be represented in half precision.
    return logits.masked_fill(inputs["attention_mask"][:, None] == 0, PADDING_LOGIT)


class ChunkLayout(NamedTuple):
    """The arrangement of the pieces into which the texts in a batch are split.

    Attributes:
        is_real: A mask [b * p] that is True for pieces that contain a token, with p pieces per text. Pieces without
            tokens are not passed to the model.
        texts: The number of texts b.
        length: The number of tokens per text n, including padding.
    """

    is_real: Tensor
    texts: int
    length: int

    def join(self, states: Tensor) -> Tensor:
        """Join outputs for pieces [pieces, l, ...] into outputs for texts [b, n, ...].

        Pieces that were omitted are filled with zeros.
        """
        joined = states.new_zeros(len(self.is_real), *states.shape[1:])
        joined[self.is_real] = states
        return joined.unflatten(0, (self.texts, -1)).flatten(1, 2)[:, : self.length]


def split_into_chunks(inputs: Mapping[str, Tensor], length: int) -> tuple[dict[str, Tensor], ChunkLayout]:
    """Split texts into pieces of equal length. No special tokens are added to the pieces.

    Args:
        inputs: The model inputs [b, n], which are padded on the right and include `attention_mask`.
        length: The length l of a piece in tokens.

    Returns:
        The inputs for all pieces that contain a token [pieces, l], and the arrangement of the pieces.
    """
    texts, tokens = inputs["attention_mask"].shape
    filled = -tokens % length
    pieces = {name: functional.pad(tensor, (0, filled)).reshape(-1, length) for name, tensor in inputs.items()}
    is_real = pieces["attention_mask"].any(1)
    return {name: tensor[is_real] for name, tensor in pieces.items()}, ChunkLayout(is_real, texts, tokens)


class Teacher:
    """A frozen model whose activations are the targets for a student.

    Args:
        model: The model, whose parameters are frozen in place.
        hidden_states: Whether to return the outputs of the layers.
        attention_outputs: Whether to return the outputs of the attention modules.
        autocast: A function that returns the context manager in which the model runs.
        max_length: The maximum number of tokens per forward pass and text. Longer texts are split into pieces (see
            `split_into_chunks`), which is only supported for encoders. If None, texts are not split.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        hidden_states: bool = False,
        attention_outputs: bool = False,
        autocast: Any = nullcontext,
        max_length: int | None = None,
    ):
        self.model = model.eval().requires_grad_(False)
        self.hidden_states, self.attention_outputs, self._autocast = hidden_states, attention_outputs, autocast
        self.max_length = max_length
        self.recorder = ActivationRecorder(model, attention_outputs)
        self.variances: dict[tuple[str, str], list[Tensor]] = {}

    @torch.no_grad()
    def run(self, inputs: dict[str, Tensor]) -> Activations:
        """Compute the teacher's activations for a batch of model inputs."""
        pieces = None
        if self.max_length is not None and inputs["attention_mask"].shape[1] > self.max_length:
            inputs, pieces = split_into_chunks(inputs, self.max_length)
        with self._autocast():
            activations = self.recorder.run(self.model, inputs, self.hidden_states)
        if pieces is None:
            return activations
        logits = None if activations.logits is None else pieces.join(activations.logits)
        layers = (
            {side: list(map(pieces.join, states)) for side, states in kind.items()}
            for kind in (activations.hidden_states, activations.attention_outputs)
        )
        return Activations(logits, None, *layers)

    def measure_variances(self, batches: Iterable[tuple[dict[str, Tensor], dict[str, Tensor]]]) -> None:
        """Measure the variances of the activations (over tokens) and of the scores (over examples).

        The results are stored in `variances`. The loss terms divide errors by these variances.

        Args:
            batches: For each batch, the model inputs and a dictionary that maps "encoder" and "decoder" to masks
                [b, n] of the tokens that are not padding.
        """
        moments: dict[tuple[str, str], list[_Moments]] = {}
        for inputs, masks in batches:
            activations = self.run(inputs)
            for kind in LAYER_KINDS:
                for side, layers in getattr(activations, kind).items():
                    layer_moments = moments.setdefault((kind, side), [_Moments() for _ in layers])
                    for moment, states in zip(layer_moments, layers, strict=True):
                        moment.add(states[masks[side].bool()])
            if self.recorder.answer is LogitsKind.SCORES and activations.logits is not None:
                moments.setdefault(SCORE_STATISTICS, [_Moments()])[0].add(activations.logits)
        self.variances = {key: [moment.variance() for moment in entries] for key, entries in moments.items()}


class _Moments:
    """Accumulates the sums and squared sums of vectors, from which the mean variance of a coordinate is computed."""

    def __init__(self) -> None:
        self.count, self.sum, self.squares = 0, torch.zeros(()), torch.zeros(())

    def add(self, states: Tensor) -> None:
        """Add vectors [n, D] to the sums."""
        states = states.cpu().double()
        self.count += len(states)
        self.sum, self.squares = self.sum + states.sum(0), self.squares + states.square().sum(0)

    def variance(self) -> Tensor:
        """Compute the variance, averaged over the coordinates, as a positive scalar."""
        mean = self.sum / self.count
        variance = (self.squares / self.count - mean.square()).mean().float()
        return variance.clamp(min=torch.finfo(torch.float32).tiny)  # the variance is 0 if all vectors are equal


def compute_layer_error(
    student: Sequence[Tensor], teacher: Sequence[Tensor], variances: Sequence[Tensor], mask: Tensor
) -> LossTerm:
    """Compute the squared error of each token relative to the variance, averaged over layers.

    The error is 0 if student and teacher are identical, and 1 on average if the student always returns the mean of the
    teacher's vectors.

    Args:
        student: The activations of the student, one tensor [b, n, D] per layer.
        teacher: The activations of the teacher, in the same format.
        variances: The variances of the teacher's activations, one scalar per layer.
        mask: A mask [b, n] that is 1 for tokens that are not padding.

    Returns:
        The sum of the errors [b] and the number of tokens [b] for each example.
    """
    errors = torch.zeros(mask.shape, device=mask.device)
    for student_states, teacher_states, variance in zip(student, teacher, variances, strict=True):
        errors = errors + (student_states.float() - teacher_states.float()).square().mean(-1) / variance  # [b, n]
    mask = mask.to(errors.dtype)
    return (errors * mask).sum(-1) / len(student), mask.sum(-1)


def compute_logits_divergence(student: Tensor, teacher: Tensor, mask: Tensor | None, temperature: float) -> LossTerm:
    """Compute the Kullback-Leibler divergence of the student from the teacher in nats (arXiv 1503.02531).

    Args:
        student: The logits of the student [b, n, classes] or [b, classes].
        teacher: The logits of the teacher, with the same shape.
        mask: A mask [b, n] that is 1 for positions to include, or None for logits [b, classes].
        temperature: The temperature by which the logits are divided. The divergence is multiplied by the square of the
            temperature, so that the magnitude of the gradients is preserved.

    Returns:
        The sum of the divergences [b] and the number of positions [b] for each example.
    """
    if mask is None:
        student, teacher = student.unsqueeze(1), teacher.unsqueeze(1)
        mask = torch.ones(student.shape[:2], device=student.device)
    is_counted = mask.bool()  # [b, n], to which the computation is limited because the vocabulary is large
    log_student = functional.log_softmax(student[is_counted].float() / temperature, dim=-1)
    log_teacher = functional.log_softmax(teacher[is_counted].float() / temperature, dim=-1)
    divergence = functional.kl_div(log_student, log_teacher, reduction="none", log_target=True).sum(-1)
    return sum_values_per_example(divergence * temperature**2, is_counted), is_counted.sum(-1)


def compute_label_divergence(student: Tensor, teacher: Tensor, mask: Tensor | None, temperature: float) -> LossTerm:
    """Compute the Kullback-Leibler divergence for independent label probabilities (sigmoid outputs), in nats.

    Args:
        student: The logits of the student [b, labels].
        teacher: The logits of the teacher [b, labels].
        mask: A mask [b, labels] that is 1 for labels to include. If None, all labels are included.
        temperature: The temperature, as in `compute_logits_divergence`.

    Returns:
        The sum of the divergences [b] and the number of labels [b] for each example.
    """
    # The sigmoid of z is the softmax of z and 0.
    student, teacher = (torch.stack([logits, torch.zeros_like(logits)], dim=-1) for logits in (student, teacher))
    mask = torch.ones_like(student[..., 0]) if mask is None else mask
    return compute_logits_divergence(student, teacher, mask, temperature)


def compute_scores_error(student: Tensor, teacher: Tensor, variance: Tensor) -> LossTerm:
    """Compute the squared error of each example's scores [b, scores], relative to the variance (a scalar).

    Returns:
        For each example, the error [b] and the number of items [b], which is always 1.
    """
    errors = (student.float() - teacher.float()).square().mean(-1) / variance
    return errors, torch.ones_like(errors)


def compute_embedding_distance(student: Tensor, teacher: Tensor, mask: Tensor) -> LossTerm:
    """Compute the cosine distance between mean-pooled sentence embeddings.

    Args:
        student: The hidden states of the student [b, n, D].
        teacher: The hidden states of the teacher [b, n, D].
        mask: A mask [b, n] that is 1 for tokens that are not padding.

    Returns:
        For each example, the distance (1 - cosine similarity) [b] and the number of items [b], which is always 1.
    """
    student_embedding, teacher_embedding = mean_pooled(student.float(), mask), mean_pooled(teacher.float(), mask)
    distance = 1 - functional.cosine_similarity(student_embedding, teacher_embedding, dim=-1)
    return distance, torch.ones_like(mask[:, 0])


def check_teacher_config(
    student: Any, teacher: Any, hidden_states: bool, attention_outputs: bool, embedding: bool
) -> None:
    """Check that the configurations of a student and a teacher allow comparing the two models.

    Args:
        student: The configuration of the student.
        teacher: The configuration of the teacher.
        hidden_states: Whether the outputs of the layers are compared.
        attention_outputs: Whether the outputs of the attention modules are compared.
        embedding: Whether sentence embeddings are compared.

    Raises:
        ValueError: If the values of a field differ although they must be the same. The message names the field.
    """
    rules = {"vocab_size": "The teacher reads the student's token ids."}
    if hidden_states or attention_outputs or embedding:
        rules["hidden_size"] = "--hidden_states_weight, --attention_outputs_weight and embeddings compare vectors."
    if hidden_states or attention_outputs:
        reason = (
            "--hidden_states_weight and --attention_outputs_weight compare the models layer by layer. Set them to 0."
        )
        # The first field is for the encoder. The field for the decoder has different names in T5 and BART.
        rules |= dict.fromkeys(("num_hidden_layers", "num_decoder_layers", "decoder_layers"), reason)
    for name, reason in rules.items():
        student_value, teacher_value = getattr(student, name, None), getattr(teacher, name, None)
        if student_value != teacher_value:
            raise ValueError(
                f"--teacher must have the same {name} as the model ({student_value}), got {teacher_value}. {reason}"
            )


# The entries of a batch that are not model inputs (targets, and the position in a text stream).
NON_INPUT_KEYS = ("labels", "position", "examples")
# The `TermWeights` field for each term.
WEIGHT_BY_TERM = {
    "cross_entropy": "cross_entropy",
    "embedding_distance": "embedding_distance",
    "logits_divergence": "logits",
    "scores_error": "logits",
    **{f"{side}_{kind}_error": kind for side in (ENCODER, DECODER) for kind in LAYER_KINDS},
}


@dataclass(frozen=True)
class TermWeights:
    """The weights of the loss terms. Terms with weight 0 are omitted from the loss.

    Attributes:
        cross_entropy: The weight of the cross-entropy of the labels (masked tokens or target tokens).
        embedding_distance: The weight of `compute_embedding_distance`.
        hidden_states: The weight of `compute_layer_error` for the layers.
        attention_outputs: The weight of `compute_layer_error` for the attention modules.
        logits: The weight of `compute_logits_divergence`, `compute_label_divergence` or `compute_scores_error`.
        temperature: The temperature for the divergence.
    """

    cross_entropy: float = 0.0
    embedding_distance: float = 0.0
    hidden_states: float = 0.0
    attention_outputs: float = 0.0
    logits: float = 0.0
    temperature: float = 1.0

    @property
    def needs_hidden_states(self) -> bool:
        """True if a term requires the outputs of the layers."""
        return self.hidden_states > 0 or self.embedding_distance > 0


def get_model_inputs(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the entries of a batch that are model inputs."""
    return {key: value for key, value in batch.items() if key not in NON_INPUT_KEYS}


class UptrainingObjective:
    """A weighted sum of loss terms, each of which is the mean over its own items (tokens or sentences) in the batch.

    Batches are weighted by their number of items, which is the number of labels (masked tokens or target tokens).
    Without labels, it is the number of sentences if only sentence embeddings are compared, and the number of tokens
    otherwise.

    Args:
        model: The student, which must not have been wrapped yet.
        weights: The weights of the loss terms.
        teacher: The teacher, or None if there is no teacher.
    """

    def __init__(self, model: Any, weights: TermWeights, teacher: Teacher | None):
        self.weights, self.teacher = weights, teacher
        self.recorder = ActivationRecorder(model, weights.attention_outputs > 0)
        self.has_encoder_and_decoder = self.recorder.has_encoder_and_decoder

    def count(self, batch: dict[str, Tensor]) -> int:
        """Return the number of items in a batch."""
        if "labels" in batch:
            return int((batch["labels"] >= 0).sum())
        weights = self.weights
        if not (weights.hidden_states or weights.attention_outputs or weights.logits):
            return len(batch["input_ids"])
        return int(batch["attention_mask"].sum())

    def loss_sum(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Compute the loss of a batch, multiplied by the number of items (see `count`)."""
        return self.sum_terms(self.compute_terms(model, batch)) * self.count(batch)

    def sum_terms(self, terms: dict[str, LossTerm]) -> Tensor:
        """Compute the weighted sum of the terms' means."""
        weights = {name: getattr(self.weights, WEIGHT_BY_TERM[name]) for name in terms}
        losses = [weights[name] * sums.sum() / items.sum().clamp(min=1) for name, (sums, items) in terms.items()]
        return torch.stack(losses).sum()

    def compute_terms(
        self, model: nn.Module, batch: dict[str, Tensor], evaluating: bool = False
    ) -> dict[str, LossTerm]:
        """Compute each term for each example.

        Args:
            model: The student or its wrapper.
            batch: The batch.
            evaluating: Whether to also compute the cheap terms (cross-entropy and embedding distance) if their weight
                is 0.
        """
        weights, labels = self.weights, batch.get("labels")
        inputs = get_model_inputs(batch)
        # If the teacher returns hidden states, evaluations include the embedding distance regardless of the weights.
        has_teacher_states = self.teacher is not None and self.teacher.hidden_states
        with_cosine = evaluating and has_teacher_states and not self.has_encoder_and_decoder
        student = self.recorder.run(model, inputs, weights.needs_hidden_states or with_cosine)
        terms: dict[str, LossTerm] = {}
        if labels is not None and student.logits is not None and (weights.cross_entropy or evaluating):
            terms["cross_entropy"] = compute_token_cross_entropy(student.logits, labels)
        if self.teacher is not None:
            terms |= self._compute_teacher_terms(student, self.teacher, self.teacher.run(inputs), batch, with_cosine)
        return terms

    def get_masks(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the masks [b, n] of the tokens that are not padding, for "encoder" and, if it exists, "decoder"."""
        masks = {ENCODER: batch["attention_mask"]}
        if not self.has_encoder_and_decoder:
            return masks
        # If there are no targets, the decoder reads the same text as the encoder.
        return masks | {DECODER: (batch["labels"] >= 0).long() if "labels" in batch else batch["attention_mask"]}

    def _compute_teacher_terms(
        self, student: Activations, teacher: Teacher, targets: Activations, batch: dict[str, Tensor], with_cosine: bool
    ) -> dict[str, LossTerm]:
        """Compute the terms that compare the student with the targets, which are the teacher's activations.

        If `with_cosine` is True, the embedding distance is computed regardless of its weight.
        """
        weights, masks = self.weights, self.get_masks(batch)
        terms: dict[str, LossTerm] = {}
        for kind in LAYER_KINDS:
            if not getattr(weights, kind):
                continue
            for side, layers in getattr(student, kind).items():
                variances = teacher.variances[kind, side]
                terms[f"{side}_{kind}_error"] = compute_layer_error(
                    layers, getattr(targets, kind)[side], variances, masks[side]
                )
        if weights.logits:
            terms |= self._compute_logits_loss(student, teacher, targets, batch)
        if weights.embedding_distance or with_cosine:
            states = student.hidden_states[ENCODER][-1], targets.hidden_states[ENCODER][-1]
            terms["embedding_distance"] = compute_embedding_distance(*states, masks[ENCODER])
        return terms

    def _compute_logits_loss(
        self, student: Activations, teacher: Teacher, targets: Activations, batch: dict[str, Tensor]
    ) -> dict[str, LossTerm]:
        """Compute the term that compares logits."""
        temperature, kind = self.weights.temperature, self.recorder.answer
        if student.span_logits is not None and targets.span_logits is not None:
            # There is one distribution for the start and one for the end.
            mask = torch.ones_like(batch["attention_mask"][:, :2])
            divergence = compute_logits_divergence(student.span_logits, targets.span_logits, mask, temperature)
            return {"logits_divergence": divergence}
        actual, expected, teacher_kind = student.logits, targets.logits, teacher.recorder.answer
        if actual is None or expected is None:
            raise ValueError("--logits_weight requires logits, but a model has none. Set it to 0.")
        # A distribution over a single class is constant, so it cannot be trained.
        has_one_class = kind is LogitsKind.CLASSES and actual.shape[-1] < 2
        if kind is not teacher_kind or actual.shape != expected.shape or has_one_class:
            raise ValueError(
                "--logits_weight requires logits of the same kind and shape over at least 2 classes, got "
                f"{kind.value} {list(actual.shape)} from the model and {teacher_kind.value} {list(expected.shape)} "
                "from the teacher. Set it to 0, or check num_labels and problem_type in config.json."
            )
        if kind is LogitsKind.SCORES:
            return {"scores_error": compute_scores_error(actual, expected, teacher.variances[SCORE_STATISTICS][0])}
        label_mask = None  # None includes all labels
        if actual.dim() == 3 or kind is LogitsKind.TOKENS:
            label_mask = batch["labels"] >= 0 if "labels" in batch else batch["attention_mask"]
        compute_divergence = compute_logits_divergence if kind is LogitsKind.CLASSES else compute_label_divergence
        return {"logits_divergence": compute_divergence(actual, expected, label_mask, temperature)}


def check_architecture(settings: UptrainingSettings, config: PreTrainedConfig) -> None:
    """Check that the objective supports the checkpoint's architecture.

    Raises:
        ValueError: If the objective requires an encoder but the model is an encoder-decoder, or vice versa.
    """
    pairs = {"mlm": False, "embedding": False, "seq2seq": True, SPAN_CORRUPTION: True}
    is_encoder_decoder = pairs.get(settings.objective, config.is_encoder_decoder)
    if config.is_encoder_decoder != is_encoder_decoder:
        rule, invalid_value = ("an encoder", "an encoder-decoder")[:: -1 if is_encoder_decoder else 1]
        raise ValueError(
            f"--objective {settings.objective} requires {rule}, but {settings.model_name_or_path} "
            f"({config.model_type}) is {invalid_value}. Use another model."
        )


def compare_held_out_losses(before: dict[str, Any], after: dict[str, Any], steps: int) -> dict[str, bool]:
    """Determine whether training reduced the held-out loss, and log a warning if it did not.

    Args:
        before: The log record of the evaluation before training.
        after: The dev metrics after training.
        steps: The number of training steps.

    Returns:
        A dictionary with "held_out_loss_improved", which is empty if there were no training steps.
    """
    if not steps or "eval_loss" not in before:
        return {}
    is_lower = after["loss"] < before["eval_loss"]
    if not is_lower:
        message = "The held-out loss did not improve (%.4f before training, %.4f after). Train for more steps or with "
        message += "a lower --learning_rate, or use the original checkpoint."
        logger.warning(message, before["eval_loss"], after["loss"])
    return {"held_out_loss_improved": is_lower}


def resolve_term_weights(settings: UptrainingSettings, input_kind: DecoderInput) -> TermWeights:
    """Determine the weights of the loss terms from the settings and the defaults.

    Args:
        settings: The settings of the run.
        input_kind: The kind of input that the model's decoder reads.

    Raises:
        ValueError: If there is a teacher but the weights of its terms are all 0, or if `predict_with_generate` is set
            for a model that cannot generate texts.
    """
    has_task = settings.objective in ("mlm", "seq2seq", SPAN_CORRUPTION)
    compares_embeddings = settings.objective == "embedding"
    if settings.predict_with_generate and input_kind is not DecoderInput.OWN_TARGETS:
        raise ValueError(
            f"--predict_with_generate requires a model that generates text, but {settings.model_name_or_path} does "
            "not. Remove it."
        )
    if settings.teacher is None:
        return TermWeights(cross_entropy=1.0)
    compares_logits = has_task or input_kind is DecoderInput.OWN_TARGETS
    weights = {
        "embedding_distance": float(compares_embeddings),
        "hidden_states": _value_or_default(settings.hidden_states_weight, float(not compares_embeddings)),
        "attention_outputs": _value_or_default(settings.attention_outputs_weight, float(not compares_embeddings)),
        "logits": _value_or_default(settings.logits_weight, float(compares_logits)),
    }
    if not any(weights.values()):
        raise ValueError(
            "--teacher requires a weight above 0, but --hidden_states_weight, --attention_outputs_weight and "
            "--logits_weight are 0. Set one of them, or remove --teacher."
        )
    return TermWeights(cross_entropy=float(has_task), temperature=settings.temperature, **weights)


def check_teacher_length(
    settings: UptrainingSettings, teacher: PreTrainedConfig, input_kind: DecoderInput, weights: TermWeights
) -> None:
    """Check that the teacher supports the lengths of the texts and targets.

    Args:
        settings: The settings of the run.
        teacher: The configuration of the teacher.
        input_kind: The type of input that the model's decoder reads.
        weights: The weights of the loss terms.

    Raises:
        ValueError: If the teacher has too few positions, or if `teacher_max_length` is not supported for the model or
            the loss terms.
    """
    piece_length, positions = settings.teacher_max_length, get_max_input_length(teacher)
    has_pieces = piece_length is not None
    if has_pieces and (input_kind is not DecoderInput.NOTHING or (weights.logits and settings.objective != "mlm")):
        raise ValueError(
            "--teacher_max_length requires an encoder without --logits_weight because the pieces of a text have no "
            "common output. Remove one of the flags."
        )
    lengths = [min(piece_length or settings.max_length, settings.max_length)]
    lengths += [settings.max_target_length or settings.max_length] if input_kind.is_target else []
    if positions is not None and max(lengths) > positions:
        raise ValueError(
            f"--teacher {settings.teacher} has {positions} positions, but --max_length, --max_target_length or "
            f"--teacher_max_length is {max(lengths)}. Set it to at most {positions}."
        )


def _value_or_default(value: float | None, default: float) -> float:
    """Return `value`, or `default` if `value` is None."""
    return default if value is None else value
