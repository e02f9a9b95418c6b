"""The report of a conversion, `conversion_report.json`, with the errors of the converted weights.

The relative Frobenius errors of the two products that attention is made of, over all heads i:

    logits:  sqrt( sum_i |B_i - B'_i|^2 / sum_i |B_i|^2 ),  B_i = W_q,i^T W_k,i   (biases included: [W | b] for W)
    values:  sqrt( sum_i |P_i - P'_i|^2 / sum_i |P_i|^2 ),  P_i = W_o,i W_v,i     (the value's bias included)

with W_k,i the key head that query head i reads.

These errors compare weights and know nothing of the data: after a calibration they are large where the model is good.
There the error that means something is that of each attention's output y, computed in float32 on the calibration's
held-out text, for each of its calls with the inputs of the source:

    output:  sqrt( sum |y - y'|^2 / sum |y - mean y|^2 ) over the tokens; 0 is equal, 1 no better than the mean

How near a converted model is to its original: one number on held-out examples of the calibration.

The errors of single attentions do not say what the model has become: they add up, or they cancel. So the whole model
runs on held-out examples before and after, each one alone and whole, as a user gives it. Compared is what the model
is for:

- a model that writes: the tokens it writes by itself, greedily, by edit distance (Levenshtein, 1966);
- a language model's head: its loss on masked tokens, or on each next one;
- a head that classifies or answers: the predictions that change. Tags count if either model gives another one than
  the most frequent tag, and so do classes if one of them has more than three quarters of the examples. Of several
  labels those count that either model gives (a label that most examples have: those that either does not give);
- a head that gives scores, as of a regression, a reranker or a choice: their error, as a share of their variance;
- anything else: the cosine of embeddings, the means of the last hidden states, less the mean of all of them.

Each is a ratio of sums over examples and has a 95 % interval (`ratio_interval`), which decides: the model is within
tolerance if the whole interval is, outside if none of it is, and otherwise the number is inconclusive.
"""

import json
import logging
import math
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..files import REPORT_NAME, atomic_write
from ..modeling.variant_names import ATTN_VARIANTS_VERSION
from .attention_modules import AttentionModule
from .attention_tensors import AttentionTensors, HeadCounts, reorder_heads
from .cache_budget import cache_bytes_per_token, cached_numbers
from .checkpoint.tensor_files import TensorEntry, element_size
from .plan import ConversionPlan

if TYPE_CHECKING:
    import torch

__all__ = [
    "BOUNDS",
    "SHARES",
    "ConversionReport",
    "LayerReport",
    "ModelNotKeptError",
    "Quality",
    "attention_errors",
    "bilinear_error",
    "check_kept",
    "conversion_report",
    "edit_distance",
    "layer_report",
    "package_versions",
    "ratio_interval",
]

logger = logging.getLogger(__name__)

# The tolerance of each measure.
BOUNDS = {"tokens": 0.1, "loss": 0.3, "predictions": 0.1, "scores": 0.1, "embeddings": 0.8}

# Those that count what changes.
SHARES = ("tokens", "predictions")
# Of a normal distribution, 95 % lies within so many standard deviations.
Z = 1.959964

ADVICE = (
    "If the examples are of the kind that the model reads, keep more heads (--num_key_value_heads) or a larger latent "
    "(--kv_lora_rank), give more examples, or train the model afterwards (`attn-variants uptrain`, for models of "
    "text). `attn-variants frontier` shows what each choice loses."
)
MORE_EXAMPLES = "Give more examples (--calibration_file, --calibration_size), or keep more heads or a larger latent."


