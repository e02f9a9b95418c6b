"""Defines the calibration settings: the text or audio, and the fitting options. This module does not import torch."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..files import is_blank, is_unicode

if TYPE_CHECKING:
    import torch
    from transformers import FeatureExtractionMixin, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

# Maximum number of examples sampled from a text file, and from a folder of audio files. Fewer audio files are needed
# because Whisper encodes each recording as 1,500 positions.
CALIBRATION_SIZE, AUDIO_CALIBRATION_SIZE = 2048, 64
# The same limits for `convert --quick`.
QUICK_SIZE, QUICK_AUDIO_SIZE = 384, 48
# Maximum number of tokens that a model generates per example, for text and for audio. The latter value is taken from
# Whisper's own code.
MAX_LENGTH, MAX_AUDIO_LENGTH = 64, 224
# Maximum number of tokens in a passage, if the model has enough positions.
PASSAGE_LENGTH = 256
# Maximum number of tokens in a text if the model itself has no limit.
MAX_DEFAULT_LENGTH = 512
# Maximum number of tokens used for fitting if no length is set, so that long files do not take hours.
FIT_TOKENS = 2**18
BATCH_SIZE, AUDIO_BATCH_SIZE = 32, 4
# One example for fitting, and one that is held out.
MIN_TEXTS = 2
# A tenth of the examples is held out, but at least MIN_HELD_OUT_EXAMPLES or a quarter, whichever is smaller.
# With 200 examples, a share of 5 % has a confidence interval of about ±3 percentage points.
HELD_OUT_SHARE, MIN_HELD_OUT_EXAMPLES = 0.1, 200
# Share of repeated texts that triggers a warning.
WARN_REPEATED_SHARE = 0.25
FIT_DEFAULTS: dict[str, Any] = {"fit_steps": 400, "fit_learning_rate": 0.03, "fit_batch_size": 32}


@dataclass(frozen=True)
class Calibration:
    """The text or audio for calibration, and the fitting options.

    Encoders need no labels, and gradients never pass through more than one attention module. A few thousand lines of
    typical text are enough, and many short texts are better than a few long ones. A tenth of the examples (a quarter
    if there are few) is not used for fitting, but to measure the errors in the report.

    A model keeps its quality on long text only if the calibration text contains long examples. For encoders, half of
    the texts are therefore joined with the texts that follow them to form passages. Passages have between 16 and 256
    tokens, and their lengths are distributed evenly on a logarithmic scale.

    Args:
        texts: At least two different examples. For models that read pairs of texts, the examples must be pairs of
            strings. Repeated examples are dropped, so that no held-out text is also used for fitting.
        target_texts: For encoder-decoders, the decoder's text for each example. If None, the model generates it
            greedily.
        tokenizer: The model's tokenizer. If None, it is loaded from the checkpoint folder. Required for models in
            memory.
        max_length: Maximum number of tokens in a text or, for audio, in the generated output. If None, texts are only
            truncated if they are longer than the model's number of positions (512 tokens if the model has no limit),
            and passages that are joined from shorter texts have up to 256 tokens. For audio, the default is 224, and
            the output is always limited to half of the model's positions.
        passages: Whether half of the texts are joined with the texts that follow them. If None, texts are joined for
            encoders and decoder-only models that read single texts. Not supported for other models.
        batch_size: Number of examples in a forward pass. Defaults to 32 for text and 4 for audio.
        fit_steps: For the method "calibrated", the number of Adam steps per module after the closed form. Defaults to
            400. If 0, only the closed form is used.
        fit_learning_rate: Initial learning rate of these steps, relative to the root mean square of each tensor.
            Defaults to 0.03. For a latent, this default is multiplied by the relative error of the closed form.
        fit_batch_size: Number of texts in a step. Defaults to 32.
        source_lang, target_lang: Languages for a multilingual tokenizer (`model_properties.set_languages`). If None,
            the languages saved with the tokenizer are used.
        device: Device for the computations. If None, a GPU is used if available.
        audio: Paths of audio files, which are used instead of texts for speech models. Each file is truncated or
            padded to the length of one input window. The decoder reads the model's own greedy output.
        feature_extractor: Feature extractor for audio. If None, it is loaded from the checkpoint folder.
        whole_length: Number of tokens in the longest text, limited by the model's number of positions. The conversion
            sets this field (`batches.set_length_statistics`) and evaluates the converted model on texts of up to this
            length.
        cut_share: Share of the texts that are truncated. The conversion sets this field together with `whole_length`.

    Raises:
        TypeError: if `texts` is not a list of strings or of pairs of strings.
        ValueError: if there are too few examples or targets, if a text is empty, or if a number is out of range.

    Example:

    ```py
    >>> from hf_attn_variants.conversion import Calibration
    >>> calibration = Calibration(["How do I reset my password?", "Where is my parcel?"], fit_steps=100)
    >>> calibration.num_held_out
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
        elif texts := [name for name in ("texts", "target_texts", "tokenizer") if getattr(self, name)]:
            raise ValueError(f"`audio` cannot be combined with `{texts[0]}`. Remove one of them.")
        if isinstance(self.audio, str) or len(self.examples) < MIN_TEXTS:
            raise ValueError(
                f"`{'texts' if is_text else 'audio'}` in `Calibration` must be a list of at least {MIN_TEXTS} "
                "different examples. One is used for fitting, and one is held out to measure errors."
            )
        if self.batch_size is None:
            object.__setattr__(self, "batch_size", BATCH_SIZE if is_text else AUDIO_BATCH_SIZE)
        for name, minimum in (("max_length", 2), ("batch_size", 1), ("fit_steps", 0), ("fit_batch_size", 1)):
            value = getattr(self, name)
            if value is not None and value < minimum:
                raise ValueError(
                    f"`{name}` in `Calibration` must be at least {minimum}, got {value}. Use a larger number."
                )
        rate = self.fit_learning_rate
        if rate is not None and not 0 < rate < math.inf:
            raise ValueError(f"`fit_learning_rate` in `Calibration` must be a finite number above 0, got {rate}.")
        if self.passages and not self.supports_passages:
            raise ValueError("`passages` is only supported for single texts without targets. Remove it.")

    def _check_texts(self) -> None:
        """Check that the texts are non-empty strings or pairs of strings, and convert pairs to tuples."""
        # Pairs loaded from JSON are lists because JSON has no tuples.
        rows: list[Any] = [tuple(text) if isinstance(text, list | tuple) else text for text in self.texts]
        pairs = [row if isinstance(row, tuple) else (row,) for row in rows]
        kinds = {(isinstance(row, tuple), len(parts)) for row, parts in zip(rows, pairs, strict=True)}
        are_strings = all(isinstance(text, str) for parts in pairs for text in parts)
        if isinstance(self.texts, str) or not are_strings or kinds not in (set(), {(False, 1)}, {(True, 2)}):
            raise TypeError("`texts` in `Calibration` must be a list of strings, or of pairs of strings.")
        object.__setattr__(self, "texts", rows)
        _check_unicode("texts", [text for parts in pairs for text in parts])
        if any(is_blank(text) for parts in pairs for text in parts):
            raise ValueError("`texts` in `Calibration` must not contain empty texts. Remove them.")
        if self.target_texts is not None:
            if isinstance(self.target_texts, str) or len(self.target_texts) != len(rows):
                raise ValueError(
                    f"`target_texts` in `Calibration` must be a list with one target per text, got "
                    f"{len(self.target_texts)} targets for {len(rows)} texts."
                )
            _check_unicode("target_texts", self.target_texts)
        self._drop_repeated_texts()

    def _drop_repeated_texts(self) -> None:
        """Keep only the first of several equal texts, so that no held-out text is also used for fitting."""
        count = len(self.texts)
        first_rows: dict[Any, int] = {}
        for row, text in enumerate(self.texts):
            first_rows.setdefault(text, row)
        rows = list(first_rows.values())
        if len(rows) == count:
            return
        level = logging.WARNING if len(rows) < (1 - WARN_REPEATED_SHARE) * count else logging.INFO
        message = (
            "Only %d of the %d calibration texts are different. The others are dropped. Provide more varied texts."
        )
        logger.log(level, message, len(rows), count)
        for name in ("texts", "target_texts"):
            if (values := getattr(self, name)) is not None:
                object.__setattr__(self, name, [values[row] for row in rows])

    @property
    def resolved_batch_size(self) -> int:
        """The batch size, which is never None after initialization."""
        rows: Any = self.batch_size
        return rows

    @property
    def examples(self) -> Sequence[Any]:
        """The texts, or the audio files if there are no texts."""
        return self.texts if self.audio is None else self.audio

    @property
    def processor(self) -> Any:
        """The tokenizer, or the feature extractor for audio. None if it is not set."""
        return self.tokenizer if self.audio is None else self.feature_extractor

    @property
    def length(self) -> int:
        """The maximum number of tokens in a text or, for audio, in the generated output."""
        default = self.whole_length or MAX_LENGTH if self.audio is None else MAX_AUDIO_LENGTH
        return default if self.max_length is None else self.max_length

    @property
    def passage_length(self) -> int:
        """The maximum number of tokens in a passage."""
        return max(PASSAGE_LENGTH, self.length) if self.max_length is None else self.max_length

    @property
    def evaluation_length(self) -> int:
        """The maximum number of tokens in a text that is used to measure the quality of the whole model."""
        return self.whole_length or self.length

    @property
    def generated_length(self) -> int:
        """The maximum number of tokens that the model generates when its quality is measured."""
        return max(MAX_LENGTH, self.evaluation_length) if self.audio is None else self.length

    @property
    def supports_passages(self) -> bool:
        """True if texts can be joined with the texts that follow them."""
        return self.audio is None and self.target_texts is None and isinstance(self.texts[0], str)

    @property
    def num_held_out(self) -> int:
        """The number of held-out examples."""
        count = len(self.examples)
        return max(1, round(HELD_OUT_SHARE * count), min(MIN_HELD_OUT_EXAMPLES, count // 4))

    def get_fit_option(self, name: str) -> Any:
        """Return `fit_steps`, `fit_learning_rate` or `fit_batch_size`, or its default if it is None."""
        value = getattr(self, name)
        return FIT_DEFAULTS[name] if value is None else value

    def get_report_settings(self, method: Any, passage_length: int | None) -> dict[str, Any]:
        """Return the calibration settings and the method's `options` as JSON values for the report.

        Args:
            method: The conversion method.
            passage_length: Maximum number of tokens in a passage, or None if texts are not joined.
        """
        return {
            "count": len(self.examples),
            "kind": "files of audio" if self.audio else "pairs" if isinstance(self.texts[0], tuple) else "texts",
            "targets": self.target_texts is not None,
            "held_out": self.num_held_out,
            "max_length": self.length,
            "cut_share": round(self.cut_share, 4),
            "passage_length": passage_length,
            **{name: self.get_fit_option(name) for name in method.options},
        }


def _check_unicode(name: str, texts: Sequence[str]) -> None:
    """Check that texts do not contain lone surrogates, which tokenizers do not accept."""
    for number, text in enumerate(texts):
        if not is_unicode(text):
            raise ValueError(
                f"`{name}` in `Calibration` must be valid Unicode, but `{name}[{number}]` contains a lone surrogate."
            )


# The types of calibration data that users can pass: settings, texts, pairs of texts, or the path of a text file, a
# table or a folder of audio files.
CalibrationLike = Calibration | Sequence[str] | Sequence[tuple[str, str]] | str | os.PathLike
