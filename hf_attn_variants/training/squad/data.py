"""SQuAD files as questions, and the windows of tokens that cover long contexts."""

import gzip
import hashlib
import json
import logging
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import load_dataset
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from ...modeling.mechanisms.patterns.global_tokens import MASK as GLOBAL_MASK
from ...open_files import read_file
from ...table_files import RepeatingObject, parse_rows, repeated_name
from ...text_lines import is_unicode
from ..engine.tokenizers import check_max_length
from .settings import SquadSettings

__all__ = [
    "NO_ANSWER",
    "Answer",
    "Question",
    "Window",
    "check_unanswerable",
    "checked_stride",
    "hash_questions",
    "load_squad",
    "load_squad_hub",
    "make_windows",
    "read_squad",
    "window_collator",
]

logger = logging.getLogger(__name__)

HUB_DATASETS = {False: "rajpurkar/squad", True: "rajpurkar/squad_v2"}


@dataclass(frozen=True)
class Answer:
    """A span of the context, and the character of the context that it begins at."""

    text: str
    start: int


@dataclass(frozen=True)
class Question:
    """A question about a context, with the spans that are right."""

    id: str  # unique in its file
    question: str
    context: str
    answers: tuple[Answer, ...]  # none: the context does not answer it (or, in a test file, unknown)


def read_squad(path: str | Path, has_answers: bool = True) -> list[Question]:
    """Read a file of SQuAD's own JSON layout: {"data": [{"paragraphs": [{"context", "qas": [...]}]}]}, plain or .gz.

    The answers of a test file are neither needed nor read (`has_answers` false).

    Raises:
        OSError: if the file cannot be read.
        ValueError: if it has another layout or no question, or an answer is not in the context; the message names the
            file and the question.
    """
    path = Path(path)
    questions = list(_questions(path, _load_json(path), has_answers))
    if not questions:
        raise ValueError(f"{path} is empty: it has no question")
    _check_ids(str(path), questions)
    return questions


def _load_json(path: Path) -> Any:
    if not path.is_file():
        raise OSError(f"{path}: no such file")
    try:
        content = read_file(path)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise OSError(f"{path} is no whole gzip file ({error})") from error
    if not content.strip():
        raise ValueError(f"{path} is empty")
    try:
        return parse_rows(content)
    except ValueError as error:  # a UnicodeDecodeError as well
        raise ValueError(f"{path} is not JSON: {error}") from error


def _questions(path: Path, content: Any, has_answers: bool) -> Iterator[Question]:
    for at_article, article in enumerate(_items(content, "data", f"{path}: the file")):
        for at_paragraph, paragraph in enumerate(_items(article, "paragraphs", f"{path}: data[{at_article}]")):
            where = f"{path}: data[{at_article}].paragraphs[{at_paragraph}]"
            context = _text(paragraph, "context", where)
            for at_qa, qa in enumerate(_items(paragraph, "qas", where)):
                where_qa = f"{where}.qas[{at_qa}]"
                question = _text(qa, "question", where_qa), context
                if (twice := repeated_name(qa)) is not None:
                    raise ValueError(f"{where_qa} has the name {twice!r} twice; rename one")
                found = _answers(qa, context, where_qa) if has_answers else ()
                given = qa.get("id")
                own = f"{at_article}-{at_paragraph}-{at_qa}" if given is None else str(given)
                yield Question(own, *question, found)


def _items(holder: Any, key: str, where: str) -> list[Any]:
    if isinstance(holder, RepeatingObject):
        raise ValueError(f"{where} has the name {holder.name!r} twice; rename one")
    values = holder.get(key) if isinstance(holder, dict) else None
    if not isinstance(values, list):
        has = f"its keys are {', '.join(map(str, holder))}" if isinstance(holder, dict) else "it is no JSON object"
        raise ValueError(f'{where} has no list "{key}"; {has}: this is not the layout of SQuAD')
    return values


def _text(holder: Any, key: str, where: str) -> str:
    value = holder.get(key) if isinstance(holder, dict) else None
    if not isinstance(value, str):
        has = f"; its keys are {', '.join(map(str, holder))}" if isinstance(holder, dict) else ""
        raise ValueError(f'{where} has no text "{key}"{has}')
    if not is_unicode(value):
        raise ValueError(f'{where} has half a surrogate pair in its "{key}", which is no text')
    return value


