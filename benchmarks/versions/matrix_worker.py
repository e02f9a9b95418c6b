"""Run one cell of `transformers_matrix.py`: save or load repositories with one version of Transformers.

`save FOLDER` needs this package and its tests on the path. `load FOLDER` runs only the code in the repositories. Both
print JSON as their last line.
"""

import dataclasses
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.modeling_outputs import BaseModelOutputWithPast

TENSORS = "expected.safetensors"
RANKS = {"kv_lora_rank": 16, "encoder_kv_lora_rank": 20, "cross_kv_lora_rank": 24}
VARIANTS: dict[str, dict[str, Any]] = {
    "gqa": {"num_key_value_heads": 4},
    "latent": {"num_key_value_heads": 4, "kv_lora_rank": 16},
    "talking": {"talking_heads": "both"},
    "dynamic": {"talking_heads": "both", "talking_heads_dynamic": ["x2l", "m2w"]},  # no cache in decoders
    "window": {"attention_pattern": "sliding_window", "attention_window": 4},
    "hedgehog": {"num_key_value_heads": 4, "attention_kernel": "hedgehog"},
    "hybrid": {"attention_kernel": "hybrid", "attention_window": 4},
}
WRITERS = ("ForConditionalGeneration", "MTModel", "LMHeadModel", "RobertaForCausalLM", "ElectraForCausalLM")
NEW_TOKENS = 6
# The numbers of tokens in consecutive calls with a cache.
PIECES = (3, 1, 1, 1, 1, 1, 1)
SEARCHES = {"greedy": 1, "tokens": 2}  # numbers of beams


def save(folder: Path) -> dict[str, Any]:
    """Save a repository with inputs and outputs for each architecture and variant, and return their names."""
    from architectures import ARCHITECTURES
    from relatives import RELATIVES

    import hf_attn_variants

    names = []
    for row in (*ARCHITECTURES, *RELATIVES):
        heads = [head for head in row.heads if head.endswith((*WRITERS, "ForMaskedLM"))]
        for head in heads:
            for variant in VARIANTS:
                if variant == "latent" and not row.config_class.get_rank_fields():
                    continue
                model = row.make_model(head, **_make_fields(row, variant))
                _make_coarse(model)
                repository = folder / f"{head}-{variant}"
                model.save_pretrained(repository)
                loaded = getattr(hf_attn_variants, type(model).__name__).from_pretrained(repository).eval()
                inputs = {name: value.contiguous() for name, value in row.make_batch(head).items()}
                named_inputs = {f"input.{name}": value for name, value in inputs.items()}
                save_file(named_inputs | _compute_outputs(loaded, inputs), repository / TENSORS)
                names.append(repository.name)
    return {"repositories": names, "transformers": transformers.__version__}


def load(folder: Path) -> dict[str, Any]:
    """Load each repository of a folder with its remote code, and return how its outputs differ or the error."""
    sys.modules["hf_attn_variants"] = None  # type: ignore[assignment]
    return {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "rows": [
            {"repository": repository.name} | _compare_repository(repository)
            for repository in sorted(folder.iterdir())
        ],
    }


def _make_fields(row: Any, variant: str) -> dict[str, Any]:
    fields = dict(VARIANTS[variant])
    if variant == "latent" and hasattr(row.config_class, "encoder_decoder_layers"):
        fields |= RANKS
    if "talking_heads" in fields and "encoder_attention_heads" in row.tiny:
        fields["encoder_attention_heads"] = 12  # talking heads need equal heads in encoder and decoder
    if "attention_kernel" in fields and row.name in ("t5", "umt5"):
        fields["position_embedding_type"] = "sinusoidal"  # kernels cannot add a relative bias
    return fields


def _make_coarse(model: Any) -> None:
    # With few distinct numbers, an archive of the repositories is small.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((parameter * 16).round() / 16)


def _can_generate(model: Any) -> bool:
    return type(model).__name__.endswith(WRITERS)


def _cache_name() -> str:
    """Return the name of the cache in this version of Transformers, without importing this package."""
    names = {field.name for field in dataclasses.fields(BaseModelOutputWithPast)}
    return "cache" if "cache" in names else "past_key_values"


