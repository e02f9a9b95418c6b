"""Calibration: text or audio through the source model, and new heads fitted to what its attentions make of it."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from transformers import GenerationConfig

from ...languages import set_languages
from ...model_properties import DecoderInput, decoder_input
from ...modeling.attention.variant_mixins import AttnVariantModelMixin
from ...progress import is_watched, progress_bar
from ..attention_modules import AttentionModule
from ..attention_tensors import AttentionTensors, HeadCounts, LatentForms, best_latent
from ..calibration_settings import Calibration
from ..checkpoint.models import TensorSource
from ..methods import CalibratedMethod, LatentInText, LayerContext, MeanPooling
from ..plan import ConversionPlan, seeded_generator, why_not_calibrated
from .batches import (
    Batch,
    check_amount,
    check_source_loss,
    check_targets,
    make_batches,
    reads_passages,
    whole_batches,
    with_lengths,
)
from .examples import audio_batches
from .fitting import error_compared_with, rounded
from .methods import latent_forms
from .recording import AttentionInputs, attend, recorded_inputs, recorded_together
from .source_outputs import SourceModel, SourceOutputs

__all__ = ["CalibrationResult", "calibrate", "calibration_settings", "forms_on_text", "is_calibrated"]

# What the work on an attention takes, in calls of it: the closed form for each batch, a step of the fit.
CLOSED_FORM_CALLS, STEP_CALLS = 12.0, 4.0
# Work of at least so many seconds is announced with its length.
WORTH_SAYING = 20.0

logger = logging.getLogger(__name__)

# Batches of the source's arguments: of the examples to fit to, and of those that are held out.
Batches = tuple[list[Batch], list[Batch]]


class CalibrationResult(NamedTuple):
    """What a calibration made.

    Attributes:
        attentions: the new projections, on the CPU, of every attention that was fitted, by their modules' names.
        source_outputs: what the source makes of held-out examples, to compare the converted model with; None where
            nothing was fitted, or nobody asks.
        batches: the examples as the source reads them, for another calibration of the same source on the same ones.
        calibration: the calibration, with the lengths of its texts.
    """

    attentions: dict[str, AttentionTensors]
    source_outputs: SourceOutputs | None
    batches: Batches | None = None
    calibration: Calibration | None = None


def calibrate(
    plan: ConversionPlan,
    reader: TensorSource,
    source: SourceModel,
    calibration: Calibration | None,
    with_source_outputs: bool = True,
    batches: Batches | None = None,
) -> CalibrationResult:
    """Fit every attention that the plan changes to what the source makes of the calibration.

    Args:
        plan: the conversion, by a method that looks at text where there is a calibration.
        reader: the source's tensors.
        source: loads the source as this package's model with its own heads; only how it generates is changed.
        calibration: the text or audio; None = nothing is fitted.
        with_source_outputs: whether the converted model is to be compared with the source.
        batches: those that an earlier calibration of this source on these examples, by the same seed, returned.

    Raises:
        ValueError: as for `is_calibrated`, and if there is too little text, no tokenizer, or an attention that text
            alone does not reach.
    """
    if calibration is None or not is_calibrated(plan, calibration):
        return CalibrationResult({}, None)
    with _course(plan, reader, source, calibration, batches) as course, _finite(course):
        outputs = course.source_outputs() if with_source_outputs else None
        course.find_shared_latents()
        return CalibrationResult(course.converted(), outputs, course.batches, course.calibration)


def forms_on_text(
    plan: ConversionPlan,
    modules: Sequence[AttentionModule],
    reader: TensorSource,
    source: SourceModel,
    calibration: Calibration,
) -> list[LatentForms]:
    """Return what latents of some of the source's attentions lose on text; arguments and errors as for `calibrate`."""
    with _course(plan, reader, source, calibration) as course, _finite(course):
        return course.forms(modules)


def is_calibrated(plan: ConversionPlan, calibration: Calibration) -> bool:
    """Return whether a plan has attentions to fit to the text or audio.

    Raises:
        ValueError: where it cannot: for a source with talking heads, or a BERT with cross-attention; or there are only
            talking heads to add.
    """
    if not plan.reduced:
        if any(module.projections for module in plan.modules):
            raise ValueError(
                "a calibration fits fewer key/value heads, a latent or a kernel; talking heads are added without: "
                "leave it out."
            )
        return False
    _check_kind(plan, calibration)
    if (reason := why_not_calibrated(plan)) is not None:
        raise ValueError(f'method {plan.method.name!r} cannot be used here: {reason}. Use method "mean".')
    if not plan.hears:
        check_targets(plan.model_class, plan.config, calibration)
    return True


