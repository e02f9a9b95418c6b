"""Reports the result of a conversion (`conversion_report.json`), including the quality of the converted model.

**Weight errors.** These are the relative Frobenius errors of two weight products, over all heads i in a module:

    logits:  sqrt( sum_i |B_i - B'_i|^2 / sum_i |B_i|^2 ),  B_i = W_q,i^T W_k,i   ([W | b] instead of W for biases)
    values:  sqrt( sum_i |P_i - P'_i|^2 / sum_i |P_i|^2 ),  P_i = W_o,i W_v,i     (including the bias of the values)

W_k,i is the key head that query head i uses. These errors do not depend on data, and they can be large after
calibration even if the model is good.

**Output errors.** After calibration, the error in the output y of each attention module is more meaningful. It is
computed in float32 on held-out text from the inputs that the module receives in the original model:

    output:  sqrt( sum |y - y'|^2 / sum |y - mean y|^2 ), summed over all tokens

If the error is 0, the outputs are identical. If it is 1, they are no better than the mean output.

**Model quality.** The errors of individual attention modules can add up or cancel. The whole model is therefore run
on held-out examples before and after the conversion. As in actual use, the examples are not joined into passages, and
they are only truncated at the model's maximum length. The measure depends on the task:

- Models that generate text: the greedily generated tokens, compared by edit distance (Levenshtein, 1966).
- Other language models: the loss on masked tokens, or on the next token.
- Classification and question answering: the share of predictions that change. For taggers, a token is only counted if
  at least one of the models predicts a tag other than the most frequent one. The same applies to classifiers if one
  class accounts for more than three quarters of the predictions. In multi-label classification, a label is counted if
  at least one of the models predicts it. If most examples have a label, it is counted if at least one of the models
  does not predict it.
- Scores (regression, reranking, multiple choice): the squared error as a share of the variance.
- All other models: the cosine similarity of embeddings. An embedding is the mean of the last hidden states, minus the
  mean embedding of all examples.

Each measure is a ratio of sums over examples with a 95 % confidence interval (`compute_ratio_confidence_interval`). If
the whole interval is within the tolerance, the verdict is "within tolerance". If the whole interval is outside the
tolerance, the verdict is "outside tolerance". Otherwise, the verdict is "inconclusive".
"""

import json
import logging
import math
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..files import REPORT_NAME, atomic_write
from ..modeling.variant_names import ATTN_VARIANTS_VERSION
from .attention_modules import AttentionModule
from .attention_tensors import AttentionTensors, HeadCounts, reorder_heads
from .checkpoint.tensor_files import TensorEntry
from .layer_choice import compute_cache_bytes_per_token, count_cached_values
from .plan import ConversionPlan

logger = logging.getLogger(__name__)

# The tolerance of each measure.
TOLERANCES = {"tokens": 0.1, "loss": 0.3, "predictions": 0.1, "scores": 0.1, "embeddings": 0.8}

# The measures that are shares, either of changed tokens or of changed predictions.
SHARE_MEASURES = ("tokens", "predictions")
# The 97.5 % quantile of the standard normal distribution.
NORMAL_QUANTILE = 1.959964

QUALITY_ADVICE = (
    "If the examples are typical of the model's inputs, use more heads (--num_key_value_heads), a larger latent "
    "(--kv_lora_rank) or more examples, or train the converted model (`attn-variants uptrain`, for text models). "
    "Run `attn-variants frontier` to compare the loss of different settings."
)
MORE_EXAMPLES_ADVICE = "Use more examples (--calibration_file, --calibration_size), more heads or a larger latent."


