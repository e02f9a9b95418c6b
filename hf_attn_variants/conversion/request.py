"""What a user asks of a conversion, and whether the source can be given it."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .attention_modules import AttentionModule
from .cache_budget import PROBE, check_cache_bytes, check_has_cache, fields_within
from .calibration.calibrate import forms_on_text
from .calibration.matching_layers import check_matching_layers, fields_keeping, matching_shares
from .calibration.plan_checks import is_calibrated, why_not_calibrated
from .calibration.source_models import SourceModel
from .calibration.texts import CalibrationLike, as_calibration
from .checkpoint.models import TensorSource
from .checkpoint.source import warn_of_own_code
from .checkpoint.tensor_files import TensorEntry
from .latents import lost_by_rank, weight_forms
from .methods import resolve_method
from .methods.base import ConversionMethod
from .plan import ConversionPlan, make_plan

__all__ = ["DTYPES", "ConversionRequest", "checked_dtype"]

logger = logging.getLogger(__name__)
# What is lost without text, kept with it, and how to say that it is meant. The figures: docs/results_conversion.md
# and, of latents, docs/conversion_appendix.md.
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
DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "float16", "bfloat16")}


@dataclass
class ConversionRequest:
    """What a user asks of a conversion; made only if it can be asked of some source."""

    num_key_value_heads: int | None
    asked_method: str | ConversionMethod | None
    asked_calibration: CalibrationLike | None
    asked_dtype: torch.dtype | str | None
    seed: int
    fields: dict[str, Any]

    def __post_init__(self) -> None:
        self.kv_cache_bytes = self.fields.pop("kv_cache_bytes", None)
        if self.kv_cache_bytes is not None:
            asked = self.fields | {"num_key_value_heads": self.num_key_value_heads}
            self.kv_cache_bytes = check_cache_bytes(self.kv_cache_bytes, asked)
        self.calibration = as_calibration(self.asked_calibration, self.seed)
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
        self, config: dict[str, Any], reader: TensorSource, source: SourceModel, config_file: Path | None = None
    ) -> ConversionPlan:
        """Return the checked plan; warn where heads are averaged and nobody asked for that."""
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
            check_matching_layers(plan, fields, self.matching_layers, self.calibration)
        self._lost_without_examples(plan)  # raises an error for the command
        if self.calibration is not None:
            is_calibrated(plan, self.calibration)  # refuses what cannot be
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
        check_has_cache(config)
        probe = self._make_plan(config, entries, fields | PROBE, config_file)
        chosen = fields_within(probe, self.kv_cache_bytes, entries, partial(losses, probe))
        by_layer = {**(fields.get("per_layer_values") or {}), **chosen.pop("per_layer_values", {})}
        return fields | chosen | {"per_layer_values": by_layer or None}

    def _keeping_matching_layers(
        self, probe: ConversionPlan, fields: dict[str, Any], source: SourceModel
    ) -> dict[str, Any]:
        """Return the fields of a conversion that leaves layers as they are; `probe` is that of all layers."""
        check_matching_layers(probe, fields, self.matching_layers, self.calibration)
        calibration: Any = self.calibration  # there is one, or `check_matching_layers` had refused
        is_calibrated(probe, calibration)  # refuses what cannot be
        model, tokenizer = source(probe)
        tokenizer = calibration.processor or tokenizer
        self.matching_shares = matching_shares(probe, model, tokenizer, calibration)
        return fields_keeping(probe, fields, self.matching_shares, self.matching_layers)

    def _losses(
        self, reader: TensorSource, source: SourceModel, plan: ConversionPlan, modules: list[AttentionModule]
    ) -> list[torch.Tensor]:
        """Return what latents of these attentions lose by rank, on the text where the method looks at it."""
        if self.calibration is None or not is_calibrated(plan, self.calibration):
            tensors = [replace(module.read(reader.read), latent_weight=None) for module in modules]
            forms = [weight_forms(each, module.heads) for each, module in zip(tensors, modules, strict=True)]
        else:
            forms = forms_on_text(plan, modules, reader, source, self.calibration)
        return [lost_by_rank([each.key, each.value]) for each in forms]


def checked_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Return a dtype that tensors can be converted to, or None for the one that they have.

    Raises:
        ValueError: for another one.
    """
    torch_dtype = DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype
    if torch_dtype is not None and torch_dtype not in DTYPES.values():
        raise ValueError(f"`dtype` must be one of {', '.join(DTYPES)}; got {dtype!r}.")
    return torch_dtype
