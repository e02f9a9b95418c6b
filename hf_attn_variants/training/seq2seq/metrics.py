"""Computes metrics such as BLEU, chrF and ROUGE for generated texts, with tokenizers that suit the target language."""

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
from typing import Any

from . import check_text_metrics

logger = logging.getLogger(__name__)

# The prefixes of Unicode names for letters in scripts without spaces between words.
KANA_SCRIPTS = ("HIRAGANA", "KATAKANA", "HALFWIDTH KATAKANA")
UNSPACED_SCRIPTS = ("CJK", *KANA_SCRIPTS, "BOPOMOFO", "THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN")
# The minimum shares of letters for choosing a tokenizer. The Chinese tokenizer splits words in other scripts in the
# same way as 13a, so a small share of Chinese letters is enough. The "char" tokenizer splits words into characters.
MIN_CHINESE_SHARE, MIN_KANA_SHARE, MIN_OTHER_SHARE = 0.1, 0.05, 0.1
MAX_COUNTED_LETTERS = 200_000
# Maps language codes, with which --target_lang starts, to SacreBLEU tokenizers ("ja" also requires MeCab).
LANGUAGES = {"zh": "zh", "zho": "zh", "yue": "zh", "ja": "ja", "jpn": "ja"}
LANGUAGES |= dict.fromkeys(("th", "tha", "lo", "lao", "km", "khm", "my", "mya", "bo", "bod"), "char")


def choose_bleu_tokenizer(references: Iterable[str], target_lang: str | None = None) -> str:
    """Choose a SacreBLEU tokenizer that suits the language or script of the reference texts.

    Args:
        references: The reference texts. If `target_lang` does not determine the tokenizer, about the first 200,000
            characters are examined.
        target_lang: The language in the tokenizer's notation, such as "zh_CN", "jpn_Jpan" or "th".

    Returns:
        "zh" for Chinese, "ja-mecab" for Japanese ("char" if its packages are not installed), "char" for Thai, Lao,
        Khmer, Burmese and Tibetan, and "13a", SacreBLEU's default, for scripts with spaces between words.

    Example:
        ```python
        choose_bleu_tokenizer(["A dog runs."])  # "13a"
        ```
    """
    language = LANGUAGES.get(re.split(r"[^a-z]", (target_lang or "").lower())[0])
    if language is None:
        counts = _count_scripts(references)
        total, kana = sum(counts.values()), sum(counts[name] for name in KANA_SCRIPTS)
        chinese = counts["CJK"] + counts["BOPOMOFO"] + kana
        other_count = sum(counts[name] for name in UNSPACED_SCRIPTS) - chinese
        language = "13a"
        if other_count > max(MIN_OTHER_SHARE * total, chinese):
            language = "char"
        elif chinese > MIN_CHINESE_SHARE * total:
            language = "ja" if kana > MIN_KANA_SHARE * chinese else "zh"
    if language == "ja":
        has_mecab = all(importlib.util.find_spec(name) is not None for name in ("MeCab", "ipadic"))
        return "ja-mecab" if has_mecab else "char"
    return language


def resolve_bleu_tokenizer(settings: Any, references: Iterable[str]) -> str:
    """Return the SacreBLEU tokenizer that the settings select, or choose one (see `choose_bleu_tokenizer`)."""
    if settings.tokenize is not None:
        return settings.tokenize
    name = choose_bleu_tokenizer(references, settings.target_lang)
    logger.info("BLEU uses the SacreBLEU tokenizer %r. Set --tokenize to use another tokenizer.", name)
    return name


def _count_scripts(texts: Iterable[str]) -> Counter[str]:
    """Count the letters of each script.

    The keys are "ASCII", the names of the scripts in `UNSPACED_SCRIPTS`, and "" for all other scripts.
    """
    characters: Counter[str] = Counter()
    for text in texts:
        characters.update(text)
        if characters.total() > MAX_COUNTED_LETTERS:
            break
    counts: Counter[str] = Counter()
    for character, count in characters.items():
        if character.isalpha():
            counts["ASCII" if character.isascii() else get_unspaced_script(character)] += count
    return counts