def _answers(qa: dict[str, Any], context: str, where: str) -> tuple[Answer, ...]:
    impossible = qa.get("is_impossible", False)
    if not isinstance(impossible, bool):
        raise ValueError(f"{where}: is_impossible must be true or false, got {impossible!r:.60}")
    where_id = f"{where} (id {qa.get('id')})"
    if impossible:
        if qa.get("answers"):
            raise ValueError(f"{where_id} is_impossible and has answers; plausible ones are plausible_answers")
        return ()
    answers = []
    for number, answer in enumerate(_items(qa, "answers", where)):
        text = _text(answer, "text", f"{where}.answers[{number}]")
        answers.append(Answer(text, _checked_start(text, answer.get("answer_start"), context, where_id)))
    if not answers and "is_impossible" not in qa:
        raise ValueError(f"{where_id} has no answer and no is_impossible")
    return tuple(answers)


def _checked_start(text: str, start: Any, context: str, where: str) -> int:
    """Return where an answer begins in its context; a whole number that was written as a string is taken."""
    if isinstance(start, str) and start.isascii() and start.isdecimal():
        start = int(start)
    if not isinstance(start, int) or isinstance(start, bool):
        raise ValueError(f"{where}: answer_start must be a whole number, got {start!r:.60}")
    if not 0 <= start <= len(context) - len(text) or not text:
        raise ValueError(
            f"{where}: the answer {text[:60]!r} at character {start} does not lie in its context of "
            f"{len(context)} characters"
        )
    if context[start : start + len(text)] != text:
        raise ValueError(
            f"{where}: the answer {text[:60]!r} is not what stands at character {start} of its context, "
            f"{context[start : start + len(text)][:60]!r}"
        )
    return start


def load_squad(
    files: Mapping[str, Any], from_hub: bool, version_2: bool = False, with_train: bool = True
) -> dict[str, list[Question]]:
    """Read SQuAD's splits that there are of "train", "dev" and "test", from the files or, `from_hub`, the Hub.

    `files` has "train_file", "validation_file" and "test_file", a path or None each.

    Raises:
        OSError: if a file or the Hub's dataset cannot be read.
        ValueError: if it holds something else, or questions have no answer.
    """
    splits = {}
    for name, split in (("train", "train"), ("dev", "validation"), ("test", "test"))[0 if with_train else 1 :]:
        path = files[f"{split}_file"]
        if path is not None:
            splits[name] = read_squad(path, has_answers=name != "test")
        elif from_hub and name != "test":
            splits[name] = load_squad_hub(split, version_2)
        if name != "test" and name in splits:
            check_unanswerable(path or f"the Hub's {split} split", splits[name], version_2)
    return splits


def load_squad_hub(split: str, version_2: bool) -> list[Question]:
    """Load a split ("train", "validation") of SQuAD v1.1 or v2.0 from the Hub.

    Raises:
        OSError: if it cannot be loaded.
        ValueError: if an answer is not in its context.
    """
    name = HUB_DATASETS[version_2]
    try:
        rows = load_dataset(name, split=split)
    except Exception as error:  # the Hub's many ways to fail are one thing to the user
        raise OSError(
            f"cannot load {name} ({split}) from the Hub ({type(error).__name__}: {error}); "
            "give --train_file and --validation_file"
        ) from error
    questions = []
    for row in rows:
        answers = tuple(map(Answer, row["answers"]["text"], row["answers"]["answer_start"]))
        for answer in answers:
            _checked_start(answer.text, answer.start, row["context"], f"{name} ({split}), id {row['id']}")
        questions.append(Question(row["id"], row["question"], row["context"], answers))
    _check_ids(f"{name} ({split})", questions)
    return questions


def _check_ids(source: str, questions: list[Question]) -> None:
    seen: set[str] = set()
    for question in questions:
        if question.id in seen:
            raise ValueError(
                f"{source}: two questions have the id {question.id}; predictions could not tell them apart"
            )
        seen.add(question.id)


def check_unanswerable(source: str, questions: Iterable[Question], version_2: bool) -> None:
    """Check that questions without an answer are expected.

    Raises:
        ValueError: if there are some, and `version_2` is False.
    """
    found = [question.id for question in questions if not question.answers]
    if found and not version_2:
        raise ValueError(
            f"{source}: {len(found)} questions have no answer in their context (the first is {found[0]}): for SQuAD "
            "v2.0 give --version_2_with_negative"
        )


def hash_questions(questions: Iterable[Question]) -> str:
    """Return the hash of all questions, by which a resumed run knows that they are the same."""
    digest = hashlib.blake2b(digest_size=8)
    for item in questions:
        digest.update(json.dumps([item.id, item.question, item.context, [vars(a) for a in item.answers]]).encode())
    return digest.hexdigest()


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
