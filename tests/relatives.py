"""The relatives of BERT and BART, including ModernBERT and Whisper, as rows of the table in architectures.py."""

from typing import Any

import torch
import transformers
from architectures import (
    BATCH,
    T5,
    VOCABULARY,
    Architecture,
    Head,
    choices,
    classes,
    source_and_target,
    span,
    text_inputs,
    token_classes,
    token_ids,
    tokens,
)

import hf_attn_variants

__all__ = ["ENCODERS", "ENCODER_DECODERS", "MODERNBERT", "RELATIVES", "ROTARY", "WHISPER"]


def _row(name: str, config: str, heads: dict[str, Head], inputs: Any, tiny: dict[str, Any]) -> Architecture:
    return Architecture(
        name=name,
        config_class=getattr(hf_attn_variants, f"AttnVariant{config}"),
        upstream_config_class=getattr(transformers, config),
        tiny={"vocab_size": VOCABULARY, "pad_token_id": 1, **tiny},
        heads=heads,
        inputs=inputs,
    )


def _encoder_heads(name: str, more: dict[str, Head]) -> dict[str, Head]:
    heads = {
        "Model": Head(),
        "ForMaskedLM": Head(tokens),
        "ForSequenceClassification": Head(classes),
        "ForMultipleChoice": Head(classes, inputs=choices),
        "ForTokenClassification": Head(token_classes),
        "ForQuestionAnswering": Head(span),
    }
    return {f"{name}{head}": row for head, row in (heads | more).items()}


def _with_one_end() -> dict[str, Any]:
    # BART classifies by the state at its end token, as many in each row.
    inputs = text_inputs()
    inputs["input_ids"][:, 1] = 2
    return inputs


def _decoder_heads(name: str, more: dict[str, Head]) -> dict[str, Head]:
    return {f"{name}{head}": row for head, row in ({"Model": Head()} | more).items()}


_BERT = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "intermediate_size": 37,
    "max_position_embeddings": 40,
}
_DECODER_LM = {"ForCausalLM": Head(tokens, config={"is_decoder": True})}
ENCODERS = (
    _row("roberta", "RobertaConfig", _encoder_heads("Roberta", _DECODER_LM), text_inputs, _BERT),
    _row(
        "electra",
        "ElectraConfig",
        _encoder_heads("Electra", _DECODER_LM | {"ForPreTraining": Head(token_classes)}),
        text_inputs,
        _BERT | {"embedding_size": 16},
    ),
    _row(
        "distilbert",
        "DistilBertConfig",
        _encoder_heads("DistilBert", {}),
        text_inputs,
        {"dim": 48, "n_layers": 2, "n_heads": 12, "hidden_dim": 37, "max_position_embeddings": 40},
    ),
)
# The second layer of two is local. Its window of two tokens on each side is shorter than the texts.
MODERNBERT = _row(
    "modernbert",
    "ModernBertConfig",
    _encoder_heads("ModernBert", {}),
    text_inputs,
    _BERT | {"local_attention": 4, "bos_token_id": 0, "eos_token_id": 2, "cls_token_id": 0, "sep_token_id": 2},
)

# Stacks of unequal heads, of which talking heads know nothing.
_BART = {
    "d_model": 48,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 12,
    "encoder_ffn_dim": 37,
    "decoder_ffn_dim": 33,
    "max_position_embeddings": 40,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
    "init_std": 0.2,
}
_GENERATION, _CAUSAL = {"ForConditionalGeneration": Head(tokens)}, {"ForCausalLM": Head(tokens, inputs=text_inputs)}
_ANSWERS = {
    "ForSequenceClassification": Head(classes, inputs=_with_one_end),
    "ForQuestionAnswering": Head(span, inputs=text_inputs),
}
_BART_FAMILY = tuple(
    _row(name.lower(), f"{name}Config", _decoder_heads(name, heads), source_and_target, _BART)
    for name, heads in {
        "Bart": _GENERATION | _CAUSAL | _ANSWERS,
        "MBart": _GENERATION | _CAUSAL | _ANSWERS,
        "Marian": {"MTModel": Head(tokens)} | _CAUSAL,
        "M2M100": _GENERATION,
        "Pegasus": _GENERATION | _CAUSAL,
    }.items()
)


class _UMT5(Architecture):
    """UMT5 with a correction: under sdpa, its decoder attends to future tokens in Transformers 5.15 to 5.17."""

    def make_upstream_model(self, head: str, seed: int = 0, **fields: Any) -> Any:
        model = super().make_upstream_model(head, seed, **fields)
        for name, module in model.named_modules():
            if "decoder." in name and name.endswith("SelfAttention"):
                module.is_causal = True
        return model


UMT5 = _UMT5(
    **vars(T5)
    | {
        "name": "umt5",
        "config_class": hf_attn_variants.AttnVariantUMT5Config,
        "upstream_config_class": transformers.UMT5Config,
        "tiny": T5.tiny | {"d_model": 48},
        "heads": {f"UM{head}": row for head, row in T5.heads.items()},
    }
)
ENCODER_DECODERS = (*_BART_FAMILY, UMT5)

_FRAMES, _MEL_BINS = 40, 8


def _speech() -> dict[str, torch.Tensor]:
    return {"input_features": torch.randn(BATCH, _MEL_BINS, _FRAMES)}


def _speech_and_target() -> dict[str, torch.Tensor]:
    return _speech() | {"decoder_input_ids": token_ids()}


def _target_of_states() -> dict[str, Any]:
    # The decoder without its encoder attends to given encoder outputs.
    return text_inputs() | {"encoder_outputs": torch.randn(BATCH, _FRAMES // 2, _BART["d_model"])}


WHISPER = _row(
    "whisper",
    "WhisperConfig",
    {
        "WhisperModel": Head(),
        "WhisperForConditionalGeneration": Head(tokens),
        "WhisperForCausalLM": Head(tokens, inputs=_target_of_states),
        "WhisperForAudioClassification": Head(classes, inputs=_speech, config={"use_weighted_layer_sum": True}),
    },
    _speech_and_target,
    {name: value for name, value in _BART.items() if name not in ("max_position_embeddings", "forced_eos_token_id")}
    | {
        "num_mel_bins": _MEL_BINS,
        "max_source_positions": _FRAMES // 2,
        "max_target_positions": 40,
        "begin_suppress_tokens": None,
        "classifier_proj_size": 16,
    },
)
# Rotary positions do not support latents, additive scores and some kernels.
ROTARY = (MODERNBERT,)
RELATIVES = (*ENCODERS, *ROTARY, *ENCODER_DECODERS, WHISPER)
