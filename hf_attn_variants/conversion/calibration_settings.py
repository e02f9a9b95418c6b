"""The settings of a calibration: its text or audio, and the options of the fit. This module does not import torch."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..files import is_blank, is_unicode

if TYPE_CHECKING:
    import torch
    from transformers import FeatureExtractionMixin, PreTrainedTokenizerBase

# Number of examples drawn from a file, and from a folder of audio. Whisper encodes each recording as 1,500 positions.
CALIBRATION_SIZE, AUDIO_CALIBRATION_SIZE = 2048, 64
# The same numbers for `convert --quick`.
QUICK_SIZE, QUICK_AUDIO_SIZE = 384, 48
# Maximum number of tokens that a model generates per example. The number for audio is the one in Whisper's own code.
MAX_LENGTH, MAX_AUDIO_LENGTH = 64, 224
# Maximum number of tokens in a passage, if the model has enough positions.
PASSAGE_LENGTH = 256
# Maximum number of tokens in a text for a model without a limit of its own.
LONGEST = 512
# Maximum number of tokens that new heads are fitted to if no length is given, so that long files do not take hours.
FIT_TOKENS = 2**18
BATCH_SIZE, AUDIO_BATCH_SIZE = 32, 4
# One example to fit to, and one that is held out.
MIN_TEXTS = 2
# A tenth of the examples is held out, or LEAST_HELD_OUT examples if they are at most a quarter. With 200 examples, a
# share of 5 % has a confidence interval of about ±3 points.
HELD_OUT, LEAST_HELD_OUT = 0.1, 200
FIT_DEFAULTS: dict[str, Any] = {"fit_steps": 400, "fit_learning_rate": 0.03, "fit_batch_size": 32}


@dataclass(frozen=True)
class Calibration:
    """The text or audio of a calibration, and the options of the fit.

    An encoder needs no labels, and no gradient passes through more than one attention. A few thousand lines of typical
    text are enough, and many short texts are better than a few long ones. A tenth of the examples (a quarter if there
    are few) is held out: nothing is fitted to them, and they measure the errors in the report.

    A model keeps its quality on long text only if the calibration contains long text. Therefore half of the texts for
    an encoder start a passage, that is, the following texts are appended to them. The lengths of passages are between
    16 and 256 tokens and are distributed evenly on a logarithmic scale.

    Args:
        texts: At least two examples. For models that read pairs of texts, pairs, which the tokenizer joins.
        target_texts: For encoder-decoders, the text of the decoder for each example. None: the model generates it
            greedily.
        tokenizer: Tokenizer of the model. None: the one in the checkpoint folder. Models in memory need one.
        max_length: Maximum number of tokens in a text, or in the output for audio. None: the length of the longest
            text, but at most the positions of the model (512 if it has no limit), and 256 for passages of shorter
            texts; 224 for audio, but at most half of the positions of the model.
        passages: Whether half of the texts are continued with the texts after them. None: only for encoders, or
            decoder-only models, that read single texts. Other models do not support it.
        batch_size: Number of texts in a forward pass. None: 32, or 4 for audio.
        fit_steps: For the method "calibrated", the number of Adam steps per module after the closed form. None: 400.
            0: only the closed form.
        fit_learning_rate: Initial learning rate of these steps, relative to the root mean square of each tensor. None:
            0.03. For a latent it is multiplied by the relative error of the closed form.
        fit_batch_size: Number of texts in a step. None: 32.
        source_lang, target_lang: Languages of a multilingual tokenizer (`languages.set_languages`). None: those that
            the tokenizer was saved with.
        device: Device of the computations. None: a GPU if there is one.
        audio: Paths of audio files instead of texts, for speech models. Each file is cut or padded to one window. The
            text of the decoder is the greedy output of the model.
        feature_extractor: Feature extractor for audio. None: the one in the checkpoint folder.
        whole_length: Number of tokens in the longest text, at most the positions of the model. The conversion computes
            it (`batches.add_text_lengths`) and measures the converted model on texts of this length.
        cut_share: Share of the texts that `max_length` or the positions of the model truncate. The conversion computes
            it together with `whole_length`.

    Raises:
        TypeError: if `texts` contains anything except strings or pairs of strings, `target_texts` anything except
            strings, or `audio` anything except paths.
        ValueError: if there are too few examples, a text is empty, or a number is out of range.

    Example:

    ```py
    >>> from hf_attn_variants.conversion import Calibration
    >>> calibration = Calibration(["How do I reset my password?", "Where is my parcel?"], fit_steps=100)
    >>> calibration.held_out_count
    1
    ```
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
        """Check the values and set the default batch size."""
        is_text = self.audio is None
        if is_text:
            self._check_texts()
        else:
            _check_is_list("audio", self.audio)
            if texts := [name for name in ("texts", "target_texts", "tokenizer") if getattr(self, name)]:
                raise ValueError(f"`audio` and `{texts[0]}` must not be given together. Leave one of them out.")
        if len(self.examples) < MIN_TEXTS:
            raise ValueError(
                f"`{'texts' if is_text else 'audio'}` of a calibration must contain at least {MIN_TEXTS} examples, "
                f"got {len(self.examples)}. One is for fitting and one is held out to measure errors."
            )
        if self.batch_size is None:
            object.__setattr__(self, "batch_size", BATCH_SIZE if is_text else AUDIO_BATCH_SIZE)
        for name, least in (("max_length", 2), ("batch_size", 1), ("fit_steps", 0), ("fit_batch_size", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(
                    f"`{name}` of a calibration must be at least {least}, got {value}. Give a larger number."
                )
        rate = self.fit_learning_rate
        if rate is not None and not 0 < rate < math.inf:
            raise ValueError(
                f"`fit_learning_rate` of a calibration must be a finite number above 0, got {rate}. The default is "
                f"{FIT_DEFAULTS['fit_learning_rate']}."
            )
        if self.passages and not self.can_be_passages:
            raise ValueError(
                "`passages` must only be True for single texts, not for pairs, texts with targets, or audio. Leave it "
                "out."
            )

    def _check_texts(self) -> None:
        """Check that the texts are at least two non-empty strings, or pairs of strings, and turn lists into tuples."""
        _check_is_list("texts", self.texts)
        # JSON has no tuples: pairs from such a file are lists.
        rows: list[Any] = [tuple(text) if isinstance(text, list | tuple) else text for text in self.texts]
        object.__setattr__(self, "texts", rows)
        pairs = [row if isinstance(row, tuple) else (row,) for row in rows]
        is_pair = isinstance(rows[0], tuple) if rows else False
        for row, parts in zip(rows, pairs, strict=True):
            if isinstance(row, tuple) is not is_pair or not all(isinstance(text, str) for text in parts):
                raise TypeError(
                    f"`texts` of a calibration must be strings or pairs of strings, got {row!r:.80}. Do not mix them."
                )
            if len(parts) != 1 + is_pair:
                raise ValueError(f"`texts` of a calibration must be pairs of two strings, got {row!r:.80}.")
        _check_unicode("texts", [text for parts in pairs for text in parts])
        if any(is_blank(text) for parts in pairs for text in parts):
            raise ValueError("`texts` of a calibration must not contain empty texts. Remove them.")
        if self.target_texts is not None:
            self._check_targets(self.target_texts)

    def _check_targets(self, targets: Sequence[str]) -> None:
        """Check that there is a target string for each text."""
        _check_is_list("target_texts", targets)
        if not all(isinstance(text, str) for text in targets):
            raise TypeError("`target_texts` of a calibration must be strings.")
        if len(targets) != len(self.texts):
            raise ValueError(
                f"`target_texts` of a calibration must contain one target per text, got {len(targets)} targets for "
                f"{len(self.texts)} texts."
            )
        _check_unicode("target_texts", targets)

    @property
    def batch_rows(self) -> int:
        """The batch size, which is never None after initialization."""
        rows: Any = self.batch_size
        return rows

    @property
    def examples(self) -> Sequence[Any]:
        """The texts or the audio files."""
        return self.texts if self.audio is None else self.audio

    @property
    def processor(self) -> Any:
        """The tokenizer or the feature extractor, or None if it is not given."""
        return self.tokenizer if self.audio is None else self.feature_extractor

    @property
    def length(self) -> int:
        """The maximum number of tokens in a text, or in the output for audio."""
        default = self.whole_length or MAX_LENGTH if self.audio is None else MAX_AUDIO_LENGTH
        return default if self.max_length is None else self.max_length

    @property
    def passage_length(self) -> int:
        """The maximum number of tokens in a passage."""
        return max(PASSAGE_LENGTH, self.length) if self.max_length is None else self.max_length

    @property
    def measured_length(self) -> int:
        """The maximum number of tokens in a text on which the quality of the whole model is measured."""
        return self.whole_length or self.length

    @property
    def written_length(self) -> int:
        """The maximum number of tokens that the model generates when its quality is measured."""
        return max(MAX_LENGTH, self.measured_length) if self.audio is None else self.length

    @property
    def can_be_passages(self) -> bool:
        """Whether texts can be continued with the texts after them."""
        return self.audio is None and self.target_texts is None and isinstance(self.texts[0], str)

    @property
    def held_out_count(self) -> int:
        """The number of held-out examples."""
        count = len(self.examples)
        return max(1, round(HELD_OUT * count), min(LEAST_HELD_OUT, count // 4))

    def fit_option(self, name: str) -> Any:
        """Return `fit_steps`, `fit_learning_rate` or `fit_batch_size`, or its default if it is None."""
        value = getattr(self, name)
        return FIT_DEFAULTS[name] if value is None else value

    def settings(self, method: Any, passage_length: int | None) -> dict[str, Any]:
        """Return the settings of the calibration and the `options` of a method as JSON values for the report.

        Args:
            method: The conversion method.
            passage_length: Maximum number of tokens in a passage. None: no text was continued.
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
    """Check that texts contain no lone surrogates, which tokenizers reject."""
    for number, text in enumerate(texts):
        if not is_unicode(text):
            raise ValueError(
                f"`{name}` of a calibration must be valid Unicode, got a lone surrogate in `{name}[{number}]`."
            )


def _check_is_list(name: str, value: Any) -> None:
    """Check that an argument is a list or another sequence, but not a string."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError(f"`{name}` of a calibration must be a list, got {type(value).__name__}.")


# A calibration as users give it: texts, pairs of texts, or the path of a text file, a table or a folder of audio.
CalibrationLike = Calibration | Sequence[str] | Sequence[tuple[str, str]] | str | os.PathLike
