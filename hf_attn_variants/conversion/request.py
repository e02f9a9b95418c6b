"""The request of a user for a conversion, checked before anything is read, and the names of the methods."""

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
from .checkpoint.source import warn_of_own_code
from .checkpoint.tensor_files import TensorEntry
from .methods import CalibratedMethod, ConversionMethod, FirstHead, MeanPooling, RandomHeads
from .plan import ConversionPlan, make_plan, why_not_calibrated

if TYPE_CHECKING:
    from .calibration.source_outputs import SourceModel
    from .calibration_settings import Calibration

__all__ = ["DTYPES", "METHODS", "ConversionRequest", "checked_dtype", "resolve_method"]

logger = logging.getLogger(__name__)
# What is lost without text, kept with it, and how to say that it is meant. The figures: benchmarks/convert/README.md
# and, of latents, benchmarks/convert/calibration_experiments.md.
POOLED = (
    "heads are averaged, and the model loses quality until it is trained again. Measured: Spearman 0.867 to 0.804 "
    "(MiniLM, a third of its heads), BLEU 36.8 to 1.6 (a T5, a quarter).",
    "With text, `calibration=` (--calibration_file), they keep 0.867 and 36.4.",
    'If averaging is meant, say method="mean" (--method mean).',
)
COMPRESSED = (
    "a latent is found from the weights alone, and the model loses quality until it is trained again. Measured: "
    "Spearman 0.867 to 0.846 (MiniLM, 128 of 384 numbers), BLEU 36.8 to 33.4 (a T5, 64 of 256).",
    "With text, `calibration=` (--calibration_file), it keeps 0.868 and 35.3.",
    'If weights alone are meant, say method="mean" (--method mean).',
)
REPLACED = (
    "a kernel takes the place of a softmax, and much of the model is lost until it is trained again. "
    "Measured: Spearman 0.867 to 0.70 (MiniLM, elu).",
    "With text, `calibration=` (--calibration_file), hedgehog keeps 0.860.",
    'If weights alone are meant, say method="mean" (--method mean).',
)
HEARD = "With audio, `calibration=` (--calibration_audio_dir), new heads are fitted to what the old ones make of it."


def _aligned() -> ConversionMethod:
    from .calibration.methods import Aligned

    return Aligned()


def _calibrated() -> ConversionMethod:
    from .calibration.methods import Calibrated

    return Calibrated()


# The last two load the calibration only if they are used.
METHODS: dict[str, Callable[[], ConversionMethod]] = {
    **{method.name: method for method in (MeanPooling, FirstHead, RandomHeads)},
    "aligned": _aligned,
    "calibrated": _calibrated,
}
DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "float16", "bfloat16")}


