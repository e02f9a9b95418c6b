"""Records of models in memory: outputs, gradients, generation, `share_memory` and `quantize`."""

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from architectures import ARCHITECTURES
from fixtures.golden_repositories import ARCHITECTURE_HEADS, MECHANISMS, get_mechanism_fields, supports_mechanism
from fixtures.upstream_seq2seq import FAMILIES, make_source_batch, make_tiny_model
from relatives import RELATIVES

import hf_attn_variants

from .digests import Record, digest, record_each

__all__ = ["models", "quantized", "shared_memory"]

SIX_TOKENS: dict[str, Any] = {"max_new_tokens": 6, "min_new_tokens": 6}
SEARCHES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "3 beams": {"num_beams": 3},
    "static cache": {"cache_implementation": "static"},
    "3 beams, static cache": {"num_beams": 3, "cache_implementation": "static"},
}
MORE_SEARCHES: dict[str, dict[str, Any]] = {
    "2 of 4 beams": {"num_beams": 4, "num_return_sequences": 2},
    "3 samples": {"do_sample": True, "num_return_sequences": 3},
}
BERT_SIZES = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 512}
T5_SIZES = {"d_model": 256, "d_kv": 64, "d_ff": 512, "num_layers": 2, "num_heads": 4}
VARIANTS: dict[str, dict[str, Any]] = {
    "gqa": {"num_key_value_heads": 2},
    "latent": {"num_key_value_heads": 2, "kv_lora_rank": 64},
    "talking": {"talking_heads": "both"},
}


def models() -> Record:
    """Return the records of every architecture with every mechanism that it supports, and of every head."""
    mechanisms = {
        f"{architecture}, {name}": (architecture, name)
        for architecture in ARCHITECTURE_HEADS
        for name in MECHANISMS
        if supports_mechanism(architecture, name)
    }
    heads = {head: row for row in (*ARCHITECTURES, *RELATIVES) for head in row.heads}
    return record_each(mechanisms, lambda item: _record_model(*mechanisms[item])) | record_each(
        heads,
        lambda head: _record_head(heads[head].make_model(head, "gqa"), heads[head].make_batch(head, labels=True)),
    )


def shared_memory() -> Record:
    """Return the records of generation after `share_memory`, for the encoder-decoders of Transformers."""
    items = {f"{name}, {form}": (name, form) for name in FAMILIES for form in ("keys_and_values", "encoder_outputs")}

    def generated(item: str) -> Record:
        family, form = items[item]
        model = hf_attn_variants.share_memory(make_tiny_model(family), cross_cache=form)
        return _record_generation(model, make_source_batch(family), SEARCHES | MORE_SEARCHES)

    return record_each(items, generated)


def quantized() -> Record:
    """Return the records of `quantize` with each backend for int8 products, and in bfloat16."""
    paths = {
        f"{kind}, {name}": (kind, path) for kind in ("bert", "t5") for name, path in _find_int8_backends().items()
    }
    chosen = {
        f"{kind}, {variant}, {dtype}": (kind, variant, dtype)
        for kind in ("bert", "t5")
        for variant in (None, *VARIANTS)
        for dtype in ("int8", "bfloat16")
    }

    def on_path(item: str) -> Record:
        kind, path = paths[item]
        with _use_fixed_backend(path):
            return _record_quantized(kind, "gqa", "int8", generates=False)

    return record_each(paths, on_path) | record_each(chosen, lambda item: _record_quantized(*chosen[item]))


def _record_model(architecture: str, mechanism: str) -> Record:
    torch.manual_seed(0)
    row, head = ARCHITECTURE_HEADS[architecture]
    model, batch = row.make_model(head, **get_mechanism_fields(architecture, mechanism)), row.make_batch(head)
    state = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    records = {"tensors": digest(state, *model.state_dict().values())}
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            records[implementation] = digest(model(**batch, use_cache=False).logits)
        model.zero_grad()
        model(**batch, use_cache=False).logits.float().square().mean().backward()
        gradients = [
            (name, tensor.grad) for name, tensor in sorted(model.named_parameters()) if tensor.grad is not None
        ]
        records[f"{implementation}, gradients"] = digest(
            [name for name, _ in gradients], *(tensor for _, tensor in gradients)
        )
    with torch.no_grad():
        outputs = model(**batch, use_cache=False, output_attentions=True, output_hidden_states=True)
    records["attentions and hidden states"] = digest(*_collect_tensors(tuple(outputs.values())))
    model.set_attn_implementation("sdpa")
    decodes = model.config.is_encoder_decoder or getattr(model.config, "is_decoder", False)
    if model.can_generate() and decodes:
        inputs = {name: tensor for name, tensor in batch.items() if not name.startswith(("decoder_", "labels"))}
        records |= _record_generation(model, inputs, SEARCHES)
    return records