def get_unspaced_script(character: str) -> str:
    """Return the script of a letter if the script has no spaces between words, and "" otherwise."""
    name = unicodedata.name(character, "")
    return next((script for script in UNSPACED_SCRIPTS if name.startswith(script)), "")


class UnicodeTokenizer:
    """Splits texts into words of letters, marks and digits. In scripts without spaces, each character is a word."""

    def tokenize(self, text: str) -> list[str]:
        """Return the lowercase words of a text."""
        parts: list[str] = []
        for character in unicodedata.normalize("NFC", text.lower()):
            is_word = unicodedata.category(character)[0] in "LMN"
            if not is_word:
                parts.append(" ")
            elif not character.isascii() and get_unspaced_script(character):
                parts.append(f" {character} ")
            else:
                parts.append(character)
        return "".join(parts).split()


ROUGE_TYPES = ("rouge1", "rouge2", "rougeL", "rougeLsum")
# This includes sentence ends in Hindi, Arabic, Urdu, Chinese and Japanese. In Chinese and Japanese, no space follows.
SENTENCE_END = re.compile("(?<=[.!?\u0964\u061f\u06d4])\\s+|(?<=[\u3002\uff01\uff1f])\\s*")

# The texts with which a custom metric is tested.
TRIAL_TEXTS = ("A dog runs.", "Two cats sleep in the sun.")

# One or more reference texts per prediction.
References = Sequence[Sequence[str]]


@dataclass(frozen=True)
class TextMetric:
    """A metric that compares generated texts with references.

    Attributes:
        names: The names of the values that the metric returns.
        score: A function that maps predictions and references to a dictionary of values.
    """

    names: tuple[str, ...]
    score: Callable[..., dict[str, float]]


def _compute_bleu(predictions: Sequence[str], references: References, tokenize: str | None = None) -> dict[str, float]:
    """Compute BLEU. If `tokenize` is None, the tokenizer is chosen based on the references."""
    import sacrebleu

    tokenize = tokenize or choose_bleu_tokenizer(text for row in references for text in row)
    streams = list(zip_longest(*references))
    return {"bleu": sacrebleu.corpus_bleu(list(predictions), streams, tokenize=tokenize).score}


def _compute_chrf(predictions: Sequence[str], references: References) -> dict[str, float]:
    """Compute chrF."""
    import sacrebleu

    # SacreBLEU expects a list with the first references of all rows, a list with the second references, and so on.
    # Rows with fewer references are filled with None.
    streams = list(zip_longest(*references))
    return {"chrf": sacrebleu.corpus_chrf(list(predictions), streams).score}


def _compute_rouge(predictions: Sequence[str], references: References) -> dict[str, float]:
    """Compute ROUGE-1, ROUGE-2, ROUGE-L and ROUGE-Lsum."""
    from rouge_score.rouge_scorer import RougeScorer

    # ROUGE-Lsum expects one sentence per line, but models do not generate line ends.
    def split_sentences(text: str) -> str:
        return SENTENCE_END.sub("\n", text)

    counts = _count_scripts(text for row in references for text in row)
    # The tokenizer of rouge_score is only suitable if at least 90% of the letters are a to z.
    is_ascii = counts["ASCII"] >= (1 - MIN_OTHER_SHARE) * sum(counts.values())
    tokenizer = None if is_ascii else UnicodeTokenizer()
    scorer = RougeScorer(list(ROUGE_TYPES), use_stemmer=True, tokenizer=tokenizer)
    scores = [
        scorer.score_multi([split_sentences(reference) for reference in row], split_sentences(text))
        for text, row in zip(predictions, references, strict=True)
    ]
    return {name: 100 * sum(score[name].fmeasure for score in scores) / len(scores) for name in ROUGE_TYPES}


