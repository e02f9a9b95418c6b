"""Reads SQuAD files, splits long contexts into windows, extracts answers from logits, and scores the answers."""

import hashlib
import json
import logging
import math
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from ...files import MAX_BYTES, is_unicode, load_json
from ...modeling.mechanisms.patterns.window_pattern import GLOBAL_MASK_ARGUMENT as GLOBAL_MASK
from ..engine.dataset_splits import load_dataset_splits
from ..engine.models import check_max_length
from ..seq2seq.metrics import choose_bleu_tokenizer, get_unspaced_script
from . import SquadSettings

logger = logging.getLogger(__name__)

HUB_DATASETS = {False: "rajpurkar/squad", True: "rajpurkar/squad_v2"}


@dataclass(frozen=True)
class Answer:
    """A correct answer to a question.

    Attributes:
        text: The text of the answer, which is part of the context.
        start: The index of the answer's first character in the context.
    """

    text: str
    start: int


@dataclass(frozen=True)
class Question:
    """A question about a context.

    Attributes:
        id: The id, which is unique within the file.
        question: The text of the question.
        context: The text in which the answer is searched.
        answers: The correct answers. Empty if the context does not contain an answer or if the answers are unknown.
    """

    id: str
    question: str
    context: str
    answers: tuple[Answer, ...]


def read_squad(path: str | Path, has_answers: bool = True) -> list[Question]:
    """Read a file in the SQuAD JSON format, {"data": [{"paragraphs": [{"context", "qas": [...]}]}]}.

    Args:
        path: The path of the file, which is plain text or .gz.
        has_answers: Whether to read the answers. Test files do not require answers.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If the file has a different format or contains no questions, or if an answer does not match its
            context. The message names the file and the question.
    """
    path = Path(path)
    try:
        content = load_json(path, MAX_BYTES, unique_keys=True)
    except ValueError as error:
        raise ValueError(f"{error} It must contain a single JSON object in the SQuAD format.") from error
    questions = list(_read_questions(path, content, has_answers))
    if not questions:
        raise ValueError(f"{path} must contain at least one question, but has none.")
    _check_ids(str(path), questions)
    return questions


def _read_questions(path: Path, content: Any, has_answers: bool) -> Iterator[Question]:
    """Yield the questions of a file."""
    for article_index, article in enumerate(_get_value(content, "data", list, f"{path}: The file")):
        paragraphs = _get_value(article, "paragraphs", list, f"{path}: data[{article_index}]")
        for paragraph_index, paragraph in enumerate(paragraphs):
            place = f"{path}: data[{article_index}].paragraphs[{paragraph_index}]"
            context = _get_value(paragraph, "context", str, place)
            for qa_index, qa in enumerate(_get_value(paragraph, "qas", list, place)):
                qa_place = f"{place}.qas[{qa_index}]"
                question = _get_value(qa, "question", str, qa_place), context
                answers = _read_answers(qa, context, qa_place) if has_answers else ()
                id_value = qa.get("id")
                question_id = f"{article_index}-{paragraph_index}-{qa_index}" if id_value is None else str(id_value)
                yield Question(question_id, *question, answers)


def _get_value(parent: Any, key: str, kind: type, location: str) -> Any:
    """Return the list or text under a key of a JSON object. Raise `ValueError` if there is none."""
    value = parent.get(key) if isinstance(parent, dict) else None
    if not isinstance(value, kind):
        invalid_value = f"the keys {', '.join(map(str, parent))}" if isinstance(parent, dict) else "another JSON value"
        if value is not None:
            invalid_value = f"{value!r:.60}"
        name = "a list" if kind is list else "text"
        raise ValueError(f'{location} must contain {name} "{key}" in the SQuAD format, got {invalid_value}.')
    if isinstance(value, str) and not is_unicode(value):
        raise ValueError(f'{location} must contain valid text in "{key}", got an incomplete surrogate pair.')
    return value


