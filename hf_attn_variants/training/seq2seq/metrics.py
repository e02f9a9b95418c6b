"""BLEU, chrF and ROUGE of generated texts, and the tokenizers that suit the script of a target language."""

import importlib.util
import logging
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from numbers import Real
from pathlib import Path

from .settings import check_text_metrics

__all__ = [
    "TEXT_METRICS",
    "TextMetric",
    "UnicodeTokenizer",
    "choose_tokenizer",
    "is_ascii_writing",
    "log_tokenizer",
    "score_texts",
    "text_metric",
]

logger = logging.getLogger(__name__)

# The beginning of the Unicode names of letters that are written without spaces between words.
KANA = ("HIRAGANA", "KATAKANA", "HALFWIDTH KATAKANA")
UNSPACED = ("CJK", *KANA, "BOPOMOFO", "THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN")
# Shares of letters: Chinese tokenization divides words of other scripts as 13a does, that by characters does not.
LEAST_CHINESE, LEAST_KANA, LEAST_OTHER = 0.1, 0.05, 0.1
SHOWN_LETTERS = 200_000
# sacrebleu's tokenizer for a language, by the first two or three letters of `--target_lang`.
LANGUAGES = {"zh": "zh", "zho": "zh", "yue": "zh", "ja": "ja", "jpn": "ja"}
LANGUAGES |= dict.fromkeys(("th", "tha", "lo", "lao", "km", "khm", "my", "mya", "bo", "bod"), "char")


def choose_tokenizer(references: Iterable[str], target_lang: str | None = None) -> str:
    """Return the tokenizer of sacrebleu that suits the writing system of right texts.

    Args:
        references: the texts; the first 200,000 letters decide, if `target_lang` does not.
        target_lang: the language, as a tokenizer calls it ("zh_CN", "jpn_Jpan", "th").

    Returns:
        "zh" for Chinese; "ja-mecab" for Japanese, or "char" if its packages are not installed; "char" for Thai, Lao,
        Khmer, Burmese and Tibetan; "13a", sacrebleu's default, for scripts with spaces between words.
    """
    language = LANGUAGES.get(re.split(r"[^a-z]", (target_lang or "").lower())[0])
    if language is None:
        counts = _scripts(references)
        total, kana = sum(counts.values()), sum(counts[name] for name in KANA)
        chinese = counts["CJK"] + counts["BOPOMOFO"] + kana
        other = sum(counts[name] for name in UNSPACED) - chinese
        language = "13a"
        if other > max(LEAST_OTHER * total, chinese):
            language = "char"
        elif chinese > LEAST_CHINESE * total:
            language = "ja" if kana > LEAST_KANA * chinese else "zh"
    if language == "ja":
        has_mecab = all(importlib.util.find_spec(name) is not None for name in ("MeCab", "ipadic"))
        return "ja-mecab" if has_mecab else "char"
    return language


def log_tokenizer(name: str, is_given: bool) -> None:
    """Log the tokenizer that BLEU uses, and how to name another one."""
    if not is_given:
        logger.info("BLEU is computed with sacrebleu's tokenizer %r; --tokenize names another one", name)


def is_ascii_writing(texts: Iterable[str]) -> bool:
    """Return whether less than a tenth of the letters lie outside a-z, so that rouge_score's own tokenizer fits."""
    counts = _scripts(texts)
    return counts["ASCII"] >= (1 - LEAST_OTHER) * sum(counts.values())


def _scripts(texts: Iterable[str]) -> Counter[str]:
    """Count letters by the unspaced script that they belong to, "ASCII", or "" for others."""
    characters: Counter[str] = Counter()
    for text in texts:
        characters.update(text)
        if characters.total() > SHOWN_LETTERS:
            break
    counts: Counter[str] = Counter()
    for character, count in characters.items():
        if character.isalpha():
            counts["ASCII" if character.isascii() else _unspaced(character)] += count
    return counts


def _unspaced(character: str) -> str:
    name = unicodedata.name(character, "")
    return next((script for script in UNSPACED if name.startswith(script)), "")


class UnicodeTokenizer:
    """Words of letters, marks and digits of every script; in scripts without spaces each character is a word."""

    def tokenize(self, text: str) -> list[str]:
        """Return the words of a text, in lower case."""
        parts: list[str] = []
        for character in unicodedata.normalize("NFC", text.lower()):
            is_word = unicodedata.category(character)[0] in "LMN"
            if not is_word:
                parts.append(" ")
            elif not character.isascii() and _unspaced(character):
                parts.append(f" {character} ")
            else:
                parts.append(character)
        return "".join(parts).split()


ROUGE_TYPES = ("rouge1", "rouge2", "rougeL", "rougeLsum")
# Also the ends of Hindi, Arabic, Urdu, Chinese and Japanese sentences; behind the last two there is no space.
SENTENCE_END = re.compile("(?<=[.!?\u0964\u061f\u06d4])\\s+|(?<=[\u3002\uff01\uff1f])\\s*")

# What a metric of others' is tried on.
TRIAL = ("A dog runs.", "Two cats sleep in the sun.")

# One or more right texts of each prediction.
References = Sequence[Sequence[str]]


