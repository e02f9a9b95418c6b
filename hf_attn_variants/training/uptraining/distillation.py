"""How far a student is from its teacher: hidden states, attention outputs, logits, sentence embeddings."""

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from ...answers import Answer, answer_of
from ...decoder_inputs import DecoderInput, decoder_input
from ...inspection.sentence_similarity import mean_pooled
from ..engine.losses import Term, sums_by_example
from .pieces import in_pieces
from .trainable import named_attentions

__all__ = [
    "ActivationRecorder",
    "Activations",
    "Teacher",
    "check_teacher",
    "embedding_distance",
    "labels_divergence",
    "layer_error",
    "logits_divergence",
    "scores_error",
]

ENCODER, DECODER = "encoder", "decoder"
PADDING_LOGIT = -1e4
LAYER_KINDS = ("hidden_states", "attention_outputs")
# The teacher's scores, beside its layers, among the variances.
SCORES = ("logits", ENCODER)


@dataclass
class Activations:
    """What a forward pass leaves to compare."""

    logits: Tensor | None = None  # [b, n, vocabulary] or [b, labels]; None for a model without such a head
    # Of question answering [b, 2, n]: each token as the answer's first, and as its last; padding cannot be either.
    span_logits: Tensor | None = None
    # Side ("encoder"; of an encoder-decoder also "decoder") -> the output of each layer, or attention, [b, n, D].
    hidden_states: dict[str, list[Tensor]] = field(default_factory=dict)
    attention_outputs: dict[str, list[Tensor]] = field(default_factory=dict)


class ActivationRecorder:
    """Runs a model and keeps what `Activations` holds.

    The model's attention modules get hooks, which stay; it may be wrapped for data-parallel training afterwards.

    Raises:
        ValueError: if the attentions of this architecture are not known.
    """

    def __init__(self, model: PreTrainedModel, attention_outputs: bool = False):
        self.has_both_stacks = decoder_input(type(model), model.config) is not DecoderInput.NOTHING
        self.answer = answer_of(model)
        self._outputs: dict[str, list[Tensor]] | None = None  # None: not running
        if attention_outputs:
            for site, _, module in named_attentions(model):
                side = site.stack_of(model.config) if self.has_both_stacks else ENCODER
                self._keep_output(module.get_submodule(site.output), side)

    def _keep_output(self, module: nn.Module, side: str) -> None:
        def keep(_: nn.Module, inputs: Any, output: Tensor) -> None:
            # Gradient checkpointing calls again in the backward pass.
            if self._outputs is not None:
                self._outputs.setdefault(side, []).append(output)  # ALBERT's layers share one attention

        module.register_forward_hook(keep)

    def run(self, model: nn.Module, inputs: dict[str, Tensor], hidden_states: bool = False) -> Activations:
        """Run `model` (the one given before, or its wrapper) on a batch; `hidden_states` asks for those."""
        self._outputs = {}
        # A decoder would keep keys and values that nothing reads; an encoder does not know the argument.
        options = {"use_cache": False} if self.has_both_stacks else {}
        outputs = model(**inputs, output_hidden_states=hidden_states, **options)
        kept, self._outputs = self._outputs, None
        fields = {ENCODER: "hidden_states"}
        if self.has_both_stacks:
            fields = {ENCODER: "encoder_hidden_states", DECODER: "decoder_hidden_states"}
        # The first entry is the embeddings.
        layers = {side: list(outputs[name][1:]) for side, name in fields.items() if hidden_states}
        return Activations(getattr(outputs, "logits", None), _span_logits(inputs, outputs), layers, kept)


def _span_logits(inputs: dict[str, Tensor], outputs: Any) -> Tensor | None:
    if getattr(outputs, "start_logits", None) is None:
        return None
    logits = torch.stack([outputs.start_logits, outputs.end_logits], dim=1)
    # No weight is left of it, at any temperature that is used, and half precision holds it.
    return logits.masked_fill(inputs["attention_mask"][:, None] == 0, PADDING_LOGIT)


class Teacher:
    """A frozen model, run in the context `autocast`, whose activations a student is compared with.

    With a `max_length` it reads a longer text in pieces of so many tokens (`in_pieces`); an encoder alone can.
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
        """Return the teacher's activations on a batch of model inputs."""
        pieces = None
        if self.max_length is not None and inputs["attention_mask"].shape[1] > self.max_length:
            inputs, pieces = in_pieces(inputs, self.max_length)
        with self._autocast():
            found = self.recorder.run(self.model, inputs, self.hidden_states)
        if pieces is None:
            return found
        logits = None if found.logits is None else pieces.in_a_row(found.logits)
        layers = (
            {side: list(map(pieces.in_a_row, states)) for side, states in kind.items()}
            for kind in (found.hidden_states, found.attention_outputs)
        )
        return Activations(logits, None, *layers)

    def measure_variances(self, batches: Iterable[tuple[dict[str, Tensor], dict[str, Tensor]]]) -> None:
        """Measure the variance of each layer's activations over tokens, and of scores, by which errors are divided.

        The batches are model inputs, and the mask [b, n] of real tokens of each side.
        """
        moments: dict[tuple[str, str], list[_Moments]] = {}
        for inputs, masks in batches:
            activations = self.run(inputs)
            for kind in LAYER_KINDS:
                for side, layers in getattr(activations, kind).items():
                    found = moments.setdefault((kind, side), [_Moments() for _ in layers])
                    for moment, states in zip(found, layers, strict=True):
                        moment.add(states[masks[side].bool()])
            if self.recorder.answer is Answer.SCORES and activations.logits is not None:
                moments.setdefault(SCORES, [_Moments()])[0].add(activations.logits)
        self.variances = {key: [moment.variance() for moment in found] for key, found in moments.items()}


