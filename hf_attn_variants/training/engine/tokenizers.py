"""Functions that load the tokenizer and adapt it to the model: padding, token types, end tokens and lengths."""

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
# The number of rows that are tokenized to count those that are cut.
COUNTED_ROWS = 10_000


def load_tokenizer(
    settings: ModelSettings, config: PreTrainedConfig | None, words: bool = False
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of `--tokenizer_name` or of the checkpoint.

    It pads and cuts on the right, whatever side was saved.

    Args:
        settings: The settings of the run.
        config: The configuration of the model. None for a new model, which is made to fit the tokenizer.
        words: Whether the tokenizer reads lists of words. If it recognizes words by a space before them (RoBERTa), it
            is loaded so that each word of a list has one.

    Raises:
        OSError: If there is no tokenizer.
        ValueError: If the tokenizer cannot be used, has no padding token, or has more tokens than the model.
    """
    source = settings.tokenizer_name or settings.source
    advice = ". Give a folder or Hub id that has them with --tokenizer_name."
    with reading_checkpoint(source) as folder:
        check_tokenizer_files(folder, advice)
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=settings.trust_remote_code)
        if words and _needs_space(tokenizer):
            options = {"add_prefix_space": True, "trust_remote_code": settings.trust_remote_code}
            tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    check_learned_tokens(tokenizer, source, advice)
    if tokenizer.pad_token is None:
        raise ValueError(f"The tokenizer of {source} must have a padding token, because batches are padded.")
    if config is not None and (size := get_vocabulary_size(tokenizer)) > config.vocab_size:
        raise ValueError(
            f"The tokenizer of {source} has {size} tokens, but the model has only {config.vocab_size}. Give the "
            "tokenizer of the model with --tokenizer_name."
        )
    # Positions count from the first token, and the code that cuts windows and pads labels works at the end.
    tokenizer.padding_side = tokenizer.truncation_side = "right"
    return tokenizer


def _needs_space(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the tokenizer reads a first word without a space before it as the middle of a word."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    pre_tokenizer = json.loads(backend.to_str())["pre_tokenizer"] if backend is not None else None
    parts = (pre_tokenizer or {}).get("pretokenizers", [pre_tokenizer or {}])
    return any(part.get("type") == "ByteLevel" and not part["add_prefix_space"] for part in parts)


def get_vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the number of rows that an embedding needs. It exceeds the number of tokens if their ids have gaps."""
    return max(len(tokenizer), 1 + max(tokenizer.get_vocab().values()))


def fit_token_types(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, pairs: bool = True) -> bool:
    """Make a tokenizer return token types if the model has them, and only then. This is also saved.

    In Transformers v5, ALBERT's tokenizer returns them only on request. BERT's tokenizer returns them also for a
    DistilBERT, which has no token types and would not accept this input.

    Args:
        tokenizer: The tokenizer, which is changed.
        config: The configuration of the model.
        pairs: Whether texts are read as pairs. Otherwise, token types are not added, because they are all the same.

    Returns:
        Whether the tokenizer was changed.
    """
    has_types, names = getattr(config, "type_vocab_size", 0) > 1, tokenizer.model_input_names
    if ("token_type_ids" in names) == has_types or (has_types and not pairs):
        return False
    others = [name for name in names if name != "token_type_ids"]
    tokenizer.model_input_names = [*others, "token_type_ids"] if has_types else others
    tokenizer.init_kwargs["model_input_names"] = tokenizer.model_input_names  # this attribute is saved
    return True


def append_end_tokens(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, pair: bool) -> None:
    """Make a tokenizer append the end token to each text if the classifier of the model reads it. This is also saved.

    The classifiers of encoder-decoders read the end token. T5's own tokenizer appends it to every text, but a
    tokenizer for translation may not append it to the two texts of a pair.

    Args:
        tokenizer: The tokenizer, which is changed.
        config: The configuration of the model.
        pair: Whether texts are read as pairs.

    Raises:
        ValueError: If the tokenizer does not append the end token and cannot be changed, or if it puts other tokens
            around texts, which would be lost.
    """
    if not config.is_encoder_decoder or tokenizer(*("a", "a")[: 1 + pair])["input_ids"].count(config.eos_token_id):
        return
    end = tokenizer.eos_token
    processor = getattr(getattr(tokenizer, "backend_tokenizer", None), "post_processor", None)
    if tokenizer.eos_token_id != config.eos_token_id or not isinstance(processor, TemplateProcessing | None):
        raise ValueError(
            f"The tokenizer does not append the end token of the model (id {config.eos_token_id}) to "
            f"{'the texts of a pair' if pair else 'a text'}, where the classifier reads it. Give another tokenizer "
            "with --tokenizer_name, or set its eos_token and a post-processor that appends it."
        )
    if others := sorted(_find_template_tokens(tokenizer) - {end}):
        raise ValueError(
            f"The tokenizer puts {', '.join(others)} around texts, but does not append the end token {end} to "
            f"{'those of a pair' if pair else 'them'}, where the classifier reads it. Give another tokenizer with "
            f"--tokenizer_name, or put {end} into the template of its post-processor."
        )
    logger.info("The tokenizer now appends %s to each text, because the classifier of the model reads it.", end)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"$A {end}", pair=f"$A {end} $B {end}", special_tokens=[(end, tokenizer.eos_token_id)]
    )


