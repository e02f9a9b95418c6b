"""How near a converted model is to its source: one number on held-out examples of the calibration.

The errors of single attentions do not say what the model has become: they add up, or they cancel. So the whole model
runs on the tenth of the examples that nothing was fitted to, before and after, and what is compared is what it is for:

- a model that writes: the tokens it writes by itself, greedily, by edit distance (Levenshtein, 1966) to the source's;
  where targets are given, its loss on them;
- a language model's head: its loss on masked tokens, or on each next one;
- a head that classifies or answers: the predictions that change; of one that gives several labels, the labels;
- a head that gives scores, as of a regression or a reranker: their error, as a share of their variance;
- anything else: the cosine of embeddings, the means of the last hidden states, less the mean of all of them.
"""

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..files import REPORT_NAME, atomic_write

__all__ = ["BOUNDS", "ModelNotKeptError", "Quality", "check_kept", "edit_distance"]

# Beyond these a conversion has not kept the model.
BOUNDS = {"tokens": 0.1, "loss": 0.3, "predictions": 0.1, "scores": 0.1, "embeddings": 0.8}

# With fewer examples "kept" is a hint.
FEW = 8

NOT_KEPT = (
    "Are the examples of the kind that the model reads? If so, keep more heads (--num_key_value_heads) or a latent "
    "(--kv_lora_rank), give more examples, or train it afterwards (`attn-variants uptrain`, for models of text). "
    "`attn-variants frontier` shows what each choice loses."
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Quality:
    """How near a converted model is to its source on held-out examples.

    Args:
        measure: "tokens" = the share of written tokens that change; "loss" = nats a token above the source's;
            "predictions" = the share that changes; "scores" = their mean squared error as a share of their variance;
            "embeddings" = the mean cosine to the source's.
        value: what was found; None = the converted model's outputs are no numbers, or the examples are `alike`.
        bound: the most of it, for embeddings the least, at which the model counts as kept.
        examples: how many were held out.
        losses: of the source and of the converted model, nats a token, where they were measured.
        runaway: of a model that writes: the examples of which it writes more than twice as much as the source. It
            repeats itself there, mostly, which makes much of `value`.
        alike: of embeddings and scores: the source gives all examples the same, so that there is nothing to compare.
        unknown: of losses: the source's own is above that of a guess, so that it does not know such text at all.
    """

    measure: str
    value: float | None
    bound: float
    examples: int
    losses: tuple[float, float] | None = None
    runaway: int = 0
    alike: bool = False
    unknown: bool = False

    @classmethod
    def of(cls, values: dict[str, Any]) -> "Quality | None":
        """Return what a report holds as `to_dict` made it; None where it is none of this version."""
        if values.get("measure") not in BOUNDS or not {"bound", "examples"} <= values.keys():
            return None
        others = {name: values[name] for name in ("runaway", "alike", "unknown") if name in values}
        return cls(values["measure"], values.get("value"), values["bound"], values["examples"], **others)

    @property
    def is_kept(self) -> bool:
        """Whether the model is within the bound."""
        if self.value is None or self.says_nothing:
            return False
        return self.value >= self.bound if self.measure == "embeddings" else self.value <= self.bound

    @property
    def says_nothing(self) -> bool:
        """Whether such examples tell nothing of any conversion."""
        return self.alike or self.unknown

    @property
    def verdict(self) -> str:
        """What a summary says of the model."""
        if not self.is_kept:
            return "NOT KNOWN" if self.says_nothing else "NOT KEPT"
        return "kept" if self.examples >= FEW else "kept, as far as so few examples can say"

    def __str__(self) -> str:
        if self.alike:
            return f"its source gives all examples one {self.measure[:-1]}, with which nothing can be compared"
        if self.unknown:
            loss = "" if self.losses is None else f" of {self.losses[0]:.1f} nats a token"
            return f"its source has a loss{loss} there, more than a guess has"
        if self.value is None:
            return "its outputs are no numbers"
        return {
            "tokens": f"{self.value:.1%} of the tokens it writes are not the source's{self._runaway_text()}",
            "loss": f"its loss is {self.value:+.3f} nats a token beside the source's",
            "predictions": f"{self.value:.1%} of its predictions are not the source's",
            "scores": f"its scores have an error of {self.value:.1%} of their variance, beside the source's",
            "embeddings": f"its embeddings have a cosine of {self.value:.3f} to the source's",
        }[self.measure]

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
        return asdict(self) | {"is_kept": self.is_kept}


class ModelNotKeptError(ValueError):
    """A conversion that was to be strict has not kept the model."""

    exit_status = 1  # of a command: the work was done, and its result is refused


def check_kept(quality: Quality | None, strict: bool, report: Any = None) -> None:
    """Warn of a conversion that has not kept the model; if it is to be strict, raise.

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
    begin = "nothing says whether the conversion has" if quality.says_nothing else "the conversion has not"
    message = (
        f"{begin} kept the model: {quality} ({quality.examples} held-out examples; the bound is "
        f"{quality.shown_bound}). {NOT_KEPT}"
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