def _check_kind(plan: ConversionPlan, calibration: Calibration) -> None:
    name = plan.model_class.__name__.removeprefix("AttnVariant")
    if plan.hears and calibration.audio is None:
        raise ValueError(f"{name} reads audio: give the calibration `audio` (--calibration_audio_dir), no texts.")
    if not plan.hears and calibration.audio is not None:
        raise ValueError(f"{name} reads text: give the calibration `texts` (--calibration_file), no audio.")


def calibration_settings(plan: ConversionPlan, calibration: Calibration) -> dict[str, Any]:
    """Return the settings of the calibration for the report."""
    are_passages = reads_passages(plan.model_class, plan.config, calibration)
    return calibration.settings(plan.method, calibration.passage_length if are_passages else None)


@contextmanager
def _finite(course: "_Course") -> Iterator[None]:
    """Say of which attention the numbers have no solution: its weights are finite, what it makes of text is not."""
    try:
        yield
    except torch.linalg.LinAlgError as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"the attention {course.at!r} cannot be fitted: what it makes of the calibration is too large or not "
            f'finite ({reason}). Look at the checkpoint\'s weights, or convert with method "mean" (--method mean).'
        ) from error


def _course(
    plan: ConversionPlan,
    reader: TensorSource,
    source: SourceModel,
    calibration: Calibration,
    batches: Batches | None = None,
) -> "_Course":
    model, processor = source(plan)
    hears = calibration.audio is not None
    processor = calibration.processor or processor
    if processor is None:
        name = "feature_extractor" if hears else "tokenizer"
        raise ValueError(f"calibration needs the model's {name}: give `Calibration(..., {name}={name})`.")
    device = calibration.device or ("cuda" if torch.cuda.is_available() else "cpu")
    model = model.eval().to(device)
    calibration = with_lengths(calibration, processor, plan.config)
    if batches is None:
        batches = _batches(plan, model, processor, calibration)
        config: Any = plan.config
        check_amount([module.site.stack_of(config) for module in plan.reduced], config.hidden_size, batches[0])
    return _Course(plan, reader, model, processor, calibration, batches)


def _batches(plan: ConversionPlan, model: AttnVariantModelMixin, processor: Any, calibration: Calibration) -> Batches:
    """Return the examples as the source reads them; how it generates is theirs from then on."""
    hears = calibration.audio is not None
    if not hears and decoder_input(type(model), model.config) is DecoderInput.OWN_TARGETS:
        # Its own settings, beams or penalties, are for its users, but for what each text begins with.
        begin = model.generation_config.forced_bos_token_id
        model.generation_config = GenerationConfig.from_model_config(model.config)
        model.generation_config.forced_bos_token_id = begin
        start = set_languages(processor, model.config, calibration.source_lang, calibration.target_lang)
        if start is not None:
            start.apply_to(model)
    make: Callable[..., Batches] = audio_batches if hears else make_batches
    return make(model, processor, calibration, _held_out_draw(plan))


def _held_out_draw(plan: ConversionPlan) -> torch.Generator:
    return seeded_generator(plan.seed, "held-out texts")


@dataclass(frozen=True)
class _Visit:
    """One attention of the source and its calls on the text; where it has a latent, that is its memory."""

    module: AttentionModule
    tensors: AttentionTensors
    layer: LayerContext
    inputs: list[AttentionInputs]

    @property
    def heads(self) -> HeadCounts:
        return self.module.heads


