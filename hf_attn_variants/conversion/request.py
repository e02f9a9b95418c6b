"""The arguments of a conversion, checked before anything is read, and the names of the methods."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .attention_modules import AttentionModule
from .attention_tensors import lost_by_rank, weight_forms
from .calibration_settings import FIT_DEFAULTS, CalibrationLike
from .checkpoint.models import TensorSource
from .checkpoint.source import warn_about_remote_code
from .checkpoint.tensor_files import TensorEntry
from .methods import CalibratedMethod, ConversionMethod, FirstHead, MeanPooling, RandomHeads
from .plan import ConversionPlan, explain_not_calibrated, make_plan

if TYPE_CHECKING:
    from .calibration.source_outputs import SourceModel
    from .calibration_settings import Calibration

__all__ = ["DTYPES", "METHODS", "ConversionRequest", "resolve_dtype", "resolve_method"]

logger = logging.getLogger(__name__)
# For each change: the loss without text, the result with text, and how to select the change without text explicitly.
# The numbers are from benchmarks/convert/README.md and, for latents, benchmarks/convert/calibration_experiments.md.
POOLED = (
    "The conversion averages heads, so the model loses quality until it is trained again. Measured: Spearman "
    "0.867 to 0.804 (MiniLM, a third of its heads), BLEU 36.8 to 1.6 (a T5, a quarter).",
    "With text, `calibration` (--calibration_file), the same models keep 0.867 and 36.4.",
    'To average heads without this message, give method="mean" (--method mean).',
)
COMPRESSED = (
    "The conversion computes latents from the weights alone, so the model loses quality until it is trained again. "
    "Measured: Spearman 0.867 to 0.846 (MiniLM, 128 of 384 numbers), BLEU 36.8 to 33.4 (a T5, 64 of 256).",
    "With text, `calibration` (--calibration_file), the same models keep 0.868 and 35.3.",
    'To use the weights alone without this message, give method="mean" (--method mean).',
)
REPLACED = (
    "A kernel replaces the softmax, so the model loses much of its quality until it is trained again. "
    "Measured: Spearman 0.867 to 0.70 (MiniLM, elu).",
    "With text, `calibration` (--calibration_file), hedgehog keeps 0.860.",
    'To use the weights alone without this message, give method="mean" (--method mean).',
)
CALIBRATE_ON_AUDIO = (
    "With audio, `calibration` (--calibration_audio_dir), new heads are fitted to the outputs of the old ones."
)


def _make_aligned() -> ConversionMethod:
    """Return the method "aligned". The import needs the code of the calibration."""
    from .calibration.methods import Aligned

    return Aligned()


def _make_calibrated() -> ConversionMethod:
    """Return the method "calibrated". The import needs the code of the calibration."""
    from .calibration.methods import Calibrated

    return Calibrated()


# The names of the methods. The last two import the code of the calibration when they are used.
METHODS: dict[str, Callable[[], ConversionMethod]] = {
    **{method.name: method for method in (MeanPooling, FirstHead, RandomHeads)},
    "aligned": _make_aligned,
    "calibrated": _make_calibrated,
}
DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "float16", "bfloat16")}


@dataclass
class ConversionRequest:
    """The arguments of a conversion. The constructor checks those that do not depend on a checkpoint.

    Args:
        num_key_value_heads: Number of key/value heads afterwards, or None.
        requested_method: Name of a method, a method, or None for the default.
        requested_calibration: Calibration text or audio as users give it, or None.
        requested_dtype: The dtype of floating-point tensors afterwards, its name, or None.
        seed: Seed of all random numbers.
        fields: All other arguments: configuration fields, and options such as `strict`.
    """

    num_key_value_heads: int | None
    requested_method: str | ConversionMethod | None
    requested_calibration: CalibrationLike | None
    requested_dtype: torch.dtype | str | None
    seed: int
    fields: dict[str, Any]

    def __post_init__(self) -> None:
        """Separate the options from the configuration fields and check them."""
        self.kv_cache_bytes = self.fields.pop("kv_cache_bytes", None)
        if self.kv_cache_bytes is not None:
            from .cache_budget import check_cache_bytes

            fields = self.fields | {"num_key_value_heads": self.num_key_value_heads}
            self.kv_cache_bytes = check_cache_bytes(self.kv_cache_bytes, fields)
        self.calibration = _read_calibration(self.requested_calibration, self.seed)
        self.matching_layers = self.fields.pop("keep_matching_layers", None)
        self.matching_shares: list[float] | None = None
        self.strict = bool(self.fields.pop("strict", False))
        # Users of the command must name the method before it writes a decoder with averaged heads.
        self.needs_method = bool(self.fields.pop("needs_method", False))
        if self.strict and self.calibration is None:
            raise ValueError(
                "`strict` (--strict) needs text or audio to compare the converted model with the original one. Give "
                "`calibration` (--calibration_file)."
            )
        self.method = resolve_method(self.requested_method, self.calibration)
        self.dtype = resolve_dtype(self.requested_dtype)

    def plan(
        self,
        config: dict[str, Any],
        reader: TensorSource,
        source: "SourceModel | None",
        config_file: Path | None = None,
    ) -> ConversionPlan:
        """Return the checked plan. Warn if heads are averaged and the user did not select a method.

        Args:
            config: The config.json of the original model.
            reader: Its tensors.
            source: Function that loads the original model for the calibration. None: there is no calibration.
            config_file: Path of `config`, for messages.
        """
        warn_about_remote_code(config)
        entries = reader.entries
        fields = self._add_ranks(config, entries, config_file, partial(self._measure_losses, reader, source))
        if self.matching_layers is not None:
            probe = self._make_plan(config, entries, fields, config_file)
            fields = self._exclude_matching_layers(probe, fields, source)
        plan = self._make_plan(config, entries, fields, config_file)
        if (warning := self._describe_loss_without_examples(plan)) is not None:
            logger.warning(warning)
        return plan

    def _describe_loss_without_examples(self, plan: ConversionPlan) -> str | None:
        """Return a warning about lost quality if there are no examples, or None if a method or examples are given.

        Raises:
            ValueError: with this text, if `needs_method` is set and the decoder would generate nothing useful.
        """
        if self.requested_method is not None or not plan.reduced or self.calibration is not None:
            return None
        pools = any(module.heads.relation == "pool" for module in plan.reduced)
        loss, result_with_text, how_to_confirm = POOLED if pools else COMPRESSED
        gets_kernel = any(module.gets_kernel for module in plan.reduced)
        if gets_kernel:
            loss, result_with_text, how_to_confirm = REPLACED
        advice, examples = (CALIBRATE_ON_AUDIO, "audio") if plan.reads_audio else (result_with_text, "text")
        if (reason := explain_not_calibrated(plan)) is None:
            message = f"There is no {examples} to calibrate on. {loss} {advice} {how_to_confirm}"
        else:
            message = f"{loss} A calibration is not possible: {reason}. {how_to_confirm}"
        has_decoder = any(module.site.get_stack_name(plan.config) == "decoder" for module in plan.reduced)
        if self.needs_method and has_decoder and (pools or gets_kernel):
            raise ValueError(message)
        return message

    def check(
        self, config: dict[str, Any], entries: Mapping[str, TensorEntry], config_file: Path | None = None
    ) -> ConversionPlan:
        """Return the plan without reading weights or text. Ranks and layers that depend on them are placeholders.

        Args:
            config: The config.json of the original model.
            entries: The dtypes and shapes of its tensors.
            config_file: Path of `config`, for messages.

        Raises:
            ValueError: if the conversion is not possible.
        """
        fields = self._add_ranks(config, entries, config_file, lambda _, modules: [torch.zeros(1) for _ in modules])
        plan = self._make_plan(config, entries, fields, config_file)
        if self.matching_layers is not None:
            from .calibration.matching_layers import check_matching_layers

            check_matching_layers(plan, fields, self.matching_layers, self.calibration)
        self._describe_loss_without_examples(plan)  # raises an error for the command
        if self.calibration is not None:
            from .calibration.calibrate import is_calibrated

            is_calibrated(plan, self.calibration)  # raises an error if a calibration is not possible
        return plan

    def _make_plan(
        self,
        config: dict[str, Any],
        entries: Mapping[str, TensorEntry],
        fields: Mapping[str, Any],
        config_file: Path | None,
    ) -> ConversionPlan:
        """Return the plan for these fields. Arguments as for `plan.make_plan`."""
        return make_plan(config, entries, self.method, fields, self.seed, self.dtype, config_file)

    def _add_ranks(
        self,
        config: dict[str, Any],
        entries: Mapping[str, TensorEntry],
        config_file: Path | None,
        losses: Callable[[ConversionPlan, list[AttentionModule]], list[torch.Tensor]],
    ) -> dict[str, Any]:
        """Return the requested fields with ranks that fit into `kv_cache_bytes`. `losses`: see `fields_within`."""
        fields = {"num_key_value_heads": self.num_key_value_heads} | self.fields
        if self.kv_cache_bytes is None:
            return fields
        from .cache_budget import PROBE, check_has_cache, fields_within

        check_has_cache(config)
        probe = self._make_plan(config, entries, fields | PROBE, config_file)
        budget_fields = fields_within(probe, self.kv_cache_bytes, entries, partial(losses, probe))
        by_layer = {**(fields.get("per_layer_values") or {}), **budget_fields.pop("per_layer_values", {})}
        return fields | budget_fields | {"per_layer_values": by_layer or None}

    def _exclude_matching_layers(self, probe: ConversionPlan, fields: dict[str, Any], source: Any) -> dict[str, Any]:
        """Return the fields of a conversion that does not change token-matching layers.

        Args:
            probe: The plan that converts all layers.
            fields: The fields of this plan.
            source: Function that loads the original model.
        """
        from .calibration.calibrate import is_calibrated
        from .calibration.matching_layers import check_matching_layers, fields_keeping, matching_shares

        check_matching_layers(probe, fields, self.matching_layers, self.calibration)
        calibration: Any = self.calibration  # `check_matching_layers` raises an error if there is none
        is_calibrated(probe, calibration)  # raises an error if a calibration is not possible
        model, tokenizer = source(probe)
        tokenizer = calibration.processor or tokenizer
        self.matching_shares = matching_shares(probe, model, tokenizer, calibration)
        return fields_keeping(probe, fields, self.matching_shares, self.matching_layers)

    def _measure_losses(
        self, reader: TensorSource, source: Any, plan: ConversionPlan, modules: list[AttentionModule]
    ) -> list[torch.Tensor]:
        """Return the loss of the latents of these attentions by rank, measured on text if there is a calibration."""
        if self.calibration is not None:
            from .calibration.calibrate import forms_on_text, is_calibrated

            if is_calibrated(plan, self.calibration):
                forms = forms_on_text(plan, modules, reader, source, self.calibration)
                return [lost_by_rank([pair.key, pair.value]) for pair in forms]
        tensors = [replace(module.read(reader.read), latent_weight=None) for module in modules]
        forms = [weight_forms(attention, module.heads) for attention, module in zip(tensors, modules, strict=True)]
        return [lost_by_rank([pair.key, pair.value]) for pair in forms]


def _read_calibration(calibration: CalibrationLike | None, seed: int) -> "Calibration | None":
    """Return the calibration that a user gave in any form, or None."""
    if calibration is None:
        return None
    from .calibration.examples import as_calibration

    return as_calibration(calibration, seed)


def resolve_method(
    method: str | ConversionMethod | None, calibration: "Calibration | None" = None
) -> ConversionMethod:
    """Return the conversion method of a name. A method is returned unchanged.

    Args:
        method: Name of a method, a method, or None: "calibrated" with a calibration, else "mean".
        calibration: The calibration, or None.

    Raises:
        ValueError: if the name is unknown, the method needs a calibration that is missing or does not use the given
            one, or the calibration has an option that the method does not use.

    Example:

    ```py
    >>> from hf_attn_variants.conversion.request import resolve_method
    >>> resolve_method("mean").name
    'mean'
    ```
    """
    if method is None:
        method = "mean" if calibration is None else "calibrated"
    if isinstance(method, str):
        if method not in METHODS:
            raise ValueError(f"`method` must be one of {', '.join(METHODS)}, got {method!r}.")
        method = METHODS[method]()
    if not isinstance(method, CalibratedMethod):
        if calibration is not None:
            raise ValueError(
                f"`method` must be one that uses text if `calibration` is given, got {method.name!r}. Leave one of "
                "them out."
            )
        return method
    if calibration is None:
        raise ValueError(f"`method` {method.name!r} needs text. Give `calibration` (--calibration_file).")
    unused = [name for name in FIT_DEFAULTS if getattr(calibration, name) is not None and name not in method.options]
    if unused:
        raise ValueError(
            f'`{unused[0]}` (--{unused[0]}) must only be given for the method "calibrated", got {method.name!r}. '
            "Leave it out."
        )
    return method


def resolve_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Return the dtype of a name after checking that tensors can be converted to it. None is returned unchanged.

    Raises:
        ValueError: if the dtype is not one of `DTYPES`.
    """
    torch_dtype = DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype
    if torch_dtype is not None and torch_dtype not in DTYPES.values():
        raise ValueError(f"`dtype` must be one of {', '.join(DTYPES)}, got {dtype!r}.")
    return torch_dtype
