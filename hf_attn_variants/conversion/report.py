"""What a conversion changed, in numbers: `conversion_report.json`.

Per attention module, the relative Frobenius errors of the two products that attention is made of, over all heads i:

    logits:  sqrt( sum_i |B_i - B'_i|^2 / sum_i |B_i|^2 ),  B_i = W_q,i^T W_k,i   (biases included: [W | b] for W)
    values:  sqrt( sum_i |P_i - P'_i|^2 / sum_i |P_i|^2 ),  P_i = W_o,i W_v,i     (the value's bias included)

with W_k,i the key head that query head i reads. They compare weights and know nothing of the data: after a calibration
they are large where the model is good. There the error that means something is that of each attention's output y,
computed in float32 on the calibration's held-out text, for each of its calls with the inputs of the source:

    output:  sqrt( sum |y - y'|^2 / sum |y - mean y|^2 ) over the tokens; 0 is equal, 1 no better than the mean
"""

import json
import math
import platform
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..model_history import REPORT_NAME
from ..modeling.configuration_attn_variants import can_cache
from .calibration.head_sharing import reorder_heads
from .checkpoint.io import TORCH_DTYPES, TensorEntry
from .grouping import HeadCounts
from .methods import AttentionTensors
from .plan import AttentionModule, ConversionPlan

__all__ = [
    "REPORT_NAME",
    "ConversionReport",
    "LayerReport",
    "added_projections",
    "attention_errors",
    "bilinear_error",
    "cache_bytes",
    "count_parameters",
    "layer_report",
    "package_versions",
]

# A weight [h*d, D] and its bias [h*d] or None.
Projection = tuple[torch.Tensor, torch.Tensor | None]
BLOCK_ELEMENTS = 2**20


@dataclass(frozen=True)
class LayerReport:
    """One attention module: heads before and after, and relative errors (None where the source's products are 0).

    `details` are the method's. After a calibration they hold `output_relative_error`, of the attention's output on
    held-out text, and `output_relative_error_averaged`, what averaged heads would have there; after a fit
    `relative_error_closed_form` and `relative_error_fitted` too, and `fit_kept`: whether the fit was the better one.
    An error is None where it is no number.
    """

    module: str
    site: str
    change: str
    key_heads: tuple[int, int]
    value_heads: tuple[int, int]
    logits_relative_error: float | None
    value_relative_error: float | None
    details: dict[str, Any] = field(default_factory=dict)