def _keeps_cache(model: Any) -> bool:
    """Return whether a decoder supports a cache; key-side dynamic projections do not."""
    return not any(name.startswith("m2") for name in getattr(model.config, "talking_heads_dynamic", None) or ())


@torch.no_grad()
def _compute_outputs(model: Any, inputs: dict[str, torch.Tensor], **options: Any) -> dict[str, torch.Tensor]:
    """Return the logits and, if the model generates text, the tokens of each search."""
    outputs = {"logits": model(**inputs).logits.contiguous()}
    if _can_generate(model):
        encoder_inputs = {name: value for name, value in inputs.items() if name != "decoder_input_ids"}
        if not model.config.is_encoder_decoder:  # a prompt must not be padded on the right
            encoder_inputs = {"input_ids": encoder_inputs["input_ids"]}
        options |= {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
        for name, beams in SEARCHES.items():
            outputs[name] = model.generate(**encoder_inputs, **options, num_beams=beams).contiguous()
    return outputs


@torch.no_grad()
def _compare_cached_steps(model: Any, inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return the largest difference between the logits of cached steps and of one pass, and the cache lengths."""
    is_pair, name = model.config.is_encoder_decoder, _cache_name()
    text = "decoder_input_ids" if is_pair else "input_ids"
    source = {key: value for key, value in inputs.items() if key != text} if is_pair else {}
    full_logits = model(**source, **{text: inputs[text]}, use_cache=False).logits
    cache, lengths, steps = {}, [], []
    for piece in inputs[text].split(PIECES, 1):
        output = model(**source, **{text: piece}, **cache, use_cache=True)
        cache = {name: getattr(output, name)}
        steps.append(output.logits)
        lengths.append(int(cache[name].get_seq_length()))
    return {"steps_difference": float((torch.cat(steps, 1) - full_logits).abs().max()), "cache_lengths": lengths}


def _compare_repository(repository: Path) -> dict[str, Any]:
    saved = load_file(repository / TENSORS)
    inputs = {name.removeprefix("input."): value for name, value in saved.items() if name.startswith("input.")}
    try:
        model = _load_repository(repository)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            outputs = _compute_outputs(model, inputs)
            cached = _compare_cached_steps(model, inputs) if _can_generate(model) and _keeps_cache(model) else {}
        if cached:  # the repositories do not contain these tokens
            saved |= {
                f"uncached {name}": value for name, value in _compute_outputs(model, inputs, use_cache=False).items()
            }
    except Exception as error:  # any error is a result of the matrix
        return {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
    row: dict[str, Any] = {
        "largest_difference": float((outputs["logits"] - saved["logits"]).abs().max()),
        "largest_logit": float(saved["logits"].abs().max()),
    }
    same = {}
    for name in set(SEARCHES) & set(outputs):
        expected = [saved[key] for key in (name, f"uncached {name}") if key in saved]
        same[f"same_{name}"] = all(torch.equal(outputs[name], output) for output in expected)
    deprecated = [warning for warning in caught if issubclass(warning.category, (FutureWarning, DeprecationWarning))]
    messages = sorted({str(warning.message).splitlines()[0] for warning in deprecated})
    return row | dict(sorted(same.items())) | cached | ({"warnings": messages} if messages else {})


def _load_repository(repository: Path) -> Any:
    config = transformers.AutoConfig.from_pretrained(repository, trust_remote_code=True)
    places = {name.rpartition(".")[2]: auto for auto, name in config.auto_map.items() if "PreTraining" not in auto}
    auto_class = getattr(transformers, places[config.architectures[0]])
    model, info = auto_class.from_pretrained(repository, trust_remote_code=True, output_loading_info=True)
    if missing := sorted(info["missing_keys"]):
        raise ValueError(f"{len(missing)} tensors were not loaded, for example {missing[0]}.")
    return model.eval()


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    os.environ["HF_HUB_OFFLINE"] = "1"
    print(json.dumps({"save": save, "load": load}[sys.argv[1]](Path(sys.argv[2]))))
