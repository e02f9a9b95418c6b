"""The text of a calibration, and how closely new heads are fitted to it; torch and transformers are not imported."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

__all__ = ["CALIBRATION_SIZE", "FIT_DEFAULTS", "MIN_TEXTS", "Calibration"]

# The examples that are drawn from a file.
CALIBRATION_SIZE = 2048
# One to fit to, one that is held out.
MIN_TEXTS = 2
# The share of the texts that nothing is fitted to: on them errors are measured.
HELD_OUT = 0.1
FIT_DEFAULTS = {"fit_steps": 400, "fit_learning_rate": 0.03, "fit_batch_size": 32}


@dataclass(frozen=True)
class Calibration:
    """The text that a conversion may look at, and how closely it fits the new heads to what the old ones make of it.

    An encoder needs no labels, and no gradient passes through more than one attention. A few thousand lines of the
    kind of text that the model is for are enough; many short ones say more than a few long ones. A tenth of them is
    held out: nothing is fitted to it, and the errors of the report are measured on it.

    Args:
        texts: one example each, two at least; or pairs of texts for a model that will read pairs, as the tokenizer
            joins them.
        target_texts: encoder-decoders: the decoder's text for each of them; None = the model's own greedy outputs.
        tokenizer: the model's; None = the one beside the checkpoint (a model in memory has none).
        max_length: tokens at which a text is cut.
        batch_size: texts a forward pass.
        fit_steps: method "calibrated": Adam steps a module after the closed form; None = 400, 0 = it alone.
        fit_learning_rate: of these steps, at their beginning and relative to the root mean square of each tensor;
            None = 0.03, for a latent times the relative error of its closed form.
        fit_batch_size: texts a step; None = 32.
        source_lang, target_lang: the languages of a multilingual tokenizer (`languages.set_languages`); None = those
            that it was saved with.
        device: where to run; None = a GPU if there is one.

    Raises:
        TypeError: if `texts` holds anything but strings or pairs of them, or `target_texts` anything but strings.
        ValueError: if there are too few, one is empty, or a number is out of its range.
    """

    texts: Sequence[str] | Sequence[tuple[str, str]]
    target_texts: Sequence[str] | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    max_length: int = 64
    batch_size: int = 32
    fit_steps: int | None = None
    fit_learning_rate: float | None = None
    fit_batch_size: int | None = None
    source_lang: str | None = None
    target_lang: str | None = None
    device: str | torch.device | None = None

    def __post_init__(self) -> None:
        _check_is_list("texts", self.texts)
        if not len(self.texts):
            raise ValueError("a calibration needs `texts`; the list is empty.")
        # A pair that was read from JSON is a list.
        rows = [tuple(text) if isinstance(text, list | tuple) else text for text in self.texts]
        object.__setattr__(self, "texts", rows)
        pairs = isinstance(rows[0], tuple)
        for row in rows:
            parts = row if pairs else [row]
            if isinstance(row, tuple) is not pairs or not all(isinstance(text, str) for text in parts):
                raise TypeError(f"`texts` of a calibration must be strings, or pairs of strings; got {row!r:.80}.")
        if pairs and any(len(pair) != 2 for pair in rows):
            raise ValueError("a pair of a calibration's `texts` has two strings.")
        if any(not text.strip() for row in rows for text in (row if pairs else [row])):
            raise ValueError("`texts` of a calibration must not be empty; one of them is.")
        if len(rows) < MIN_TEXTS:
            raise ValueError(
                f"a calibration needs {MIN_TEXTS} `texts` at least, one to fit to and one that is held out to measure "
                f"errors on; got {len(rows)}."
            )
        if self.target_texts is not None:
            self._check_targets(self.target_texts)
        for name, least in (("max_length", 2), ("batch_size", 1), ("fit_steps", 0), ("fit_batch_size", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"`{name}` of a calibration must be at least {least}; got {value}.")
        rate = self.fit_learning_rate
        if rate is not None and not 0 < rate < math.inf:
            raise ValueError(f"`fit_learning_rate` of a calibration must be more than 0; got {rate}.")

    def _check_targets(self, targets: Sequence[str]) -> None:
        _check_is_list("target_texts", targets)
        for text in targets:
            if not isinstance(text, str):
                raise TypeError(f"`target_texts` of a calibration must be strings; got {text!r:.80}.")
        if len(targets) != len(self.texts):
            raise ValueError(
                f"a calibration has a target for each text: {len(self.texts)} texts, {len(targets)} targets."
            )

    @property
    def held_out_count(self) -> int:
        """How many of the texts are held out."""
        return max(1, round(HELD_OUT * len(self.texts)))

    def fit_option(self, name: str) -> Any:
        """Return `fit_steps`, `fit_learning_rate` or `fit_batch_size`: as given, or the default."""
        given = getattr(self, name)
        return FIT_DEFAULTS[name] if given is None else given

    def settings(self, method: Any) -> dict[str, Any]:
        """Return what a report says of it and of the `options` of a method, as JSON values; no text itself."""
        return {
            "count": len(self.texts),
            "kind": "pairs" if isinstance(self.texts[0], tuple) else "texts",
            "targets": self.target_texts is not None,
            "held_out": self.held_out_count,
            "max_length": self.max_length,
            **{name: self.fit_option(name) for name in method.options},
        }


def _check_is_list(name: str, value: Any) -> None:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError(f"`{name}` of a calibration must be a list; got a {type(value).__name__}.")