@dataclass
class ConversionReport:
    """What was converted, how, and what it changed; `save` writes it, `summary` says it in a few lines.

    Args:
        source: the folder or Hub id.
        source_revision: the Hub's commit, where there is one.
        output_dir: where the converted checkpoint is.
        method, seed, dtype: as given.
        architecture: the converted model's class.
        heads: the configuration's head counts, {field: [before, after]}.
        talking_heads: the talking-heads parameters that were added, {suffix of their name: shape}.
        layers: one row an attention module.
        parameters: elements of all floating-point tensors stored, {"before": ..., "after": ...}.
        kv_cache_bytes_per_token: for decoders, {site: {"before": ..., "after": ...}}, over all layers and in the dtype
            stored; "cross" counts tokens of the encoder. None for an encoder, which has no cache, and for memory-side
            dynamic projections, which cannot use one.
        files_copied, files_left_out: of what lay beside the weights.
        versions: of the packages.
        calibration: what heads were fitted to and how (`Calibration.settings`); None where there was no text.
        seconds: the time that the conversion took.
    """

    source: str
    source_revision: str | None
    output_dir: str
    method: str
    seed: int
    dtype: str | None
    architecture: str
    heads: dict[str, tuple[int, int]]
    talking_heads: dict[str, tuple[int, ...]]
    layers: list[LayerReport]
    parameters: dict[str, int]
    kv_cache_bytes_per_token: dict[str, dict[str, int]] | None
    files_copied: list[str]
    files_left_out: list[str]
    versions: dict[str, str]
    calibration: dict[str, Any] | None = None
    seconds: float = 0.0

    @property
    def mean_logits_relative_error(self) -> float | None:
        """The mean over the attention modules whose heads changed."""
        return self._mean("logits_relative_error")

    @property
    def mean_value_relative_error(self) -> float | None:
        """The mean over the attention modules whose heads changed."""
        return self._mean("value_relative_error")

    @property
    def mean_output_relative_error(self) -> float | None:
        """Of the attentions' outputs on held-out text: the mean over the calibrated ones; None without calibration."""
        return self._mean_detail("output_relative_error")

    @property
    def mean_output_relative_error_averaged(self) -> float | None:
        """The same if heads had been averaged."""
        return self._mean_detail("output_relative_error_averaged")

    def __str__(self) -> str:
        return self.summary()

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        means = {
            "mean_logits_relative_error": self.mean_logits_relative_error,
            "mean_value_relative_error": self.mean_value_relative_error,
            "mean_output_relative_error": self.mean_output_relative_error,
            "mean_output_relative_error_averaged": self.mean_output_relative_error_averaged,
        }
        return asdict(self) | means

    def save(self, folder: Path) -> None:
        """Write `conversion_report.json` into a folder."""
        (folder / REPORT_NAME).write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")

    def summary(self) -> str:
        """Return a few lines for people."""
        heads = [f"  {name:<27} {before} -> {after}" for name, (before, after) in self.heads.items()]
        before, after = self.parameters["before"], self.parameters["after"]
        how = f" ({self.method})" if any(layer.change == "pool" for layer in self.layers) else ""
        lines = [
            f"Converted {self.source}{how} into {self.output_dir}",
            *heads,
            f"  {'parameters':<27} {before:,} -> {after:,} ({(after - before) / max(before, 1):+.1%})",
        ]
        if self.talking_heads:
            added = ", ".join(f"{name} {list(shape)}" for name, shape in self.talking_heads.items())
            lines.append(f"  {'talking heads added':<27} {added}")
        for site, cache in (self.kv_cache_bytes_per_token or {}).items():
            lines.append(f"  {f'KV cache a token ({site})':<27} {cache['before']:,} -> {cache['after']:,} bytes")
        lines += self._output_errors() or [
            f"  {'relative error of logits':<27} {_percent(self.mean_logits_relative_error)}",
            f"  {'... of value products':<27} {_percent(self.mean_value_relative_error)} (means over layers)",
        ]
        if self.files_left_out:
            lines.append(f"  {'not copied':<27} {', '.join(self.files_left_out)}")
        lines.append(f"  {'time':<27} {self.seconds:.1f} s; details in {REPORT_NAME}")
        return "\n".join(lines)

    def _output_errors(self) -> list[str]:
        """Return what held-out text says of the attentions' outputs; nothing where it was not asked."""
        if self.mean_output_relative_error is None:
            return []
        averaged = _percent(self.mean_output_relative_error_averaged)
        value = f"{_percent(self.mean_output_relative_error)} on held-out text (averaged heads: {averaged})"
        lines = [f"  {'error of attention outputs':<27} {value}"]
        kept = {layer.module: layer.details["fit_kept"] for layer in self.layers if "fit_kept" in layer.details}
        if kept:
            before = _percent(self._mean_detail("relative_error_closed_form"))
            lines.append(f"  {'... by the closed form':<27} {before}, then fitted")
        unfitted = [name for name, is_kept in kept.items() if not is_kept]
        if unfitted:
            shown = ", ".join(unfitted[:3]) + (", ..." if len(unfitted) > 3 else "")
            value = f"in {len(unfitted)} of {len(kept)} attentions, where the fit is no better: {shown}"
            lines.append(f"  {'closed form kept':<27} {value}")
        return lines

    def _mean_detail(self, name: str) -> float | None:
        known = [error for layer in self.layers if (error := layer.details.get(name)) is not None]
        return sum(known) / len(known) if known else None

    def _mean(self, name: str) -> float | None:
        changed = [layer for layer in self.layers if layer.change != "same"]
        errors = [getattr(layer, name) for layer in changed or self.layers]
        known = [error for error in errors if error is not None]
        return sum(known) / len(known) if known else None


def attention_errors(
    before: AttentionTensors, after: AttentionTensors, heads: HeadCounts
) -> tuple[float | None, float | None]:
    """Return the relative errors of the logits' bilinear forms and of the value-output products (module docstring).

    Args:
        before: the source's projections, `heads.key[0]` key and `heads.value[0]` value heads.
        after: the converted ones, `heads.key[1]` and `heads.value[1]`.
        heads: the head counts.

    Returns:
        The two errors; None where the source's products are zero.
    """
    return _logits_error(before, after, heads), _values_error(before, after, heads)


def bilinear_error(
    left: torch.Tensor, right: torch.Tensor, new_left: torch.Tensor, new_right: torch.Tensor
) -> tuple[float, float]:
    """Return |left^T right - new_left^T new_right|^2 and |left^T right|^2 (Frobenius) without forming either product.

    The difference is left^T (right - new_right) + (left - new_left)^T new_right, and |X^T Y|^2 = <X X^T, Y Y^T>: only
    matrices of 2d x 2d, and exactly zero where nothing changed.

    Args:
        left, new_left: [..., d, D_1].
        right, new_right: [..., d, D_2].

    Returns:
        The two squared norms, each summed over the leading dimensions.
    """
    left_gram = left @ left.mT
    reference = (left_gram * (right @ right.mT)).sum()
    columns = right - new_right  # [..., d, D_2]
    if new_left is not left:
        rows = torch.cat([left, left - new_left], dim=-2)  # [..., 2d, D_1]
        left_gram, columns = rows @ rows.mT, torch.cat([columns, new_right], dim=-2)
    difference = (left_gram * (columns @ columns.mT)).sum()
    return max(difference.item(), 0.0), reference.item()