def _compute_accuracy(predictions: Sequence[str], references: References) -> dict[str, float]:
    """Compute the share of texts that match a reference."""
    right = [
        text.strip() in {reference.strip() for reference in row}
        for text, row in zip(predictions, references, strict=True)
    ]
    return {"accuracy": sum(right) / len(right)}


# BLEU uses the tokenizer for the script of the references, and chrF uses SacreBLEU's defaults. Both range from 0 to
# 100. ROUGE is the F-measure (0 to 100), with Porter stemming if most letters are a to z. Accuracy is the share of
# texts that match a reference, ignoring surrounding whitespace.
TEXT_METRICS: dict[str, TextMetric] = {
    "bleu": TextMetric(("bleu",), _compute_bleu),
    "chrf": TextMetric(("chrf",), _compute_chrf),
    "rouge": TextMetric(ROUGE_TYPES, _compute_rouge),
    "accuracy": TextMetric(("accuracy",), _compute_accuracy),
}


def get_text_metric(name: str) -> TextMetric:
    """Return a built-in metric, or load an `evaluate` metric from a script or a Hub repository.

    Raises:
        ValueError: If `evaluate` cannot load the metric, or if the metric does not return a number for texts.
    """
    return TEXT_METRICS.get(name) or _load_evaluate_metric(name)


@cache
def _load_evaluate_metric(name: str) -> TextMetric:
    """Load an `evaluate` metric, and compute it for two example texts to determine the names of its values."""
    import evaluate
    from datasets import Value

    path = Path(name).expanduser()
    try:
        metric = evaluate.load(str(path) if path.exists() else name, keep_in_memory=True)
        formats = metric.features if isinstance(metric.features, list) else [metric.features]
        takes_one = all(isinstance(columns["references"], Value) for columns in formats)

        def compute_scores(predictions: Sequence[str], references: References) -> dict[str, float]:
            if takes_one and any(len(row) > 1 for row in references):
                raise ValueError(
                    f"--metrics {name} requires a single reference per text, but some rows have several references. "
                    "Use another metric."
                )
            rows = [row[0] for row in references] if takes_one else [list(row) for row in references]
            values = metric.compute(predictions=list(predictions), references=rows)
            return {key: float(value) for key, value in values.items() if isinstance(value, Real)}

        names = tuple(compute_scores(TRIAL_TEXTS, [(text,) for text in TRIAL_TEXTS]))
    except Exception as error:  # custom code can raise any exception
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ValueError(
            f"--metrics {name} cannot score texts against references ({reason}). Use another metric."
        ) from error
    if not names:
        raise ValueError(f"--metrics {name} does not return a number for texts and references. Use another metric.")
    return TextMetric(names, compute_scores)


def score_texts(
    names: Sequence[str],
    predictions: Sequence[str],
    references: References,
    trust_remote_code: bool = False,
    tokenize: str | None = None,
) -> dict[str, float]:
    """Compute metrics for generated texts.

    ROUGE-Lsum compares texts sentence by sentence. A sentence ends at a line end, or after ".", "!" or "?" if a space
    follows.

    Args:
        names: The metrics, in the format of `check_text_metrics`.
        predictions: The generated texts, one per row.
        references: The reference texts, one or more per row.
        trust_remote_code: Whether to allow code from the Hub to run.
        tokenize: The SacreBLEU tokenizer for BLEU. If None, it is chosen based on the script of the references.

    Returns:
        A dictionary from the names of the values to the values.

    Raises:
        ValueError: If a metric is unknown or its package is not installed.

    Example:
        ```python
        score_texts(["chrf"], ["A dog runs."], [["A dog runs."]])  # {"chrf": 100.0}
        ```
    """
    check_text_metrics(names, trust_remote_code)
    values: dict[str, float] = {}
    for name in names:
        options = {"tokenize": tokenize} if name == "bleu" else {}
        values |= get_text_metric(name).score(predictions, references, **options)
    return values
