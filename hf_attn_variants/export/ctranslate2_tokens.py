"""The tokens of an exported model: CTranslate2 reads and writes their texts, where transformers has numbers."""

import logging
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig, PreTrainedTokenizerBase

__all__ = ["NO_TIMES", "TRANSCRIPT", "Tokens", "model_tokens"]

logger = logging.getLogger(__name__)
# Of a Whisper.
TRANSCRIPT, NO_TIMES = "<|startoftranscript|>", "<|notimestamps|>"
SECONDS_A_STEP = 0.02


@dataclass(frozen=True)
class Tokens:
    """The tokens of a model, and those with a meaning.

    Args:
        vocabulary: the text of each number, no two the same.
        prompt: what the decoder reads before it writes: the start, and what generation is forced to begin with.
        end: the end token.
        unknown: the text of the unknown token.
        never: what is never written.
        never_first: what is not written first.
    """

    vocabulary: list[str]
    prompt: list[int]
    end: int
    unknown: str
    never: list[int]
    never_first: list[int]

    def texts(self, numbers: list[int]) -> list[str]:
        """Return the texts of tokens."""
        return [self.vocabulary[number] for number in numbers]


def model_tokens(tokenizer: PreTrainedTokenizerBase, config: Any, generation: GenerationConfig) -> Tokens:
    """Return the tokens of an encoder-decoder.

    Raises:
        ValueError: if the decoder has no start token, or not one end token, or a Whisper's tokenizer not its prompt.
    """
    start, ends = (_setting(name, config, generation) for name in ("decoder_start_token_id", "eos_token_id"))
    ends = ends if isinstance(ends, list) else [ends]
    for name, value in (("decoder_start_token_id", start), ("eos_token_id", ends[0])):
        if value is None or value >= config.vocab_size:
            raise ValueError(
                f"`{name}` must be one of the {config.vocab_size} tokens; got {value}: set it in "
                "generation_config.json (of a multilingual model it says the language)."
            )
    if len(ends) > 1:
        raise ValueError(f"`eos_token_id` must be one token: CTranslate2's configuration has one; got {ends}.")
    hears = config.upstream_model_types[0] == "whisper"
    vocabulary = _vocabulary(tokenizer, config.vocab_size, hears)
    prompt, never = [start], sorted(generation.suppress_tokens or [])
    never_first = sorted(generation.begin_suppress_tokens or []) if hears else []
    if hears:
        if missing := [token for token in (TRANSCRIPT, NO_TIMES) if token not in vocabulary]:
            raise ValueError(f"the tokenizer of a Whisper must know {' and '.join(missing)}.")
        prompt = [vocabulary.index(TRANSCRIPT), vocabulary.index(NO_TIMES)]
    else:
        # The end token among them is ignored by `generate`, too.
        alone = {words[0] for words in generation.bad_words_ids or [] if len(words) == 1} - set(ends)
        never = sorted({*never, *alone})
        if generation.forced_bos_token_id is not None:
            prompt.append(generation.forced_bos_token_id)
    unknown = tokenizer.unk_token if tokenizer.unk_token in vocabulary else vocabulary[ends[0]]
    return Tokens(vocabulary, prompt, ends[0], unknown, never, never_first)


def _setting(name: str, config: Any, generation: GenerationConfig) -> Any:
    value = getattr(generation, name, None)
    return getattr(config, name, None) if value is None else value


def _vocabulary(tokenizer: PreTrainedTokenizerBase, size: int, hears: bool) -> list[str]:
    """Return `size` texts, no two the same, each by its number; numbers that the tokenizer does not use get some."""
    numbers = sorted({*tokenizer.get_vocab().values()})
    if beyond := [number for number in numbers if number >= size]:
        logger.warning("the model has %d tokens: the tokenizer's %d others are left out", size, len(beyond))
    known = [number for number in numbers if number < size]
    names: Any = tokenizer.convert_ids_to_tokens(known)
    found: dict[int, str] = {}
    taken: set[str] = set()
    for number, name in zip(known, names, strict=True):
        if name is not None and name not in taken:
            found[number] = name
            taken.add(name)
    first = tokenizer.get_vocab().get(NO_TIMES, size) + 1 if hears else size
    for number in range(size):
        if number not in found:
            name = f"<unused_{number}>" if number < first else f"<|{(number - first) * SECONDS_A_STEP:.2f}|>"
            while name in taken:
                name = f"_{name}"
            found[number] = name
            taken.add(name)
    return [found[number] for number in range(size)]