def _read_answers(qa: dict[str, Any], context: str, location: str) -> tuple[Answer, ...]:
    """Return the answers to a question, and check that they are in the context."""
    is_impossible = qa.get("is_impossible", False)
    if not isinstance(is_impossible, bool):  # the string "false" would be treated as true
        raise ValueError(f"{location}: is_impossible must be true or false, got {is_impossible!r:.60}.")
    id_place = f"{location} (id {qa.get('id')})"
    if is_impossible:
        if qa.get("answers"):
            raise ValueError(
                f"{id_place}: answers must be empty if is_impossible is true. Move plausible answers to "
                "plausible_answers."
            )
        return ()
    answers = []
    for number, answer in enumerate(_get_value(qa, "answers", list, location)):
        text = _get_value(answer, "text", str, f"{location}.answers[{number}]")
        answers.append(Answer(text, _check_answer_start(text, answer.get("answer_start"), context, id_place)))
    if not answers and "is_impossible" not in qa:
        raise ValueError(f"{id_place} must contain an answer or is_impossible, but has neither. Add one of them.")
    return tuple(answers)


def _check_answer_start(text: str, start: Any, context: str, location: str) -> int:
    """Check that the context contains an answer at its start position, and return the position as an integer.

    The start position may be a string that contains a whole number.
    """
    if isinstance(start, str) and start.isascii() and start.isdecimal():
        start = int(start)
    if not isinstance(start, int) or isinstance(start, bool):
        raise ValueError(f"{location}: answer_start must be a whole number, got {start!r:.60}.")
    if not text or start < 0 or context[start : start + len(text)] != text:
        raise ValueError(
            f"{location}: The answer {text[:60]!r} must match the context, which has {len(context)} characters, at "
            f"character {start}, got {context[max(start, 0) :][: len(text)][:60]!r}. Correct answer_start."
        )
    return start


def load_squad(
    files: Mapping[str, Any], from_hub: bool, version_2: bool = False, with_train: bool = True
) -> dict[str, list[Question]]:
    """Read the SQuAD splits ("train", "dev" and "test") from files or from the Hub, omitting splits without a source.

    Args:
        files: Maps "train_file", "validation_file" and "test_file" to paths, or to None if a file is not set.
        from_hub: Whether to load the train and dev splits from the Hub if their files are not set.
        version_2: Whether to use SQuAD v2.0 instead of v1.1.
        with_train: Whether to read the train split.

    Raises:
        OSError: If a file or a Hub dataset cannot be read.
        ValueError: If a file has invalid content, or if v1.1 questions have no answer.
    """
    splits = {}
    for name, split in (("train", "train"), ("dev", "validation"), ("test", "test"))[0 if with_train else 1 :]:
        path = files[f"{split}_file"]
        if path is not None:
            splits[name] = read_squad(path, has_answers=name != "test")
        elif from_hub and name != "test":
            splits[name] = load_squad_from_hub(split, version_2)
        if name != "test" and name in splits:
            check_answers_exist(path or f"The {split} split of the Hub", splits[name], version_2)
    answers = (answer.text for question in splits.get("dev", ()) for answer in question.answers)
    if choose_normalization(answers) is normalize_unspaced_answer:
        logger.info("F1 compares characters instead of words because the dev answers are in a script without spaces.")
    return splits


def load_squad_from_hub(split: str, version_2: bool) -> list[Question]:
    """Load a SQuAD split from the Hub.

    Args:
        split: "train" or "validation".
        version_2: Whether to use SQuAD v2.0 instead of v1.1.

    Raises:
        OSError: If the split cannot be loaded.
        ValueError: If an answer does not match its context.
    """
    name = HUB_DATASETS[version_2]
    rows = load_dataset_splits(name, advice="Set --train_file and --validation_file instead.", split=split)
    questions = []
    for row in rows:
        answers = tuple(map(Answer, row["answers"]["text"], row["answers"]["answer_start"]))
        for answer in answers:
            _check_answer_start(answer.text, answer.start, row["context"], f"{name} ({split}), id {row['id']}")
        questions.append(Question(row["id"], row["question"], row["context"], answers))
    _check_ids(f"{name} ({split})", questions)
    return questions


def _check_ids(source: str, questions: list[Question]) -> None:
    """Check that all questions have different ids."""
    ids = Counter(question.id for question in questions)
    if repeated := [question_id for question_id, count in ids.items() if count > 1]:
        raise ValueError(
            f"{source}: Questions must have unique ids because predictions are stored by id, got {repeated[0]} twice."
        )


def check_answers_exist(source: str, questions: Iterable[Question], version_2: bool) -> None:
    """Check that all questions have answers, unless SQuAD v2.0 is used.

    Args:
        source: The description of the questions in messages.
        questions: The questions.
        version_2: Whether SQuAD v2.0 is used.

    Raises:
        ValueError: If a v1.1 question has no answer.
    """
    unanswered = [question.id for question in questions if not question.answers]
    if unanswered and not version_2:
        raise ValueError(
            f"{source}: {len(unanswered)} questions have no answer in their context, such as {unanswered[0]}. For "
            "SQuAD v2.0, set --version_2_with_negative."
        )


