"""The text or audio of a calibration, and how closely new heads are fitted to it; imports no torch."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..input_files import is_blank, is_unicode

if TYPE_CHECKING:
    import torch
    from transformers import FeatureExtractionMixin, PreTrainedTokenizerBase

__all__ = [
    "AUDIO_CALIBRATION_SIZE",
    "CALIBRATION_SIZE",
    "FIT_DEFAULTS",
    "FIT_TOKENS",
    "LONGEST",
    "MAX_AUDIO_LENGTH",
    "MAX_LENGTH",
    "MIN_TEXTS",
    "PASSAGE_LENGTH",
    "QUICK_AUDIO_SIZE",
    "QUICK_SIZE",
    "Calibration",
    "CalibrationLike",
]

# How many examples are drawn from a file, and from a folder of audio, where a Whisper's window has 1,500 positions.
CALIBRATION_SIZE, AUDIO_CALIBRATION_SIZE = 2048, 64
# The same with `convert --quick`.
QUICK_SIZE, QUICK_AUDIO_SIZE = 384, 48
# Tokens that a model may write of an example; of audio as many as Whisper's own code generates.
MAX_LENGTH, MAX_AUDIO_LENGTH = 64, 224
# Of a passage, where the model has positions for as many.
PASSAGE_LENGTH = 256
# Tokens of the longest example that is read whole by a model without a limit of its own.
LONGEST = 512
# Where no length is given, the new heads are fitted to as many tokens at most: a long file takes no hour.
FIT_TOKENS = 2**18
BATCH_SIZE, AUDIO_BATCH_SIZE = 32, 4
# One to fit to, one that is held out.
MIN_TEXTS = 2
# Nothing is fitted to a tenth of the examples, or to this many if they are a quarter at most: with 200 examples a
# share of 5 % is known to 3 %.
HELD_OUT, LEAST_HELD_OUT = 0.1, 200
FIT_DEFAULTS: dict[str, Any] = {"fit_steps": 400, "fit_learning_rate": 0.03, "fit_batch_size": 32}


@dataclass(frozen=True)
class Calibration:
    """The text or audio that a conversion may look at, and how closely new heads are fitted to the old ones.

    An encoder needs no labels, and no gradient passes through more than one attention. A few thousand lines of the
    kind of text that the model is for are enough; many short ones say more than a few long ones. A tenth of them (of
    few, a quarter) is held out: nothing is fitted to it, and the errors of the report are measured on it.

    What a model makes of long text is kept only if it reads long text here. So for an encoder half of the texts are
    beginnings of passages: the texts that follow are joined to them, up to lengths from 16 tokens to 256 that are as
    often between 16 and 32 as between 128 and 256.

    Args:
        texts: one example each, two at least; or pairs of texts for a model that will read pairs, as the tokenizer
            joins them.
        target_texts: encoder-decoders: the decoder's text for each of them; None = the model's own greedy outputs.
        tokenizer: the model's; None = the one beside the checkpoint (a model in memory has none).
        max_length: tokens at which a text is cut, or the model's output for audio; None = the longest text's, up to
            the model's positions (512 if it has no limit), and 256 for passages of shorter texts; for audio 224 (and
            at most half of the model's positions).
        passages: whether half of the texts go on with those after them; None = for an encoder (or a decoder alone)
            that reads single texts. Others cannot.
        batch_size: texts a forward pass; None = 32, for audio 4.
        fit_steps: method "calibrated": Adam steps a module after the closed form; None = 400, 0 = it alone.
        fit_learning_rate: of these steps, at their beginning and relative to the root mean square of each tensor;
            None = 0.03, for a latent times the relative error of its closed form.
        fit_batch_size: texts a step; None = 32.
        source_lang, target_lang: the languages of a multilingual tokenizer (`languages.set_languages`); None = those
            that it was saved with.
        device: where to run; None = a GPU if there is one.
        audio: in the place of texts, for a model that reads speech: paths of files, of which each is cut or padded to
            one window; the decoder's text is the model's own greedy output.
        feature_extractor: of audio, the model's; None = the one beside the checkpoint.
        whole_length: the tokens of the longest text, up to the model's positions. A conversion finds it
            (`batches.with_lengths`), and measures the converted model on texts of this length.
        cut_share: the share of the texts that `max_length` or the model's positions cut; found with `whole_length`.

    Raises:
        TypeError: if `texts` holds anything but strings or pairs of them, `target_texts` anything but strings, or
            `audio` anything but paths.
        ValueError: if there are too few, one is empty, or a number is out of its range.
    """

    texts: Sequence[str] | Sequence[tuple[str, str]] = ()
    target_texts: Sequence[str] | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    max_length: int | None = None
    passages: bool | None = None
    batch_size: int | None = None
    fit_steps: int | None = None
    fit_learning_rate: float | None = None
    fit_batch_size: int | None = None
    source_lang: str | None = None
    target_lang: str | None = None
    device: str | torch.device | None = None
    audio: Sequence[str | os.PathLike] | None = None
    feature_extractor: FeatureExtractionMixin | None = None
    whole_length: int | None = None
    cut_share: float = 0.0

    def __post_init__(self) -> None:
        is_text = self.audio is None
        (self._check_texts if is_text else self._check_audio)()
        if self.batch_size is None:
            object.__setattr__(self, "batch_size", BATCH_SIZE if is_text else AUDIO_BATCH_SIZE)
        for name, least in (("max_length", 2), ("batch_size", 1), ("fit_steps", 0), ("fit_batch_size", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"`{name}` of a calibration must be at least {least}; got {value}.")
        rate = self.fit_learning_rate
        if rate is not None and not 0 < rate < math.inf:
            raise ValueError(f"`fit_learning_rate` of a calibration must be more than 0; got {rate}.")
        if self.passages and not self.can_be_passages:
            raise ValueError("`passages` are made of single texts; pairs, texts with targets and audio stay alone.")

    def _check_texts(self) -> None:
        _check_is_list("texts", self.texts)
        if not len(self.texts):
            raise ValueError("a calibration needs `texts`; the list is empty.")
        # A pair that was read from JSON is a list.
        rows: list[Any] = [tuple(text) if isinstance(text, list | tuple) else text for text in self.texts]
        object.__setattr__(self, "texts", rows)
        pairs = isinstance(rows[0], tuple)
        for row in rows:
            parts = row if pairs else [row]
            if isinstance(row, tuple) is not pairs or not all(isinstance(text, str) for text in parts):
                raise TypeError(f"`texts` of a calibration must be strings, or pairs of strings; got {row!r:.80}.")
        if pairs and any(len(pair) != 2 for pair in rows):
            raise ValueError("a pair of a calibration's `texts` has two strings.")
        if any(is_blank(text) for row in rows for text in (row if pairs else [row])):
            raise ValueError("`texts` of a calibration must not be empty; one of them is.")
        _check_unicode("texts", [text for row in rows for text in (row if pairs else [row])])
        if len(rows) < MIN_TEXTS:
            raise ValueError(
                f"a calibration needs {MIN_TEXTS} `texts` at least, one to fit to and one that is held out to measure "
                f"errors on; got {len(rows)}."
            )
        if self.target_texts is not None:
            self._check_targets(self.target_texts)

    def _check_audio(self) -> None:
        files = self.audio or ()
        _check_is_list("audio", files)
        for name in ("texts", "target_texts", "tokenizer"):
            if getattr(self, name):
                raise ValueError(f"a calibration has `audio` or `{name}`, not both.")
        for path in files:
            if not isinstance(path, str | os.PathLike):
                raise TypeError(f"`audio` of a calibration must be paths of files; got {path!r:.80}.")
        if len(files) < MIN_TEXTS:
            raise ValueError(
                f"a calibration needs {MIN_TEXTS} files of `audio` at least, one to fit to and one that is held out "
                f"to measure errors on; got {len(files)}."
            )

    def _check_targets(self, targets: Sequence[str]) -> None:
        _check_is_list("target_texts", targets)
        for text in targets:
            if not isinstance(text, str):
                raise TypeError(f"`target_texts` of a calibration must be strings; got {text!r:.80}.")
        if len(targets) != len(self.texts):
            raise ValueError(
                f"a calibration has a target for each text: {len(self.texts)} texts, {len(targets)} targets."
            )
        _check_unicode("target_texts", targets)

    @property
    def batch_rows(self) -> int:
        """`batch_size`, which has a default by now."""
        rows: Any = self.batch_size
        return rows

    @property
    def examples(self) -> Sequence[Any]:
        """The texts, or the files of audio."""
        return self.texts if self.audio is None else self.audio

    @property
    def processor(self) -> Any:
        """What makes the model's inputs of examples, where it is given: the tokenizer or the feature extractor."""
        return self.tokenizer if self.audio is None else self.feature_extractor

    @property
    def length(self) -> int:
        """Tokens at which a text is cut, or the model's output for audio."""
        default = self.whole_length or MAX_LENGTH if self.audio is None else MAX_AUDIO_LENGTH
        return default if self.max_length is None else self.max_length

    @property
    def passage_length(self) -> int:
        """Tokens at which a passage is cut."""
        return max(PASSAGE_LENGTH, self.length) if self.max_length is None else self.max_length

    @property
    def measured_length(self) -> int:
        """Tokens at which a text is cut that the whole model is measured on, whatever the fit reads."""
        return self.whole_length or self.length

    @property
    def written_length(self) -> int:
        """Tokens that the model may write of an example that it is measured on."""
        return max(MAX_LENGTH, self.measured_length) if self.audio is None else self.length

    @property
    def can_be_passages(self) -> bool:
        """Whether these texts can go on with those after them."""
        return self.audio is None and self.target_texts is None and isinstance(self.texts[0], str)

    @property
    def held_out_count(self) -> int:
        """How many of the examples are held out."""
        count = len(self.examples)
        return max(1, round(HELD_OUT * count), min(LEAST_HELD_OUT, count // 4))

    def fit_option(self, name: str) -> Any:
        """Return `fit_steps`, `fit_learning_rate` or `fit_batch_size`: as given, or the default."""
        given = getattr(self, name)
        return FIT_DEFAULTS[name] if given is None else given

    def settings(self, method: Any, passage_length: int | None) -> dict[str, Any]:
        """Return what a report says of it and of the `options` of a method, as JSON values; no text itself.

        Args:
            passage_length: tokens at which passages were cut; None = every text stood alone.
        """
        return {
            "count": len(self.examples),
            "kind": "files of audio" if self.audio else "pairs" if isinstance(self.texts[0], tuple) else "texts",
            "targets": self.target_texts is not None,
            "held_out": self.held_out_count,
            "max_length": self.length,
            "cut_share": round(self.cut_share, 4),
            "passage_length": passage_length,
            **{name: self.fit_option(name) for name in method.options},
        }


def _check_unicode(name: str, texts: Sequence[str]) -> None:
    for number, text in enumerate(texts):
        if not is_unicode(text):
            raise ValueError(
                f"`{name}` of a calibration must be Unicode; {name}[{number}] holds half a surrogate pair."
            )


def _check_is_list(name: str, value: Any) -> None:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError(f"`{name}` of a calibration must be a list; got a {type(value).__name__}.")


# A calibration as a user gives it: texts, pairs of texts, the path of a text file, a table or a folder of audio.
CalibrationLike = Calibration | Sequence[str] | Sequence[tuple[str, str]] | str | os.PathLike
