"""How near a converted model is to its original: one number on held-out examples of the calibration.

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

import logging
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..files import REPORT_NAME, atomic_write

if TYPE_CHECKING:
    import torch

__all__ = ["BOUNDS", "SHARES", "ModelNotKeptError", "Quality", "check_kept", "edit_distance", "ratio_interval"]

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

logger = logging.getLogger(__name__)


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
