"""Tokenizers of BLEU and ROUGE for writing systems whose words neither spaces nor the letters a to z divide."""

import importlib.util
import logging
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable

__all__ = ["UnicodeTokenizer", "choose_tokenizer", "is_ascii_writing", "log_tokenizer"]

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
