"""Passages for an encoder: texts joined to those that follow, so that a calibration reads text of many lengths."""

from collections.abc import Sequence

from transformers import PreTrainedConfig, PreTrainedModel

from ...decoder_inputs import DecoderInput, decoder_input
from ..calibration_settings import Calibration

__all__ = ["passages", "reads_passages"]

# Tokens of the shortest passage; single texts are shorter.
SHORTEST = 16
GOLDEN_RATIO = (1 + 5**0.5) / 2


def reads_passages(model_class: type[PreTrainedModel], config: PreTrainedConfig, calibration: Calibration) -> bool:
    """Return whether half of a calibration's texts go on with those after them.

    Raises:
        ValueError: if that is asked for, and the model has a decoder beside its encoder.
    """
    has_both = decoder_input(model_class, config) is not DecoderInput.NOTHING
    if calibration.passages and has_both:
        raise ValueError(
            f"`passages` are for encoders; {model_class.__name__} has a decoder too, which would have to answer them."
        )
    return calibration.can_be_passages and not has_both and calibration.passages is not False


def passages(texts: Sequence[str], counts: Sequence[int], longest: int) -> dict[int, tuple[str, int]]:
    """Return what every second text becomes: itself with the texts after it, and the tokens at which that is cut.

    The logarithms of these lengths are spread evenly between those of `SHORTEST` and `longest`. A text that is as long
    as its passage would be stays as it is.

    Args:
        texts: the texts.
        counts: the tokens of each, without special ones. Words would not do: Chinese and chemical formulas have none.
        longest: the tokens of the longest passage.
    """
    shortest = min(SHORTEST, longest)
    joined = {}
    for i in range(0, len(texts), 2):
        # Multiples of the golden ratio, modulo 1, are even over any stretch of texts, and nothing is drawn.
        length = round(shortest * (longest / shortest) ** (i // 2 * GOLDEN_RATIO % 1))
        parts, tokens = [texts[i]], counts[i]
        # After the last text comes the first, and none comes twice.
        for following in range(1, len(texts)):
            if tokens >= length:
                break
            parts.append(texts[(i + following) % len(texts)])
            tokens += max(1, counts[(i + following) % len(texts)])
        if len(parts) > 1:
            joined[i] = (" ".join(parts), length)
    return joined
