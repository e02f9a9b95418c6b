"""Calibration: text or audio through the source model, and new heads fitted to what its attentions make of it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from transformers import GenerationConfig

from ...decoder_inputs import DecoderInput, decoder_input
from ...languages import set_languages
from ...modeling.attention.variant_mixins import AttnVariantModelMixin
from ...modeling.fields.kernel_fields import has_kernel
from ...progress import is_watched, progress_bar
from ..attention_modules import AttentionModule
from ..calibration_settings import Calibration
from ..checkpoint.in_memory import TensorSource
from ..grouping import HeadCounts
from ..latents import LatentForms, best_latent
from ..methods.base import CalibratedMethod, LatentInText, LayerContext
from ..methods.mean import MeanPooling
from ..plan import ConversionPlan, seeded_generator
from ..projections import AttentionTensors
from .audio import audio_batches
from .batches import Batch, check_targets, make_batches
from .fitting import relative_error, rounded
from .latent_forms import latent_forms
from .passages import reads_passages
from .recording import AttentionInputs, attend, recorded_inputs
from .source_models import SourceModel

__all__ = ["calibrate", "calibration_settings", "forms_on_text", "is_calibrated", "why_not_calibrated"]

# What recorded inputs may take; more modules than fit into it are recorded in several passes over the text.
MAX_RECORDED_BYTES = 3 * 2**30


def why_not_calibrated(plan: ConversionPlan) -> str | None:
    """Return why no text can say how the plan's source is to be pooled; None where it can."""
    talking_heads = plan.source_config.talking_heads
    if talking_heads is not None:
        what = f"the source has talking heads ({talking_heads!r}), whose do not"
        return f"it fits heads whose weights sum to one; {what}"
    if has_kernel(plan.source_config):
        return "it fits to a softmax's outputs; the source has a kernel in its place"
    is_encoder_decoder = getattr(plan.config, "is_encoder_decoder", False)
    if not is_encoder_decoder and any(module.site.is_cross_attention for module in plan.reduced):
        return (
            "it cannot reach the cross-attention of a decoder alone: there is no text for the encoder that this reads"
        )
    return None


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
    name = plan.model_class.__name__
    if plan.hears and calibration.audio is None:
        raise ValueError(f"{name} reads audio: give the calibration `audio` (--calibration_audio_dir), no texts.")
    if not plan.hears and calibration.audio is not None:
        raise ValueError(f"{name} reads text: give the calibration `texts` (--calibration_file), no audio.")


def calibrate(
    plan: ConversionPlan, reader: TensorSource, source: SourceModel, calibration: Calibration | None
) -> dict[str, AttentionTensors]:
    """Return the new projections, on the CPU, of every attention that the plan fits, by their modules' names.

    Args:
        plan: the conversion, by a method that looks at text where there is a calibration.
        reader: the source's tensors.
        source: loads the source as this package's model with its own heads; only how it generates is changed.
        calibration: the text or audio; None = nothing is fitted.

    Raises:
        ValueError: as for `is_calibrated`, and if there is too little text, no tokenizer, or an attention that text
            alone does not reach.
    """
    if calibration is None or not is_calibrated(plan, calibration):
        return {}
    with _course(plan, reader, source, calibration) as course, _finite(course):
        course.find_shared_latents()
        return course.converted()


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


def calibration_settings(plan: ConversionPlan, calibration: Calibration | None) -> dict[str, Any] | None:
    """Return what a report says of the calibration; None where nothing was fitted."""
    if calibration is None or not plan.reduced:
        return None
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


