"""Calibration: text through the source model, and new heads fitted to what its attentions make of it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from ...progress import is_watched, progress_bar
from ..calibration_settings import Calibration
from ..checkpoint.in_memory import TensorSource
from ..grouping import HeadCounts
from ..methods.base import CalibratedMethod, LayerContext
from ..methods.mean import MeanPooling
from ..plan import AttentionModule, ConversionPlan, initializer_std, seeded_generator
from ..projections import AttentionTensors
from .batches import make_batches
from .fitting import relative_error, rounded
from .recording import AttentionInputs, attend, recorded_inputs

__all__ = ["calibrate", "method_to_calibrate", "why_not_calibrated"]

# What recorded inputs may take; more modules than fit into it are recorded in several passes over the text.
MAX_RECORDED_BYTES = 3 * 2**30


def why_not_calibrated(plan: ConversionPlan) -> str | None:
    """Return why no text can say how the plan's source is to be pooled; None where it can."""
    talking_heads = plan.source_config.talking_heads
    if talking_heads is not None:
        what = f"the source has talking heads ({talking_heads!r}), whose do not"
        return f"it fits heads whose weights sum to one; {what}"
    is_encoder_decoder = getattr(plan.config, "is_encoder_decoder", False)
    if not is_encoder_decoder and any(module.site.is_cross_attention for module in plan.modules):
        return (
            "it cannot reach the cross-attention of a decoder alone: there is no text for the encoder that this reads"
        )
    return None


def method_to_calibrate(plan: ConversionPlan, calibration: Calibration | None) -> CalibratedMethod | None:
    """Return the plan's method if it has attentions to fit: those it has not seen yet or, with a text, all anew.

    Raises:
        ValueError: where it cannot: for a source with talking heads, or a BERT with cross-attention; or there is a
            text and only talking heads to add.
    """
    method = plan.method
    if calibration is not None and not plan.pooled and any(module.projections for module in plan.modules):
        raise ValueError("a calibration fits fewer key/value heads; talking heads are added without: leave it out.")
    if not isinstance(method, CalibratedMethod) or not plan.pooled:
        return None
    if calibration is not None:
        method.converted.clear()  # of another model, or on another text
    elif all(module.name in method.converted for module in plan.pooled):
        return None
    if (reason := why_not_calibrated(plan)) is not None:
        raise ValueError(f'method {method.name!r} cannot be used here: {reason}. Use method "mean".')
    return method


def calibrate(
    plan: ConversionPlan,
    method: CalibratedMethod,
    reader: TensorSource,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    calibration: Calibration | None,
) -> None:
    """Give a method the new projections of every attention that the plan pools.

    Args:
        plan, method: the conversion and its method, as `method_to_calibrate` returned it.
        reader: the source's tensors.
        model: the source as this package's model with its own heads, in float32; only how it generates is changed.
        tokenizer: the one beside the checkpoint, if any.
        calibration: the text.

    Raises:
        ValueError: if there is too little text, no tokenizer, or an attention that text alone does not reach.
    """
    modules = plan.pooled
    if calibration is None:
        raise ValueError(f"method {method.name!r} has not seen this model yet: give `calibration=Calibration(texts)`.")
    tokenizer = calibration.tokenizer or tokenizer
    if tokenizer is None:
        raise ValueError("calibration needs the model's tokenizer: give `Calibration(..., tokenizer=tokenizer)`.")
    device = calibration.device or ("cuda" if torch.cuda.is_available() else "cpu")
    model = model.eval().to(device)
    if model.can_generate():  # its own settings, beams or penalties, are for its users
        model.generation_config = GenerationConfig.from_model_config(model.config)
    used, held_out = make_batches(model, tokenizer, calibration, seeded_generator(plan.seed, "held-out texts"))
    # A step each for the closed form, whose time no number of steps is known for; the estimate is of the mean so far.
    steps = 1 + method.steps(calibration)
    errors = []
    with progress_bar(total=steps * len(modules), desc="calibrating", unit="step", smoothing=0) as bar:
        for group in _recorded_together(modules, plan.model_class, model.config, used + held_out):
            calls = recorded_inputs(model, [module.name for module in group], used + held_out)
            for module in group:
                bar.set_description(f"calibrating attention {len(errors) + 1} of {len(modules)}", refresh=is_watched())
                tensors = module.read(lambda name: reader.read(name).float().to(device))
                generator = seeded_generator(plan.seed, module.name)
                inputs = calls.pop(module.name)
                uses = max(1, len(inputs) // len(used + held_out))
                inputs, held = inputs[: uses * len(used)], inputs[uses * len(used) :]
                std = initializer_std(plan.config)
                error = _held_out_error(tensors, module.heads, held)
                layer = LayerContext(module.name, module.site.name, generator, std, uses, held, error, bar.update)
                converted = method.convert_module(tensors, module.heads, layer, inputs, calibration)
                details = _output_errors(tensors, converted, module.heads, layer)
                method.remember(module.name, tensors, replace(converted, details=details))
                errors.append(details["output_relative_error"])
                bar.update(steps * len(errors) - bar.n)
                if None not in errors:
                    mean = sum(errors) / len(errors)
                    bar.set_postfix_str(f"outputs {mean:.1%} off on held-out text", refresh=is_watched())


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
    averaged = MeanPooling().pool(tensors, heads, layer)
    return details | {"output_relative_error_averaged": rounded(layer.held_out_error(averaged))}


def _recorded_together(
    modules: list[AttentionModule], model_class: Any, config: Any, batches: Sequence[dict[str, torch.Tensor]]
) -> Iterator[list[AttentionModule]]:
    """Split the modules so that what is recorded for each part fits into `MAX_RECORDED_BYTES`."""
    positions = sum(max(tensor.numel() for tensor in batch.values()) for batch in batches)
    calls = max(model_class.module_runs(config, module.name) for module in modules)
    at_once = max(1, MAX_RECORDED_BYTES // (positions * config.hidden_size * 4 * calls))
    for start in range(0, len(modules), at_once):
        yield modules[start : start + at_once]