@dataclass(frozen=True)
class Quality:
    """The quality of a converted model compared with the original model on held-out examples.

    Args:
        measure: "tokens" (share of generated tokens that change), "loss" (increase in nats per token), "predictions"
            (share of predictions that change), "scores" (mean squared error as a share of the variance) or
            "embeddings" (mean cosine similarity).
        value: The value of the measure. None if the outputs are not finite, or if `alike` is True.
        bound: The tolerance, which is a maximum for most measures and a minimum for embeddings.
        examples: Number of held-out examples.
        losses: Losses of the original and converted models in nats per token, if measured.
        runaway: For models that generate text, the number of outputs with more than twice as many tokens as the
            original output. Most such outputs are repetitive, which can explain a large `value`.
        alike: Whether the original model gives the same output for all examples, which makes a comparison meaningless.
        unknown: Whether the original model's loss is higher than that of a random guess, which means that the model
            was not trained on this type of text.
        interval: The 95 % confidence interval of the value. None if there is only one example, or if the report was
            written by version 0.1.
        is_rare: Whether the most frequent prediction is excluded if both models make it.
    """

    measure: str
    value: float | None
    bound: float
    examples: int
    losses: tuple[float, float] | None = None
    runaway: int = 0
    alike: bool = False
    unknown: bool = False
    interval: tuple[float, float] | None = None
    is_rare: bool = False

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Quality | None":
        """Create an instance from values in a report, or return None if an incompatible version wrote the report."""
        if values.get("measure") not in TOLERANCES or not {"bound", "examples"} <= values.keys():
            return None
        known = {field.name for field in fields(cls)} & values.keys() - {"losses"}
        interval = values.get("interval")
        options: dict[str, Any] = {name: values[name] for name in known} | {"interval": interval and tuple(interval)}
        return cls(**{"value": None} | options)

    @property
    def is_within_tolerance(self) -> bool:
        """True if the model is within tolerance."""
        return self.verdict == "within tolerance"

    @property
    def verdict(self) -> str:
        """The verdict, which is "within tolerance", "outside tolerance" or "inconclusive"."""
        if self.alike or self.unknown or (self.value is not None and self.interval is None and self.examples < 2):
            return "inconclusive"
        if self.value is None:
            return "outside tolerance"
        ends = (self.value,) if self.interval is None else self.interval
        is_minimum = self.measure == "embeddings"
        are_within = [end >= self.bound if is_minimum else end <= self.bound for end in ends]
        if all(are_within):
            return "within tolerance"
        return "inconclusive" if any(are_within) else "outside tolerance"

    def __str__(self) -> str:
        """Describe the quality and its confidence interval as part of a sentence."""
        if self.alike:
            same = f"gives all examples the same {self.measure[:-1]}"
            text = "generates nothing" if self.measure == "tokens" else same
            return f"the original model {text}, so the models cannot be compared"
        if self.unknown:
            loss = "" if self.losses is None else f" of {self.losses[0]:.1f} nats per token"
            return f"the original model has a loss{loss} on these examples, which is more than that of a random guess"
        if self.value is None:
            return "its outputs are not finite numbers"
        rare = ", without the most frequent one," if self.is_rare else ""
        text = {
            "tokens": f"{self.value:.1%} of its generated tokens differ from the original's",
            "loss": f"its loss is {self.value:+.3f} nats per token compared with the original's",
            "predictions": f"{self.value:.1%} of its predictions{rare} differ from the original's",
            "scores": f"the error of its scores is {self.value:.1%} of the variance of the original's",
            "embeddings": f"its embeddings have a cosine of {self.value:.3f} to the original's",
        }[self.measure]
        if self.interval is not None:
            form = {"loss": "{:+.3f}", "embeddings": "{:.3f}"}.get(self.measure, "{:.1%}")
            text += f" (95 % interval {form.format(self.interval[0])} to {form.format(self.interval[1])})"
        if self.runaway:
            text += f"; for {self.runaway} of {self.examples} examples it generates more than twice as many tokens"
        return text

    @property
    def formatted_bound(self) -> str:
        """The bound with its unit, for messages."""
        if self.measure == "loss":
            return f"{self.bound} nats"
        return f"{self.bound}" if self.measure == "embeddings" else f"{self.bound:.0%}"

    def to_dict(self) -> dict[str, Any]:
        """Return the fields and the verdict as JSON values."""
        return asdict(self) | {"verdict": self.verdict, "is_kept": self.is_within_tolerance}