@dataclass(frozen=True)
class Quality:
    """How near a converted model is to its original on held-out examples.

    Args:
        measure: "tokens" = the share of written tokens that change; "loss" = nats per token above the original's;
            "predictions" = the share that changes; "scores" = their mean squared error as a share of their variance;
            "embeddings" = the mean cosine to the original's.
        value: the number; None = the converted model's outputs are no numbers, or the examples are `alike`.
        bound: the tolerance: the most of it, for embeddings the least.
        examples: how many were held out.
        losses: of the original and of the converted model, nats per token, where they were measured.
        runaway: of a model that writes: the examples of which it writes more than twice as much as the original. It
            repeats itself there, mostly, which makes much of `value`.
        alike: the original gives all examples the same, so that there is nothing to compare.
        unknown: the original's own loss is above that of a guess, so that it does not know such text at all.
        interval: of the value, at 95 %; None = a single example, or a report of version 0.1.
        is_rare: whether the most frequent prediction is left out where neither model gives another one.
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
    def of(cls, values: dict[str, Any]) -> "Quality | None":
        """Return what a report holds as `to_dict` made it; None where it is none of this version."""
        if values.get("measure") not in BOUNDS or not {"bound", "examples"} <= values.keys():
            return None
        others: dict[str, Any] = {
            name: values[name] for name in ("runaway", "alike", "unknown", "is_rare") if name in values
        }
        interval = values.get("interval")
        others["interval"] = None if interval is None else tuple(interval)
        return cls(values["measure"], values.get("value"), values["bound"], values["examples"], **others)

    @property
    def is_kept(self) -> bool:
        """Whether the model is within tolerance."""
        return self.verdict == "within tolerance"

    @property
    def says_nothing(self) -> bool:
        """Whether such examples tell nothing of any conversion."""
        return self.alike or self.unknown

    @property
    def verdict(self) -> str:
        """ "within tolerance", "outside tolerance" or "inconclusive", by the interval."""
        if self.says_nothing or (self.value is not None and self.interval is None and self.examples < 2):
            return "inconclusive"
        if self.value is None:
            return "outside tolerance"
        ends = (self.value,) if self.interval is None else self.interval
        are_within = [end >= self.bound if self.measure == "embeddings" else end <= self.bound for end in ends]
        if all(are_within):
            return "within tolerance"
        return "inconclusive" if any(are_within) else "outside tolerance"

    def __str__(self) -> str:
        if self.alike:
            what = "writes nothing" if self.measure == "tokens" else f"gives all examples one {self.measure[:-1]}"
            return f"the original model {what}, so there is nothing to compare"
        if self.unknown:
            loss = "" if self.losses is None else f" of {self.losses[0]:.1f} nats per token"
            return f"the original model has a loss{loss} on these examples, which is more than a guess has"
        if self.value is None:
            return "its outputs are not numbers"
        rare = ", without the most frequent one," if self.is_rare else ""
        text = {
            "tokens": f"{self.value:.1%} of the tokens it writes differ from the original's",
            "loss": f"its loss is {self.value:+.3f} nats per token compared with the original's",
            "predictions": f"{self.value:.1%} of its predictions{rare} differ from the original's",
            "scores": f"its scores have an error of {self.value:.1%} of the variance of the original's",
            "embeddings": f"its embeddings have a cosine of {self.value:.3f} to the original's",
        }[self.measure]
        return text + self._interval_text() + self._runaway_text()

    def _interval_text(self) -> str:
        if self.interval is None:
            return ""
        form = {"loss": "{:+.3f}", "embeddings": "{:.3f}"}.get(self.measure, "{:.1%}")
        return f" (95 % interval {form.format(self.interval[0])} to {form.format(self.interval[1])})"

    def _runaway_text(self) -> str:
        if not self.runaway:
            return ""
        return f"; in {self.runaway} of {self.examples} examples it writes more than twice as much, and repeats itself"

    @property
    def shown_bound(self) -> str:
        """The bound as people write it."""
        if self.measure == "loss":
            return f"{self.bound} nats"
        return f"{self.bound}" if self.measure == "embeddings" else f"{self.bound:.0%}"

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return asdict(self) | {"verdict": self.verdict, "is_kept": self.is_kept}


def ratio_interval(found: "torch.Tensor", counts: "torch.Tensor", is_share: bool) -> tuple[float, float] | None:
    """Return the 95 % interval of sum(found) / sum(counts), whose examples are drawn at random.

    The variance is that of a ratio of sums over examples (Cochran, Sampling Techniques, 1977, section 6.4), because
    what changes in one text is not independent. A share has Wilson's interval (1927) for as many independent units as
    have this variance, any other number Student's.

    Args:
        found, counts: of each example, [n].
        is_share: whether the ratio is a share of `counts` units.

    Returns:
        The interval; None if fewer than two examples count.
    """
    examples, total = int((counts > 0).sum()), float(counts.sum())
    if examples < 2:
        return None
    ratio = float(found.sum()) / total
    squares = float((found - ratio * counts).square().sum())
    variance = squares / total**2 * examples / (examples - 1)
    if is_share and ratio < 1:
        units = min(total, ratio * (1 - ratio) / variance) if ratio * variance else total
        middle = ratio + Z**2 / (2 * units)
        spread = Z * math.sqrt(ratio * (1 - ratio) / units + (Z / (2 * units)) ** 2)
        scale = 1 + Z**2 / units
        return max(0.0, (middle - spread) / scale), (middle + spread) / scale
    free = examples - 1  # Student's quantile by its expansion (Abramowitz and Stegun, 26.7.5)
    factor = Z + (Z**3 + Z) / (4 * free) + (5 * Z**5 + 16 * Z**3 + 3 * Z) / (96 * free**2)
    low, high = ratio - factor * math.sqrt(variance), ratio + factor * math.sqrt(variance)
    return max(0.0, low) if is_share else low, high


class ModelNotKeptError(ValueError):
    """A strict conversion is not within tolerance."""

    exit_status = 1  # of a command: the work was done, and its result is refused


def check_kept(quality: Quality | None, strict: bool, report: Any = None) -> None:
    """Warn of a conversion that is not within tolerance; if it is to be strict, raise.

    Args:
        quality: of the converted model; None = it was not measured.
        strict: whether it is an error.
        report: of a conversion into a folder (`ConversionReport`): the error leaves it beside the folder, which does
            not appear.

    Raises:
        ModelNotKeptError: if the conversion is to be strict.
    """
    if quality is None or quality.is_kept:
        return
    is_open = quality.verdict == "inconclusive" and not quality.says_nothing
    message = (
        f"the conversion is {quality.verdict}: {quality}, on {quality.examples} held-out examples; the tolerance is "
        f"{quality.shown_bound}. {MORE_EXAMPLES if is_open else ADVICE}"
    )
    if not strict:
        logger.warning(message)
        return
    if report is not None:
        folder = Path(report.output_dir).absolute()
        place = folder.with_name(f"{folder.name}.{REPORT_NAME}")
        atomic_write(place, report.to_json())
        message += f" The report is {place}."
    raise ModelNotKeptError(message)


def edit_distance(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return how many tokens, or words, have to be inserted, deleted or replaced to make the second of the first."""
    row = list(range(len(second) + 1))
    for i, one in enumerate(first, 1):
        before, row[0] = row[0], i
        for j, other in enumerate(second, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (one != other))
    return row[-1]