def _course(plan: ConversionPlan, reader: TensorSource, source: SourceModel, calibration: Calibration) -> "_Course":
    model, processor = source(plan)
    hears = calibration.audio is not None
    processor = calibration.processor or processor
    if processor is None:
        name = "feature_extractor" if hears else "tokenizer"
        raise ValueError(f"calibration needs the model's {name}: give `Calibration(..., {name}={name})`.")
    device = calibration.device or ("cuda" if torch.cuda.is_available() else "cpu")
    model = model.eval().to(device)
    if not hears and decoder_input(type(model), model.config) is DecoderInput.OWN_TARGETS:
        # Its own settings, beams or penalties, are for its users, but for what each text begins with.
        begin = model.generation_config.forced_bos_token_id
        model.generation_config = GenerationConfig.from_model_config(model.config)
        model.generation_config.forced_bos_token_id = begin
        start = set_languages(processor, model.config, calibration.source_lang, calibration.target_lang)
        if start is not None:
            start.give(model)
    batches = audio_batches if hears else make_batches
    used, held_out = batches(model, processor, calibration, seeded_generator(plan.seed, "held-out texts"))
    return _Course(plan, reader, model, calibration, used, held_out)


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
        calibration: Calibration,
        used: Sequence[Batch],
        held_out: Sequence[Batch],
    ):
        self._plan, self._reader, self._model = plan, reader, model
        self._method = cast(CalibratedMethod, plan.method)  # `resolve_method` takes no other with a calibration
        self._calibration, self._batches = calibration, (used, held_out)
        # A step each for the closed form, of which no number of steps is known; the estimate is of the mean so far.
        self._steps = 1 + self._method.steps(calibration)
        self.at = plan.reduced[0].name  # the attention that is worked on
        parts = [
            (m.heads.relation == "pool") + (m.heads.rank_relation == "compress") + m.gets_kernel for m in plan.reduced
        ]
        self._bar = progress_bar(total=self._steps * sum(parts), desc="calibrating", unit="step", smoothing=0)
        self._parts_done = 0
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
            details = _output_errors(visit.tensors, tensors, visit.heads, visit.layer)
            converted[name] = replace(tensors, details=details).to("cpu")
            self._errors.append(details["output_relative_error"])
            known = [error for error in self._errors if error is not None]
            if len(known) == len(self._errors):
                mean = sum(known) / len(known)
                self._bar.set_postfix_str(f"outputs {mean:.1%} off on held-out text", refresh=is_watched())
        return converted

    def _visits(self, modules: list[AttentionModule]) -> Iterator[_Visit]:
        used, held_out = self._batches
        batches, config = [*used, *held_out], self._model.config
        for group in _recorded_together(modules, self._plan.model_class, config, batches):
            calls = recorded_inputs(self._model, [module.name for module in group], batches)
            for module in group:
                number = 1 + modules.index(module)
                self.at = module.name
                self._bar.set_description(f"calibrating attention {number} of {len(modules)}", refresh=is_watched())
                tensors = module.read(self._read)
                tensors = replace(tensors, latent_weight=None)  # what it makes is recorded as the memory
                inputs = calls.pop(module.name)
                uses = max(1, len(inputs) // len(batches))
                inputs, held = inputs[: uses * len(used)], inputs[uses * len(used) :]
                error = _held_out_error(tensors, module.heads, held)
                known = {"uses": uses, "held_out": held, "held_out_error": error, "on_step": self._bar.update}
                yield _Visit(module, tensors, self._plan.layer(module, **known), inputs)

    def _read(self, name: str) -> torch.Tensor:
        return self._reader.read(name).float().to(next(self._model.parameters()).device)

    def _with_new_heads(self, visit: _Visit) -> AttentionTensors:
        if visit.heads.relation != "pool":
            return self._plan.with_new_heads(visit.module, visit.tensors)
        tensors = self._method.convert_module(visit.tensors, visit.heads, visit.layer, visit.inputs, self._calibration)
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
            self._calibration,
            LatentInText(weight, forms, module.site.shares_latent),
        )
        self._part_done()
        return tensors

    def _with_kernel(self, visit: _Visit, tensors: AttentionTensors) -> AttentionTensors:
        tensors = _without_error(tensors).with_new_kernel(visit.module.new_kernel, visit.heads)
        targets = _outputs(visit)
        tensors = self._method.with_kernel(tensors, visit.heads, visit.layer, visit.inputs, targets, self._calibration)
        self._part_done()
        return tensors

    def _part_done(self) -> None:
        self._parts_done += 1
        self._bar.update(self._steps * self._parts_done - self._bar.n)


@torch.no_grad()
def _outputs(visit: _Visit) -> list[torch.Tensor]:
    """Return the source's outputs on the text, [b, n, D] each."""
    return [attend(visit.tensors, batch, visit.heads.query)[0] for batch in visit.inputs]


def _without_error(tensors: AttentionTensors) -> AttentionTensors:
    # That of its new heads alone is not what the report means.
    details = {name: value for name, value in tensors.details.items() if name != "output_relative_error"}
    return replace(tensors, details=details)


@torch.no_grad()
def _held_out_error(
    tensors: AttentionTensors, heads: HeadCounts, held_out: Sequence[AttentionInputs]
) -> Callable[[AttentionTensors], float | None]:
    """Return the function that measures other projections' outputs on held-out text against one attention's own."""
    targets = [attend(tensors, batch, heads.query)[0] for batch in held_out]
    return lambda converted: relative_error(converted, heads, held_out, targets)


def _output_errors(
    tensors: AttentionTensors, converted: AttentionTensors, heads: HeadCounts, layer: LayerContext
) -> dict[str, Any]:
    """Return the method's details with the errors on held-out text: its own, and those that averaged heads have."""
    details = dict(converted.details)
    if "output_relative_error" not in details:
        details["output_relative_error"] = rounded(layer.held_out_error(converted))
    if heads.relation != "pool" or converted.kernel is not None:
        return details
    averaged = MeanPooling().pool(tensors, heads, layer)
    return details | {"output_relative_error_averaged": rounded(layer.held_out_error(averaged))}


def _recorded_together(
    modules: list[AttentionModule], model_class: Any, config: Any, batches: Sequence[dict[str, torch.Tensor]]
) -> Iterator[list[AttentionModule]]:
    """Split the modules so that what is recorded for each part fits into `MAX_RECORDED_BYTES`."""
    positions = sum(max(map(_positions, batch.values())) for batch in batches)
    calls = max((model_class.module_runs(config, module.name) for module in modules), default=1)
    at_once = max(1, MAX_RECORDED_BYTES // (positions * config.hidden_size * 4 * calls))
    for start in range(0, len(modules), at_once):
        yield modules[start : start + at_once]


def _positions(argument: torch.Tensor) -> int:
    """Return how many positions an argument of the model has: ids [b, n], or features of audio [b, bins, frames]."""
    return argument[:, 0].numel() if argument.ndim == 3 else argument.numel()