def compute_ratio_confidence_interval(
    amounts: torch.Tensor, counts: torch.Tensor, is_share: bool
) -> tuple[float, float] | None:
    """Return the 95 % confidence interval of sum(amounts) / sum(counts) over randomly sampled examples.

    The variance is computed for a ratio of sums over examples (Cochran, Sampling Techniques, 1977, section 6.4)
    because changes within the same example are not independent. For shares, Wilson's interval (1927) is used with the
    number of independent units that would have the same variance. For all other ratios, Student's interval is used.

    Args:
        amounts: The numerator for each example, [n].
        counts: The denominator for each example, [n].
        is_share: Whether the ratio is a share, which means that each amount is a part of its count.

    Returns:
        The lower and upper ends of the interval, or None if fewer than two examples have a positive count.
    """
    examples, total = int((counts > 0).sum()), float(counts.sum())
    if examples < 2:
        return None
    ratio = float(amounts.sum()) / total
    squares = float((amounts - ratio * counts).square().sum())
    variance = squares / total**2 * examples / (examples - 1)
    if is_share and ratio < 1:
        units = min(total, ratio * (1 - ratio) / variance) if ratio * variance else total
        middle = ratio + NORMAL_QUANTILE**2 / (2 * units)
        spread = NORMAL_QUANTILE * math.sqrt(ratio * (1 - ratio) / units + (NORMAL_QUANTILE / (2 * units)) ** 2)
        scale = 1 + NORMAL_QUANTILE**2 / units
        return max(0.0, (middle - spread) / scale), (middle + spread) / scale
    degrees_of_freedom = examples - 1  # Student's quantile, approximated by a series (Abramowitz and Stegun, 26.7.5)
    factor = (
        NORMAL_QUANTILE
        + (NORMAL_QUANTILE**3 + NORMAL_QUANTILE) / (4 * degrees_of_freedom)
        + (5 * NORMAL_QUANTILE**5 + 16 * NORMAL_QUANTILE**3 + 3 * NORMAL_QUANTILE) / (96 * degrees_of_freedom**2)
    )
    low, high = ratio - factor * math.sqrt(variance), ratio + factor * math.sqrt(variance)
    return max(0.0, low) if is_share else low, high


class OutsideToleranceError(ValueError):
    """Raised if a conversion with `strict=True` is not within tolerance."""

    exit_status = 1  # The conversion ran to completion, but the result is rejected.


def check_within_tolerance(quality: Quality | None, strict: bool, report: Any = None) -> None:
    """Warn or raise an error if a conversion is not within tolerance.

    Args:
        quality: Quality of the converted model, or None if it was not measured.
        strict: Whether to raise an error instead of logging a warning.
        report: The `ConversionReport` if the converted model is written to a folder. The report is saved next to the
            folder before the error is raised because the folder itself is not created.

    Raises:
        OutsideToleranceError: if `strict` is True and the conversion is not within tolerance.
    """
    if quality is None or quality.is_within_tolerance:
        return
    needs_examples = quality.verdict == "inconclusive" and not (quality.alike or quality.unknown)
    message = (
        f"The conversion is {quality.verdict}: {quality} (on {quality.examples} held-out examples). The tolerance is "
        f"{quality.formatted_bound}. {MORE_EXAMPLES_ADVICE if needs_examples else QUALITY_ADVICE}"
    )
    if not strict:
        logger.warning(message)
        return
    if report is not None:
        folder = Path(report.output_dir).absolute()
        path = folder.with_name(f"{folder.name}.{REPORT_NAME}")
        atomic_write(path, report.to_json())
        message += f" The report was written to {path}."
    raise OutsideToleranceError(message)


