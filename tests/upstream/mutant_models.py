"""Tiny models of every architecture and their measurements, inside one mutant of Transformers.

This module imports no class of Transformers at its top, because the import hook of the mutant must come first.
"""

import importlib
import inspect
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

# Without dropout, a model has the same outputs in training and in evaluation.
_DROPS_NOTHING = dict.fromkeys(
    ("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout_rate", "dropout", "attention_dropout"), 0.0
)
VOCABULARY, BATCH, LENGTH, WIDTH = 24, 2, 5, 16
NEW_TOKENS = 3
CACHE_NAMES = ("cache", "past_key_values")  # since Transformers 5.24, and before

_BERT = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 20}
_BERT |= {"max_position_embeddings": 24, "pad_token_id": 1}
_T5 = {"d_model": WIDTH, "d_kv": 4, "d_ff": 20, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
_T5 |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 10}
_STACK = {"layers": 2, "attention_heads": 4, "ffn_dim": 20}
_IDS = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
_DECODERS = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in _STACK.items()}
_DECODERS |= {"d_model": WIDTH, **_IDS, "forced_eos_token_id": None}
_BART = _DECODERS | {"max_position_embeddings": 24}
_WHISPER = _DECODERS | {"num_mel_bins": 4, "max_source_positions": 8, "max_target_positions": 24}
_WHISPER |= {"begin_suppress_tokens": None, "suppress_tokens": None}
_DISTILBERT = {"dim": WIDTH, "n_layers": 2, "n_heads": 4, "hidden_dim": 20, "max_position_embeddings": 24}
_MODERNBERT = _BERT | {
    "bos_token_id": 0,
    "eos_token_id": 2,
    "cls_token_id": 0,
    "sep_token_id": 2,
    "local_attention": 4,
}
_DECODER = {"is_decoder": True, "add_cross_attention": True}
_LATENT, _CROSS = {"kv_lora_rank": WIDTH}, {"encoder_kv_lora_rank": WIDTH, "cross_kv_lora_rank": WIDTH}
_SINES = {"position_embedding_type": "sinusoidal"}
_WINDOW = {"attention_pattern": "sliding_window", "attention_window": 4}
_WINDOWS = _WINDOW | {f"encoder_{name}": value for name, value in _WINDOW.items()}


@dataclass(frozen=True)
class Model:
    """A head of Transformers, its configuration, its type of inputs, and the variants of this package."""

    head: str
    config: dict[str, Any]
    use: str  # "encoder", "decoder", "encoder-decoder" or "speech"
    exact: dict[str, Any] = field(default_factory=dict)  # fields that do not change outputs
    own: dict[str, dict[str, Any]] = field(default_factory=dict)  # fields without a Transformers model


def _make_encoder(head: str, config: dict[str, Any]) -> Model:
    return Model(head, config, "encoder", _LATENT, {"sines": _SINES | {"kv_lora_rank": 8}, "windows": _WINDOW})


def _make_decoder(head: str) -> Model:
    return Model(
        head, _BERT | _DECODER, "decoder", _LATENT, {"sines": _SINES | {"kv_lora_rank": 8}, "windows": _WINDOW}
    )


def _make_encoder_decoder(head: str, config: dict[str, Any], use: str = "encoder-decoder") -> Model:
    ranks = {"kv_lora_rank": 8, "encoder_kv_lora_rank": 8, "cross_kv_lora_rank": 8}
    sines = _SINES if "d_kv" in config else {}
    return Model(head, config, use, _LATENT | _CROSS, {"sines": ranks | sines, "windows": _WINDOWS})