# A weight [h*d, D] and its bias [h*d] or None.
Projection = tuple[torch.Tensor, torch.Tensor | None]
BLOCK_ELEMENTS = 2**20


def attention_errors(
    before: AttentionTensors, after: AttentionTensors, heads: HeadCounts
) -> tuple[float | None, float | None]:
    """Return the relative errors of the logits' products and of the values' (module docstring).

    Args:
        before, after: the projections of the source and the converted ones.
        heads: their head counts.

    Returns:
        The two errors; None where the source's products are zero.
    """
    queries, new_queries = before.pair("query"), after.pair("query")
    keys, new_keys = before.pair("key"), after.pair("key")
    values, new_values = before.pair("value"), after.pair("value")
    outputs = new_outputs = (before.output_weight.T, None)
    if after.output_weight is not before.output_weight:
        new_outputs = (after.output_weight.T, None)
    return (
        _summed_error(queries, keys, new_queries, new_keys, heads.query, heads.key, heads.head_dim),
        _summed_error(outputs, values, new_outputs, new_values, heads.output, heads.value, heads.head_dim),
    )


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


@dataclass(frozen=True)
class LayerReport:
    """One attention module: heads before and after, and relative errors (None where the source's products are 0).

    `change` is "same", or what happened: heads "pool" or "expand", a latent "compress" or "expand", a softmax
    becomes a "kernel". `rank` is that of the latent which keys and values are made from, None where that is the input.

    `details` are the method's. After a calibration they hold `output_relative_error`, of the attention's output on
    held-out text, and `output_relative_error_averaged`, what averaged heads would have there; after a fit
    `relative_error_closed_form` and `relative_error_fitted` too, and `fit_kept`: whether the fit was the better one.
    An error is None where it is no number. Of a latent, `latent_key_energy` and `latent_value_energy` are the shares
    that it keeps.
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
    """What was converted, how, and what it changed; `save` writes it, `summary` says it in a few lines.

    Args:
        source: the folder or Hub id.
        source_revision: the Hub's commit, where there is one.
        output_dir: where the converted checkpoint is.
        method, seed, dtype: as given.
        architecture: the converted model's class.
        heads: the configuration's head counts and, where there are any, the ranks of latents, {field: [before,
            after]}; of a field that differs by layer the values of all layers.
        other_fields: kernels and patterns that changed, {field: [before, after]}.
        talking_heads: the talking-heads parameters that were added, {suffix of their name: shape}; where not all
            attentions get the same, the kind of attention stands before it.
        layers: one row an attention module.
        parameters: elements of all floating-point tensors stored, {"before": ..., "after": ...}.
        kv_cache_bytes_per_token: for decoders, {site: {"before": ..., "after": ...}}, over all layers and in the dtype
            stored; "cross" counts tokens of the encoder. None for an encoder, which has no cache, and for memory-side
            dynamic projections, which cannot use one.
        files_copied, files_left_out: of what lay beside the weights.
        versions: of the packages.
        calibration: what heads were fitted to and how (`Calibration.settings`); None where there was no text.
        matching_shares: by layer, how much of a head's attention goes to a word's other occurrences, of the head with
            the most (`keep_matching_layers`); None where it was not asked.
        quality: how near the whole model is to its source on held-out examples; None where nothing was fitted.
        seconds: the time that the conversion took.
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

    def reduced(self) -> bool:
        """Whether an attention has fewer heads now, a smaller latent or a kernel."""
        return any({"pool", "compress", "kernel"} & set(layer.change.split(", ")) for layer in self.layers)

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
        """The same error, had heads been averaged."""
        return self._mean_detail("output_relative_error_averaged")

    def __str__(self) -> str:
        return self.summary()

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values: the fields, then the means, which are the properties."""
        means = [name for name, each in vars(ConversionReport).items() if isinstance(each, property)]
        quality = None if self.quality is None else self.quality.to_dict()
        return asdict(self) | {"quality": quality} | {name: getattr(self, name) for name in means}

    def save(self, folder: Path) -> None:
        """Write `conversion_report.json` into a folder."""
        (folder / REPORT_NAME).write_text(self.to_json(), encoding="utf-8")

    def to_json(self) -> str:
        """Return what the file holds."""
        return json.dumps(self.to_dict(), indent=2) + "\n"

    def summary(self, attention_errors: bool = False) -> str:
        """Return a few lines for people.

        Args:
            attention_errors: say what the attentions lose, too, each alone; where the whole model was not measured
                that is said anyway.
        """
        fields = self.heads | self.other_fields
        changed = [f"  {name:<27} {_shown(before)} -> {_shown(after)}" for name, (before, after) in fields.items()]
        before, after = self.parameters["before"], self.parameters["after"]
        how = f" ({self.method})" if self.reduced() else ""
        lines = [
            f"Converted {self.source}{how} into {self.output_dir}",
            *changed,
            f"  {'parameters in the files':<27} {before:,} -> {after:,} ({(after - before) / max(before, 1):+.1%})",
        ]
        if self.talking_heads:
            added = ", ".join(f"{name} {list(shape)}" for name, shape in self.talking_heads.items())
            lines.append(f"  {'talking heads added':<27} {added}")
        if self.matching_shares is not None:
            shares = ", ".join(f"{share:.2f}" for share in self.matching_shares)
            lines.append(f"  {'attention to the same word':<27} {shares} by layer: the largest are kept")
        for site, cache in (self.kv_cache_bytes_per_token or {}).items():
            lines.append(f"  {f'KV cache a token ({site})':<27} {cache['before']:,} -> {cache['after']:,} bytes")
        if attention_errors or self.quality is None:
            # Weights that are the same say nothing about a window or another pattern, which changes the outputs.
            is_changed = any(layer.change != "same" for layer in self.layers)
            weights = [
                f"  {'relative error of logits':<27} {_percent(self.mean_logits_relative_error)}",
                f"  {'... of value products':<27} {_percent(self.mean_value_relative_error)} (means over layers)",
            ]
            lines += self._output_errors() or (weights if is_changed else [])
        if nearer := [layer.module for layer in self.layers if layer.details.get("averaged")]:
            value = f"in {len(nearer)} attentions, where they are nearer: {_few(nearer)}"
            lines.append(f"  {'averaged heads kept':<27} {value}")
        if self.quality is not None:
            value = f"{self.quality}, on {self.quality.examples} held-out examples"
            lines.append(f"  {'the whole model':<27} {value}: {self.quality.verdict} ({self.quality.shown_bound})")
        if self.files_left_out:
            lines.append(f"  {'not copied':<27} {', '.join(self.files_left_out)}")
        lines.append(f"  {'time':<27} {self.seconds:.1f} s; details in {REPORT_NAME}")
        return "\n".join(lines)

    def _output_errors(self) -> list[str]:
        """Return what held-out text says of the attentions' outputs; nothing where it was not asked."""
        if self.mean_output_relative_error is None:
            return []
        averaged = self.mean_output_relative_error_averaged
        beside = "" if averaged is None else f" (averaged heads: {_percent(averaged)})"
        value = f"{_percent(self.mean_output_relative_error)} on held-out text{beside}"
        lines = [f"  {'error of attention outputs':<27} {value}"]
        fits = {layer.module: layer.details["fit_kept"] for layer in self.layers if "fit_kept" in layer.details}
        if fits:
            before = _percent(self._mean_detail("relative_error_closed_form"))
            lines.append(f"  {'... by the closed form':<27} {before}, then fitted")
        unfitted = [name for name, is_kept in fits.items() if not is_kept]
        if unfitted:
            value = f"in {len(unfitted)} of {len(fits)} attentions, where the fit is no better: {_few(unfitted)}"
            lines.append(f"  {'closed form kept':<27} {value}")
        return lines

    def _mean_detail(self, name: str) -> float | None:
        return _mean_known(layer.details.get(name) for layer in self.layers)

    def _mean(self, name: str) -> float | None:
        changed = [layer for layer in self.layers if layer.change != "same"]
        return _mean_known(getattr(layer, name) for layer in changed or self.layers)


