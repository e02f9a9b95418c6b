"""The model of text to text: a checkpoint's, or a T5 from scratch."""

import argparse

import torch
from transformers import AutoModelForSeq2SeqLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from .models import enable_gradient_checkpointing, load_config, load_model, load_tokenizer
from .new_model import new_config

__all__ = ["load_seq2seq_config", "load_seq2seq_model"]


def load_seq2seq_config(args: argparse.Namespace) -> tuple[PreTrainedConfig, PreTrainedTokenizerBase]:
    """Loads the tokenizer, and the config of the checkpoint or of the model from scratch that the flags describe.

    Args:
        args: Reads `model_name_or_path`, or else `model_type`, `config_overrides`, `num_key_value_heads`,
            `talking_heads`; `tokenizer_name`, `dropout_rate`.

    Raises:
        OSError: The checkpoint or the tokenizer is not there.
        ValueError: One cannot be used, they do not fit, the tokenizer ends no text in its end token, or a field of the
            new config is wrong.
    """
    if args.model_name_or_path is not None:
        config = load_config(args)
        tokenizer = load_tokenizer(args, config)
        if config.is_encoder_decoder:  # another model is refused for what it is
            _check_end_token(args, tokenizer)
        return config, tokenizer
    tokenizer = load_tokenizer(args, None)
    _check_end_token(args, tokenizer)
    config = new_config(args, tokenizer)
    # T5's: no [CLS] and [SEP], and the decoder starts with padding.
    config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    config.decoder_start_token_id = tokenizer.pad_token_id
    return config, tokenizer


def _check_end_token(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> None:
    end = tokenizer.eos_token_id
    if end is None or tokenizer(text_target="a")["input_ids"][-1:] != [end]:
        raise ValueError(
            f"the tokenizer of {args.tokenizer_name or args.model_name_or_path} ends no text in an end token "
            f"({'it has none' if end is None else repr(tokenizer.eos_token)}): generation would not learn to stop. "
            "Give one that does with --tokenizer_name, or set its eos_token and a post-processor that appends it"
        )


def load_seq2seq_model(args: argparse.Namespace, config: PreTrainedConfig) -> PreTrainedModel:
    """Loads the checkpoint, or makes a new model with weights drawn at random, in float32.

    Args:
        args: Reads `model_name_or_path`, `attn_implementation`, `gradient_checkpointing`, `trust_remote_code`.
        config: Of `load_seq2seq_config`.

    Raises:
        OSError: The checkpoint cannot be read.
        ValueError: It does not fit its config, or the machine cannot do `attn_implementation`.
    """
    if args.model_name_or_path is not None:
        model = load_model(args, args.model_name_or_path, config, AutoModelForSeq2SeqLM)
    else:
        try:
            model = AutoModelForSeq2SeqLM.from_config(
                config, dtype=torch.float32, attn_implementation=args.attn_implementation
            )
        except (ValueError, ImportError) as error:
            raise ValueError(f"cannot build a new {args.model_type} model: {error}") from error
    if args.gradient_checkpointing:
        enable_gradient_checkpointing(model)
    return model