def _find_template_tokens(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Return the special tokens in the template of the tokenizer. The set is empty if there is no template."""
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
    """Check that the model has a position for every token, and that at least one is left for text.

    Args:
        max_length: The number of tokens at which texts are cut.
        config: The configuration of the model.
        tokenizer: The tokenizer of the model.
        pair: Whether texts are read as pairs.
        flag: The name of the flag for `max_length`, for messages.
        multiple: If given, batches are padded to a multiple of this number of tokens.

    Raises:
        ValueError: If `max_length` or the padded length exceeds the maximum of the model or the tokenizer, or if no
            token is left for text.
    """
    special = tokenizer.num_special_tokens_to_add(pair=pair)
    if max_length < special + 1:
        raise ValueError(f"--{flag} must be at least {special + 1} ({special} special tokens), got {max_length}.")
    positions = longest_input(config)
    if positions is None:  # T5 has no limit; that of its tokenizer is only the length of the pretraining
        return
    if max_length > positions:
        raise ValueError(
            f"--{flag} must be at most {positions}, the number of positions of the model, got {max_length}."
        )
    if max_length > tokenizer.model_max_length:
        limit = tokenizer.model_max_length
        raise ValueError(f"--{flag} must be at most {limit}, the maximum of the tokenizer, got {max_length}.")
    if (padded := -(-max_length // (multiple or 1)) * (multiple or 1)) > positions:
        raise ValueError(
            f"--pad_to_multiple_of {multiple} pads texts of --{flag} {max_length} to {padded} tokens, but the model "
            f"has only {positions} positions. Use a smaller --{flag}."
        )


def warn_about_truncation(
    tokenizer: PreTrainedTokenizerBase, split: str, rows: str, columns: dict[str, list[str]], flag: str, limit: int
) -> int:
    """Warn how many of the first 10,000 rows of a split have more tokens than allowed, and return their number.

    Args:
        tokenizer: The tokenizer of the model.
        split: The name of the split, for the message, for example "train".
        rows: The name of the rows, for the message, for example "sources".
        columns: The texts of all rows by the argument of the tokenizer ("text", "text_pair", "text_target").
        flag: The flag of the limit, for the message.
        limit: The maximum number of tokens of a row, including special tokens.
    """
    columns = {name: list(texts[:COUNTED_ROWS]) for name, texts in columns.items()}
    ids = tokenizer(**columns, return_attention_mask=False, verbose=False)["input_ids"]
    lengths = [len(row) for row in ids]
    if cut := sum(length > limit for length in lengths):
        logger.warning(
            "%s: %d of %d %s have more than --%s %d tokens and are cut (the longest has %d).",
            split, cut, len(lengths), rows, flag, limit, max(lengths),
        )  # fmt: skip
    return cut


def encode_words(
    tokenizer: PreTrainedTokenizerBase, words: list[str], max_length: int
) -> tuple[dict[str, list[int]], dict[int, int]]:
    """Tokenize a sentence that is split into words.

    Returns:
        The inputs of the tokenizer, and the position of the first token of each word by the index of the word. Words
        that are cut off at `max_length`, or for which there are no tokens, are not included.
    """
    row = tokenizer(words, is_split_into_words=True, truncation=True, max_length=max_length)
    first_tokens: dict[int, int] = {}
    for position, word in enumerate(row.word_ids()):
        if word is not None:
            first_tokens.setdefault(word, position)
    return dict(row), first_tokens
