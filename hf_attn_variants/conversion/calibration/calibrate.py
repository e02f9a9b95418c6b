"""Calibration: fitting new heads to the outputs of the original attentions on text or audio."""

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
from ..plan import ConversionPlan, explain_not_calibrated, seeded_generator
from .batches import (
    Batch,
    add_text_lengths,
    check_amount,
    check_source_loss,
    check_targets,
    make_batches,
    make_untruncated_batches,
    reads_passages,
)
from .examples import make_audio_batches
from .fitting import error_compared_with, round_error
from .methods import latent_forms
from .recording import AttentionInputs, compute_attention, group_modules, record_inputs
from .source_outputs import SourceModel, SourceOutputs

__all__ = ["CalibrationResult", "calibrate", "calibration_settings", "forms_on_text", "is_calibrated"]

# Cost of the work on an attention, in calls of it: for the closed form of a batch, and for a step of the fit.
CLOSED_FORM_CALLS, STEP_CALLS = 12.0, 4.0
# The expected duration is logged if it is at least this many seconds.
MIN_LOGGED_SECONDS = 20.0

logger = logging.getLogger(__name__)

# Batches of model inputs: of the examples to fit to, and of the held-out examples.
Batches = tuple[list[Batch], list[Batch]]


class CalibrationResult(NamedTuple):
    """The result of a calibration.

    Attributes:
        attentions: The new projections of every fitted attention on the CPU, by module name.
        source_outputs: The outputs of the original model on held-out examples, for comparison with the converted
            model. None: nothing was fitted, or they were not requested.
        batches: The inputs of the original model, for another calibration of the same model on the same examples.
        calibration: The calibration with the lengths of its texts.
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
    """Fit every attention that the plan changes to the outputs of the original attention.

    Args:
        plan: The plan of the conversion. With a calibration, its method is a `CalibratedMethod`.
        reader: The tensors of the original model.
        source: Function that loads the original model in this package's class. Only its generation settings are
            changed.
        calibration: The text or audio. None: nothing is fitted.
        with_source_outputs: Whether the converted model will be compared with the original one.
        batches: The batches of an earlier calibration of this model with the same examples and seed.

    Raises:
        ValueError: as for `is_calibrated`, and if there is too little text, no tokenizer, or an attention that the
            text does not reach.
    """
    if calibration is None or not is_calibrated(plan, calibration):
        return CalibrationResult({}, None)
    with _start_run(plan, reader, source, calibration, batches) as run, _explain_linalg_errors(run):
        outputs = run.compute_source_outputs() if with_source_outputs else None
        run.find_shared_latents()
        return CalibrationResult(run.fit_attentions(), outputs, run.batches, run.calibration)


def forms_on_text(
    plan: ConversionPlan,
    modules: Sequence[AttentionModule],
    reader: TensorSource,
    source: SourceModel,
    calibration: Calibration,
) -> list[LatentForms]:
    """Return the quadratic forms of latents of some attentions, measured on text.

    Args:
        plan, reader, source, calibration: As for `calibrate`.
        modules: The attention modules.

    Raises:
        ValueError: as for `calibrate`.
    """
    with _start_run(plan, reader, source, calibration) as run, _explain_linalg_errors(run):
        return run.compute_forms(modules)


def is_calibrated(plan: ConversionPlan, calibration: Calibration) -> bool:
    """Return whether a plan has attentions to fit to the text or audio.

    Raises:
        ValueError: if a calibration is not possible, for example because the original model has talking heads or is a
            BERT with cross-attention, or useless, because the conversion only adds talking heads.
    """
    if not plan.reduced:
        if any(module.projections for module in plan.modules):
            raise ValueError(
                "`calibration` must only be given for fewer key/value heads, a latent or a kernel. Talking heads need "
                "none: leave it out."
            )
        return False
    _check_kind(plan, calibration)
    if (reason := explain_not_calibrated(plan)) is not None:
        raise ValueError(f'`method` {plan.method.name!r} cannot be used for this model: {reason}. Use method "mean".')
    if not plan.reads_audio:
        check_targets(plan.model_class, plan.config, calibration)
    return True


def _check_kind(plan: ConversionPlan, calibration: Calibration) -> None:
    """Check that a calibration is audio if the model reads audio, and text otherwise."""
    name = plan.model_class.__name__.removeprefix("AttnVariant")
    if plan.reads_audio and calibration.audio is None:
        raise ValueError(f"`calibration` must be audio for {name}, got text. Give a folder (--calibration_audio_dir).")
    if not plan.reads_audio and calibration.audio is not None:
        raise ValueError(f"`calibration` must be text for {name}, got audio. Give texts (--calibration_file).")


def calibration_settings(plan: ConversionPlan, calibration: Calibration) -> dict[str, Any]:
    """Return the settings of the calibration for the report."""
    are_passages = reads_passages(plan.model_class, plan.config, calibration)
    return calibration.settings(plan.method, calibration.passage_length if are_passages else None)


@contextmanager
def _explain_linalg_errors(run: "CalibrationRun") -> Iterator[None]:
    """Name the attention in errors of linear algebra. Its weights are finite, but its outputs on the text are not."""
    try:
        yield
    except torch.linalg.LinAlgError as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"The attention {run.current_name!r} cannot be fitted, because its outputs on the calibration are too "
            f"large or not finite ({reason}). Check the weights of the checkpoint, or convert with method "
            '"mean" (--method mean).'
        ) from error


def _start_run(
    plan: ConversionPlan,
    reader: TensorSource,
    source: SourceModel,
    calibration: Calibration,
    batches: Batches | None = None,
) -> "CalibrationRun":
    """Load the original model and make its batches. Arguments as for `calibrate`."""
    model, processor = source(plan)
    is_audio = calibration.audio is not None
    processor = calibration.processor or processor
    if processor is None:
        name = "feature_extractor" if is_audio else "tokenizer"
        raise ValueError(f"`{name}` must be given for a model without one. Use `Calibration(..., {name}={name})`.")
    device = calibration.device or ("cuda" if torch.cuda.is_available() else "cpu")
    model = model.eval().to(device)
    calibration = add_text_lengths(calibration, processor, plan.config)
    if batches is None:
        batches = _make_batches(plan, model, processor, calibration)
        config: Any = plan.config
        check_amount([module.site.get_stack_name(config) for module in plan.reduced], config.hidden_size, batches[0])
    return CalibrationRun(plan, reader, model, processor, calibration, batches)


def _make_batches(
    plan: ConversionPlan, model: AttnVariantModelMixin, processor: Any, calibration: Calibration
) -> Batches:
    """Return the batches of the original model, and set its generation settings to those of the batches."""
    is_audio = calibration.audio is not None
    if not is_audio and decoder_input(type(model), model.config) is DecoderInput.OWN_TARGETS:
        # Its own settings, such as beams or penalties, do not matter here, except for the first token of outputs.
        begin = model.generation_config.forced_bos_token_id
        model.generation_config = GenerationConfig.from_model_config(model.config)
        model.generation_config.forced_bos_token_id = begin
        start = set_languages(processor, model.config, calibration.source_lang, calibration.target_lang)
        if start is not None:
            start.apply_to(model)
    make: Callable[..., Batches] = make_audio_batches if is_audio else make_batches
    return make(model, processor, calibration, _make_held_out_generator(plan))


def _make_held_out_generator(plan: ConversionPlan) -> torch.Generator:
    """Return the random number generator that selects the held-out examples."""
    return seeded_generator(plan.seed, "held-out texts")


@dataclass(frozen=True)
class AttentionCalls:
    """An attention of the original model and its calls on the text. If it has a latent, the inputs are latents."""

    module: AttentionModule
    tensors: AttentionTensors
    layer: LayerContext
    inputs: list[AttentionInputs]

    @property
    def heads(self) -> HeadCounts:
        """The head counts before and after."""
        return self.module.heads


class CalibrationRun:
    """The calibration of all attentions: it finds the shared latents first, and then fits each attention."""

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
        self.current_name = plan.reduced[0].name  # for error messages
        self._parts = sum(
            (m.heads.relation == "pool") + (m.heads.rank_relation == "compress") + m.gets_kernel for m in plan.reduced
        )
        # For the progress bar, a closed form counts as the number of fitting steps that take as long. It counts as one
        # step until the duration has been measured.
        self._closed_form_steps, self._fit_steps = 1, self._method.steps(calibration)
        total = self._parts * (1 + self._fit_steps)
        self._bar = progress_bar(total=total, desc="calibrating", unit="step", smoothing=0)
        self._parts_done = 0
        self._is_estimated = False
        self._errors: list[float | None] = []
        # For attentions that share a latent: their new heads, their quadratic forms, and the latents by name.
        self._new_heads: dict[str, AttentionTensors] = {}
        self._forms: dict[str, LatentForms] = {}
        self._latents: dict[str | None, torch.Tensor] = {}

    def __enter__(self) -> "CalibrationRun":
        self._bar.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._bar.__exit__(*raised)

    def compute_source_outputs(self) -> SourceOutputs:
        """Return the outputs of the original model on the held-out examples, without truncation."""
        batches = self.batches[1]
        if self.calibration.audio is None:
            generator = _make_held_out_generator(self._plan)
            batches = make_untruncated_batches(self._model, self._processor, self.calibration, generator)
        outputs = SourceOutputs(self._model, self._processor, self.calibration, batches)
        check_source_loss(outputs.loss, self._model.config.vocab_size)
        return outputs

    def find_shared_latents(self) -> None:
        """Compute the latents that several attentions share, after one pass over all these attentions."""
        sharing = [module for module in self._plan.reduced if module.new_latent is not None]
        for calls in self._record_calls(sharing):
            name, tensors = calls.module.name, self._convert_heads(calls)
            if calls.heads.relation == "pool":
                self._new_heads[name] = tensors.to("cpu")
            self._forms[name] = latent_forms(tensors, calls.heads, calls.inputs, calls.layer.generator)
        for latent in dict.fromkeys(module.new_latent for module in sharing):
            readers = [module for module in sharing if module.new_latent == latent]
            forms = [form for module in readers for form in self._forms[module.name][:2]]
            self._latents[latent] = best_latent(forms, readers[0].heads.new_rank)

    def compute_forms(self, modules: Sequence[AttentionModule]) -> list[LatentForms]:
        """Return the quadratic forms of latents of these attentions with their original heads."""
        self._is_estimated = True  # There is no fit whose duration could be estimated.
        return [
            latent_forms(calls.tensors, calls.heads, calls.inputs, calls.layer.generator)
            for calls in self._record_calls(list(modules))
        ]

    def fit_attentions(self) -> dict[str, AttentionTensors]:
        """Return the new projections of every attention, by module name."""
        converted = {}
        for calls in self._record_calls(self._plan.reduced):
            name = calls.module.name
            tensors = self._new_heads.pop(name, None)
            tensors = self._convert_heads(calls) if tensors is None else tensors.to(calls.tensors.query_weight.device)
            if calls.heads.rank_relation == "compress":
                tensors = self._add_latent(calls, tensors)
            if calls.module.gets_kernel:
                tensors = self._add_kernel(calls, tensors)
            tensors = _add_errors(calls.tensors, tensors, calls.heads, calls.layer)
            converted[name] = tensors.to("cpu")
            self._errors.append(tensors.details["output_relative_error"])
            known = [error for error in self._errors if error is not None]
            if len(known) == len(self._errors):
                mean = sum(known) / len(known)
                self._bar.set_postfix_str(f"mean error per attention {mean:.1%}", refresh=is_watched())
        return converted

    def _record_calls(self, modules: list[AttentionModule]) -> Iterator[AttentionCalls]:
        """Yield the calls of each attention. Attentions whose inputs fit into memory are recorded together."""
        fit_batches, held_out_batches = self.batches
        batches, config = [*fit_batches, *held_out_batches], self._model.config
        for group in group_modules(modules, self._plan.model_class, config, batches):
            recorded = record_inputs(self._model, [module.name for module in group], batches)
            if not self._is_estimated:
                self._log_estimate(group, recorded)
            for module in group:
                number = 1 + modules.index(module)
                self.current_name = module.name
                self._bar.set_description(f"calibrating attention {number} of {len(modules)}", refresh=is_watched())
                tensors = module.read(self._read)
                tensors = replace(tensors, latent_weight=None)  # the recorded inputs are its latents
                inputs = recorded.pop(module.name)
                uses = max(1, len(inputs) // len(batches))
                inputs, held_out = inputs[: uses * len(fit_batches)], inputs[uses * len(fit_batches) :]
                error = error_compared_with(tensors, module.heads, held_out)
                context = {"uses": uses, "held_out": held_out, "held_out_error": error, "on_step": self._on_step}
                yield AttentionCalls(module, tensors, self._plan.layer(module, **context), inputs)

    @torch.no_grad()
    def _log_estimate(self, group: Sequence[AttentionModule], calls: Mapping[str, Sequence[AttentionInputs]]) -> None:
        """Log the expected duration of the fit once, estimated from the duration of one call of each attention."""
        self._is_estimated, reduced = True, self._plan.reduced
        closed = steps = 0.0
        size = self.calibration.fit_option("fit_batch_size")
        for module in group:
            tensors, inputs = module.read(self._read), calls[module.name]
            tensors = replace(tensors, latent_weight=None)
            started = time.perf_counter()
            compute_attention(tensors, inputs[len(inputs) // 2], module.heads.query)
            seconds = time.perf_counter() - started
            closed += CLOSED_FORM_CALLS * seconds * len(inputs)
            steps += STEP_CALLS * seconds * self._fit_steps * min(1.0, size / len(inputs[0].states))
        if steps:
            self._closed_form_steps = max(1, round(closed / steps * self._fit_steps))
            self._bar.total = self._parts * (self._closed_form_steps + self._fit_steps)
        share = len(reduced) / len(group)
        closed, steps = closed * share, steps * share
        if closed + steps > MIN_LOGGED_SECONDS:
            fit = f", {_format_duration(steps)} of it for steps that --fit_steps 0 or --quick skip" if steps else ""
            message = "Fitting %d attentions to %d examples takes about %s%s."
            logger.info(message, len(reduced), len(self.calibration.examples), _format_duration(closed + steps), fit)

    def _read(self, name: str) -> torch.Tensor:
        """Return a tensor of the original model in float32, on the device of the calibration."""
        return self._reader.read(name).float().to(next(self._model.parameters()).device)

    def _convert_heads(self, calls: AttentionCalls) -> AttentionTensors:
        """Return the projections of an attention with its new heads."""
        if calls.heads.relation != "pool":
            return self._plan.with_new_heads(calls.module, calls.tensors)
        tensors = self._method.convert_module(calls.tensors, calls.heads, calls.layer, calls.inputs, self.calibration)
        self._finish_part()
        return tensors

    def _add_latent(self, calls: AttentionCalls, tensors: AttentionTensors) -> AttentionTensors:
        """Return the projections of an attention with its latent."""
        module, heads = calls.module, calls.heads
        forms = self._forms.pop(module.name, None)
        if forms is None:
            forms = latent_forms(tensors, heads, calls.inputs, calls.layer.generator)
        weight = self._latents.get(module.new_latent)
        if weight is None:
            weight = best_latent([forms.key, forms.value], heads.new_rank)
        tensors = self._method.with_latent(
            _remove_error(tensors),
            heads,
            calls.layer,
            calls.inputs,
            _compute_outputs(calls),
            self.calibration,
            LatentInText(weight, forms, module.site.shares_latent),
        )
        self._finish_part()
        return tensors

    def _add_kernel(self, calls: AttentionCalls, tensors: AttentionTensors) -> AttentionTensors:
        """Return the projections of an attention with its kernel."""
        tensors = _remove_error(tensors).with_new_kernel(calls.module.new_kernel, calls.heads)
        targets = _compute_outputs(calls)
        tensors = self._method.with_kernel(tensors, calls.heads, calls.layer, calls.inputs, targets, self.calibration)
        self._finish_part()
        return tensors

    def _on_step(self) -> None:
        """Update the progress bar after a fitting step."""
        # The closed form is finished before the first step.
        started = self._parts_done * (self._closed_form_steps + self._fit_steps) + self._closed_form_steps
        self._bar.update(1 + max(0, started - self._bar.n))

    def _finish_part(self) -> None:
        """Update the progress bar after new heads, a latent or a kernel."""
        self._parts_done += 1
        self._bar.update(self._parts_done * (self._closed_form_steps + self._fit_steps) - self._bar.n)


@torch.no_grad()
def _compute_outputs(calls: AttentionCalls) -> list[torch.Tensor]:
    """Return the outputs of the original attention on the text, [b, n, D] each."""
    return [compute_attention(calls.tensors, batch, calls.heads.query)[0] for batch in calls.inputs]


def _remove_error(tensors: AttentionTensors) -> AttentionTensors:
    """Remove the error that only includes the new heads, because the report contains the error after all changes."""
    details = {name: value for name, value in tensors.details.items() if name != "output_relative_error"}
    return replace(tensors, details=details)


def _add_errors(
    tensors: AttentionTensors, converted: AttentionTensors, heads: HeadCounts, layer: LayerContext
) -> AttentionTensors:
    """Return an attention with its error on held-out text, and that of averaged heads, in `details`.

    If averaged heads have a smaller error, they are returned instead. This prevents harm from too little text.
    """
    details = dict(converted.details)
    if "output_relative_error" not in details:
        details["output_relative_error"] = round_error(layer.held_out_error(converted))
    if heads.relation != "pool" or converted.kernel is not None:
        return replace(converted, details=details)
    averaged = MeanPooling().pool(tensors, heads, layer)
    error, averaged_error = details["output_relative_error"], round_error(layer.held_out_error(averaged))
    details["output_relative_error_averaged"] = averaged_error
    is_better = averaged_error is not None and (error is None or averaged_error < error)
    if is_better and averaged.latent_weight is converted.latent_weight is None:
        details |= {"output_relative_error": averaged_error, "averaged": True}
        details.pop("head_groups", None)  # averaging does not reorder heads
        return replace(averaged, details=details)
    return replace(converted, details=details)


def _format_duration(seconds: float) -> str:
    """Return a duration in seconds or minutes as text."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} minutes"