def _record_head(model: Any, batch: dict[str, torch.Tensor]) -> Record:
    with torch.no_grad():
        return {"outputs": digest(*_collect_tensors(tuple(model(**batch).values())))}


@torch.no_grad()
def _record_generation(model: Any, inputs: dict[str, torch.Tensor], searches: dict[str, dict[str, Any]]) -> Record:
    """Return the tokens and scores of each search, or the type of the error if the model does not support it."""
    records: Record = {}
    is_whisper = "whisper" in model.config.model_type
    options = SIX_TOKENS | ({"return_timestamps": False} if is_whisper else {"pad_token_id": 0})
    for name, search in searches.items():
        torch.manual_seed(0)
        try:
            output = model.generate(
                **inputs, **{"do_sample": False} | options | search, return_dict_in_generate=True, output_scores=True
            )
            records[name] = digest(output["sequences"], *output["scores"])
        except (ValueError, RuntimeError, TypeError, AttributeError, NotImplementedError) as error:
            records[name] = type(error).__name__
    return records


def _record_quantized(kind: str, variant: str | None, dtype: str, generates: bool = True) -> Record:
    prefix = "AttnVariant" if variant else ""
    library: Any = hf_attn_variants if variant else transformers
    fields = VARIANTS.get(variant or "", {})
    head, sizes = ("BertForMaskedLM", BERT_SIZES) if kind == "bert" else ("T5ForConditionalGeneration", T5_SIZES)
    ids = {"decoder_start_token_id": 0} if kind == "t5" else {"max_position_embeddings": 64}
    config = getattr(library, f"{prefix}{'Bert' if kind == 'bert' else 'T5'}Config")
    torch.manual_seed(0)
    model = getattr(library, prefix + head)(config(vocab_size=300, **sizes, **ids, **fields)).eval()
    tokens = torch.randint(4, 300, (3, 17), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(17) < torch.tensor([17, 11, 4])[:, None]).long()
    inputs = {"input_ids": tokens, "attention_mask": mask}
    if kind == "t5" and variant is None:
        hf_attn_variants.share_memory(model)
    model = hf_attn_variants.quantize(model, dtype)
    with torch.no_grad():
        logits = model(**inputs, **({"decoder_input_ids": tokens[:, :5]} if kind == "t5" else {})).logits
    layers = [
        f"{path} {type(module).__name__}" for path, module in model.named_modules() if hasattr(module, "in_features")
    ]
    records = {"logits": digest(logits), "layers": digest(layers)}
    return records | (_record_generation(model, inputs, SEARCHES) if kind == "t5" and generates else {})


def _find_int8_backends() -> dict[str, Any]:
    """Return the named backends whose int8 products are correct on this processor, or none if their module has moved.

    This function and `_use_fixed_backend` import an internal module, because the package would choose the fastest
    backend by time. All backends return the same bits. Therefore, if the module has moved, the records without a fixed
    backend can still be compared.
    """
    try:
        module: Any = importlib.import_module("hf_attn_variants.quantization.int8_weight")
        engine = torch.backends.quantized.engine
        return {
            f"{path.name}, {bits} bits": (path, bits)
            for bits in module.MAX_MAGNITUDES
            for path in module._find_correct_backends(engine, bits)
        }
    except (ImportError, AttributeError) as error:
        print(f"  The backend of int8 products cannot be fixed: {error}", flush=True)
        return {}


@contextlib.contextmanager
def _use_fixed_backend(path: Any) -> Iterator[None]:
    module: Any = importlib.import_module("hf_attn_variants.quantization.int8_weight")
    chosen = module.get_current_plan
    module.get_current_plan = lambda: module.ExecutionPlan(path[1], (path[0],) * len(module.ROW_COUNTS))
    try:
        yield
    finally:
        module.get_current_plan = chosen


def _collect_tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _collect_tensors(item)