@dataclass
class ConversionRequest:
    """The request of a user for a conversion. Creating it checks the arguments that no checkpoint is needed for."""

    num_key_value_heads: int | None
    asked_method: str | ConversionMethod | None
    asked_calibration: CalibrationLike | None
    asked_dtype: torch.dtype | str | None
    seed: int
    fields: dict[str, Any]

    def __post_init__(self) -> None:
        self.kv_cache_bytes = self.fields.pop("kv_cache_bytes", None)
        if self.kv_cache_bytes is not None:
            from .cache_budget import check_cache_bytes

            asked = self.fields | {"num_key_value_heads": self.num_key_value_heads}
            self.kv_cache_bytes = check_cache_bytes(self.kv_cache_bytes, asked)
        self.calibration = _read_calibration(self.asked_calibration, self.seed)
        self.matching_layers = self.fields.pop("keep_matching_layers", None)
        self.matching_shares: list[float] | None = None
        self.strict = bool(self.fields.pop("strict", False))
        # The command writes no decoder with averaged heads unless its user names the method.
        self.needs_method = bool(self.fields.pop("needs_method", False))
        if self.strict and self.calibration is None:
            raise ValueError(
                "`strict` (--strict) compares the converted model with the original on text or audio: give a "
                "calibration (--calibration_file)."
            )
        self.method = resolve_method(self.asked_method, self.calibration)
        self.dtype = checked_dtype(self.asked_dtype)

    def plan(
        self,
        config: dict[str, Any],
        reader: TensorSource,
        source: "SourceModel | None",
        config_file: Path | None = None,
    ) -> ConversionPlan:
        """Return the checked plan; warn if heads are averaged and the user did not ask for that.

        Args:
            config: the original model's config.json.
            reader: its tensors.
            source: loads it for the calibration; None without a calibration.
            config_file: the path of `config`, for messages.
        """
        warn_of_own_code(config)
        entries = reader.entries
        fields = self._with_ranks(config, entries, config_file, partial(self._losses, reader, source))
        if self.matching_layers is not None:
            probe = self._make_plan(config, entries, fields, config_file)
            fields = self._keeping_matching_layers(probe, fields, source)
        plan = self._make_plan(config, entries, fields, config_file)
        if (lost := self._lost_without_examples(plan)) is not None:
            logger.warning(lost)
        return plan

    def _lost_without_examples(self, plan: ConversionPlan) -> str | None:
        """Return what is lost where nobody gave examples or a method; None where one of them is given.

        Raises:
            ValueError: if the command did, and a decoder would write nothing of use.
        """
        if self.asked_method is not None or not plan.reduced or self.calibration is not None:
            return None
        pools = any(module.heads.relation == "pool" for module in plan.reduced)
        lost, kept, meant = POOLED if pools else COMPRESSED
        gets_kernel = any(module.gets_kernel for module in plan.reduced)
        if gets_kernel:
            lost, kept, meant = REPLACED
        kept, examples = (HEARD, "audio") if plan.hears else (kept, "text")
        if (reason := why_not_calibrated(plan)) is None:
            message = f"no {examples} to calibrate on: {lost} {kept} {meant}"
        else:
            message = f"{lost} A calibration would not help: {reason}. {meant}"
        decodes = any(module.site.stack_of(plan.config) == "decoder" for module in plan.reduced)
        if self.needs_method and decodes and (pools or gets_kernel):
            raise ValueError(message)
        return message

    def check(
        self, config: dict[str, Any], entries: Mapping[str, TensorEntry], config_file: Path | None = None
    ) -> ConversionPlan:
        """Return the plan without reading a weight or a text: ranks and layers that these choose stand for any.

        Args:
            config: the source's config.json.
            entries: its tensors, with their dtypes and shapes.
            config_file: where `config` was read, for messages.

        Raises:
            ValueError: if the source cannot be given what is asked.
        """
        fields = self._with_ranks(config, entries, config_file, lambda _, modules: [torch.zeros(1) for _ in modules])
        plan = self._make_plan(config, entries, fields, config_file)
        if self.matching_layers is not None:
            from .calibration.matching_layers import check_matching_layers

            check_matching_layers(plan, fields, self.matching_layers, self.calibration)
        self._lost_without_examples(plan)  # raises an error for the command
        if self.calibration is not None:
            from .calibration.calibrate import is_calibrated

            is_calibrated(plan, self.calibration)  # raises an error if it cannot be
        return plan

    def _make_plan(
        self,
        config: dict[str, Any],
        entries: Mapping[str, TensorEntry],
        fields: Mapping[str, Any],
        config_file: Path | None,
    ) -> ConversionPlan:
        return make_plan(config, entries, self.method, fields, self.seed, self.dtype, config_file)

    def _with_ranks(
        self,
        config: dict[str, Any],
        entries: Mapping[str, TensorEntry],
        config_file: Path | None,
        losses: Callable[[ConversionPlan, list[AttentionModule]], list[torch.Tensor]],
    ) -> dict[str, Any]:
        """Return the fields asked for, with the ranks that `kv_cache_bytes` has room for."""
        fields = {"num_key_value_heads": self.num_key_value_heads} | self.fields
        if self.kv_cache_bytes is None:
            return fields
        from .cache_budget import PROBE, check_has_cache, fields_within

        check_has_cache(config)
        probe = self._make_plan(config, entries, fields | PROBE, config_file)
        chosen = fields_within(probe, self.kv_cache_bytes, entries, partial(losses, probe))
        by_layer = {**(fields.get("per_layer_values") or {}), **chosen.pop("per_layer_values", {})}
        return fields | chosen | {"per_layer_values": by_layer or None}

    def _keeping_matching_layers(self, probe: ConversionPlan, fields: dict[str, Any], source: Any) -> dict[str, Any]:
        """Return the fields of a conversion that leaves layers as they are; `probe` is that of all layers."""
        from .calibration.calibrate import is_calibrated
        from .calibration.matching_layers import check_matching_layers, fields_keeping, matching_shares

        check_matching_layers(probe, fields, self.matching_layers, self.calibration)
        calibration: Any = self.calibration  # `check_matching_layers` raises an error if there is none
        is_calibrated(probe, calibration)  # raises an error if it cannot be
        model, tokenizer = source(probe)
        tokenizer = calibration.processor or tokenizer
        self.matching_shares = matching_shares(probe, model, tokenizer, calibration)
        return fields_keeping(probe, fields, self.matching_shares, self.matching_layers)

    def _losses(
        self, reader: TensorSource, source: Any, plan: ConversionPlan, modules: list[AttentionModule]
    ) -> list[torch.Tensor]:
        """Return the loss of latents of these attentions by rank: on text if there is a calibration."""
        if self.calibration is not None:
            from .calibration.calibrate import forms_on_text, is_calibrated

            if is_calibrated(plan, self.calibration):
                forms = forms_on_text(plan, modules, reader, source, self.calibration)
                return [lost_by_rank([each.key, each.value]) for each in forms]
        tensors = [replace(module.read(reader.read), latent_weight=None) for module in modules]
        forms = [weight_forms(each, module.heads) for each, module in zip(tensors, modules, strict=True)]
        return [lost_by_rank([each.key, each.value]) for each in forms]