class _Moments:
    """Running moments of vectors, for the mean variance of a coordinate, a scalar."""

    def __init__(self) -> None:
        self.count, self.sum, self.squares = 0, torch.zeros(()), torch.zeros(())

    def add(self, states: Tensor) -> None:
        states = states.cpu().double()  # [n, D]
        self.count += len(states)
        self.sum, self.squares = self.sum + states.sum(0), self.squares + states.square().sum(0)

    def variance(self) -> Tensor:
        mean = self.sum / self.count
        variance = (self.squares / self.count - mean.square()).mean().float()
        return variance.clamp(min=torch.finfo(torch.float32).tiny)  # a layer that always gives the same vector


def layer_error(
    student: Sequence[Tensor], teacher: Sequence[Tensor], variances: Sequence[Tensor], mask: Tensor
) -> Term:
    """Return the squared error of each token's vectors as a share of their variance, averaged over layers.

    0: they are equal; 1: as far as if the student gave the teacher's mean vector everywhere. `student` and `teacher`
    have one tensor [b, n, D] a layer, `variances` the teacher's, a scalar a layer; `mask` [b, n] is 1 for a real
    token.
    """
    errors = torch.zeros(mask.shape, device=mask.device)
    for mine, other, variance in zip(student, teacher, variances, strict=True):
        errors = errors + (mine.float() - other.float()).square().mean(-1) / variance  # [b, n]
    mask = mask.to(errors.dtype)
    return (errors * mask).sum(-1) / len(student), mask.sum(-1)


def logits_divergence(student: Tensor, teacher: Tensor, mask: Tensor | None, temperature: float) -> Term:
    """Return the Kullback-Leibler divergence of the student from the teacher, in nats (arXiv:1503.02531).

    Args:
        student, teacher: logits [b, n, classes], or [b, classes].
        mask: [b, n], 1 where it counts; None for logits [b, classes].
        temperature: divides the logits; the result is multiplied by its square, so that gradients keep their size.
    """
    if mask is None:
        student, teacher = student.unsqueeze(1), teacher.unsqueeze(1)
        mask = torch.ones(student.shape[:2], device=student.device)
    chosen = mask.bool()  # [b, n]; the vocabulary is large, so only what counts is computed
    log_student = functional.log_softmax(student[chosen].float() / temperature, dim=-1)
    log_teacher = functional.log_softmax(teacher[chosen].float() / temperature, dim=-1)
    divergence = functional.kl_div(log_student, log_teacher, reduction="none", log_target=True).sum(-1)
    return sums_by_example(divergence * temperature**2, chosen), chosen.sum(-1)


def labels_divergence(student: Tensor, teacher: Tensor, mask: Tensor | None, temperature: float) -> Term:
    """Return the Kullback-Leibler divergence of each label's probability, in nats a label.

    Args:
        student, teacher: logits [b, labels], each of a sigmoid.
        mask: [b, labels], 1 where it counts; None: everywhere.
        temperature: as in `logits_divergence`.
    """
    # A sigmoid of z is a softmax over z and 0.
    student, teacher = (torch.stack([logits, torch.zeros_like(logits)], dim=-1) for logits in (student, teacher))
    mask = torch.ones_like(student[..., 0]) if mask is None else mask
    return logits_divergence(student, teacher, mask, temperature)


def scores_error(student: Tensor, teacher: Tensor, variance: Tensor) -> Term:
    """Return the squared error of each example's scores [b, scores] as a share of their variance (a scalar)."""
    errors = (student.float() - teacher.float()).square().mean(-1) / variance
    return errors, torch.ones_like(errors)


def embedding_distance(student: Tensor, teacher: Tensor, mask: Tensor) -> Term:
    """Return 1 - cosine of the mean-pooled sentence embeddings; hidden states [b, n, D], mask [b, n]."""
    mine, other = mean_pooled(student.float(), mask), mean_pooled(teacher.float(), mask)
    return 1 - functional.cosine_similarity(mine, other, dim=-1), torch.ones_like(mask[:, 0])


def check_teacher(student: Any, teacher: Any, hidden_states: bool, attention_outputs: bool, embedding: bool) -> None:
    """Check from their configurations that a teacher and a student can be compared in what is asked.

    Raises:
        ValueError: if they differ in something that has to be the same; the message names it.
    """
    rules = {"vocab_size": "the teacher reads the student's token ids"}
    if hidden_states or attention_outputs or embedding:
        rules["hidden_size"] = "--hidden_states_weight, --attention_outputs_weight and embeddings compare vectors"
    if hidden_states or attention_outputs:
        reason = "--hidden_states_weight and --attention_outputs_weight compare layer by layer; 0 leaves them out"
        # An encoder-decoder's first is the encoder's; its decoder has T5's name, or BART's.
        rules |= dict.fromkeys(("num_hidden_layers", "num_decoder_layers", "decoder_layers"), reason)
    for name, reason in rules.items():
        mine, other = getattr(student, name, None), getattr(teacher, name, None)
        if mine != other:
            raise ValueError(f"--teacher has {name} {other} and the model has {mine}; they must be the same: {reason}")