MODELS: dict[str, tuple[Model, ...]] = {
    "bert": (_make_encoder("BertForMaskedLM", _BERT), _make_decoder("BertLMHeadModel")),
    "albert": (_make_encoder("AlbertForMaskedLM", _BERT | {"embedding_size": 12}),),
    "t5": (_make_encoder_decoder("T5ForConditionalGeneration", _T5),),
    "umt5": (_make_encoder_decoder("UMT5ForConditionalGeneration", _T5),),
    "bart": (_make_encoder_decoder("BartForConditionalGeneration", _BART),),
    "mbart": (_make_encoder_decoder("MBartForConditionalGeneration", _BART),),
    "marian": (_make_encoder_decoder("MarianMTModel", _BART),),
    "m2m_100": (_make_encoder_decoder("M2M100ForConditionalGeneration", _BART),),
    "pegasus": (_make_encoder_decoder("PegasusForConditionalGeneration", _BART),),
    "whisper": (_make_encoder_decoder("WhisperForConditionalGeneration", _WHISPER, "speech"),),
    "roberta": (_make_encoder("RobertaForMaskedLM", _BERT), _make_decoder("RobertaForCausalLM")),
    "distilbert": (_make_encoder("DistilBertForMaskedLM", _DISTILBERT),),
    "electra": (_make_encoder("ElectraForMaskedLM", _BERT), _make_decoder("ElectraForCausalLM")),
    # Rotary positions do not support latents.
    "modernbert": (Model("ModernBertForMaskedLM", _MODERNBERT, "encoder", own={"windows": _WINDOW}),),
    "nomic_bert": (Model("NomicBertForMaskedLM", _BERT, "encoder", own={"windows": _WINDOW}),),
}


def get_transformers_class(architecture: str, model: Model) -> type:
    """Return the class of the mutated Transformers."""
    return getattr(importlib.import_module(f"transformers.models.{architecture}.modeling_{architecture}"), model.head)


def get_variant_class(architecture: str, model: Model) -> type:
    """Return the class of this package, loaded with the mutated Transformers."""
    module = importlib.import_module(f"hf_attn_variants.modeling.architectures.modeling_attn_variant_{architecture}")
    return getattr(module, f"AttnVariant{model.head}")


