"""Which models CTranslate2 has a form for, asked of a configuration: of the variants, those of grouped heads."""

from typing import Any

from ..decoder_inputs import DecoderInput, decoder_input
from ..modeling.fields.field_table import row_of
from ..modeling.fields.foreign_classes import fields_in_effect
from .upstream import upstream_architecture

__all__ = ["ACTIVATIONS", "SPECIFIED", "check_has_form"]

# By upstream's `model_type`: the hosts that `ctranslate2_specs` knows.
SPECIFIED = ("t5", "umt5", "bart", "mbart", "marian", "m2m_100", "pegasus", "whisper")
# CTranslate2's activations by transformers' names, which are its own in small letters or others.
ACTIVATIONS = {
    **{name.lower(): name for name in ("GELU", "RELU", "Sigmoid", "SWISH", "Tanh")},
    "gelu_fast": "GELUTanh",
    "gelu_new": "GELUTanh",
    "gelu_python": "GELU",
    "gelu_pytorch_tanh": "GELUTanh",
    "quick_gelu": "GELUSigmoid",
    "silu": "SWISH",
}


def check_has_form(model_class: type, config: Any) -> None:
    """Check that CTranslate2 computes what a model of a variant configuration does; no tensor is asked.

    Heads may be any, in each layer. Latents are multiplied in. Every other field of the table has to be as in a model
    without a variant.

    Raises:
        ValueError: if it does not; the message names the class, or the field.
    """
    name, host = upstream_architecture(model_class), config.upstream_model_types[0]
    if host not in SPECIFIED or decoder_input(model_class, config) is not DecoderInput.OWN_TARGETS:
        raise ValueError(
            f"a {name} cannot be exported to CTranslate2: encoder-decoders that generate can, of "
            f"{', '.join(SPECIFIED)}."
        )
    for field in fields_in_effect(config):
        if row_of(field)[1].unknown_upstream:
            raise ValueError(
                f"`{field}` is {getattr(config, field)!r}, which CTranslate2 cannot compute: of the variants it has "
                "grouped heads only. Try `--to onnx`."
            )
    activation = config.dense_act_fn if host in ("t5", "umt5") else config.activation_function
    # A Whisper's encoder has no field of its own for it.
    known = [each for each, form in ACTIVATIONS.items() if host != "whisper" or form == "GELU"]
    if activation not in known:
        raise ValueError(
            f"the activation {activation!r} of a {name} has no form in CTranslate2: {', '.join(known)} have."
        )
    if not getattr(config, "share_encoder_decoder_embeddings", True):
        raise ValueError(
            "`share_encoder_decoder_embeddings` is False: a model with two vocabularies cannot be exported."
        )