@dataclass(frozen=True)
class TextMetric:
    """A metric over texts: the names of its values, and the function from predictions and references to them."""

    names: tuple[str, ...]
    score: Callable[..., dict[str, float]]


def _bleu(predictions: Sequence[str], references: References, tokenize: str | None = None) -> dict[str, float]:
    import sacrebleu

    tokenize = tokenize or choose_tokenizer(text for row in references for text in row)
    streams = list(zip_longest(*references))
    return {"bleu": sacrebleu.corpus_bleu(list(predictions), streams, tokenize=tokenize).score}


def _chrf(predictions: Sequence[str], references: References) -> dict[str, float]:
    import sacrebleu

    # It wants the first reference of every row, then the second, ...; None where a row has fewer.
    streams = list(zip_longest(*references))
    return {"chrf": sacrebleu.corpus_chrf(list(predictions), streams).score}


def _rouge(predictions: Sequence[str], references: References) -> dict[str, float]:
    from rouge_score.rouge_scorer import RougeScorer

    def lines(text: str) -> str:  # a line is a sentence to rougeLsum, and T5's tokenizer generates none
        return SENTENCE_END.sub("\n", text)

    own = None if is_ascii_writing(text for row in references for text in row) else UnicodeTokenizer()
    scorer = RougeScorer(list(ROUGE_TYPES), use_stemmer=True, tokenizer=own)
    scores = [
        scorer.score_multi([lines(reference) for reference in row], lines(text))
        for text, row in zip(predictions, references, strict=True)
    ]
    return {name: 100 * sum(score[name].fmeasure for score in scores) / len(scores) for name in ROUGE_TYPES}


def _accuracy(predictions: Sequence[str], references: References) -> dict[str, float]:
    right = [
        text.strip() in {reference.strip() for reference in row}
        for text, row in zip(predictions, references, strict=True)
    ]
    return {"accuracy": sum(right) / len(right)}


# BLEU with the tokenizer for the references' script, chrF with sacrebleu's defaults (0 to 100); ROUGE F-measures (0 to
# 100), with Porter stemming where the letters are a to z; accuracy: the share of texts that are a reference, spaces
# around them aside.
TEXT_METRICS: dict[str, TextMetric] = {
    "bleu": TextMetric(("bleu",), _bleu),
    "chrf": TextMetric(("chrf",), _chrf),
    "rouge": TextMetric(ROUGE_TYPES, _rouge),
    "accuracy": TextMetric(("accuracy",), _accuracy),
}


def text_metric(name: str) -> TextMetric:
    """Return a metric by its name, or one of `evaluate` by its script or repository, whose code is run.

    Raises:
        ValueError: if `evaluate` cannot load it, or it makes no number of texts.
    """
    return TEXT_METRICS.get(name) or _loaded(name)


@cache
def _loaded(name: str) -> TextMetric:
    """Load a metric of `evaluate`, and try it on two texts: that says what its numbers are called."""
    import evaluate
    from datasets import Value

    path = Path(name).expanduser()
    try:
        metric = evaluate.load(str(path) if path.exists() else name, keep_in_memory=True)
        formats = metric.features if isinstance(metric.features, list) else [metric.features]
        takes_one = all(isinstance(each["references"], Value) for each in formats)

        def score(predictions: Sequence[str], references: References) -> dict[str, float]:
            if takes_one and any(len(row) > 1 for row in references):
                raise ValueError(f"--metrics {name} takes one reference a text, and there are rows with more")
            rows = [row[0] for row in references] if takes_one else [list(row) for row in references]
            found = metric.compute(predictions=list(predictions), references=rows)
            return {key: float(value) for key, value in found.items() if isinstance(value, Real)}

        names = tuple(score(TRIAL, [(text,) for text in TRIAL]))
    except Exception as error:  # of others' code
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ValueError(f"--metrics {name} cannot score texts against references ({reason})") from error
    if not names:
        raise ValueError(f"--metrics {name} makes no number of texts and references")
    return TextMetric(names, score)


def score_texts(
    names: Sequence[str],
    predictions: Sequence[str],
    references: References,
    trust_remote_code: bool = False,
    tokenize: str | None = None,
) -> dict[str, float]:
    """Compute metrics by name, of one text a row and the texts that are right for it.

    To rougeLsum a text's lines are its sentences, and a line also ends behind each ".", "!" or "?" before a space.

    Args:
        names: as `check_text_metrics` takes them.
        predictions: a text a row.
        references: a row's right texts, one or more.
        trust_remote_code: whether code of the Hub may be run.
        tokenize: sacrebleu's tokenizer for BLEU; None: the one for the references' script.

    Raises:
        ValueError: if a metric is unknown or its package missing, or predictions and references are not as many.
    """
    check_text_metrics(names, trust_remote_code)
    if not predictions or len(predictions) != len(references) or not all(references):
        raise ValueError(
            f"metrics need texts and as many rows of references, got {len(predictions)} and {len(references)}"
        )
    values: dict[str, float] = {}
    for name in names:
        options = {"tokenize": tokenize} if name == "bleu" else {}
        values |= text_metric(name).score(predictions, references, **options)
    return values
