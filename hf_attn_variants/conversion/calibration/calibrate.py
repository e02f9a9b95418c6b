"""Calibration: fitting new attentions to the outputs of the original ones on text or audio.

    examples ──► batches ──► original model ──► inputs of each attention            (batches, recording)
                    │                                   │
                    │        shared latents: one pass over all attentions that read them
                    │                                   │
                    │        for each attention:  new heads ─► latent ─► kernel     (methods, fitting)
                    │                                   │
                    │        averaged heads instead, if their error on held-out examples is smaller
                    ▼
    held-out examples ──► outputs of the whole original model                       (source_outputs)

Each attention is fitted to its inputs in the original model, and therefore independently of the others. The inputs of
as many attentions as fit into memory are recorded in one pass over the batches (`recording.group_modules`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from transformers import GenerationConfig

from ...model_properties import DecoderInput, decoder_input, set_languages
from ...modeling.attention.variant_mixins import AttnVariantModelMixin
from ...progress import is_watched, progress_bar
from ..attention_modules import AttentionModule
from ..attention_tensors import (
    AttentionTensors,
    CalibratedMethod,
    HeadCounts,
    LatentForms,
    LatentInText,
    LayerContext,
    MeanPooling,
    best_latent,
)
from ..calibration_settings import Calibration
from ..checkpoint.models import TensorSource
from ..plan import ConversionPlan, explain_not_calibrated, make_seeded_generator
from ..report import CalibrationResult
from .batches import (
    Batch,
    add_text_lengths,
    check_source_loss,
    check_targets,
    check_token_count,
    make_batches,
    make_untruncated_batches,
    should_join_passages,
)
from .examples import make_audio_batches
from .fitting import make_error_function, round_error
from .methods import compute_latent_forms
from .recording import compute_attention, group_modules, record_inputs
from .source_outputs import SourceLoader, SourceOutputs

# Batches of model inputs: of the examples to fit to, and of the held-out examples.
Batches = tuple[list[Batch], list[Batch]]


def calibrate(
    plan: ConversionPlan,
    reader: TensorSource,
    source: SourceLoader,
    calibration: Calibration,
    with_source_outputs: bool = True,
    batches: Batches | None = None,
) -> CalibrationResult:
    """Fit every attention that the plan changes to the outputs of the original attention.

    Args:
        plan: The plan of the conversion. Its method is a `CalibratedMethod`.
        reader: The tensors of the original model.
        source: Function that loads the original model in this package's class. Only its generation settings are
            changed.
        calibration: The text or audio.
        with_source_outputs: Whether the converted model will be compared with the original one.
        batches: The batches of an earlier calibration of this model with the same examples and seed.

    Raises:
        ValueError: as for `should_calibrate`, and if there is too little text, no tokenizer, or an attention that the
            text does not reach.
    """
    if not should_calibrate(plan, calibration):
        return CalibrationResult({})
    with _open_calibration_run(plan, reader, source, calibration, batches) as run:
        outputs = run.compute_source_outputs() if with_source_outputs else None
        run.find_shared_latents()
        return CalibrationResult(run.fit_attentions(), outputs, run.batches, run.settings())


def measure_latent_forms(
    plan: ConversionPlan,
    modules: Sequence[AttentionModule],
    reader: TensorSource,
    source: SourceLoader,
    calibration: Calibration,
) -> list[LatentForms]:
    """Return the quadratic forms of latents of some attentions with their original heads, measured on text.

    Args:
        plan, reader, source, calibration: As for `calibrate`.
        modules: The attention modules.

    Raises:
        ValueError: as for `calibrate`.
    """
    with _open_calibration_run(plan, reader, source, calibration) as run:
        return [
            compute_latent_forms(calls.tensors, calls.heads, calls.layer.inputs, calls.layer.generator)
            for calls in run.record_calls(modules)
        ]


def should_calibrate(plan: ConversionPlan, calibration: Calibration) -> bool:
    """Return whether a plan has attentions to fit to the text or audio.

    Raises:
        ValueError: if a calibration is not possible, for example because the original model has talking heads or is a
            BERT with cross-attention, or useless, because the conversion only adds talking heads.
    """
    if not plan.reduced_modules:
        if any(module.projections for module in plan.modules):
            raise ValueError(
                "`calibration` must only be given for fewer key/value heads, a latent or a kernel. Talking heads need "
                "none: leave it out."
            )
        return False
    if plan.reads_audio is not (calibration.audio is not None):
        kind, option = ("audio", "calibration_audio_dir") if plan.reads_audio else ("text", "calibration_file")
        name = plan.model_class.__name__.removeprefix("AttnVariant")
        raise ValueError(f"`calibration` must be {kind} for {name}. Give it (--{option}).")
    if (reason := explain_not_calibrated(plan)) is not None:
        raise ValueError(f'`method` {plan.method.name!r} cannot be used for this model: {reason}. Use method "mean".')
    if not plan.reads_audio:
        check_targets(plan.model_class, plan.config, calibration)
    return True


@contextmanager
def _open_calibration_run(
    plan: ConversionPlan,
    reader: TensorSource,
    source: SourceLoader,
    calibration: Calibration,
    batches: Batches | None = None,
) -> Iterator["CalibrationRun"]:
    """Load the original model, make its batches, and name the attention in errors of linear algebra.

    Arguments as for `calibrate`.
    """
    model, processor = source(plan)
    processor = calibration.processor or processor
    device = calibration.device or ("cuda" if torch.cuda.is_available() else "cpu")
    model = model.eval().to(device)
    calibration = add_text_lengths(calibration, processor, plan.config)
    if batches is None:
        batches = _make_batches(plan, model, processor, calibration)
        config: Any = plan.config
        check_token_count(
            [module.site.stack_of(config) for module in plan.reduced_modules], config.hidden_size, batches[0]
        )
    run = CalibrationRun(plan, reader, model, processor, calibration, batches)
    try:
        yield run
    except torch.linalg.LinAlgError as error:  # the weights are finite, but the outputs on the text are not
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"The attention {run.current_name!r} cannot be fitted, because its outputs on the calibration are too "
            f"large or not finite ({reason}). Check the weights of the checkpoint, or convert with method "
            '"mean" (--method mean).'
        ) from error


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
    return make_seeded_generator(plan.seed, "held-out texts")


class AttentionCalls(NamedTuple):
    """An attention of the original model with its calls on the text. If it has a latent, the inputs are latents."""

    module: AttentionModule
    tensors: AttentionTensors
    layer: LayerContext

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
        self.current_name = plan.reduced_modules[0].name  # for error messages
        # For attentions that share a latent: their new heads, their quadratic forms, and the latents by name.
        self._new_heads: dict[str, AttentionTensors] = {}
        self._forms: dict[str, LatentForms] = {}
        self._latents: dict[str | None, torch.Tensor] = {}

    def settings(self) -> dict[str, Any]:
        """Return the settings of the calibration for the report."""
        calibration = self.calibration
        are_passages = should_join_passages(self._plan.model_class, self._plan.config, calibration)
        return calibration.settings(self._plan.method, calibration.passage_length if are_passages else None)

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
        sharing = [module for module in self._plan.reduced_modules if module.new_latent is not None]
        for calls in self.record_calls(sharing):
            name, tensors = calls.module.name, self._convert_heads(calls)
            if calls.heads.relation == "pool":
                self._new_heads[name] = tensors.to("cpu")
            self._forms[name] = compute_latent_forms(tensors, calls.heads, calls.layer.inputs, calls.layer.generator)
        for latent in dict.fromkeys(module.new_latent for module in sharing):
            readers = [module for module in sharing if module.new_latent == latent]
            forms = [form for module in readers for form in self._forms[module.name][:2]]
            self._latents[latent] = best_latent(forms, readers[0].heads.new_rank)

    def fit_attentions(self) -> dict[str, AttentionTensors]:
        """Return the new projections of every attention, by module name."""
        converted = {}
        for calls in self.record_calls(self._plan.reduced_modules):
            name = calls.module.name
            tensors = self._new_heads.pop(name, None)
            tensors = self._convert_heads(calls) if tensors is None else tensors.to(calls.tensors.query_weight.device)
            if calls.heads.rank_relation == "compress":
                tensors = self._convert_to_latent(calls, tensors)
            if calls.module.gets_kernel:
                tensors = _remove_error_details(tensors).with_new_kernel(calls.module.new_kernel, calls.heads)
                tensors = self._method.with_kernel(tensors, calls.heads, calls.layer)
            converted[name] = _add_error_details(calls.tensors, tensors, calls.heads, calls.layer).to("cpu")
        return converted

    def record_calls(self, modules: Sequence[AttentionModule]) -> Iterator[AttentionCalls]:
        """Yield the calls of each attention. Attentions whose inputs fit into memory are recorded together."""
        if not modules:
            return
        fit_batches, held_out_batches = self.batches
        batches, config = [*fit_batches, *held_out_batches], self._model.config
        with progress_bar(total=len(modules), desc="calibrating", unit="attention", smoothing=0) as bar:
            for group in group_modules(modules, self._plan.model_class, config, batches):
                recorded = record_inputs(self._model, [module.name for module in group], batches)
                for module in group:
                    self.current_name = module.name
                    bar.set_description(f"calibrating {module.name}", refresh=is_watched())
                    # The recorded inputs are the latents of an attention that has any.
                    tensors = replace(module.read_tensors(self._read), latent_weight=None)
                    inputs = recorded.pop(module.name)
                    uses = max(1, len(inputs) // len(batches))
                    inputs, held_out = inputs[: uses * len(fit_batches)], inputs[uses * len(fit_batches) :]
                    with torch.no_grad():
                        targets = [compute_attention(tensors, batch, module.heads.query)[0] for batch in inputs]
                    error = make_error_function(tensors, module.heads, held_out)
                    context: dict[str, Any] = {"calibration": self.calibration, "inputs": inputs, "targets": targets}
                    layer = self._plan.layer(module, uses=uses, held_out_error=error, **context)
                    yield AttentionCalls(module, tensors, layer)
                    bar.update()

    def _read(self, name: str) -> torch.Tensor:
        """Return a tensor of the original model in float32, on the device of the calibration."""
        return self._reader.read(name).float().to(next(self._model.parameters()).device)

    def _convert_heads(self, calls: AttentionCalls) -> AttentionTensors:
        """Return the projections of an attention with its new heads."""
        if calls.heads.relation != "pool":
            return self._plan.with_new_heads(calls.module, calls.tensors)
        return self._method.convert_module(calls.tensors, calls.heads, calls.layer)

    def _convert_to_latent(self, calls: AttentionCalls, tensors: AttentionTensors) -> AttentionTensors:
        """Return the projections of an attention with its latent."""
        module, heads = calls.module, calls.heads
        forms = self._forms.pop(module.name, None)
        if forms is None:
            forms = compute_latent_forms(tensors, heads, calls.layer.inputs, calls.layer.generator)
        weight = self._latents.get(module.new_latent)
        if weight is None:
            weight = best_latent([forms.key, forms.value], heads.new_rank)
        latent = LatentInText(weight, forms, module.site.shares_latent)
        return self._method.with_latent(_remove_error_details(tensors), heads, calls.layer, latent)


def _remove_error_details(tensors: AttentionTensors) -> AttentionTensors:
    """Remove the error that only includes the new heads, because the report contains the error after all changes."""
    details = {name: value for name, value in tensors.details.items() if name != "output_relative_error"}
    return replace(tensors, details=details)


def _add_error_details(
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
