"""Loads the tokenizer to train with, and makes it fit the model: padding, token types, end tokens, lengths."""

import json
import logging

from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from ...conversion.checkpoint.models import check_learned_tokens, check_tokenizer_files, reading_checkpoint
from ...registration import longest_input
from .settings import ModelSettings

__all__ = [
    "append_end_tokens",
    "check_max_length",
    "encode_words",
    "fit_token_types",
    "get_vocabulary_size",
    "load_tokenizer",
    "warn_about_truncation",
]

logger = logging.getLogger(__name__)
# Rows that are looked at to say how many are cut.
COUNTED_ROWS = 10_000


def load_tokenizer(
    settings: ModelSettings, config: PreTrainedConfig | None, words: bool = False
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of `--tokenizer_name` or of the checkpoint; without a config the model is made to fit it.

    It pads and cuts on the right, whatever side it was saved with. With `words` it is to read lists of words: one that
    tells a word's beginning by the space before it (RoBERTa's) reads each as if it had one.

    Raises:
        OSError: if there is none.
        ValueError: if it cannot be used, has no padding token, or more tokens than the model.
    """
    source = settings.tokenizer_name or settings.source
    advice = "; give a folder or Hub id that has them with --tokenizer_name"
    with reading_checkpoint(source) as found:
        check_tokenizer_files(found, advice)
        tokenizer = AutoTokenizer.from_pretrained(found, trust_remote_code=settings.trust_remote_code)
        if words and _needs_space(tokenizer):
            options = {"add_prefix_space": True, "trust_remote_code": settings.trust_remote_code}
            tokenizer = AutoTokenizer.from_pretrained(found, **options)
    check_learned_tokens(tokenizer, source, advice)
    if tokenizer.pad_token is None:
        raise ValueError(f"the tokenizer of {source} has no padding token; batches cannot be padded without one")
    if config is not None and (size := get_vocabulary_size(tokenizer)) > config.vocab_size:
        raise ValueError(
            f"the tokenizer of {source} has {size} tokens and the model only {config.vocab_size}; "
            "give its own with --tokenizer_name"
        )
    # Positions count from the first token, windows are cut at the end, and labels are padded there.
    tokenizer.padding_side = tokenizer.truncation_side = "right"
    return tokenizer


def _needs_space(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether a first word without a space before it is read as the middle of a word."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    found = json.loads(backend.to_str())["pre_tokenizer"] if backend is not None else None
    parts = (found or {}).get("pretokenizers", [found or {}])
    return any(part.get("type") == "ByteLevel" and not part["add_prefix_space"] for part in parts)


def get_vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return how many rows an embedding of its tokens needs: more than tokens where their numbers have gaps."""
    return max(len(tokenizer), 1 + max(tokenizer.get_vocab().values()))


def fit_token_types(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, pairs: bool = True) -> bool:
    """Let a tokenizer, also once saved, say which text of a pair a token is of, where the model can tell, or not.

    ALBERT's of transformers v5 does so only where asked; BERT's beside a DistilBERT, which has no token types, would
    hand it an input that it does not know. Without `pairs` there is nothing to tell, and nothing is added. Return
    whether this one did otherwise before.
    """
    can_tell, names = getattr(config, "type_vocab_size", 0) > 1, tokenizer.model_input_names
    if ("token_type_ids" in names) == can_tell or (can_tell and not pairs):
        return False
    others = [name for name in names if name != "token_type_ids"]
    tokenizer.model_input_names = [*others, "token_type_ids"] if can_tell else others
    tokenizer.init_kwargs["model_input_names"] = tokenizer.model_input_names  # this is what is saved
    return True