def layer_report(
    plan: ConversionPlan,
    module: AttentionModule,
    before: AttentionTensors,
    after: AttentionTensors,
    stored: dict[str, torch.Tensor],
) -> LayerReport:
    """Compare one attention before with what is stored of it, {tensor name: tensor}."""
    errors: tuple[float | None, float | None] = (0.0, 0.0)
    if module.heads.relation != "same" or plan.dtype is not None:
        # Of what is stored, rounding to another dtype included.
        final = AttentionTensors(**{part: stored[name] for part, name in module.tensors.items()})
        if groups := after.details.get("head_groups"):
            before = reorder_heads(before, module.heads, groups)
        errors = attention_errors(before, final, module.heads)
    heads = module.heads
    return LayerReport(module.name, module.site.name, heads.relation, heads.key, heads.value, *errors, after.details)


def added_projections(plan: ConversionPlan) -> dict[str, tuple[int, ...]]:
    """Return the talking-heads parameters that are new, {suffix of their name: shape}."""
    return {name.rsplit(".", 1)[-1]: shape for module in plan.modules for name, shape in module.projections.items()}


def cache_bytes(
    plan: ConversionPlan, before: dict[str, TensorEntry], after: dict[str, TensorEntry]
) -> dict[str, dict[str, int]] | None:
    """Return what a token costs in each kind of cached attention, over all layers; None where there is no cache."""
    if not can_cache(plan.config):
        return None
    sites: dict[str, dict[str, int]] = {}
    for module in plan.modules:
        # The encoder's attention, or any attention of an encoder-only model, is computed once.
        if module.site.stack_of(plan.config) == "decoder":
            site = sites.setdefault(module.site.name, {"before": 0, "after": 0})
            for i, (when, entries) in enumerate((("before", before), ("after", after))):
                heads = module.heads.key[i] + module.heads.value[i]
                itemsize = TORCH_DTYPES[entries[module.tensors["key_weight"]].dtype].itemsize
                site[when] += heads * module.heads.head_dim * itemsize
    return sites or None


def count_parameters(entries: dict[str, TensorEntry]) -> int:
    """Count the elements of all floating-point tensors."""
    return sum(entry.numel for entry in entries.values() if entry.is_floating)


def package_versions() -> dict[str, str]:
    """Return the versions of what took part in a conversion."""
    from importlib.metadata import version

    from ..modeling.configuration_attn_variants import ATTN_VARIANTS_VERSION

    packages = {name: version(name) for name in ("torch", "transformers")}
    return {"hf_attn_variants": ATTN_VARIANTS_VERSION, "python": platform.python_version()} | packages


def _logits_error(before: AttentionTensors, after: AttentionTensors, heads: HeadCounts) -> float | None:
    return _summed_error(
        (before.query_weight, before.query_bias),
        (before.key_weight, before.key_bias),
        (after.query_weight, after.query_bias),
        (after.key_weight, after.key_bias),
        heads.query,
        heads.key,
        heads.head_dim,
    )


def _values_error(before: AttentionTensors, after: AttentionTensors, heads: HeadCounts) -> float | None:
    output = before.output_weight.T
    new_output = output if after.output_weight is before.output_weight else after.output_weight.T
    return _summed_error(
        (output, None),
        (before.value_weight, before.value_bias),
        (new_output, None),
        (after.value_weight, after.value_bias),
        heads.output,
        heads.value,
        heads.head_dim,
    )


def _summed_error(
    left: Projection,
    right: Projection,
    new_left: Projection,
    new_right: Projection,
    heads: int,
    shared: tuple[int, int],
    head_dim: int,
) -> float | None:
    """Return the relative error over all `heads`, of which each reads one of `shared` heads before and after."""
    # Some heads at a time: float64 copies of all would outgrow the layer itself.
    block = max(1, BLOCK_ELEMENTS // (head_dim * max(left[0].shape[1], right[0].shape[1])))
    unchanged = all(new is old for new, old in zip(new_left, left, strict=True))
    difference = reference = 0.0
    for indices in torch.arange(heads).split(block):
        before, after = (indices // (heads // count) for count in shared)
        lefts = _heads(left, indices, head_dim)
        new_lefts = lefts if unchanged else _heads(new_left, indices, head_dim)
        terms = bilinear_error(lefts, _heads(right, before, head_dim), new_lefts, _heads(new_right, after, head_dim))
        difference, reference = difference + terms[0], reference + terms[1]
    return math.sqrt(difference / reference) if 0 < reference < math.inf and math.isfinite(difference) else None


def _heads(projection: Projection, indices: torch.Tensor, head_dim: int) -> torch.Tensor:
    weight, bias = projection
    heads = weight.unflatten(0, (-1, head_dim))[indices.to(weight.device)].double()  # [i, d, D]
    if bias is None:
        return heads
    # [W | b]: the bias is what an input of 1 is multiplied by.
    bias = bias.unflatten(0, (-1, head_dim))[indices.to(bias.device)].double()
    return torch.cat([heads, bias[..., None]], dim=-1)


def _percent(error: float | None) -> str:
    return "not defined" if error is None else f"{error:.1%}"
