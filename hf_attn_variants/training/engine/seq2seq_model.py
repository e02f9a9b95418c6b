"""The config and the tokenizer of text to text: a checkpoint's, or those of a T5 from scratch."""

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from .new_model import load_or_make_config
from .settings import NewModelSettings

__all__ = ["load_seq2seq_config"]


def load_seq2seq_config(settings: NewModelSettings) -> tuple[PreTrainedConfig, PreTrainedTokenizerBase]:
    """Do as `load_or_make_config`; errors as there, or ValueError if the tokenizer ends no text in its end token."""
    config, tokenizer = load_or_make_config(settings)
    if config.is_encoder_decoder:  # another model is refused for what it is
        _check_end_token(settings, tokenizer)
    if settings.model_name_or_path is None:
        # T5's: no [CLS] and [SEP], and the decoder starts with padding.
        config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
        config.decoder_start_token_id = tokenizer.pad_token_id
    return config, tokenizer


def _check_end_token(settings: NewModelSettings, tokenizer: PreTrainedTokenizerBase) -> None:
    end = tokenizer.eos_token_id
    if end is None or tokenizer(text_target="a")["input_ids"][-1:] != [end]:
        raise ValueError(
            f"the tokenizer of {settings.tokenizer_name or settings.model_name_or_path} ends no text in an end token "
            f"({'it has none' if end is None else repr(tokenizer.eos_token)}): generation would not learn to stop. "
            "Give one that does with --tokenizer_name, or set its eos_token and a post-processor that appends it"
        )