def append_end_tokens(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, pair: bool) -> None:
    """Let a tokenizer, also once saved, put the end token behind each text, where a classifier reads it there.

    That of an encoder-decoder does. T5's own tokenizer closes every text; one made for translation need not close the
    two texts of a pair.

    Raises:
        ValueError: if it does not, and cannot be made to, or it puts other tokens around texts, which would be lost.
    """
    if not config.is_encoder_decoder or tokenizer(*("a", "a")[: 1 + pair])["input_ids"].count(config.eos_token_id):
        return
    end = tokenizer.eos_token
    processor = getattr(getattr(tokenizer, "backend_tokenizer", None), "post_processor", None)
    if tokenizer.eos_token_id != config.eos_token_id or not isinstance(processor, TemplateProcessing | None):
        raise ValueError(
            f"the tokenizer does not put the model's end token (number {config.eos_token_id}) behind "
            f"{'the texts of a pair' if pair else 'a text'}, where its classifier reads: give one that does with "
            "--tokenizer_name, or set its eos_token and a post-processor that appends it"
        )
    if others := sorted(_template_tokens(tokenizer) - {end}):
        raise ValueError(
            f"the tokenizer puts {', '.join(others)} around texts, and the model's end token ({end}) not behind "
            f"{'those of a pair' if pair else 'them'}, where its classifier reads: give one that does with "
            f"--tokenizer_name, or put {end} into the template of its post-processor"
        )
    logger.info("the tokenizer now puts %s behind each text, where the model's classifier reads", end)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"$A {end}", pair=f"$A {end} $B {end}", special_tokens=[(end, tokenizer.eos_token_id)]
    )


def _template_tokens(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Return the special tokens that the tokenizer's template, if it has one, puts around texts."""
    template = json.loads(tokenizer.backend_tokenizer.to_str())["post_processor"] or {}
    pieces = [*template.get("single", []), *template.get("pair", [])]
    return {piece["SpecialToken"]["id"] for piece in pieces if "SpecialToken" in piece}


def check_max_length(
    max_length: int,
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    pair: bool = False,
    flag: str = "max_length",
    multiple: int | None = None,
) -> None:
    """Check that the model has a position for every token, and that text fits beside the special tokens.

    Args:
        max_length: tokens at which texts are cut.
        config, tokenizer: of the model.
        pair: whether texts are read as pairs.
        flag: the flag of `max_length`, for messages.
        multiple: of how many tokens batches are padded to a multiple; None: they are not.

    Raises:
        ValueError: if `max_length`, or what a batch is padded to, is more than the model's or the tokenizer's maximum,
            or no token is left for text.
    """
    special = tokenizer.num_special_tokens_to_add(pair=pair)
    if max_length < special + 1:
        raise ValueError(f"--{flag} must be at least {special + 1} ({special} special tokens), got {max_length}")
    positions = longest_input(config)
    if positions is None:  # T5 has none to run out of; its tokenizer's limit is the length it was pretrained with
        return
    if max_length > positions:
        raise ValueError(f"--{flag} {max_length} is too long: the model has {positions} positions")
    if max_length > tokenizer.model_max_length:
        limit = tokenizer.model_max_length
        raise ValueError(f"--{flag} {max_length} is too long: the tokenizer allows {limit} tokens")
    if (padded := -(-max_length // (multiple or 1)) * (multiple or 1)) > positions:
        raise ValueError(
            f"--pad_to_multiple_of {multiple} pads texts of --{flag} {max_length} to {padded} tokens: the model has "
            f"{positions} positions"
        )


def warn_about_truncation(
    tokenizer: PreTrainedTokenizerBase, split: str, rows: str, columns: dict[str, list[str]], flag: str, limit: int
) -> int:
    """Say how many of a split's first 10,000 rows have more tokens than they may; return their number.

    Args:
        tokenizer: of the model.
        split, rows: what they are, for the message: "train", "sources".
        columns: the tokenizer's arguments ("text", "text_pair", "text_target") with the texts of each row.
        flag: of the limit, for the message.
        limit: tokens that a row may have, special tokens included.
    """
    columns = {name: list(texts[:COUNTED_ROWS]) for name, texts in columns.items()}
    ids = tokenizer(**columns, return_attention_mask=False, verbose=False)["input_ids"]
    lengths = [len(row) for row in ids]
    if cut := sum(length > limit for length in lengths):
        logger.warning(
            "%s: %d of %d %s have more than --%s %d tokens and are cut (the longest has %d)",
            split, cut, len(lengths), rows, flag, limit, max(lengths),
        )  # fmt: skip
    return cut


def encode_words(
    tokenizer: PreTrainedTokenizerBase, words: list[str], max_length: int
) -> tuple[dict[str, list[int]], dict[int, int]]:
    """Tokenize a sentence that is split into words.

    Returns:
        The tokenizer's inputs, and the place of the first token of each word by the word's number; words that are cut
        off at `max_length`, or of which the tokenizer leaves nothing, are not in it.
    """
    row = tokenizer(words, is_split_into_words=True, truncation=True, max_length=max_length)
    places: dict[int, int] = {}
    for place, word in enumerate(row.word_ids()):
        if word is not None:
            places.setdefault(word, place)
    return dict(row), places