class CalibrationResult(NamedTuple):
    """The result of calibration, which is empty if calibration is not used.

    Attributes:
        attentions: The new projections of every fitted attention module, on the CPU, by module name.
        source_outputs: The original model's outputs on held-out examples (`calibration.source_outputs`). None if
            nothing was fitted, or if they were not requested.
        batches: The model inputs, which can be reused to calibrate the same model again on the same examples.
        settings: The calibration settings for the report, or None if nothing was fitted.
    """

    attentions: dict[str, AttentionTensors]
    source_outputs: Any = None
    batches: Any = None
    settings: dict[str, Any] | None = None

    def measure_quality(self, model: Any) -> Quality | None:
        """Compare the converted model with the original one, or return None if nothing was fitted."""
        return None if self.source_outputs is None else self.source_outputs.compare_with(model)


def compute_edit_distance(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return the minimum number of insertions, deletions and replacements that turn `first` into `second`."""
    row = list(range(len(second) + 1))
    for i, first_item in enumerate(first, 1):
        diagonal, row[0] = row[0], i
        for j, second_item in enumerate(second, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (first_item != second_item))
    return row[-1]


# Maximum number of elements in the float64 copy of a block of heads.
_COMPARED_ELEMENTS = 2**20


def compute_attention_errors(
    before: AttentionTensors, after: AttentionTensors, heads: HeadCounts
) -> tuple[float | None, float | None]:
    """Return the relative errors of the weight products for logits and values (see the module docstring).

    Args:
        before, after: The projections of the original and converted models.
        heads: The head counts.

    Returns:
        The two errors. An error is None if the original weight products are zero.
    """
    query, key, value = (before.get_weight_and_bias(role) for role in ("query", "key", "value"))
    new_query, new_key, new_value = (after.get_weight_and_bias(role) for role in ("query", "key", "value"))
    output = new_output = (before.output_weight.T, None)
    if after.output_weight is not before.output_weight:
        new_output = (after.output_weight.T, None)
    head_dim = heads.head_dim
    logits = _compute_relative_error((query, key), (new_query, new_key), heads.query, heads.key, head_dim)
    values = _compute_relative_error((output, value), (new_output, new_value), heads.output, heads.value, head_dim)
    return logits, values


def compute_bilinear_squared_norms(
    left: torch.Tensor, right: torch.Tensor, new_left: torch.Tensor, new_right: torch.Tensor
) -> tuple[float, float]:
    """Return the squared Frobenius norms |left^T right - new_left^T new_right|^2 and |left^T right|^2.

    Neither product is computed explicitly. The difference is left^T (right - new_right) + (left - new_left)^T
    new_right, and |X^T Y|^2 = <X X^T, Y Y^T>. This only requires matrices of size 2d x 2d, and the result is exactly
    zero if nothing has changed.

    Args:
        left, new_left: The left factors before and after the change, [..., d, D_1].
        right, new_right: The right factors before and after the change, [..., d, D_2].

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


def _compute_relative_error(
    factors: Sequence[Any], new_factors: Sequence[Any], heads: int, kv_head_counts: tuple[int, int], head_dim: int
) -> float | None:
    """Return the relative error of the products of two factors, or None if it is not defined.

    Each factor consists of a weight [h*d, D] and its bias [h*d], or None. The first factor has `heads` heads, which
    share the heads in the second factor. `kv_head_counts` contains the number of heads in the second factor before and
    after the conversion.
    """
    (left, right), (new_left, new_right) = factors, new_factors
    # Heads are processed in blocks because a float64 copy of all heads would need more memory than the layer.
    block = max(1, _COMPARED_ELEMENTS // (head_dim * max(left[0].shape[1], right[0].shape[1])))
    unchanged = all(new is old for new, old in zip(new_left, left, strict=True))
    difference = reference = 0.0
    for indices in torch.arange(heads).split(block):
        before, after = (indices // (heads // count) for count in kv_head_counts)
        lefts = _select_heads(left, indices, head_dim)
        new_lefts = lefts if unchanged else _select_heads(new_left, indices, head_dim)
        rights, new_rights = _select_heads(right, before, head_dim), _select_heads(new_right, after, head_dim)
        terms = compute_bilinear_squared_norms(lefts, rights, new_lefts, new_rights)
        difference, reference = difference + terms[0], reference + terms[1]
    return math.sqrt(difference / reference) if 0 < reference < math.inf and math.isfinite(difference) else None


def _select_heads(projection: Any, indices: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Return the given heads as float64 matrices [W | b] [i, d, D + 1], or as W [i, d, D] if there is no bias."""
    weight, bias = projection
    parts = [weight] if bias is None else [weight, bias[:, None]]
    heads = [part.unflatten(0, (-1, head_dim))[indices.to(part.device)].double() for part in parts]
    return heads[0] if bias is None else torch.cat(heads, dim=-1)


@dataclass(frozen=True)
class LayerReport:
    """The changes to one attention module.

    Args:
        module: Path of the module inside the base model.
        site: The type of attention.
        change: "same", or one or more of "pool" or "expand" (heads), "compress" or "expand" (latent), and "kernel".
        key_heads, value_heads: Numbers of heads (before, after).
        logits_relative_error, value_relative_error: Weight errors (see the module docstring). None if the original
            weight products are zero.
        details: Values from the conversion method. After calibration, `output_relative_error` is the error in the
            attention output on held-out text, and `output_relative_error_averaged` is the same error with averaged
            heads. After fitting steps, there are also `relative_error_closed_form`, `relative_error_fitted`, and
            `fit_kept` (whether the fitted result was better). Errors that are not finite are None. For latents,
            `latent_key_energy` and `latent_value_energy` are the preserved shares of energy.
        rank: Latent ranks (before, after). None if there is no latent.
    """

    module: str
    site: str
    change: str
    key_heads: tuple[int, int]
    value_heads: tuple[int, int]
    logits_relative_error: float | None
    value_relative_error: float | None
    details: dict[str, Any] = field(default_factory=dict)
    rank: tuple[int | None, int | None] = (None, None)


@dataclass
class ConversionReport:
    """The report of a conversion. `save` writes it to a folder, and `summary` returns a few lines of text.

    Args:
        source: The folder or Hub id of the original model.
        source_revision: The commit on the Hub, or None if the source is a folder.
        output_dir: Folder of the converted checkpoint.
        method, seed, dtype: The arguments of the conversion.
        architecture: Class of the converted model.
        heads: Head counts and ranks, {field: [before, after]}. The values are lists if they differ between layers.
        other_fields: Kernels and patterns that changed, {field: [before, after]}.
        talking_heads: The added talking-heads parameters, {name suffix: shape}. If they differ between types of
            attention, the type precedes the suffix.
        layers: The report of each attention module.
        parameters: Number of elements in all stored floating-point tensors, {"before": ..., "after": ...}.
        kv_cache_bytes_per_token: For decoders, {type of attention: {"before": ..., "after": ...}} over all layers, in
            the stored dtype. The values for "cross" are per source token. None if the model is an encoder, or has
            dynamic talking-heads projections that do not allow a cache.
        files_copied, files_left_out: Other files in the original folder that were or were not copied.
        versions: Package versions.
        calibration: The calibration settings (`Calibration.settings`), or None if calibration was not used.
        matching_shares: For `keep_matching_layers`, the largest share of attention that a head in each layer gives to
            other occurrences of the same word. None if the option was not used.
        quality: Quality of the whole model on held-out examples. None if nothing was fitted.
        seconds: Duration of the conversion in seconds.

    Example:

    ```py
    >>> from hf_attn_variants.conversion import convert_checkpoint
    >>> report = convert_checkpoint("google-bert/bert-base-uncased", "bert-gqa", num_key_value_heads=4)
    >>> report.parameters["after"] < report.parameters["before"]
    True
    ```
    """

    source: str
    source_revision: str | None
    output_dir: str
    method: str
    seed: int
    dtype: str | None
    architecture: str
    heads: dict[str, tuple[Any, Any]]
    other_fields: dict[str, tuple[Any, Any]]
    talking_heads: dict[str, tuple[int, ...]]
    layers: list[LayerReport]
    parameters: dict[str, int]
    kv_cache_bytes_per_token: dict[str, dict[str, int]] | None
    files_copied: list[str]
    files_left_out: list[str]
    versions: dict[str, str]
    calibration: dict[str, Any] | None = None
    matching_shares: list[float] | None = None
    quality: Quality | None = None
    seconds: float = 0.0

    def is_reduced(self) -> bool:
        """Return whether any attention module got fewer heads, a smaller latent or a kernel."""
        return any({"pool", "compress", "kernel"} & set(layer.change.split(", ")) for layer in self.layers)

    @property
    def mean_logits_relative_error(self) -> float | None:
        """The mean error of the logits over all attention modules that changed."""
        return self._compute_mean_error("logits_relative_error")

    @property
    def mean_value_relative_error(self) -> float | None:
        """The mean error of the value products over all attention modules that changed."""
        return self._compute_mean_error("value_relative_error")

    @property
    def mean_output_relative_error(self) -> float | None:
        """The mean output error of the calibrated modules on held-out text, or None if calibration was not used."""
        return self._compute_mean_detail("output_relative_error")

    @property
    def mean_output_relative_error_averaged(self) -> float | None:
        """The mean relative error of the outputs with averaged heads, or None if it was not measured."""
        return self._compute_mean_detail("output_relative_error_averaged")

    def __str__(self) -> str:
        """Return the summary."""
        return self.summary()

    def to_dict(self) -> dict[str, Any]:
        """Return the fields and the mean errors as JSON values."""
        means = [name for name, member in vars(ConversionReport).items() if isinstance(member, property)]
        quality = self.quality and self.quality.to_dict()
        return asdict(self) | {"quality": quality} | {name: getattr(self, name) for name in means}

    def save(self, folder: Path) -> None:
        """Write `conversion_report.json` into a folder."""
        (folder / REPORT_NAME).write_text(self.to_json(), encoding="utf-8")

    def to_json(self) -> str:
        """Return the contents of `conversion_report.json`."""
        return json.dumps(self.to_dict(), indent=2) + "\n"

    def summary(self, attention_errors: bool = False) -> str:
        """Return a human-readable summary in a few lines.

        Args:
            attention_errors: Whether to include the errors of the attention modules. They are always included if the
                quality of the whole model was not measured.
        """
        before, after = self.parameters["before"], self.parameters["after"]
        rows = [
            (name, f"{_format_value(old)} -> {_format_value(new)}")
            for name, (old, new) in (self.heads | self.other_fields).items()
        ]
        change = (after - before) / max(before, 1)
        rows.append(("parameters in the files", f"{before:,} -> {after:,} ({change:+.1%})"))
        if self.talking_heads:
            added = ", ".join(f"{name} {list(shape)}" for name, shape in self.talking_heads.items())
            rows.append(("talking heads added", added))
        if self.matching_shares is not None:
            shares = ", ".join(f"{share:.2f}" for share in self.matching_shares)
            value = f"{shares} by layer; the layers with the largest values are unchanged"
            rows.append(("attention to the same word", value))
        for site, cache in (self.kv_cache_bytes_per_token or {}).items():
            rows.append((f"cache per token ({site})", f"{cache['before']:,} -> {cache['after']:,} bytes"))
        if attention_errors or self.quality is None:
            rows += self._describe_attention_errors()
        if averaged := [layer.module for layer in self.layers if layer.details.get("averaged")]:
            value = f"in {len(averaged)} attention modules, where they are better: {_summarize_names(averaged)}"
            rows.append(("averaged heads used", value))
        if self.quality is not None:
            value = f"{self.quality}, on {self.quality.examples} held-out examples: {self.quality.verdict}"
            rows.append(("the whole model", f"{value} ({self.quality.formatted_bound})"))
        if self.files_left_out:
            rows.append(("not copied", ", ".join(self.files_left_out)))
        rows.append(("time", f"{self.seconds:.1f} s; details in {REPORT_NAME}"))
        method = f" ({self.method})" if self.is_reduced() else ""
        lines = [f"  {label:<27} {value}" for label, value in rows]
        return "\n".join([f"Converted {self.source}{method} into {self.output_dir}", *lines])

    def _describe_attention_errors(self) -> list[tuple[str, str]]:
        """Return summary rows about output errors on held-out text or, if they are unknown, about weight errors."""
        if self.mean_output_relative_error is None:
            # A new attention pattern changes the outputs but not the weights, so weight errors would be misleading.
            if all(layer.change == "same" for layer in self.layers):
                return []
            values = f"{_format_error(self.mean_value_relative_error)} (means over layers)"
            logits = _format_error(self.mean_logits_relative_error)
            return [("relative error of logits", logits), ("... of value products", values)]
        averaged = self.mean_output_relative_error_averaged
        comparison = "" if averaged is None else f" (averaged heads: {_format_error(averaged)})"
        value = f"{_format_error(self.mean_output_relative_error)} on held-out text{comparison}"
        rows = [("error of attention outputs", value)]
        fitted_layers = [layer for layer in self.layers if "fit_kept" in layer.details]
        if fitted_layers:
            before = _format_error(self._compute_mean_detail("relative_error_closed_form"))
            rows.append(("... of the closed form", f"{before}, before fitting"))
        if unfitted := [layer.module for layer in fitted_layers if not layer.details["fit_kept"]]:
            value = f"in {len(unfitted)} of {len(fitted_layers)} attention modules, where fitting is not better"
            rows.append(("closed form used", f"{value}: {_summarize_names(unfitted)}"))
        return rows

    def _compute_mean_detail(self, name: str) -> float | None:
        """Return the mean of an entry in `details` over all modules that have this entry."""
        return _compute_mean_ignoring_none(layer.details.get(name) for layer in self.layers)

    def _compute_mean_error(self, name: str) -> float | None:
        """Return the mean of an error over the modules that changed, or over all modules if none changed."""
        changed = [layer for layer in self.layers if layer.change != "same"]
        return _compute_mean_ignoring_none(getattr(layer, name) for layer in changed or self.layers)


def build_layer_report(
    plan: ConversionPlan,
    module: AttentionModule,
    before: AttentionTensors,
    after: AttentionTensors,
    stored: dict[str, torch.Tensor],
) -> LayerReport:
    """Return the report for one attention module.

    Args:
        plan: The conversion plan.
        module: The attention module.
        before, after: The module's projections before and after the conversion.
        stored: {name: tensor} for all tensors that are written. Their dtypes can differ from those in `after`.
    """
    errors: tuple[float | None, float | None] = (0.0, 0.0)
    if module.change != "same" or plan.dtype is not None:
        # The errors include rounding to another dtype.
        final = module.read_tensors(stored.__getitem__, converted=True)
        if groups := after.details.get("head_groups"):
            before = reorder_heads(before, module.heads, groups)
        errors = compute_attention_errors(before.fold_latent(), final.fold_latent(), module.heads)
    name, heads = module.name, module.heads
    return LayerReport(
        name, module.site.name, module.change, heads.key, heads.value, *errors, after.details, heads.rank
    )


def build_conversion_report(
    plan: ConversionPlan,
    layers: list[LayerReport],
    before: dict[str, TensorEntry],
    after: dict[str, TensorEntry],
    **fields: Any,
) -> ConversionReport:
    """Build the report of a conversion.

    Args:
        plan: The conversion plan.
        layers: The report for each attention module.
        before, after: All tensors in the original and converted checkpoints.
        fields: The remaining fields of `ConversionReport`.
    """
    return ConversionReport(
        method=plan.method.name,
        seed=plan.seed,
        dtype=None if plan.dtype is None else str(plan.dtype).removeprefix("torch."),
        architecture=plan.model_class.__name__,
        heads=plan.heads,
        other_fields=plan.other_fields,
        talking_heads=_list_talking_heads_shapes(plan),
        layers=layers,
        parameters={"before": _count_parameters(before), "after": _count_parameters(after)},
        kv_cache_bytes_per_token=_compute_cache_bytes(plan, before, after),
        versions=get_package_versions(),
        **fields,
    )


def _list_talking_heads_shapes(plan: ConversionPlan) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the new talking-heads parameters, with the shortest possible keys.

    If all modules get the same parameters, the keys are name suffixes. If all modules of each attention type get the
    same parameters, the type precedes the suffix. Otherwise, the keys are the names in the checkpoint.
    """
    shapes_by_site: dict[str, set[str]] = {}
    for module in plan.modules:
        shapes = {name.rsplit(".", 1)[-1]: shape for name, shape in module.projections.items()}
        shapes_by_site.setdefault(module.site.name, set()).add(json.dumps(shapes))
    all_shapes = set().union(*shapes_by_site.values())
    if len(all_shapes) == 1:
        return {name: tuple(shape) for name, shape in json.loads(all_shapes.pop()).items()}
    if all(len(texts) == 1 for texts in shapes_by_site.values()):
        pairs = [(site, json.loads(text)) for site, texts in shapes_by_site.items() for text in texts]
        return {f"{site} {name}": tuple(shape) for site, shapes in pairs for name, shape in shapes.items()}
    return {name: shape for module in plan.modules for name, shape in module.projections.items()}


def _compute_cache_bytes(
    plan: ConversionPlan, before: dict[str, TensorEntry], after: dict[str, TensorEntry]
) -> dict[str, dict[str, int]] | None:
    """Return the cache size per token before and after the conversion for each type of attention.

    Returns None if the model has no cache.
    """
    caches = []
    for config, entries in ((plan.source_config, before), (plan.config, after)):
        sizes = []
        for module in plan.modules:
            heads, kernel = module.site.get_heads(config, module.name), module.kernel[config is plan.config]
            numbers = count_cached_values(heads, config.hidden_size, kernel)
            sizes.append((module.site, numbers * entries[module.tensors["key_weight"]].itemsize))
        caches.append(compute_cache_bytes_per_token(config, sizes))
    old, new = caches
    if old is None or new is None:
        return None
    return {site: {"before": old[site], "after": new[site]} for site in old}


def _count_parameters(entries: dict[str, TensorEntry]) -> int:
    """Return the total number of elements in all floating-point tensors."""
    return sum(entry.numel for entry in entries.values() if entry.is_floating)


def get_package_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that a conversion depends on."""
    packages = {"torch": torch.__version__, "transformers": version("transformers")}
    return {"hf_attn_variants": ATTN_VARIANTS_VERSION, "python": platform.python_version()} | packages


def _compute_mean_ignoring_none(errors: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are not None, or None if all are None."""
    known = [error for error in errors if error is not None]
    return sum(known) / len(known) if known else None


def _format_value(value: Any) -> str:
    """Format a field value as text."""
    if isinstance(value, list):
        return f"[{', '.join(map(_format_value, value))}]"
    return "none" if value is None else str(value)


def _summarize_names(names: list[str]) -> str:
    """Join the first three names with commas, followed by an ellipsis if there are more."""
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _format_error(error: float | None) -> str:
    """Format an error as a percentage."""
    return "not defined" if error is None else f"{error:.1%}"
