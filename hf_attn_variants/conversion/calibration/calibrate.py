"""Fits new attention modules to the outputs of the original modules on text or audio.

    examples ──► batches ──► original model ──► inputs of each module               (batches, recording)
                    │                                   │
                    │        shared latents: one pass over all modules that read them
                    │                                   │
                    │        for each module:     new heads ─► latent ─► kernel     (methods, fitting)
                    │                                   │
                    │        averaged heads if their error on held-out examples is smaller
                    ▼
    held-out examples ──► outputs of the whole original model                       (source_outputs)

Except for shared latents, each module is fitted independently of the others, because it is given the inputs that it
receives in the original model. Each pass over the batches records the inputs of as many modules as fit into memory
(`recording.group_modules`).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from transformers import GenerationConfig

from ...model_properties import DecoderInput, get_decoder_input, set_languages
from ...progress import is_interactive, progress_bar
from ..attention_modules import AttentionModule
from ..attention_tensors import (
    AttentionTensors,
    CalibratedLatent,
    CalibratedMethod,
    HeadCounts,
    KeyValueErrorForms,
    LayerContext,
    MeanPooling,
    find_best_latent,
)
from ..calibration_settings import Calibration
from ..checkpoint.models import TensorSource
from ..plan import ConversionPlan, get_calibration_blocker, make_seeded_generator
from ..report import CalibrationResult
from .batches import (
    Batch,
    check_source_loss,
    check_targets,
    check_token_count,
    limit_length,
    make_batches,
    make_untruncated_batches,
    set_length_statistics,
    should_join_passages,
)
from .examples import make_audio_batches
from .fitting import make_error_function, round_error
from .methods import compute_error_forms
from .recording import compute_attention, group_modules, record_inputs
from .source_outputs import SourceLoader, SourceOutputs

# Batches of model inputs for the fitting examples and for the held-out examples.
Batches = tuple[list[Batch], list[Batch]]


def calibrate(
    plan: ConversionPlan,
    reader: TensorSource,
    source_loader: SourceLoader,
    calibration: Calibration,
    with_source_outputs: bool = True,
    batches: Batches | None = None,
) -> CalibrationResult:
    """Fit each attention module that the plan reduces, so that it reproduces the outputs of the original module.

    Args:
        plan: The conversion plan. Its method must be a `CalibratedMethod`.
        reader: The tensors of the original model.
        source_loader: Function that loads the original model with this package's class. Only the generation settings
            of the model are changed.
        calibration: The calibration settings with the text or audio.
        with_source_outputs: Whether to compute the original model's outputs for a later comparison.
        batches: The batches from an earlier calibration of this model with the same examples and seed.

    Raises:
        ValueError: if `should_calibrate` raises an error, if there is too little text, if there is no tokenizer, or if
            an attention module receives no input.
    """
    if not should_calibrate(plan, calibration):
        return CalibrationResult({})
    run = CalibrationRun(plan, reader, source_loader, calibration, batches)
    with run.convert_linalg_errors():
        outputs = run.compute_source_outputs() if with_source_outputs else None
        run.find_shared_latents()
        return CalibrationResult(run.fit_modules(), outputs, run.batches, run.get_report_settings())


def measure_error_forms(
    plan: ConversionPlan,
    modules: Sequence[AttentionModule],
    reader: TensorSource,
    source_loader: SourceLoader,
    calibration: Calibration,
) -> list[KeyValueErrorForms]:
    """Measure the quadratic forms that determine the best latents for the given attention modules.

    Args:
        plan, reader, source_loader, calibration: See `calibrate`.
        modules: The attention modules, which are measured with their original heads.

    Raises:
        ValueError: See `calibrate`.
    """
    run = CalibrationRun(plan, reader, source_loader, calibration)
    with run.convert_linalg_errors():
        return [calls.compute_error_forms(calls.tensors) for calls in run.record_calls(modules)]


def should_calibrate(plan: ConversionPlan, calibration: Calibration) -> bool:
    """Return whether a plan contains attention modules that must be fitted to the text or audio.

    Raises:
        ValueError: if calibration is not possible (for example, if the original model has talking heads or is a BERT
            decoder with cross-attention).
    """
    if not plan.reduced_modules:
        return False
    if plan.reads_audio is not (calibration.audio is not None):
        kind, option = ("audio", "calibration_audio_dir") if plan.reads_audio else ("text", "calibration_file")
        name = plan.model_class.__name__.removeprefix("AttnVariant")
        raise ValueError(f"`calibration` must be {kind} for {name}. Set it (--{option}).")
    if (reason := get_calibration_blocker(plan)) is not None:
        raise ValueError(
            f'`method` {plan.method.name!r} is not supported for this model because {reason}. Use method "mean".'
        )
    if not plan.reads_audio:
        check_targets(plan.model_class, plan.config, calibration)
    return True


class RecordedAttention(NamedTuple):
    """An original attention module with its recorded inputs, which are the latents if the module has a latent."""

    module: AttentionModule
    heads: HeadCounts
    tensors: AttentionTensors
    layer: LayerContext

    def compute_error_forms(self, tensors: AttentionTensors) -> KeyValueErrorForms:
        """Compute the quadratic forms of these projections on the recorded inputs."""
        return compute_error_forms(tensors, self.heads, self.layer.inputs, self.layer.generator)


class CalibrationRun:
    """Calibrates all attention modules. First it computes the shared latents, and then it fits each module."""

    def __init__(
        self,
        plan: ConversionPlan,
        reader: TensorSource,
        source: SourceLoader,
        calibration: Calibration,
        batches: Batches | None = None,
    ):
        """Load the original model and make its batches. See `calibrate` for the arguments."""
        model, processor = source(plan)
        self._processor = calibration.processor or processor
        self._model = model.eval().to(calibration.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self._plan, self._reader = plan, reader
        self._method = cast(CalibratedMethod, plan.method)  # ensured by `resolve_method`
        self.calibration = set_length_statistics(calibration, self._processor, plan.config)
        self.current_name = plan.reduced_modules[0].name  # for error messages
        # The new heads and quadratic forms of modules that share a latent, by module, and the latents by tensor name.
        self._new_heads: dict[str, AttentionTensors] = {}
        self._forms: dict[str, KeyValueErrorForms] = {}
        self._latents: dict[str | None, torch.Tensor] = {}
        self.batches = batches or self._make_batches()
        if batches is None:
            stacks = [module.site.get_stack_name(plan.config) for module in plan.reduced_modules]
            check_token_count(stacks, plan.config.hidden_size, self.batches[0])

    def _make_batches(self) -> Batches:
        """Return the calibration batches, and set the model's generation settings to greedy decoding."""
        model, calibration = self._model, self.calibration
        is_audio = calibration.audio is not None
        if not is_audio and get_decoder_input(type(model), model.config) is DecoderInput.OWN_TARGETS:
            # The model's own generation settings (beams, penalties) are not used, except for the first token.
            begin = model.generation_config.forced_bos_token_id
            model.generation_config = GenerationConfig.from_model_config(model.config)
            model.generation_config.forced_bos_token_id = begin
            start = set_languages(self._processor, model.config, calibration.source_lang, calibration.target_lang)
            if start is not None:
                start.apply_to(model)
        make: Any = make_audio_batches if is_audio else make_batches
        batches: Batches = make(model, self._processor, calibration, self._make_held_out_generator())
        return batches

    def _make_held_out_generator(self) -> torch.Generator:
        """Create the random number generator that selects the held-out examples."""
        return make_seeded_generator(self._plan.seed, "held-out texts")

    @contextmanager
    def convert_linalg_errors(self) -> Iterator[None]:
        """Convert linear algebra errors to a `ValueError` that names the attention module."""
        try:
            yield
        except torch.linalg.LinAlgError as error:  # the weights are finite, but the outputs on this text are not
            reason = str(error).strip().splitlines()[0]
            raise ValueError(
                f"The attention module {self.current_name!r} cannot be fitted because its outputs on the calibration "
                f"data are too large or not finite ({reason}). Check the checkpoint's weights, or convert with method "
                '"mean" (--method mean).'
            ) from error

    def get_report_settings(self) -> dict[str, Any]:
        """Return the calibration settings for the report."""
        calibration = self.calibration
        limit = partial(limit_length, self._plan.config, calibration)
        are_passages = should_join_passages(self._plan.model_class, self._plan.config, calibration)
        passage_length = limit(calibration.passage_length) if are_passages else None
        settings = calibration.get_report_settings(self._plan.method, passage_length)
        return settings | {"max_length": limit(calibration.length)}

    def compute_source_outputs(self) -> SourceOutputs:
        """Compute the original model's outputs on the untruncated held-out examples."""
        batches = self.batches[1]
        if self.calibration.audio is None:
            generator = self._make_held_out_generator()
            batches = make_untruncated_batches(self._model, self._processor, self.calibration, generator)
        outputs = SourceOutputs(self._model, self._processor, self.calibration, batches)
        check_source_loss(outputs.loss, self._model.config.vocab_size)
        return outputs

    def find_shared_latents(self) -> None:
        """Compute each latent that several modules share, based on the quadratic forms of all these modules."""
        sharing = [module for module in self._plan.reduced_modules if module.shared_latent_name is not None]
        for calls in self.record_calls(sharing):
            name, tensors = calls.module.name, self._convert_heads(calls)
            if calls.heads.kv_head_change == "pool":
                self._new_heads[name] = tensors.to("cpu")
            self._forms[name] = calls.compute_error_forms(tensors)
        for latent in dict.fromkeys(module.shared_latent_name for module in sharing):
            readers = [module for module in sharing if module.shared_latent_name == latent]
            forms = [self._forms[module.name] for module in readers]
            error_forms = [form for pair in forms for form in (pair.key, pair.value)]
            self._latents[latent] = find_best_latent(error_forms, readers[0].heads.rank[1])

    def fit_modules(self) -> dict[str, AttentionTensors]:
        """Fit every reduced module, and return the new projections, {module name: projections}."""
        converted = {}
        for calls in self.record_calls(self._plan.reduced_modules):
            name = calls.module.name
            tensors = self._new_heads.pop(name, None)
            tensors = self._convert_heads(calls) if tensors is None else tensors.to(calls.tensors.query_weight.device)
            if calls.heads.latent_change == "compress":
                tensors = self._convert_to_latent(calls, tensors)
            if calls.module.adds_kernel:
                tensors = _remove_error_details(tensors).with_new_kernel(calls.module.kernel[1], calls.heads)
                tensors = self._method.fit_kernel(tensors, calls.heads, calls.layer)
            chosen = _choose_fitted_or_averaged_heads(calls.tensors, tensors, calls.heads, calls.layer)
            converted[name] = chosen.to("cpu")
        return converted

    def record_calls(self, modules: Sequence[AttentionModule]) -> Iterator[RecordedAttention]:
        """Record the calls of as many modules at a time as fit into memory, and yield the calls of each module."""
        if not modules:
            return
        fit_batches, held_out_batches = self.batches
        batches, config = [*fit_batches, *held_out_batches], self._model.config
        with progress_bar(total=len(modules), desc="calibrating", unit="attention", smoothing=0) as bar:
            for group in group_modules(modules, self._plan.model_class, config, batches):
                recorded = record_inputs(self._model, [module.name for module in group], batches)
                for module in group:
                    self.current_name = module.name
                    bar.set_description(f"calibrating {module.name}", refresh=is_interactive())
                    # If a module has a latent, the recorded inputs are the latents.
                    tensors = replace(module.read_tensors(self._read_tensor), latent_weight=None)
                    inputs = recorded.pop(module.name)
                    # A layer of ALBERT is used several times per batch.
                    num_uses = max(1, len(inputs) // len(batches))
                    inputs, held_out = inputs[: num_uses * len(fit_batches)], inputs[num_uses * len(fit_batches) :]
                    with torch.no_grad():
                        targets = [compute_attention(tensors, batch, module.heads.query)[0] for batch in inputs]
                    error = make_error_function(tensors, module.heads, held_out)
                    context: dict[str, Any] = {"calibration": self.calibration, "inputs": inputs, "targets": targets}
                    layer = self._plan.make_layer_context(module, num_uses=num_uses, held_out_error=error, **context)
                    yield RecordedAttention(module, module.heads, tensors, layer)
                    bar.update()

    def _read_tensor(self, name: str) -> torch.Tensor:
        """Return a tensor from the original model in float32 on the device that is used for calibration."""
        return self._reader.read(name).float().to(next(self._model.parameters()).device)

    def _convert_heads(self, recorded: RecordedAttention) -> AttentionTensors:
        """Return the projections of a module after converting its heads."""
        if recorded.heads.kv_head_change != "pool":
            return self._plan.with_new_heads(recorded.module, recorded.tensors)
        return self._method.convert_module(recorded.tensors, recorded.heads, recorded.layer)

    def _convert_to_latent(self, recorded: RecordedAttention, tensors: AttentionTensors) -> AttentionTensors:
        """Return the projections of a module after adding the new latent."""
        module, heads = recorded.module, recorded.heads
        error_forms = self._forms.pop(module.name, None) or recorded.compute_error_forms(tensors)
        weight = self._latents.get(module.shared_latent_name)
        if weight is None:
            weight = find_best_latent([error_forms.key, error_forms.value], heads.rank[1])
        latent = CalibratedLatent(weight, error_forms, module.site.shares_latent)
        return self._method.with_latent(_remove_error_details(tensors), heads, recorded.layer, latent)


def _remove_error_details(tensors: AttentionTensors) -> AttentionTensors:
    """Remove the error that was measured after converting only the heads, because the report needs the final error."""
    details = {name: value for name, value in tensors.details.items() if name != "output_relative_error"}
    return replace(tensors, details=details)


def _choose_fitted_or_averaged_heads(
    tensors: AttentionTensors, converted: AttentionTensors, heads: HeadCounts, layer: LayerContext
) -> AttentionTensors:
    """Return the fitted or the averaged heads, whichever have the smaller error on held-out text.

    The errors are added to `details`. Modules with a kernel or without reduced heads are not compared with averaged
    heads, and modules with a new latent keep the fitted heads.
    """
    details = dict(converted.details)
    if "output_relative_error" not in details:
        details["output_relative_error"] = round_error(layer.held_out_error(converted))
    if heads.kv_head_change != "pool" or converted.kernel is not None:
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
