"""The relatives of BERT and BART, including Whisper, in the format of the table in architectures.py."""

from typing import Any

import torch
import transformers
from architectures import (
    BATCH,
    T5,
    VOCABULARY,
    Architecture,
    Head,
    make_choices,
    make_class_labels,
    make_source_and_target,
    make_span_labels,
    make_text_inputs,
    make_token_class_labels,
    make_token_ids,
    make_token_labels,
)

import hf_attn_variants

__all__ = ["ENCODERS", "ENCODER_DECODERS", "MODERNBERT", "NOMIC_BERT", "RELATIVES", "ROTARY", "WHISPER"]


def _make_architecture(
    name: str, config: str, heads: dict[str, Head], inputs: Any, tiny: dict[str, Any]
) -> Architecture:
    return Architecture(
        name=name,
        config_class=getattr(hf_attn_variants, f"AttnVariant{config}"),
        upstream_config_class=getattr(transformers, config),
        tiny={"vocab_size": VOCABULARY, "pad_token_id": 1, **tiny},
        heads=heads,
        inputs=inputs,
    )


def _make_encoder_heads(name: str, more: dict[str, Head]) -> dict[str, Head]:
    heads = {
        "Model": Head(),
        "ForMaskedLM": Head(make_token_labels),
        "ForSequenceClassification": Head(make_class_labels),
        "ForMultipleChoice": Head(make_class_labels, inputs=make_choices),
        "ForTokenClassification": Head(make_token_class_labels),
        "ForQuestionAnswering": Head(make_span_labels),
    }
    return {f"{name}{head}": row for head, row in (heads | more).items()}


def _with_one_end() -> dict[str, Any]:
    # BART classifies a text by the hidden state of its end token, and each row must have the same number of them.
    inputs = make_text_inputs()
    inputs["input_ids"][:, 1] = 2
    return inputs


def _make_decoder_heads(name: str, more: dict[str, Head]) -> dict[str, Head]:
    return {f"{name}{head}": row for head, row in ({"Model": Head()} | more).items()}


_BERT = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "intermediate_size": 37,
    "max_position_embeddings": 40,
}
_DECODER_LM = {"ForCausalLM": Head(make_token_labels, config={"is_decoder": True})}
ENCODERS = (
    _make_architecture(
        "roberta", "RobertaConfig", _make_encoder_heads("Roberta", _DECODER_LM), make_text_inputs, _BERT
    ),
    _make_architecture(
        "electra",
        "ElectraConfig",
        _make_encoder_heads("Electra", _DECODER_LM | {"ForPreTraining": Head(make_token_class_labels)}),
        make_text_inputs,
        _BERT | {"embedding_size": 16},
    ),
    _make_architecture(
        "distilbert",
        "DistilBertConfig",
        _make_encoder_heads("DistilBert", {}),
        make_text_inputs,
        {"dim": 48, "n_layers": 2, "n_heads": 12, "hidden_dim": 37, "max_position_embeddings": 40},
    ),
)
# The second layer of two is local. Its window of two tokens on each side is shorter than the texts.
MODERNBERT = _make_architecture(
    "modernbert",
    "ModernBertConfig",
    _make_encoder_heads("ModernBert", {}),
    make_text_inputs,
    _BERT | {"local_attention": 4, "bos_token_id": 0, "eos_token_id": 2, "cls_token_id": 0, "sep_token_id": 2},
)
_NOMIC_BERT_HEADS = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
NOMIC_BERT = _make_architecture(
    "nomic_bert",
    "NomicBertConfig",
    {name: head for name, head in _make_encoder_heads("NomicBert", {}).items() if name.endswith(_NOMIC_BERT_HEADS)},
    make_text_inputs,
    _BERT,
)

# The encoder and the decoder have different numbers of heads.
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
_GENERATION, _CAUSAL = (
    {"ForConditionalGeneration": Head(make_token_labels)},
    {"ForCausalLM": Head(make_token_labels, inputs=make_text_inputs)},
)
_ANSWERS = {
    "ForSequenceClassification": Head(make_class_labels, inputs=_with_one_end),
    "ForQuestionAnswering": Head(make_span_labels, inputs=make_text_inputs),
}
_BART_FAMILY = tuple(
    _make_architecture(name.lower(), f"{name}Config", _make_decoder_heads(name, heads), make_source_and_target, _BART)
    for name, heads in {
        "Bart": _GENERATION | _CAUSAL | _ANSWERS,
        "MBart": _GENERATION | _CAUSAL | _ANSWERS,
        "Marian": {"MTModel": Head(make_token_labels)} | _CAUSAL,
        "M2M100": _GENERATION,
        "Pegasus": _GENERATION | _CAUSAL,
    }.items()
)


class _UMT5(Architecture):
    """UMT5 with a fix for Transformers 5.15 to 5.17, whose decoder attends to future tokens with sdpa."""

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


def _make_speech() -> dict[str, torch.Tensor]:
    return {"input_features": torch.randn(BATCH, _MEL_BINS, _FRAMES)}


def _make_speech_and_target() -> dict[str, torch.Tensor]:
    return _make_speech() | {"decoder_input_ids": make_token_ids()}


def _target_of_states() -> dict[str, Any]:
    # A decoder without an encoder needs encoder outputs as inputs.
    return make_text_inputs() | {"encoder_outputs": torch.randn(BATCH, _FRAMES // 2, _BART["d_model"])}


WHISPER = _make_architecture(
    "whisper",
    "WhisperConfig",
    {
        "WhisperModel": Head(),
        "WhisperForConditionalGeneration": Head(make_token_labels),
        "WhisperForCausalLM": Head(make_token_labels, inputs=_target_of_states),
        "WhisperForAudioClassification": Head(
            make_class_labels, inputs=_make_speech, config={"use_weighted_layer_sum": True}
        ),
    },
    _make_speech_and_target,
    {name: value for name, value in _BART.items() if name not in ("max_position_embeddings", "forced_eos_token_id")}
    | {
        "num_mel_bins": _MEL_BINS,
        "max_source_positions": _FRAMES // 2,
        "max_target_positions": 40,
        "begin_suppress_tokens": None,
        "classifier_proj_size": 16,
    },
)
# Models with rotary positions do not support latents, additive scores or some kernels.
ROTARY = (MODERNBERT, NOMIC_BERT)
RELATIVES = (*ENCODERS, *ROTARY, *ENCODER_DECODERS, WHISPER)