def build(model_class: type, config: dict[str, Any]) -> Any:
    """Return a model in evaluation mode with weights far from their small initial values."""
    torch.manual_seed(0)
    known = inspect.signature(model_class.config_class.__init__).parameters
    drops = {name: value for name, value in _DROPS_NOTHING.items() if name in known}
    model = model_class(model_class.config_class(vocab_size=VOCABULARY, **drops, **config)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:  # sinusoidal tables do not change
                weight.add_(torch.randn_like(weight), alpha=0.4)
    model.tie_weights()
    return model


def take(model: Any, tensors: list[torch.Tensor]) -> Any:
    """Copy weights between two models that have the same weights in the same order, under any names."""
    names = list(model.state_dict())
    if len(names) != len(tensors):
        raise RuntimeError(f"{len(names)} weights instead of {len(tensors)}")
    model.load_state_dict(dict(zip(names, tensors, strict=True)))
    return model


def save_and_load(model: Any, read: Callable[[str], Any]) -> Any:
    """Save a model and load it again."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return read(folder).eval()


@torch.no_grad()
def measure(model: Any, use: str, generates: bool = True) -> dict[str, torch.Tensor]:
    """Return a dictionary of the outputs of a model."""
    torch.manual_seed(1)
    ids = torch.randint(5, VOCABULARY, (BATCH, LENGTH))
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[1, -2:] = 0
    if use == "encoder":
        return _measure_encoder(model, ids, mask)
    others = torch.randint(5, VOCABULARY, (BATCH, LENGTH + 1))
    if use == "decoder":
        memory = {"encoder_hidden_states": torch.randn(BATCH, LENGTH, WIDTH), "encoder_attention_mask": mask}
        results = {"padded": model(input_ids=ids, attention_mask=mask, **memory).logits[0]}
        results |= _measure_decoder(model, others, "input_ids", memory)
        inputs = {"input_ids": others[:, :2], "attention_mask": torch.ones_like(others[:, :2]), **memory}
    elif use == "speech":
        source = {"input_features": torch.randn(BATCH, 4, 16)}
        results, inputs = _measure_encoder_decoder(model, source, {}, others), source
    else:
        inputs = {"input_ids": ids, "attention_mask": mask}
        results = _measure_encoder_decoder(model, {"input_ids": ids}, {"attention_mask": mask}, others)
    return results | (_measure_generation(model, inputs, use == "decoder") if generates else {})


def _measure_encoder(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    known = inspect.signature(model.forward).parameters
    places = {"position_ids": torch.arange(LENGTH).flip(0)[None]}
    types = {"token_type_ids": (ids % 2)} if "token_type_ids" in known else {}
    embedded = model.get_input_embeddings()(ids)
    return {
        "trained": model.train()(input_ids=ids, attention_mask=mask).logits[:, : LENGTH - 2],
        "logits": model.eval()(input_ids=ids, attention_mask=mask).logits[:, : LENGTH - 2],
        "typed": model(input_ids=ids, attention_mask=mask, **types).logits[:, : LENGTH - 2],
        "embedded": model(inputs_embeds=embedded, **(places if "position_ids" in known else {}), **types).logits,
    }


def _measure_encoder_decoder(
    model: Any, source: dict[str, Any], mask: dict[str, Any], targets: torch.Tensor
) -> dict[str, torch.Tensor]:
    results = {"trained": model.train()(**source, **mask, decoder_input_ids=targets).logits}
    results |= {"logits": model.eval()(**source, **mask, decoder_input_ids=targets).logits}
    encoded = model(**source, **mask, decoder_input_ids=targets[:, :1])
    states = (encoded.encoder_last_hidden_state,)
    return results | _measure_decoder(model, targets, "decoder_input_ids", mask | {"encoder_outputs": states})


def _measure_decoder(model: Any, ids: torch.Tensor, name: str, memory: dict[str, Any]) -> dict[str, torch.Tensor]:
    get_cache_name, steps, cache = _cache_name(model), [], None
    for step in range(ids.shape[1]):
        part = {name: ids[:, step : step + 1], get_cache_name: cache}
        output = model(**part, use_cache=True, **memory)
        cache = getattr(output, get_cache_name)
        steps.append(output.logits)
    return {"whole": model(**{name: ids}, use_cache=False, **memory).logits, "steps": torch.cat(steps, 1)}


def _cache_name(model: Any) -> str:
    parameters = inspect.signature(model.forward).parameters
    return next(item for item in CACHE_NAMES if item in parameters)


def _measure_generation(model: Any, inputs: dict[str, Any], brings_cache: bool) -> dict[str, torch.Tensor]:
    options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
    results = {}
    for beams in (1, 2):
        if brings_cache:
            # For a decoder, `generate` creates a cache without cross-attention, with which Transformers fails.
            caches = vars(importlib.import_module("transformers.cache_utils"))
            pair = caches.get("EncoderDecoderCache") or caches["RenamedEncoderDecoderCache"]
            options[_cache_name(model)] = pair(caches["DynamicCache"](), caches["DynamicCache"]())
        results[f"{beams} beams"] = model.generate(**inputs, **options, num_beams=beams)
    return results


def find_first_difference(result: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> str | None:
    """Return the name and the difference of the first measurement that differs by more than rounding, or None."""
    for name, expected_value in expected.items():
        actual = result.get(name)
        if actual is None:
            continue
        if actual.shape != expected_value.shape:
            return f"{name}: {tuple(actual.shape)} instead of {tuple(expected_value.shape)}"
        if not torch.allclose(actual.float(), expected_value.float(), rtol=1e-3, atol=1e-3):
            return f"{name}: off by {(actual.float() - expected_value.float()).abs().max():.2g}"
    if "steps" in result and not torch.allclose(result["steps"], result["whole"], rtol=1e-3, atol=1e-3):
        return "steps: not the whole"
    return None
