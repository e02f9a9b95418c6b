"""Windows of tokens over SQuAD's questions and contexts, and where in them the answers stand.

A context that is too long is cut into windows that overlap by a stride; the question stands before each of them.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from ...modeling.mechanisms.patterns.global_tokens import MASK as GLOBAL_MASK
from ..engine.tokenizers import check_max_length
from .data import Answer, Question
from .settings import SquadSettings

__all__ = ["NO_ANSWER", "Window", "checked_stride", "make_windows", "window_collator"]

logger = logging.getLogger(__name__)
# The token that stands for "no answer": the first one, which is [CLS] in BERT and ALBERT.
NO_ANSWER = 0
# Tokens that windows share, where they have more than that for the context.
STRIDE = 128
# Questions handed to the tokenizer at a time.
TOKENIZER_BATCH = 256
# Which part of an example a token belongs to, in a fast tokenizer's numbering.
CONTEXT = 1
NO_OFFSETS = np.empty((0, 2), dtype=np.int32)


@dataclass(frozen=True, eq=False)
class Window:
    """One pass of the model over a part of a context."""

    question: int  # its number
    input_ids: np.ndarray  # [n]
    token_type_ids: np.ndarray | None  # [n]; None where the tokenizer gives none
    context_begin: int  # the context's first token in the window
    offsets: np.ndarray  # characters of the context at which its tokens begin and end [tokens, 2]
    # The answer's first and last token (inclusive) in the window; `NO_ANSWER` where it is not in it.
    start: int = NO_ANSWER
    end: int = NO_ANSWER


def checked_stride(settings: SquadSettings, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> int:
    """Check that windows of the lengths asked for fit the model, and that each has room to move on.

    Returns:
        How many tokens two windows share: `doc_stride`, where it is given.

    Raises:
        ValueError: if a length does not fit, or the tokenizer cannot say where its tokens stand in the text.
    """
    if not tokenizer.is_fast:
        raise ValueError(
            f"{type(tokenizer).__name__} does not say where its tokens stand in the text; a fast tokenizer (with a "
            "tokenizer.json) does"
        )
    check_max_length(settings.max_length, config, tokenizer, pair=True, multiple=settings.pad_to_multiple_of)
    room = settings.max_length - tokenizer.num_special_tokens_to_add(pair=True) - settings.max_query_length
    if room < 1 or room <= (settings.doc_stride or 0):
        rule = "give a smaller --max_query_length"
        if settings.doc_stride is not None and room > 0:
            rule = f"--doc_stride {settings.doc_stride} must be less than that"
        raise ValueError(
            f"--max_length {settings.max_length} leaves {max(room, 0)} tokens for the context beside a question of "
            f"--max_query_length {settings.max_query_length}; {rule}"
        )
    if settings.doc_stride is not None:
        return settings.doc_stride
    return STRIDE if room > STRIDE else room // 2


def make_windows(
    questions: Sequence[Question],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    doc_stride: int,
    max_query_length: int,
    token_types: bool = True,
    for_training: bool = False,
) -> list[Window]:
    """Cut all questions' contexts into windows, in the questions' order.

    Args:
        max_length: tokens of a window, the question's and special ones included.
        doc_stride: tokens of a context that two windows share.
        max_query_length: tokens of a question; a longer one is cut.
        token_types: whether the model tells question and context by token types; ALBERT's tokenizer must be asked.
        for_training: leave `offsets` out: they say what the predictions are, and take two thirds of the memory.
    """
    windows, cut = [], 0
    for begin in range(0, len(questions), TOKENIZER_BATCH):
        batch = questions[begin : begin + TOKENIZER_BATCH]
        texts, shortened = _cut_questions([q.question.lstrip() for q in batch], tokenizer, max_query_length)
        cut += shortened
        encoded = tokenizer(
            texts,
            [q.context for q in batch],
            truncation="only_second",
            max_length=max_length,
            stride=doc_stride,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
            return_token_type_ids=token_types,
            padding=False,
        )
        rows = encoded["overflow_to_sample_mapping"]
        types = encoded.get("token_type_ids")
        for i, row in enumerate(rows):
            ids = np.array(encoded["input_ids"][i], dtype=np.int32)
            inside = [at for at, part in enumerate(encoded.sequence_ids(i)) if part == CONTEXT]
            first = inside[0] if inside else len(ids)  # an empty context
            offsets = np.array(encoded["offset_mapping"][i][first : first + len(inside)], dtype=np.int32)
            type_ids = np.array(types[i], dtype=np.int8) if types is not None else None
            window = Window(begin + row, ids, type_ids, first, offsets.reshape(-1, 2))
            if batch[row].answers:
                is_first, is_last = row not in rows[i - 1 : i], row not in rows[i + 1 : i + 2]
                window = _with_answer(window, batch[row].answers[0], is_first, is_last)
            windows.append(replace(window, offsets=NO_OFFSETS) if for_training else window)
    if cut:
        long = "%d of %d questions have more than --max_query_length %d tokens and are cut"
        logger.warning(long, cut, len(questions), max_query_length)
    return windows


def _cut_questions(
    texts: list[str], tokenizer: PreTrainedTokenizerBase, max_query_length: int
) -> tuple[list[str], int]:
    encoded = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    offsets = encoded["offset_mapping"]
    long = [len(row) > max_query_length for row in offsets]
    kept = [
        text[: row[max_query_length - 1][1]] if is_long else text
        for text, row, is_long in zip(texts, offsets, long, strict=True)
    ]
    return kept, sum(long)


def _with_answer(window: Window, answer: Answer, is_first: bool, is_last: bool) -> Window:
    """Mark the answer, unless the window's edge cuts it; `is_first`, `is_last`: of the context's windows."""
    begins, ends = window.offsets[:, 0], window.offsets[:, 1]
    # Tokens that share a character with the answer; one that is empty (SentencePiece's lone space) shares none.
    filled = np.flatnonzero(ends > begins)
    inside = filled[(begins[filled] < answer.start + len(answer.text)) & (ends[filled] > answer.start)]
    if not len(inside):
        return window
    # Spaces, soft hyphens and accents of their own may belong to no token: only at an edge are characters cut off.
    spaces = len(answer.text) - len(answer.text.lstrip())
    behind = answer.start + len(answer.text.rstrip())
    if not is_first and inside[0] == filled[0] and begins[inside[0]] > answer.start + spaces:
        return window
    if not is_last and inside[-1] == filled[-1] and ends[inside[-1]] < behind:
        return window
    first, last = (int(window.context_begin + i) for i in (inside[0], inside[-1]))
    return replace(window, start=first, end=last)


def window_collator(
    tokenizer: PreTrainedTokenizerBase, pad_to_multiple_of: int | None, marks_questions: bool = False
) -> Callable[[list[Window]], dict[str, Tensor]]:
    """Make the function from windows to the model's inputs [b, n], "start_positions" and "end_positions" [b].

    With `marks_questions` there is a `global_attention_mask` too, 1 for all tokens before the context: in a pattern of
    attention, tokens far from the question read it then (arXiv 2004.05150, section 6).
    """

    def collate(windows: list[Window]) -> dict[str, Tensor]:
        rows: dict[str, list] = {"input_ids": [window.input_ids.tolist() for window in windows]}
        if windows[0].token_type_ids is not None:
            rows["token_type_ids"] = [
                window.token_type_ids.tolist() for window in windows if window.token_type_ids is not None
            ]
        batch = dict(tokenizer.pad(rows, padding=True, pad_to_multiple_of=pad_to_multiple_of, return_tensors="pt"))
        if marks_questions:
            begins = torch.tensor([window.context_begin for window in windows])
            batch[GLOBAL_MASK] = (torch.arange(batch["input_ids"].shape[1]) < begins[:, None]).long()
        starts, ends = zip(*((window.start, window.end) for window in windows), strict=True)
        return {**batch, "start_positions": torch.tensor(starts), "end_positions": torch.tensor(ends)}

    return collate