def _read_calibration(calibration: CalibrationLike | None, seed: int) -> "Calibration | None":
    if calibration is None:
        return None
    from .calibration.examples import as_calibration

    return as_calibration(calibration, seed)


def resolve_method(
    method: str | ConversionMethod | None, calibration: "Calibration | None" = None
) -> ConversionMethod:
    """Return the method of that name, or `method` itself where it is one already.

    None is "calibrated" where there is a calibration, else "mean".

    Raises:
        ValueError: for an unknown name, a method without the calibration that it needs, one that looks at no text, or
            an option of the calibration that is another method's.
    """
    if method is None:
        method = "mean" if calibration is None else "calibrated"
    if isinstance(method, str):
        if method not in METHODS:
            raise ValueError(f"`method` must be one of {', '.join(METHODS)}; got {method!r}.")
        method = METHODS[method]()
    if not isinstance(method, CalibratedMethod):
        if calibration is not None:
            raise ValueError(f"method {method.name!r} looks at no text: leave the calibration out.")
        return method
    if calibration is None:
        raise ValueError(
            f"method {method.name!r} needs calibration text: give `calibration=texts`, on the command line "
            "`--calibration_file`."
        )
    foreign = [name for name in FIT_DEFAULTS if getattr(calibration, name) is not None and name not in method.options]
    if foreign:
        raise ValueError(
            f"method {method.name!r} has no `{foreign[0]}` (--{foreign[0]}): that is an option of "
            '"calibrated"; leave it out.'
        )
    return method


def checked_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Return a dtype that tensors can be converted to, or None for the one that they have.

    Raises:
        ValueError: for another one.
    """
    torch_dtype = DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype
    if torch_dtype is not None and torch_dtype not in DTYPES.values():
        raise ValueError(f"`dtype` must be one of {', '.join(DTYPES)}; got {dtype!r}.")
    return torch_dtype
