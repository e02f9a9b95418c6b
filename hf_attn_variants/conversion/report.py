"""What a conversion changed, in numbers: `conversion_report.json`.

Per attention module, the relative Frobenius errors of the two products that attention is made of, over all heads i:

    logits:  sqrt( sum_i |B_i - B'_i|^2 / sum_i |B_i|^2 ),  B_i = W_q,i^T W_k,i   (biases included: [W | b] for W)
    values:  sqrt( sum_i |P_i - P'_i|^2 / sum_i |P_i|^2 ),  P_i = W_o,i W_v,i     (the value's bias included)

with W_k,i the key head that query head i reads. They compare weights and know nothing of the data.
"""

import json
import math
import platform
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from .grouping import HeadCounts
from .methods import AttentionTensors

__all__ = ["REPORT_NAME", "ConversionReport", "LayerReport", "attention_errors", "bilinear_error", "package_versions"]

REPORT_NAME = "conversion_report.json"


@dataclass(frozen=True)
class LayerReport:
    """One attention module: its heads before and after, and the relative errors (None where the source's products are 0)."""

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
            stored; "cross" counts tokens of the encoder. None for an encoder, which has no cache.
        files_copied, files_left_out: of what lay beside the weights.
        versions: of the packages.
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
    seconds: float = 0.0

    @property
    def mean_logits_relative_error(self) -> float | None:
        """The mean over attention modules."""
        return _mean([layer.logits_relative_error for layer in self.layers])

    @property
    def mean_value_relative_error(self) -> float | None:
        """The mean over attention modules."""
        return _mean([layer.value_relative_error for layer in self.layers])

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        means = {
            "mean_logits_relative_error": self.mean_logits_relative_error,
            "mean_value_relative_error": self.mean_value_relative_error,
        }
        return asdict(self) | means

    def save(self, folder: Path) -> None:
        """Write `conversion_report.json` into a folder."""
        (folder / REPORT_NAME).write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")

    def summary(self) -> str:
        """Return a few lines for people."""
        heads = [f"  {name:<26} {before} -> {after}" for name, (before, after) in self.heads.items()]
        before, after = self.parameters["before"], self.parameters["after"]
        lines = [
            f"Converted {self.source} ({self.method}) into {self.output_dir}",
            *heads,
            f"  {'parameters':<26} {before:,} -> {after:,} ({(after - before) / max(before, 1):+.1%})",
        ]
        if self.talking_heads:
            added = ", ".join(f"{name} {list(shape)}" for name, shape in self.talking_heads.items())
            lines.append(f"  {'talking heads added':<26} {added}")
        for site, cache in (self.kv_cache_bytes_per_token or {}).items():
            lines.append(f"  {f'KV cache a token ({site})':<26} {cache['before']:,} -> {cache['after']:,} bytes")
        lines.append(f"  {'relative error of logits':<26} {_percent(self.mean_logits_relative_error)} (mean over layers)")
        lines.append(f"  {'... of value products':<26} {_percent(self.mean_value_relative_error)}")
        if self.files_left_out:
            lines.append(f"  {'not copied':<26} {', '.join(self.files_left_out)}")
        lines.append(f"  {'time':<26} {self.seconds:.1f} s; details in {REPORT_NAME}")
        return "\n".join(lines)


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
    d = heads.head_dim
    logits = [0.0, 0.0]
    for i in range(heads.query):
        key_before, key_after = (i // (heads.query // count) for count in heads.key)
        _add(
            logits,
            bilinear_error(
                _head(before.query_weight, before.query_bias, i, d),
                _head(before.key_weight, before.key_bias, key_before, d),
                _head(after.query_weight, after.query_bias, i, d),
                _head(after.key_weight, after.key_bias, key_after, d),
            ),
        )
    values = [0.0, 0.0]
    for i in range(heads.output):
        value_before, value_after = (i // (heads.output // count) for count in heads.value)
        _add(
            values,
            bilinear_error(
                before.output_weight[:, i * d : (i + 1) * d].T.double(),  # [d, D]
                _head(before.value_weight, before.value_bias, value_before, d),
                after.output_weight[:, i * d : (i + 1) * d].T.double(),
                _head(after.value_weight, after.value_bias, value_after, d),
            ),
        )
    return _relative(*logits), _relative(*values)


def bilinear_error(
    left: torch.Tensor, right: torch.Tensor, new_left: torch.Tensor, new_right: torch.Tensor
) -> tuple[float, float]:
    """Return |left^T right - new_left^T new_right|^2 and |left^T right|^2 (Frobenius) without forming either product.

    The difference is left^T (right - new_right) + (left - new_left)^T new_right, and |X^T Y|^2 = <X X^T, Y Y^T>: only
    matrices of 2d x 2d, and exactly zero where nothing changed.

    Args:
        left, new_left: [d, D_1].
        right, new_right: [d, D_2].
    """
    rows = torch.cat([left, left - new_left])  # [2d, D_1]
    columns = torch.cat([right - new_right, new_right])  # [2d, D_2]
    difference = ((rows @ rows.T) * (columns @ columns.T)).sum()
    reference = ((left @ left.T) * (right @ right.T)).sum()
    return max(difference.item(), 0.0), reference.item()


def package_versions() -> dict[str, str]:
    """Return the versions of what took part in a conversion."""
    from importlib.metadata import version

    from ..modeling.configuration_attn_variants import ATTN_VARIANTS_VERSION

    packages = {name: version(name) for name in ("torch", "transformers")}
    return {"hf_attn_variants": ATTN_VARIANTS_VERSION, "python": platform.python_version()} | packages


def _head(weight: torch.Tensor, bias: torch.Tensor | None, index: int, head_dim: int) -> torch.Tensor:
    rows = slice(index * head_dim, (index + 1) * head_dim)
    head = weight[rows].double()
    # [W | b]: the bias is what an input of 1 is multiplied by.
    return head if bias is None else torch.cat([head, bias[rows, None].double()], dim=1)


def _add(sums: list[float], terms: tuple[float, float]) -> None:
    sums[0] += terms[0]
    sums[1] += terms[1]


def _relative(difference: float, reference: float) -> float | None:
    return math.sqrt(difference / reference) if reference > 0 else None


def _mean(errors: list[float | None]) -> float | None:
    known = [error for error in errors if error is not None]
    return sum(known) / len(known) if known else None


def _percent(error: float | None) -> str:
    return "not defined" if error is None else f"{error:.1%}"