def layer_report(
    plan: ConversionPlan,
    module: AttentionModule,
    before: AttentionTensors,
    after: AttentionTensors,
    stored: dict[str, torch.Tensor],
) -> LayerReport:
    """Compare one attention before with what is stored of it, {tensor name: tensor}."""
    errors: tuple[float | None, float | None] = (0.0, 0.0)
    if module.change != "same" or plan.dtype is not None:
        # Of what is stored, rounding to another dtype included.
        final = module.read_converted(stored.__getitem__)
        if groups := after.details.get("head_groups"):
            before = reorder_heads(before, module.heads, groups)
        errors = attention_errors(before.folded(), final.folded(), module.heads)
    heads = module.heads
    return LayerReport(
        module.name, module.site.name, module.change, heads.key, heads.value, *errors, after.details, heads.rank
    )


def conversion_report(
    plan: ConversionPlan,
    layers: list[LayerReport],
    before: dict[str, TensorEntry],
    after: dict[str, TensorEntry],
    **said: Any,
) -> ConversionReport:
    """Return the report of a conversion: what the plan, the layers and all tensors stored tell, and what is `said`."""
    return ConversionReport(
        method=plan.method.name,
        seed=plan.seed,
        dtype=None if plan.dtype is None else str(plan.dtype).removeprefix("torch."),
        architecture=plan.model_class.__name__,
        heads=plan.heads,
        other_fields=plan.other_fields,
        talking_heads=_added_projections(plan),
        layers=layers,
        parameters={"before": _count_parameters(before), "after": _count_parameters(after)},
        kv_cache_bytes_per_token=_cache_bytes(plan, before, after),
        versions=package_versions(),
        **said,
    )