def hash_questions(questions: Iterable[Question]) -> str:
    """Return a hash of the questions, which a resumed run uses to check that the data has not changed."""
    digest = hashlib.blake2b(digest_size=8)
    for item in questions:
        digest.update(json.dumps([item.id, item.question, item.context, [vars(a) for a in item.answers]]).encode())
    return digest.hexdigest()


# The position of the token that represents "no answer", which is [CLS] in BERT and ALBERT.
NO_ANSWER = 0
# The default number of tokens shared by neighboring windows. It is reduced if the windows have fewer context tokens.
DEFAULT_STRIDE = 128
# The number of questions per call of the tokenizer.
QUESTIONS_PER_CALL = 256
# The index of the context in the `sequence_ids` of a fast tokenizer.
CONTEXT_SEQUENCE = 1
NO_OFFSETS = np.empty((0, 2), dtype=np.int32)


@dataclass(frozen=True, eq=False)
class Window:
    """The model inputs for a question and a part of its context.

    Attributes:
        question: The index of the question.
        input_ids: The token ids [n].
        token_type_ids: The token types [n], or None if the tokenizer does not return token types.
        context_begin: The position of the first context token.
        offsets: The start and end (exclusive) of each context token, in characters of the context [tokens, 2].
        start: The position of the answer's first token, or `NO_ANSWER` if the answer is not in the window.
        end: The position of the answer's last token (inclusive), or `NO_ANSWER` if the answer is not in the window.
    """

    question: int
    input_ids: np.ndarray
    token_type_ids: np.ndarray | None
    context_begin: int
    offsets: np.ndarray
    start: int = NO_ANSWER
    end: int = NO_ANSWER


