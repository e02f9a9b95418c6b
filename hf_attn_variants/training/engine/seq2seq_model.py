"""The model of text to text: a checkpoint's, or a T5 from scratch."""

from transformers import AutoModelForSeq2SeqLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from .models import load_config, load_model
from .new_model import new_config, new_model
from .settings import NewModelSettings
from .tokenizers import load_tokenizer

__all__ = ["load_seq2seq_config", "load_seq2seq_model"]


def load_seq2seq_config(settings: NewModelSettings) -> tuple[PreTrainedConfig, PreTrainedTokenizerBase]:
    """Load the tokenizer, and the config of the checkpoint or of the model from scratch that the settings describe.

    Raises:
        OSError: if the checkpoint or the tokenizer is not there.
        ValueError: if one cannot be used, they do not fit, the tokenizer ends no text in its end token, or a field of
            the new config is wrong.
    """
    if settings.model_name_or_path is not None:
        config = load_config(settings)
        tokenizer = load_tokenizer(settings, config)
        if config.is_encoder_decoder:  # another model is refused for what it is
            _check_end_token(settings, tokenizer)
        return config, tokenizer
    tokenizer = load_tokenizer(settings, None)
    _check_end_token(settings, tokenizer)
    config = new_config(settings, tokenizer)
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


def load_seq2seq_model(settings: NewModelSettings, config: PreTrainedConfig) -> PreTrainedModel:
    """Load the checkpoint, or make a new model with weights drawn at random, in float32.

    Raises:
        OSError: if the checkpoint cannot be read.
        ValueError: if it does not fit its config, or the machine cannot do `attn_implementation`.
    """
    if settings.model_name_or_path is None:
        return new_model(settings, config, AutoModelForSeq2SeqLM)
    return load_model(settings, config, AutoModelForSeq2SeqLM)