def _added_projections(plan: ConversionPlan) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the talking-heads parameters to add, as few as say it all.

    By the end of their names where each attention gets the same, else with the kind of attention before it, or, of
    layers that differ, by their names in the checkpoint.
    """
    by_site: dict[str, set[str]] = {}
    for module in plan.modules:
        every = {name.rsplit(".", 1)[-1]: shape for name, shape in module.projections.items()}
        by_site.setdefault(module.site.name, set()).add(json.dumps(every))
    every_site = set().union(*by_site.values())
    if len(every_site) == 1:
        return {name: tuple(shape) for name, shape in json.loads(every_site.pop()).items()}
    if all(len(texts) == 1 for texts in by_site.values()):
        pairs = [(site, json.loads(text)) for site, texts in by_site.items() for text in texts]
        return {f"{site} {name}": tuple(shape) for site, of_site in pairs for name, shape in of_site.items()}
    return {name: shape for module in plan.modules for name, shape in module.projections.items()}


def _cache_bytes(
    plan: ConversionPlan, before: dict[str, TensorEntry], after: dict[str, TensorEntry]
) -> dict[str, dict[str, int]] | None:
    caches = []
    for config, entries in ((plan.source_config, before), (plan.config, after)):
        sizes = []
        for module in plan.modules:
            numbers = cached_numbers(module.site.heads(config, module.name), config.hidden_size)
            kernel = module.kernel[config is plan.config]
            if kernel is not None and kernel.is_causal:
                numbers = 0  # a state, of one size for any number of tokens
            sizes.append((module.site, numbers * element_size(entries[module.tensors["key_weight"]].dtype)))
        caches.append(cache_bytes_per_token(config, sizes))
    old, new = caches
    if old is None or new is None:
        return None
    return {site: {"before": old[site], "after": new[site]} for site in old}


def _count_parameters(entries: dict[str, TensorEntry]) -> int:
    return sum(entry.numel for entry in entries.values() if entry.is_floating)


def package_versions() -> dict[str, str]:
    """Return the versions of what took part in a conversion."""
    packages = {"torch": torch.__version__, "transformers": version("transformers")}
    return {"hf_attn_variants": ATTN_VARIANTS_VERSION, "python": platform.python_version()} | packages


def _mean_known(errors: Iterable[float | None]) -> float | None:
    known = [error for error in errors if error is not None]
    return sum(known) / len(known) if known else None


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_shown, value))}]"
    return "none" if value is None else str(value)


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _percent(error: float | None) -> str:
    return "not defined" if error is None else f"{error:.1%}"