def compute_stride(settings: SquadSettings, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> int:
    """Check the lengths of windows and questions, and return the number of tokens shared by neighboring windows.

    Args:
        settings: The settings of the run.
        config: The configuration of the model.
        tokenizer: The tokenizer.

    Returns:
        `doc_stride` if it is set. Otherwise, a default value that depends on the number of context tokens per window.

    Raises:
        ValueError: If a length is not valid for the model.
    """
    check_max_length(settings.max_length, config, tokenizer, pair=True, pad_to_multiple_of=settings.pad_to_multiple_of)
    context_length = settings.max_length - tokenizer.num_special_tokens_to_add(pair=True) - settings.max_query_length
    if context_length < 1 or context_length <= (settings.doc_stride or 0):
        raise ValueError(
            f"--max_length {settings.max_length} leaves {max(context_length, 0)} tokens for the context after a "
            f"question with --max_query_length {settings.max_query_length}. Use a smaller --max_query_length or "
            "--doc_stride."
        )
    if settings.doc_stride is not None:
        return settings.doc_stride
    return DEFAULT_STRIDE if context_length > DEFAULT_STRIDE else context_length // 2


def make_windows(
    questions: Sequence[Question],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    doc_stride: int,
    max_query_length: int,
    return_token_type_ids: bool = True,
    for_training: bool = False,
) -> list[Window]:
    """Split the contexts of questions into windows, and return the windows in the order of the questions.

    Args:
        questions: The questions.
        tokenizer: A fast tokenizer.
        max_length: The maximum length of a window in tokens, including the question and special tokens.
        doc_stride: The number of context tokens shared by neighboring windows.
        max_query_length: The maximum length of a question in tokens. Longer questions are truncated.
        return_token_type_ids: Whether the tokenizer should return token types, which distinguish the question from the
            context.
        for_training: Whether to omit `offsets`, which are only required for predictions and use two thirds of the
            memory.
    """
    windows, num_cut = [], 0
    for begin in range(0, len(questions), QUESTIONS_PER_CALL):
        batch = questions[begin : begin + QUESTIONS_PER_CALL]
        texts, shortened = _truncate_questions([q.question.lstrip() for q in batch], tokenizer, max_query_length)
        num_cut += shortened
        encoded = tokenizer(
            texts,
            [q.context for q in batch],
            truncation="only_second",
            max_length=max_length,
            stride=doc_stride,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
            return_token_type_ids=return_token_type_ids,
            padding=False,
        )
        rows = encoded["overflow_to_sample_mapping"]
        types = encoded.get("token_type_ids")
        for i, row in enumerate(rows):
            ids = np.array(encoded["input_ids"][i], dtype=np.int32)
            inside = [position for position, part in enumerate(encoded.sequence_ids(i)) if part == CONTEXT_SEQUENCE]
            first = inside[0] if inside else len(ids)  # the context may be empty
            offsets = np.array(encoded["offset_mapping"][i][first : first + len(inside)], dtype=np.int32)
            type_ids = np.array(types[i], dtype=np.int8) if types is not None else None
            window = Window(begin + row, ids, type_ids, first, offsets.reshape(-1, 2))
            if batch[row].answers:
                is_first, is_last = row not in rows[i - 1 : i], row not in rows[i + 1 : i + 2]
                window = _set_answer_position(window, batch[row].answers[0], is_first, is_last)
            windows.append(replace(window, offsets=NO_OFFSETS) if for_training else window)
    if num_cut:
        message = "%d of %d questions have more than --max_query_length %d tokens and are truncated."
        logger.warning(message, num_cut, len(questions), max_query_length)
    return windows


def _truncate_questions(
    texts: list[str], tokenizer: PreTrainedTokenizerBase, max_query_length: int
) -> tuple[list[str], int]:
    """Truncate questions to the maximum length, and return the questions and the number of truncated questions."""
    encoded = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    offsets = encoded["offset_mapping"]
    long = [len(row) > max_query_length for row in offsets]
    cut_texts = [
        text[: row[max_query_length - 1][1]] if is_long else text
        for text, row, is_long in zip(texts, offsets, long, strict=True)
    ]
    return cut_texts, sum(long)


def _set_answer_position(window: Window, answer: Answer, is_first: bool, is_last: bool) -> Window:
    """Set the position of the answer in a window if the window contains the whole answer.

    Args:
        window: The window.
        answer: The answer.
        is_first: Whether the window is the first window of its context.
        is_last: Whether the window is the last window of its context.

    Returns:
        The window with the position of the answer, or the unchanged window if it does not contain the whole answer.
    """
    token_starts, token_ends = window.offsets[:, 0], window.offsets[:, 1]
    # Find the tokens that overlap with the answer. Empty tokens, such as SentencePiece's space, are ignored.
    filled = np.flatnonzero(token_ends > token_starts)
    inside = filled[(token_starts[filled] < answer.start + len(answer.text)) & (token_ends[filled] > answer.start)]
    if not len(inside):
        return window
    # Spaces, soft hyphens and combining accents may not belong to any token, so characters without a token do not mean
    # that the answer is cut off. It is only cut off if its first or last token is at the edge of the window.
    spaces = len(answer.text) - len(answer.text.lstrip())
    text_end = answer.start + len(answer.text.rstrip())
    if not is_first and inside[0] == filled[0] and token_starts[inside[0]] > answer.start + spaces:
        return window
    if not is_last and inside[-1] == filled[-1] and token_ends[inside[-1]] < text_end:
        return window
    first, last = (int(window.context_begin + i) for i in (inside[0], inside[-1]))
    return replace(window, start=first, end=last)


def make_window_collator(
    tokenizer: PreTrainedTokenizerBase, pad_to_multiple_of: int | None, marks_questions: bool = False
) -> Callable[[list[Window]], dict[str, Tensor]]:
    """Create a collator that converts windows to model inputs [b, n], "start_positions" [b] and "end_positions" [b].

    Args:
        tokenizer: The tokenizer.
        pad_to_multiple_of: If set, batches are padded to a multiple of this number of tokens.
        marks_questions: Whether to add a `global_attention_mask` that is 1 for all tokens before the context. In
            sparse attention patterns, it lets all tokens attend to the question (arXiv 2004.05150, section 6).
    """

    def collate(windows: list[Window]) -> dict[str, Tensor]:
        rows: dict[str, list] = {"input_ids": [window.input_ids.tolist() for window in windows]}
        if windows[0].token_type_ids is not None:
            rows["token_type_ids"] = [
                window.token_type_ids.tolist() for window in windows if window.token_type_ids is not None
            ]
        batch = dict(tokenizer.pad(rows, padding=True, pad_to_multiple_of=pad_to_multiple_of, return_tensors="pt"))
        if marks_questions:
            context_starts = torch.tensor([window.context_begin for window in windows])
            batch[GLOBAL_MASK] = (torch.arange(batch["input_ids"].shape[1]) < context_starts[:, None]).long()
        batch["start_positions"] = torch.tensor([window.start for window in windows])
        batch["end_positions"] = torch.tensor([window.end for window in windows])
        return batch

    return collate


@dataclass(frozen=True)
class Span:
    """A span of the context, with the start logit of its first token and the end logit of its last token."""

    text: str
    start_logit: float
    end_logit: float

    @property
    def score(self) -> float:
        """The sum of the start logit and the end logit."""
        return self.start_logit + self.end_logit


@dataclass(frozen=True)
class Prediction:
    """A model's prediction for a question.

    Attributes:
        id: The id of the question.
        spans: The best spans, best first. Empty if the context has no tokens.
        null: The "no answer" span from the window in which its score is lowest. The lowest score is used because it is
            sufficient that one window contains an answer.
    """

    id: str
    spans: tuple[Span, ...]
    null: Span

    @property
    def text(self) -> str:
        """The text of the best span, or "" if there are no spans."""
        return self.spans[0].text if self.spans else ""

    @property
    def null_odds(self) -> float:
        """The score of "no answer" minus the score of the best span, or 1e9 if there are no spans."""
        return self.null.score - self.spans[0].score if self.spans else 1e9  # JSON requires a finite number

    def answer(self, null_threshold: float | None) -> str:
        """Return the predicted answer, which is "" if `null_odds` exceeds the threshold.

        If the threshold is None, `null_odds` is ignored.
        """
        return "" if null_threshold is not None and self.null_odds > null_threshold else self.text


def extract_predictions(
    questions: Sequence[Question],
    windows: Sequence[Window],
    start_logits: np.ndarray,
    end_logits: np.ndarray,
    n_best: int = 20,
    max_answer_length: int = 30,
) -> list[Prediction]:
    """Find the best answer spans for each question in all of its windows.

    Args:
        questions: The questions.
        windows: The windows of the questions.
        start_logits: The logits for the start of the answer [windows, tokens].
        end_logits: The logits for the end of the answer [windows, tokens].
        n_best: The number of starts and ends to combine per window, and the number of spans per question.
        max_answer_length: The maximum length of an answer in tokens.

    Returns:
        The predictions in the order of the questions.
    """
    spans: list[dict[tuple[int, int], Span]] = [{} for _ in questions]
    nulls: list[Span | None] = [None] * len(questions)
    for window, starts, ends in zip(windows, start_logits, end_logits, strict=True):
        null = Span("", float(starts[NO_ANSWER]), float(ends[NO_ANSWER]))
        earlier_score = nulls[window.question]
        nulls[window.question] = null if earlier_score is None or null.score < earlier_score.score else earlier_score
        context, question_spans = questions[window.question].context, spans[window.question]
        inside = slice(window.context_begin, window.context_begin + len(window.offsets))
        for characters, span in _find_window_spans(
            window.offsets, starts[inside], ends[inside], context, n_best, max_answer_length
        ):
            # Windows overlap. If two windows contain the same span, the higher score is used.
            if characters not in question_spans or span.score > question_spans[characters].score:
                question_spans[characters] = span
    return [
        Prediction(
            question.id,
            tuple(sorted(question_spans.values(), key=lambda span: -span.score)[:n_best]),
            null or Span("", 0.0, 0.0),
        )
        for question, question_spans, null in zip(questions, spans, nulls, strict=True)
    ]


def _find_window_spans(
    offsets: np.ndarray, starts: np.ndarray, ends: np.ndarray, context: str, n_best: int, max_answer_length: int
) -> list[tuple[tuple[int, int], Span]]:
    """Find the best spans in a window, each with its start and end (exclusive) in characters of the context."""
    is_usable = offsets[:, 1] > offsets[:, 0]
    first = np.argsort(-np.where(is_usable, starts, -np.inf), kind="stable")[:n_best]
    last = np.argsort(-np.where(is_usable, ends, -np.inf), kind="stable")[:n_best]
    length = last[None, :] - first[:, None] + 1
    valid = (length >= 1) & (length <= max_answer_length) & is_usable[first][:, None] & is_usable[last][None, :]
    rows, columns = np.nonzero(valid)
    order = np.argsort(-(starts[first[rows]] + ends[last[columns]]), kind="stable")[:n_best]
    spans = []
    for i in order:
        a, b = first[rows[i]], last[columns[i]]
        characters = int(offsets[a, 0]), int(offsets[b, 1])
        text = context[slice(*characters)].strip()
        if text:
            spans.append((characters, Span(text, float(starts[a]), float(ends[b]))))
    return spans


def make_nbest_entries(prediction: Prediction, with_null: bool) -> list[dict[str, Any]]:
    """Create the entries of the n-best file for a question, best first.

    Args:
        prediction: The prediction.
        with_null: Whether to include "no answer" as an entry (v2.0).

    Returns:
        A list of dictionaries with the text, the probability and the logits of each entry.
    """
    spans = [*prediction.spans, *([prediction.null] if with_null or not prediction.spans else [])]
    spans.sort(key=lambda span: -span.score)
    scores = np.array([span.score for span in spans])
    shares = np.exp(scores - scores.max())
    return [
        {"text": span.text, "probability": float(share), "start_logit": span.start_logit, "end_logit": span.end_logit}
        for span, share in zip(spans, shares / shares.sum(), strict=True)
    ]


ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = frozenset(string.punctuation)
Normalization = Callable[[str], str]


def normalize_answer(text: str) -> str:
    """Lowercase a text, remove punctuation and English articles, and separate words with single spaces.

    Example:
        ```python
        normalize_answer("The  Cat!")  # "cat"
        ```
    """
    without_punctuation = "".join(character for character in text.lower() if character not in PUNCTUATION)
    return " ".join(ARTICLES.sub(" ", without_punctuation).split())


def normalize_unspaced_answer(text: str) -> str:
    """Lowercase a text, remove punctuation, and put spaces around the characters of scripts without spaces.

    This is the normalization of Chinese answers in MLQA (arXiv 1910.07475).

    Example:
        ```python
        normalize_unspaced_answer("《三国》2。")  # "三 国 2"
        ```
    """
    kept = [c for c in text.lower() if c not in PUNCTUATION and not unicodedata.category(c).startswith("P")]
    return " ".join("".join(f" {c} " if get_unspaced_script(c) else c for c in kept).split())


def choose_normalization(answers: Iterable[str]) -> Normalization:
    """Return the function that normalizes answers in the script of the correct answers."""
    # BLEU uses another tokenizer only for scripts without spaces.
    return normalize_answer if choose_bleu_tokenizer(answers) == "13a" else normalize_unspaced_answer


def compute_exact_match(prediction: str, reference: str, normalize: Normalization = normalize_answer) -> float:
    """Return 1.0 if two answers are the same after normalization, and 0.0 otherwise."""
    return float(normalize(prediction) == normalize(reference))


def compute_token_f1(
    prediction: str, reference: str, score_if_both_empty: float = 0.0, normalize: Normalization = normalize_answer
) -> float:
    """Compute the F1 score over the words of two normalized answers, from 0 to 1.

    Args:
        prediction: The predicted answer.
        reference: The correct answer.
        score_if_both_empty: The value to return if neither answer contains words, which is 0 in the official v1.1
            script and 1 in the v2.0 script.
        normalize: The function that normalizes the answers and separates their words with spaces.
    """
    predicted_words, true_words = normalize(prediction).split(), normalize(reference).split()
    if not predicted_words or not true_words:
        return score_if_both_empty if predicted_words == true_words else 0.0
    common = sum((Counter(predicted_words) & Counter(true_words)).values())
    return 2 * common / (len(predicted_words) + len(true_words))


def score_answer(
    prediction: str,
    references: Sequence[str],
    score_if_both_empty: float = 0.0,
    normalize: Normalization = normalize_answer,
) -> tuple[float, float]:
    """Compute the best exact match and the best F1 over all correct answers.

    If there are no correct answers, the empty string counts as correct.
    """
    references = references or [""]
    return (
        max(compute_exact_match(prediction, reference, normalize) for reference in references),
        max(compute_token_f1(prediction, reference, score_if_both_empty, normalize) for reference in references),
    )


def _compute_means(scores: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the mean exact match and the mean F1 in percent."""
    exact, f1 = (100 * (sum(values) / len(values)) for values in zip(*scores, strict=True))
    return exact, f1


def find_best_no_answer_threshold(
    scores: Mapping[str, float],
    null_odds: Mapping[str, float],
    predictions: Mapping[str, str],
    has_answer: Mapping[str, bool],
) -> tuple[float, float]:
    """Find the threshold for `null_odds` above which predicting "no answer" results in the best mean score.

    Args:
        scores: Maps question ids to the scores of the answers.
        null_odds: Maps question ids to the odds of "no answer".
        predictions: Maps question ids to the predicted answers.
        has_answer: Maps question ids to True if the question has an answer.

    Returns:
        The best mean score from 0 to 100, and the largest value of `null_odds` for which answers are predicted (0 if
        no answers are predicted).
    """
    current = best = float(sum(not has_answer[key] for key in scores))
    threshold = 0.0
    for key in sorted(scores, key=null_odds.__getitem__):
        # Predicting one more answer adds its score or, for an unanswerable question, loses the point for "no answer".
        current += scores[key] if has_answer[key] else (-1.0 if predictions[key] else 0.0)
        if current > best:
            best, threshold = current, null_odds[key]
    return 100 * best / len(scores), threshold


def compute_squad_metrics(
    questions: Sequence[Question],
    predictions: Mapping[str, str],
    null_odds: Mapping[str, float] | None = None,
    no_answer_threshold: float = math.inf,
) -> dict[str, float]:
    """Compute exact match and F1, from 0 to 100, as in the official scripts.

    If the correct answers are in a script without spaces, the answers are normalized as in MLQA
    (`normalize_unspaced_answer`).

    Args:
        questions: The questions.
        predictions: Maps question ids to the predicted answers.
        null_odds: For v2.0, maps question ids to the odds of "no answer", which are higher if an answer is less
            likely. None for v1.1.
        no_answer_threshold: The value of `null_odds` above which "no answer" is predicted.

    Returns:
        For v1.1, "exact_match" and "f1". For v2.0, "exact", "f1" and "total" for all questions, for questions with an
        answer (with the prefix "HasAns_") and for questions without an answer ("NoAns_"). For v2.0, the result also
        contains "best_exact" and "best_f1" and the thresholds that result in these values ("best_exact_thresh",
        "best_f1_thresh"). These values are optimistic because the thresholds are chosen on the same questions.

    Example:
        ```python
        question = Question("1", "Who?", "It was Ada.", (Answer("Ada", 7),))
        compute_squad_metrics([question], {"1": "Ada"})  # {"exact_match": 100.0, "f1": 100.0}
        ```
    """
    references = {q.id: [answer.text for answer in q.answers] for q in questions}
    if null_odds is not None:
        return _compute_squad_v2_metrics(references, predictions, null_odds, no_answer_threshold)
    normalize = choose_normalization(text for right in references.values() for text in right)
    exact, f1 = _compute_means(
        [score_answer(predictions[key], right, normalize=normalize) for key, right in references.items()]
    )
    return {"exact_match": exact, "f1": f1}


def _compute_squad_v2_metrics(
    references: Mapping[str, list[str]],
    predictions: Mapping[str, str],
    null_odds: Mapping[str, float],
    no_answer_threshold: float,
) -> dict[str, float]:
    """Compute the metrics for v2.0."""
    normalize = choose_normalization(text for right in references.values() for text in right)
    # As in the official script, correct answers that are empty after normalization are ignored.
    raw = {
        key: score_answer(predictions[key], list(filter(normalize, right)), 1.0, normalize)
        for key, right in references.items()
    }
    has_answer = {key: bool(right) for key, right in references.items()}
    no_answer = {key: (float(not answered),) * 2 for key, answered in has_answer.items()}
    scores = {key: no_answer[key] if null_odds[key] > no_answer_threshold else raw[key] for key in raw}
    subsets = {
        "": [*scores.values()],
        "HasAns_": [scores[key] for key in scores if has_answer[key]],
        "NoAns_": [scores[key] for key in scores if not has_answer[key]],
    }
    values: dict[str, float] = {}
    for prefix, rows in subsets.items():
        if rows:
            exact, f1 = _compute_means(rows)
            values |= {f"{prefix}exact": exact, f"{prefix}f1": f1, f"{prefix}total": len(rows)}
    for position, name in enumerate(("exact", "f1")):
        raw_scores = {key: row[position] for key, row in raw.items()}
        best, threshold = find_best_no_answer_threshold(raw_scores, null_odds, predictions, has_answer)
        values |= {f"best_{name}": best, f"best_{name}_thresh": threshold}
    return values
