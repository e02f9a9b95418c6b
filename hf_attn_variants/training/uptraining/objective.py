"""Losses of uptraining: distillation from the original model, and the model's own objective."""

import logging
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ...inspection.sentence_similarity import mean_pooled
from ...model_properties import DecoderInput, LogitsKind, decoder_input, ignore_saved_length_limits, logits_kind
from ...modeling.fields.variant_config import can_cache
from ...registration import longest_input
from ..engine.finetune import MetricEvaluator
from ..engine.losses import Term, sum_by_example, token_cross_entropy
from ..engine.models import iterate_attentions
from ..engine.outputs import progress_bar
from ..seq2seq.metrics import choose_tokenizer, log_tokenizer, score_texts
from .data import in_pieces
from .settings import SPAN_CORRUPTION, UptrainingSettings

__all__ = [
    "ActivationRecorder",
    "Activations",
    "Teacher",
    "TermWeights",
    "UptrainingEvaluator",
    "UptrainingObjective",
    "check_architecture",
    "check_teacher",
    "check_teacher_length",
    "check_teacher_types",
    "embedding_distance",
    "held_out_gain",
    "labels_divergence",
    "layer_error",
    "logits_divergence",
    "model_inputs",
    "scores_error",
    "term_weights",
]

logger = logging.getLogger(__name__)

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
        self.answer = logits_kind(model)
        self._outputs: dict[str, list[Tensor]] | None = None  # None: not running
        if attention_outputs:
            for site, _, module in iterate_attentions(model):
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
            if self.recorder.answer is LogitsKind.SCORES and activations.logits is not None:
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
    return sum_by_example(divergence * temperature**2, chosen), chosen.sum(-1)


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


# What a batch holds besides the model's inputs: targets, and where a stream of text goes on behind it.
NOT_INPUTS = ("labels", "position", "examples")
# Each term, by its name among the metrics -> the weight that it is multiplied by.
TERMS = {
    "cross_entropy": "cross_entropy",
    "embedding_distance": "embedding_distance",
    "logits_divergence": "logits",
    "scores_error": "logits",
    **{f"{side}_{kind}_error": kind for side in (ENCODER, DECODER) for kind in LAYER_KINDS},
}


@dataclass(frozen=True)
class TermWeights:
    """What each term of the loss is multiplied by; 0 leaves it out."""

    cross_entropy: float = 0.0  # of the labels: masked tokens, or target tokens
    embedding_distance: float = 0.0
    hidden_states: float = 0.0  # `layer_error` of each layer
    attention_outputs: float = 0.0  # `layer_error` of each attention
    logits: float = 0.0  # `logits_divergence`, or `scores_error`
    temperature: float = 1.0  # of that divergence

    @property
    def need_hidden_states(self) -> bool:
        return self.hidden_states > 0 or self.embedding_distance > 0