class _Course:
    """The work on all attentions: first what those that share a latent lose, then each one."""

    def __init__(
        self,
        plan: ConversionPlan,
        reader: TensorSource,
        model: AttnVariantModelMixin,
        processor: Any,
        calibration: Calibration,
        batches: Batches,
    ):
        self._plan, self._reader, self._model, self._processor = plan, reader, model, processor
        self._method = cast(CalibratedMethod, plan.method)  # `resolve_method` takes no other with a calibration
        self.calibration, self.batches = calibration, batches
        self.at = plan.reduced[0].name  # the attention that is worked on
        self._parts = sum(
            (m.heads.relation == "pool") + (m.heads.rank_relation == "compress") + m.gets_kernel for m in plan.reduced
        )
        # A closed form counts as the steps of the fit that take as long; until one was timed, as one.
        self._closed_form_steps, self._fit_steps = 1, self._method.steps(calibration)
        total = self._parts * (1 + self._fit_steps)
        self._bar = progress_bar(total=total, desc="calibrating", unit="step", smoothing=0)
        self._parts_done = 0
        self._is_estimated = False
        self._errors: list[float | None] = []
        # Of the attentions that share a latent: their new heads, what they lose; by its name, the latent.
        self._new_heads: dict[str, AttentionTensors] = {}
        self._forms: dict[str, LatentForms] = {}
        self._latents: dict[str | None, torch.Tensor] = {}

    def __enter__(self) -> "_Course":
        self._bar.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._bar.__exit__(*raised)

    def source_outputs(self) -> SourceOutputs:
        """Run the source on the held-out examples, each alone and whole."""
        batches = self.batches[1]
        if self.calibration.audio is None:
            batches = whole_batches(self._model, self._processor, self.calibration, _held_out_draw(self._plan))
        outputs = SourceOutputs(self._model, self._processor, self.calibration, batches)
        check_source_loss(outputs.loss, self._model.config.vocab_size)
        return outputs

    def find_shared_latents(self) -> None:
        """Find the latents that several attentions read, after a pass over all of these."""
        sharing = [module for module in self._plan.reduced if module.new_latent is not None]
        for visit in self._visits(sharing):
            name, tensors = visit.module.name, self._with_new_heads(visit)
            if visit.heads.relation == "pool":
                self._new_heads[name] = tensors.to("cpu")
            self._forms[name] = latent_forms(tensors, visit.heads, visit.inputs, visit.layer.generator)
        for latent in dict.fromkeys(module.new_latent for module in sharing):
            readers = [module for module in sharing if module.new_latent == latent]
            forms = [form for module in readers for form in self._forms[module.name][:2]]
            self._latents[latent] = best_latent(forms, readers[0].heads.new_rank)

    def forms(self, modules: Sequence[AttentionModule]) -> list[LatentForms]:
        """Return what latents of these attentions, as they are in the source, lose."""
        self._is_estimated = True  # nothing is fitted
        visits = self._visits(list(modules))
        return [latent_forms(each.tensors, each.heads, each.inputs, each.layer.generator) for each in visits]

    def converted(self) -> dict[str, AttentionTensors]:
        """Return the new projections of every attention."""
        converted = {}
        for visit in self._visits(self._plan.reduced):
            name = visit.module.name
            tensors = self._new_heads.pop(name, None)
            tensors = self._with_new_heads(visit) if tensors is None else tensors.to(visit.tensors.query_weight.device)
            if visit.heads.rank_relation == "compress":
                tensors = self._with_latent(visit, tensors)
            if visit.module.gets_kernel:
                tensors = self._with_kernel(visit, tensors)
            tensors = _measured(visit.tensors, tensors, visit.heads, visit.layer)
            converted[name] = tensors.to("cpu")
            self._errors.append(tensors.details["output_relative_error"])
            known = [error for error in self._errors if error is not None]
            if len(known) == len(self._errors):
                mean = sum(known) / len(known)
                self._bar.set_postfix_str(f"mean error of one attention {mean:.1%}", refresh=is_watched())
        return converted

    def _visits(self, modules: list[AttentionModule]) -> Iterator[_Visit]:
        used, held_out = self.batches
        batches, config = [*used, *held_out], self._model.config
        for group in recorded_together(modules, self._plan.model_class, config, batches):
            calls = recorded_inputs(self._model, [module.name for module in group], batches)
            if not self._is_estimated:
                self._say_estimate(group, calls)
            for module in group:
                number = 1 + modules.index(module)
                self.at = module.name
                self._bar.set_description(f"calibrating attention {number} of {len(modules)}", refresh=is_watched())
                tensors = module.read(self._read)
                tensors = replace(tensors, latent_weight=None)  # what it makes is recorded as the memory
                inputs = calls.pop(module.name)
                uses = max(1, len(inputs) // len(batches))
                inputs, held = inputs[: uses * len(used)], inputs[uses * len(used) :]
                error = error_compared_with(tensors, module.heads, held)
                known = {"uses": uses, "held_out": held, "held_out_error": error, "on_step": self._on_step}
                yield _Visit(module, tensors, self._plan.layer(module, **known), inputs)

    @torch.no_grad()
    def _say_estimate(self, group: Sequence[AttentionModule], calls: Mapping[str, Sequence[AttentionInputs]]) -> None:
        """Say how long the fitting takes: by what a call of each attention takes, once."""
        self._is_estimated, reduced = True, self._plan.reduced
        closed = steps = 0.0
        size = self.calibration.fit_option("fit_batch_size")
        for module in group:
            tensors, inputs = module.read(self._read), calls[module.name]
            tensors = replace(tensors, latent_weight=None)
            started = time.perf_counter()
            attend(tensors, inputs[len(inputs) // 2], module.heads.query)
            taken = time.perf_counter() - started
            closed += CLOSED_FORM_CALLS * taken * len(inputs)
            steps += STEP_CALLS * taken * self._fit_steps * min(1.0, size / len(inputs[0].states))
        if steps:
            self._closed_form_steps = max(1, round(closed / steps * self._fit_steps))
            self._bar.total = self._parts * (self._closed_form_steps + self._fit_steps)
        share = len(reduced) / len(group)
        closed, steps = closed * share, steps * share
        if closed + steps > WORTH_SAYING:
            fit = f", {_minutes(steps)} of it the fit: --fit_steps 0, or --quick, leave that out" if steps else ""
            message = "fitting %d attentions to %d examples takes some %s%s"
            logger.info(message, len(reduced), len(self.calibration.examples), _minutes(closed + steps), fit)

    def _read(self, name: str) -> torch.Tensor:
        return self._reader.read(name).float().to(next(self._model.parameters()).device)

    def _with_new_heads(self, visit: _Visit) -> AttentionTensors:
        if visit.heads.relation != "pool":
            return self._plan.with_new_heads(visit.module, visit.tensors)
        tensors = self._method.convert_module(visit.tensors, visit.heads, visit.layer, visit.inputs, self.calibration)
        self._part_done()
        return tensors

    def _with_latent(self, visit: _Visit, tensors: AttentionTensors) -> AttentionTensors:
        module, heads = visit.module, visit.heads
        forms = self._forms.pop(module.name, None)
        if forms is None:
            forms = latent_forms(tensors, heads, visit.inputs, visit.layer.generator)
        weight = self._latents.get(module.new_latent)
        if weight is None:
            weight = best_latent([forms.key, forms.value], heads.new_rank)
        tensors = self._method.with_latent(
            _without_error(tensors),
            heads,
            visit.layer,
            visit.inputs,
            _outputs(visit),
            self.calibration,
            LatentInText(weight, forms, module.site.shares_latent),
        )
        self._part_done()
        return tensors

    def _with_kernel(self, visit: _Visit, tensors: AttentionTensors) -> AttentionTensors:
        tensors = _without_error(tensors).with_new_kernel(visit.module.new_kernel, visit.heads)
        targets = _outputs(visit)
        tensors = self._method.with_kernel(tensors, visit.heads, visit.layer, visit.inputs, targets, self.calibration)
        self._part_done()
        return tensors

    def _on_step(self) -> None:
        # The first step of a fit comes after its closed form.
        begun = self._parts_done * (self._closed_form_steps + self._fit_steps) + self._closed_form_steps
        self._bar.update(1 + max(0, begun - self._bar.n))

    def _part_done(self) -> None:
        self._parts_done += 1
        self._bar.update(self._parts_done * (self._closed_form_steps + self._fit_steps) - self._bar.n)


@torch.no_grad()
def _outputs(visit: _Visit) -> list[torch.Tensor]:
    """Return the source's outputs on the text, [b, n, D] each."""
    return [attend(visit.tensors, batch, visit.heads.query)[0] for batch in visit.inputs]


def _without_error(tensors: AttentionTensors) -> AttentionTensors:
    # That of its new heads alone is not what the report means.
    details = {name: value for name, value in tensors.details.items() if name != "output_relative_error"}
    return replace(tensors, details=details)


def _measured(
    tensors: AttentionTensors, converted: AttentionTensors, heads: HeadCounts, layer: LayerContext
) -> AttentionTensors:
    """Return an attention with the errors on held-out text: its own, and those that averaged heads have.

    Where averaged heads are nearer, it is these: a method that has too little text to learn from does no harm.
    """
    details = dict(converted.details)
    if "output_relative_error" not in details:
        details["output_relative_error"] = rounded(layer.held_out_error(converted))
    if heads.relation != "pool" or converted.kernel is not None:
        return replace(converted, details=details)
    averaged = MeanPooling().pool(tensors, heads, layer)
    error, others = details["output_relative_error"], rounded(layer.held_out_error(averaged))
    details["output_relative_error_averaged"] = others
    is_nearer = others is not None and (error is None or others < error)
    if is_nearer and averaged.latent_weight is converted.latent_weight is None:
        details |= {"output_relative_error": others, "averaged": True}
        details.pop("head_groups", None)  # averaged heads stand where they stood
        return replace(averaged, details=details)
    return replace(converted, details=details)


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} minutes"
