"""What CTranslate2 writes beside what a model does: greedily, for inputs that are drawn."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ctranslate2
import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from ..conversion.checkpoint.source import learned_tokens
from ..modeling.attention.variant_mixins import AttnVariantModelMixin
from ..modeling.upstream import cache_name, cache_of
from ..registration import longest_input
from .ctranslate2_tokens import Tokens

__all__ = ["Agreement", "Written", "drawn_inputs", "greedy", "read_back", "written_tokens"]

# Tokens of each drawn text, and how many are written at most.
LENGTHS, NEW_TOKENS = (3, 17, 9, 6), 24
# Of a Whisper's noise.
WINDOWS = 2
# Between logits: two tokens nearer than this are a tie, which sums in another order may break otherwise.
TIE = 1e-3


@dataclass(frozen=True)
class Written:
    """What a model writes.

    Args:
        tokens: of each input, to the end token where there is one.
        second: what would have been written in the place of each token.
        margins: by how much of a logit it was not.
    """

    tokens: list[list[int]]
    second: list[list[int]]
    margins: list[list[float]]


@dataclass(frozen=True)
class Agreement:
    """How far CTranslate2 writes what the model does.

    Args:
        inputs: how many there were.
        same: of how many all tokens are the same, or the first that is not is a tie.
        tokens: how many the model writes.
        same_tokens: how many of these come before the first other one.
        first: where an input parts, (its number, the place, the model's token, CTranslate2's); None: nowhere.
    """

    inputs: int
    same: int
    tokens: int
    same_tokens: int
    first: tuple[int, int, int, int] | None

    @staticmethod
    def of(expected: Written, found: list[list[int]]) -> "Agreement":
        """Compare token by token."""
        same = same_tokens = 0
        first = None
        for number, (row, other) in enumerate(zip(expected.tokens, found, strict=True)):
            pairs = zip(row, [*other, *[-1] * len(row)], strict=False)
            parted = next((at for at, (one, two) in enumerate(pairs) if one != two), None)
            is_tie = parted is not None and (
                other[parted : parted + 1] == [expected.second[number][parted]]
                and expected.margins[number][parted] < TIE
            )
            same += parted is None or is_tie
            same_tokens += len(row) if parted is None or is_tie else parted
            if parted is not None and not is_tie and first is None:
                first = number, parted, row[parted], other[parted] if parted < len(other) else -1
        return Agreement(len(found), same, sum(map(len, expected.tokens)), same_tokens, first)


def drawn_inputs(model: AttnVariantModelMixin, tokenizer: PreTrainedTokenizerBase) -> dict[str, torch.Tensor]:
    """Return a batch of inputs, the same each time: texts of drawn tokens, padded on the right; a Whisper's noise."""
    generator = torch.Generator().manual_seed(0)
    config: Any = model.config
    if model.main_input_name == "input_features":
        shape = (WINDOWS, config.num_mel_bins, 2 * config.max_source_positions)
        return {"input_features": torch.randn(shape, generator=generator)}
    learned: Any = tokenizer.convert_tokens_to_ids(sorted(learned_tokens(tokenizer)))
    learned = [number for number in learned if number < config.vocab_size]
    drawn = [torch.randint(len(learned), (length,), generator=generator).tolist() for length in LENGTHS]
    texts: Any = [tokenizer.decode([learned[at] for at in each]) for each in drawn]
    places = longest_input(config)
    rows = [tokenizer(text, truncation=places is not None, max_length=places)["input_ids"] for text in texts]
    longest = max(map(len, rows))
    padding = config.pad_token_id or 0
    ids = torch.tensor([[*row, *[padding] * (longest - len(row))] for row in rows])
    lengths = torch.tensor([len(row) for row in rows])
    return {"input_ids": ids, "attention_mask": (torch.arange(longest) < lengths[:, None]).long()}


def written_tokens(model: AttnVariantModelMixin, tokens: Tokens) -> int:
    """Return how many tokens are written at most: not more than the decoder has places for."""
    places = longest_input(model.config)
    return NEW_TOKENS if places is None else min(NEW_TOKENS, places - len(tokens.prompt))


@torch.no_grad()
def greedy(model: AttnVariantModelMixin, inputs: dict[str, torch.Tensor], tokens: Tokens) -> Written:
    """Return what a model writes greedily; at most `written_tokens`."""
    callable_model: Any = model
    states = callable_model.get_encoder()(**inputs)
    written = read = torch.tensor([tokens.prompt] * len(states[0]))
    given = {"encoder_outputs": states, "attention_mask": inputs.get("attention_mask"), "use_cache": True}
    steps: list[Any] = []
    cache = None
    for step in range(written_tokens(model, tokens)):
        output = callable_model(decoder_input_ids=read, **given, **{cache_name(): cache})
        cache, logits = cache_of(output), output.logits[:, -1]
        logits[:, [*tokens.never, *(tokens.never_first if step == 0 else [])]] = -torch.inf
        steps.append(logits.topk(2))
        read = steps[-1].indices[:, :1]
        written = torch.cat([written, read], 1)
        if (written[:, len(tokens.prompt) :] == tokens.end).any(1).all():
            break
    rows: list[list[int]] = written[:, len(tokens.prompt) :].tolist()
    lengths = [row.index(tokens.end) + 1 if tokens.end in row else len(row) for row in rows]
    return Written(
        [row[:length] for row, length in zip(rows, lengths, strict=True)],
        torch.stack([step.indices[:, 1] for step in steps], 1).tolist(),
        torch.stack([step.values[:, 0] - step.values[:, 1] for step in steps], 1).tolist(),
    )


def read_back(
    folder: Path, inputs: dict[str, torch.Tensor], tokens: Tokens, most: int, quantization: str
) -> list[list[int]]:
    """Return what CTranslate2 writes greedily, on the CPU, at most so many tokens, the end token among them.

    Quantised weights are computed with as they are where this processor can, all others in float32.
    """
    wanted = {"int16": "int16"}.get(quantization, "int8_float32" if quantization.startswith("int8") else "float32")
    compute_type = wanted if wanted in ctranslate2.get_supported_compute_types("cpu") else "float32"
    options = {"device": "cpu", "compute_type": compute_type, "intra_threads": torch.get_num_threads()}
    if "input_features" in inputs:
        return _heard(ctranslate2.models.Whisper(os.fspath(folder), **options), inputs["input_features"], tokens, most)
    rows = [
        tokens.texts(row[mask.bool()].tolist())
        for row, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
    ]
    prefix = tokens.texts(tokens.prompt[1:])
    results = ctranslate2.Translator(os.fspath(folder), **options).translate_batch(
        rows,
        target_prefix=[prefix] * len(rows) if prefix else None,
        beam_size=1,
        min_decoding_length=0,  # by default it writes one
        max_decoding_length=most + len(prefix),
        return_end_token=True,
    )
    numbers = {text: number for number, text in enumerate(tokens.vocabulary)}
    return [[numbers.get(text, -1) for text in each.hypotheses[0][len(prefix) :]] for each in results]


def _heard(whisper: Any, features: torch.Tensor, tokens: Tokens, most: int) -> list[list[int]]:
    # It writes half as many tokens as `max_length`.
    results = whisper.generate(
        ctranslate2.StorageView.from_array(np.ascontiguousarray(features.numpy())),
        [tokens.prompt] * len(features),
        beam_size=1,
        max_length=2 * most,
    )
    found = [list(each.sequences_ids[0]) for each in results]
    return [[*row, tokens.end] if len(row) < most else row for row in found]