def model_inputs(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return what of a batch the model is called with."""
    return {key: value for key, value in batch.items() if key not in NOT_INPUTS}


class UptrainingObjective:
    """The weighted sum of terms, each the mean over its own items (tokens, or sentences) of the batch.

    A batch counts by its labels, where it has some (masked tokens, or targets), by its sentences, where only their
    embeddings are compared, and by its tokens otherwise. The model is the student, not yet wrapped.
    """

    def __init__(self, model: Any, weights: TermWeights, teacher: Teacher | None):
        self.weights, self.teacher = weights, teacher
        self.recorder = ActivationRecorder(model, weights.attention_outputs > 0)
        self.has_both_stacks = self.recorder.has_both_stacks

    def count(self, batch: dict[str, Tensor]) -> int:
        """Return the number of items of a batch."""
        if "labels" in batch:
            return int((batch["labels"] >= 0).sum())
        weights = self.weights
        if not (weights.hidden_states or weights.attention_outputs or weights.logits):
            return len(batch["input_ids"])
        return int(batch["attention_mask"].sum())

    def loss_sum(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Return the loss, times `count`."""
        return self.total(self.terms(model, batch)) * self.count(batch)

    def total(self, terms: dict[str, Term]) -> Tensor:
        """Return the weighted sum of the terms' means."""
        weights = {name: getattr(self.weights, TERMS[name]) for name in terms}
        losses = [weights[name] * sums.sum() / items.sum().clamp(min=1) for name, (sums, items) in terms.items()]
        return torch.stack(losses).sum()

    def terms(self, model: nn.Module, batch: dict[str, Tensor], evaluating: bool = False) -> dict[str, Term]:
        """Compute each term, example by example.

        Evaluating, also those that cost nothing more but have no weight: cross-entropy and embedding distance.
        """
        weights, labels = self.weights, batch.get("labels")
        inputs = model_inputs(batch)
        # With a teacher, evaluation looks at embeddings whatever the terms are.
        embeds = self.teacher is not None and not self.has_both_stacks and self.teacher.hidden_states
        student = self.recorder.run(model, inputs, hidden_states=weights.need_hidden_states or (evaluating and embeds))
        terms: dict[str, Term] = {}
        if labels is not None and student.logits is not None and (weights.cross_entropy or evaluating):
            terms["cross_entropy"] = token_cross_entropy(student.logits, labels)
        if self.teacher is not None:
            terms |= self._teacher_terms(student, self.teacher, self.teacher.run(inputs), batch, embeds and evaluating)
        return terms

    def masks(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the masks of real tokens [b, n] of each side."""
        masks = {ENCODER: batch["attention_mask"]}
        if not self.has_both_stacks:
            return masks
        # Without targets the decoder reads the same text.
        return masks | {DECODER: (batch["labels"] >= 0).long() if "labels" in batch else batch["attention_mask"]}

    def _teacher_terms(
        self,
        student: Activations,
        of_teacher: Teacher,
        teacher: Activations,
        batch: dict[str, Tensor],
        embeds: bool,
    ) -> dict[str, Term]:
        weights, masks = self.weights, self.masks(batch)
        terms: dict[str, Term] = {}
        for kind in LAYER_KINDS:
            if not getattr(weights, kind):
                continue
            for side, layers in getattr(student, kind).items():
                variances = of_teacher.variances[kind, side]
                terms[f"{side}_{kind}_error"] = layer_error(
                    layers, getattr(teacher, kind)[side], variances, masks[side]
                )
        if weights.logits:
            terms |= self._logits_term(student, of_teacher, teacher, batch)
        if weights.embedding_distance or embeds:
            states = student.hidden_states[ENCODER][-1], teacher.hidden_states[ENCODER][-1]
            terms["embedding_distance"] = embedding_distance(*states, masks[ENCODER])
        return terms

    def _logits_term(
        self, student: Activations, of_teacher: Teacher, teacher: Activations, batch: dict[str, Tensor]
    ) -> dict[str, Term]:
        temperature, answer = self.weights.temperature, self.recorder.answer
        if (student.span_logits is None) != (teacher.span_logits is None):
            raise ValueError(
                "--logits_weight needs logits of one kind: of the model and its teacher, one alone answers questions"
            )
        if student.span_logits is not None and teacher.span_logits is not None:
            mask = torch.ones_like(batch["attention_mask"][:, :2])  # the first token's distribution, and the last's
            spans = student.span_logits, teacher.span_logits
            return {"logits_divergence": logits_divergence(*spans, mask, temperature)}
        others = of_teacher.recorder.answer
        if student.logits is not None and teacher.logits is not None and others is not answer:
            raise ValueError(
                f"--logits_weight needs logits of one kind: the model's are {answer.value}, its teacher's "
                f"{others.value} (num_labels and problem_type in config.json)"
            )
        logits = _checked_logits(student.logits, teacher.logits, answer)
        if answer is LogitsKind.SCORES:
            return {"scores_error": scores_error(*logits, of_teacher.variances[SCORES][0])}
        of_tokens = None
        if logits[0].dim() == 3 or answer is LogitsKind.TOKENS:
            of_tokens = batch["labels"] >= 0 if "labels" in batch else batch["attention_mask"]
        divergence = logits_divergence if answer is LogitsKind.CLASSES else labels_divergence
        return {"logits_divergence": divergence(*logits, of_tokens, temperature)}


def _checked_logits(student: Tensor | None, teacher: Tensor | None, answer: LogitsKind) -> tuple[Tensor, Tensor]:
    shapes = [None if logits is None else tuple(logits.shape) for logits in (student, teacher)]
    # A distribution over a single class is always the same.
    too_few = student is not None and answer is LogitsKind.CLASSES and student.shape[-1] < 2
    if student is None or teacher is None or shapes[0] != shapes[1] or too_few:
        found = " and ".join("none" if shape is None else str(list(shape)) for shape in shapes)
        raise ValueError(f"--logits_weight needs logits of one shape, over two classes or more; they are {found}")
    return student, teacher


class UptrainingEvaluator(MetricEvaluator):
    """Evaluates held-out rows: "loss", its terms ("embedding_cosine" for that distance) and, where asked for, "bleu".

    Args:
        loader: held-out batches, prepared by the accelerator.
        references: the targets in the loader's order; without them no texts are generated.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        objective: UptrainingObjective,
        loader: DataLoader,
        tokenizer: PreTrainedTokenizerBase,
        references: list[str] | None,
        settings: UptrainingSettings,
    ):
        super().__init__(self._scores)
        self.accelerator, self.model, self.objective, self.loader = accelerator, model, objective, loader
        self.tokenizer, self.references, self.settings = tokenizer, references, settings
        self.bleu_tokenizer: str | None = None
        self.metric_options: dict[str, str] = {}
        if references is not None:
            self.bleu_tokenizer = settings.tokenize or choose_tokenizer(references, settings.target_lang)
            self.metric_options["bleu_tokenizer"] = self.bleu_tokenizer
            log_tokenizer(self.bleu_tokenizer, settings.tokenize is not None)

    @torch.no_grad()
    def _scores(self) -> dict[str, float]:
        self.model.eval()
        sums: dict[str, list[Tensor]] = {}
        generated: list[str] = []
        quiet = self.settings.disable_tqdm
        for batch in progress_bar(self.accelerator, quiet, iterable=self.loader, desc="Evaluating", leave=False):
            terms = self.objective.terms(self.model, batch, evaluating=True)
            # Rows repeated to fill the last batch of each process are left out again.
            for name, pair in self.accelerator.gather_for_metrics(terms).items():
                sums.setdefault(name, []).append(torch.stack([part.cpu().double() for part in pair]).sum(-1))
            if self.references is not None:
                generated += self._generate(batch)
        totals: dict[str, Any] = {name: torch.stack(parts).sum(0).unbind() for name, parts in sums.items()}
        if not all(items for _, items in totals.values()):
            raise ValueError(
                "the held-out text has no token that a loss counts (none is masked, or each row is empty): give more "
                "of it with --validation_file"
            )
        metrics = {"loss": float(self.objective.total(totals))}
        for name, (total, items) in totals.items():
            value = float(total / items)
            metrics |= {"embedding_cosine": 1 - value} if name == "embedding_distance" else {name: value}
        if self.references is not None:
            right = [(reference,) for reference in self.references]
            metrics |= score_texts(["bleu"], generated, right, tokenize=self.bleu_tokenizer)
        return metrics

    def _generate(self, batch: dict[str, Tensor]) -> list[str]:
        model = self.accelerator.unwrap_model(self.model)
        with ignore_saved_length_limits(model):
            ids = model.generate(
                input_ids=batch["input_ids"],
                attention_mask=batch["attention_mask"],
                max_new_tokens=self.settings.max_target_length or self.settings.max_length,
                do_sample=False,
                num_beams=1,
                **({} if can_cache(model.config) else {"use_cache": False}),
            )
        ids = self.accelerator.pad_across_processes(ids, dim=1, pad_index=self.tokenizer.pad_token_id)
        ids = self.accelerator.gather_for_metrics(ids)
        return self.tokenizer.batch_decode(ids, skip_special_tokens=True)


def check_architecture(settings: UptrainingSettings, config: PreTrainedConfig) -> None:
    """Check that the checkpoint is of the kind that the flags are for.

    Raises:
        ValueError: if it is not.
    """
    architecture = (config.architectures or [""])[0]
    if architecture.endswith("ForMultipleChoice"):
        raise ValueError(
            f"{settings.model_name_or_path} is a {architecture}: uptraining has no texts of several "
            "choices; convert and uptrain the model that it was fine-tuned from"
        )
    pairs = {"mlm": False, "embedding": False, "seq2seq": True, SPAN_CORRUPTION: True}
    wanted = [(f"--objective {settings.objective}", pairs[settings.objective])] if settings.objective in pairs else []
    wanted += [("--predict_with_generate", True)] if settings.predict_with_generate else []
    for flag, is_encoder_decoder in wanted:
        if config.is_encoder_decoder != is_encoder_decoder:
            kind, found = ("an encoder", "an encoder-decoder")[:: -1 if is_encoder_decoder else 1]
            raise ValueError(f"{flag} is for {kind}; {settings.model_name_or_path} ({config.model_type}) is {found}")


def held_out_gain(before: dict[str, Any], after: dict[str, Any], steps: int) -> dict[str, bool]:
    """Return whether training lowered the held-out loss, for the results; {} without steps. Warn if it did not.

    Args:
        before: the record of the log before training.
        after: the dev metrics after it.
        steps: of the training.
    """
    if not steps or "eval_loss" not in before:
        return {}
    is_lower = after["loss"] < before["eval_loss"]
    if not is_lower:
        message = "the held-out loss did not improve: %.4f before training, %.4f after. Train for more steps, or with "
        message += "a lower --learning_rate, or use the checkpoint as it was."
        logger.warning(message, before["eval_loss"], after["loss"])
    return {"held_out_loss_improved": is_lower}


def term_weights(settings: UptrainingSettings, reads: DecoderInput) -> TermWeights:
    """Return the weights of the loss's terms, defaults filled in.

    Args:
        settings: the run's.
        reads: what the model's decoder reads.

    Raises:
        ValueError: if there is a teacher, and no term looks at it.
    """
    has_task, embeds = settings.objective in ("mlm", "seq2seq", SPAN_CORRUPTION), settings.objective == "embedding"
    if settings.logits_weight and reads is DecoderInput.TARGETS:
        raise ValueError(f"--logits_weight needs a head, and {settings.model_name_or_path} has none")
    if settings.predict_with_generate and reads is not DecoderInput.OWN_TARGETS:
        raise ValueError(
            f"--predict_with_generate needs a head that writes, and {settings.model_name_or_path} has none"
        )
    if settings.teacher is None:
        return TermWeights(cross_entropy=1.0)
    weights = TermWeights(
        cross_entropy=float(has_task),
        embedding_distance=float(embeds),
        hidden_states=_given(settings.hidden_states_weight, float(not embeds)),
        attention_outputs=_given(settings.attention_outputs_weight, float(not embeds)),
        logits=_given(settings.logits_weight, float(has_task or reads is DecoderInput.OWN_TARGETS)),
        temperature=settings.temperature,
    )
    of_teacher = asdict(weights) | {"cross_entropy": 0.0, "temperature": 0.0}
    if not any(of_teacher.values()):
        raise ValueError("--teacher would not be looked at: each of --hidden_states_weight, --logits_weight, ... is 0")
    return weights


def check_teacher_length(
    settings: UptrainingSettings, teacher: PreTrainedConfig, reads: DecoderInput, weights: TermWeights
) -> None:
    """Check how many tokens the teacher is to read at once, of texts and of targets.

    Raises:
        ValueError: if they are more than it has positions for, or pieces of a text make no answer for the whole.
    """
    asked, positions = settings.teacher_max_length, longest_input(teacher)
    if asked is not None and reads is not DecoderInput.NOTHING:
        raise ValueError(f"--teacher_max_length is for encoders; {settings.model_name_or_path} has a decoder")
    if asked is not None and weights.logits and settings.objective != "mlm":
        raise ValueError("--teacher_max_length and --logits_weight: pieces of a text have no answer of the whole")
    if positions is not None and min(asked or settings.max_length, settings.max_length) > positions:
        raise ValueError(
            f"--teacher {settings.teacher} has {positions} positions, for --max_length {settings.max_length}: give "
            f"--teacher_max_length, at most {positions}" + ("" if asked is None else f"; got {asked}")
        )
    targets = settings.max_target_length or settings.max_length
    if positions is not None and reads.is_target and targets > positions:
        raise ValueError(
            f"--teacher {settings.teacher} has {positions} positions, for --max_target_length {targets}: give at most "
            f"{positions}"
        )


def check_teacher_types(
    settings: UptrainingSettings, teacher: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, pairs: bool
) -> None:
    """Check that the teacher of a model that tells the two texts of a pair apart can, too.

    Raises:
        ValueError: if it has an embedding for tokens of the first text alone.
    """
    kinds = getattr(teacher, "type_vocab_size", None)  # None: it is not told which
    if pairs and "token_type_ids" in tokenizer.model_input_names and kinds is not None and kinds < 2:
        raise ValueError(
            f"--teacher {settings.teacher} has type_vocab_size {kinds}, and the tokens of a pair are of 2 types: give "
            "a teacher that knows both, or texts that are not pairs"
        )


def _given(value: float | None, default: float) -> float:
    return default if value is None else value
