"""Compare every architecture with Transformers on the device, and every variant with the CPU.

In half precision, outputs differ by rounding. The limit is 1.5 times the distance between the half-precision and the
float32 model of Transformers. The architectures are those of the tests, at their tiny sizes. The `real` cells have
heads of 64 and 512 tokens, for which other kernels are used.
"""

import argparse
from dataclasses import replace
from typing import Any

import torch
from architectures import ALBERT, ARCHITECTURES, BASE_HEADS, BERT, T5, VARIANTS, Architecture
from relatives import RELATIVES

import hf_attn_variants
from benchmarks.gpu.cells import Cells, compute_relative_error, main

DTYPES = ("float32", "bfloat16", "float16")
IMPLEMENTATIONS = ("eager", "sdpa")
# The limit of float32 covers another order of sums. For half precision, it is a multiple of the error of
# Transformers, plus two roundings, because few values can be close to float32 by chance.
FLOAT32_LIMIT, MAX_UPSTREAM_RATIO, ABSOLUTE_TOLERANCES = 2e-5, 1.5, {"bfloat16": 2**-7, "float16": 2**-10}
# The limits for a variant, which is compared with itself on the CPU in float32.
VARIANT_LIMITS = {"float32": 1e-4, "bfloat16": 6e-2, "float16": 1e-2}
ALL_ARCHITECTURES = (*ARCHITECTURES, *RELATIVES)
REAL_LENGTH, REAL_BATCH = 512, 4
SIZES = {"num_hidden_layers": 2, "num_attention_heads": 12, "intermediate_size": 3072, "hidden_size": 768}
SIZES |= {"vocab_size": 32000, "max_position_embeddings": 512}
REAL_ARCHITECTURES = {
    "bert": (BERT, SIZES),
    "albert": (ALBERT, SIZES | {"embedding_size": 128}),
    "t5": (T5, {"d_model": 768, "d_kv": 64, "d_ff": 2048, "num_layers": 2, "num_heads": 12, "vocab_size": 32000}),
}


def make_cells(args: argparse.Namespace) -> Cells:
    """Return one cell per architecture and number format, then the real sizes, then one per variant and format."""
    cells: Cells = {}
    for architecture in ALL_ARCHITECTURES:
        for dtype in DTYPES:
            cells[f"{architecture.name}, {dtype}"] = lambda architecture=architecture, dtype=dtype: (
                measure_architecture_parity(architecture, args.device, dtype)
            )
    for name, (architecture, sizes) in REAL_ARCHITECTURES.items():
        for dtype in DTYPES if not args.tiny else ():
            cells[f"real {name}, {dtype}"] = lambda architecture=architecture, sizes=sizes, dtype=dtype: (
                measure_real_parity(replace(architecture, tiny=architecture.tiny | sizes), args.device, dtype)
            )
    for architecture in ARCHITECTURES:
        for variant in VARIANTS:
            for dtype in DTYPES:
                cells[f"{architecture.name} {variant}, {dtype}"] = (
                    lambda architecture=architecture, variant=variant, dtype=dtype: measure_variant_parity(
                        architecture, variant, args.device, dtype
                    )
                )
    return cells


def measure_architecture_parity(architecture: Architecture, device: str, dtype: str) -> dict[str, Any]:
    """Return the largest errors over an architecture's heads with both implementations, including gradients."""
    largest_errors: dict[str, float] = {"ours": 0.0, "upstream": 0.0}
    misses, tokens = [], None
    for head in architecture.heads:
        upstream, variant_model = make_pair(architecture, head)
        batch = architecture.make_batch(head, labels=True)
        with torch.no_grad():
            exact = compute_outputs(upstream.to(device), to_device(batch, device))
        for implementation in IMPLEMENTATIONS:
            for model in (upstream, variant_model):
                model.set_attn_implementation(implementation)
                model.to(device, getattr(torch, dtype))
            errors = compare(
                variant_model, upstream, to_device(batch, device, dtype), exact, with_gradients=dtype == "float32"
            )
            for name, (of_ours, of_upstream) in errors.items():
                largest_errors["ours"], largest_errors["upstream"] = (
                    max(largest_errors["ours"], of_ours),
                    max(largest_errors["upstream"], of_upstream),
                )
                if not of_ours <= get_limit(dtype, of_upstream):
                    misses.append([head, implementation, name, of_ours, of_upstream])
        if dtype == "float32" and (tokens is None or tokens):
            has_same_tokens = generates_same_tokens(variant_model, upstream, to_device(batch, device))
            tokens = tokens if has_same_tokens is None else has_same_tokens
    return {
        "errors": largest_errors,
        "misses": misses,
        "same_tokens": tokens,
        "met": not misses and tokens is not False,
    }


def make_pair(architecture: Architecture, head: str, **fields: Any) -> tuple[Any, Any]:
    """Return the Transformers model with a given head and ours, with the same weights."""
    upstream = architecture.make_upstream_model(head)
    variant_model = getattr(hf_attn_variants, f"AttnVariant{head}")(
        architecture.make_config(head=head, **fields)
    ).eval()
    variant_model.load_state_dict(upstream.state_dict())
    variant_model.tie_weights()
    return upstream, variant_model


def to_device(batch: dict[str, Any], device: str, dtype: str = "float32") -> dict[str, Any]:
    """Return a batch on the device, with floating-point tensors in the dtype."""
    moved = {name: value.to(device) for name, value in batch.items()}
    return {
        name: value.to(getattr(torch, dtype)) if value.is_floating_point() else value for name, value in moved.items()
    }


def compute_outputs(model: Any, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return all outputs of a model that are tensors."""
    return {name: value for name, value in model(**batch).items() if isinstance(value, torch.Tensor)}


def compare(
    variant_model: Any, upstream: Any, batch: dict[str, Any], exact: dict[str, torch.Tensor], with_gradients: bool
) -> dict[str, tuple[float, float]]:
    """Return our error and that of Transformers for each output.

    With gradients (in float32), our error is relative to Transformers, whose error is 0. Otherwise, both errors are
    relative to `exact`.
    """
    with torch.set_grad_enabled(with_gradients):
        variant_outputs, upstream_outputs = compute_outputs(variant_model, batch), compute_outputs(upstream, batch)
    errors = {}
    for name, expected in exact.items():
        of_upstream = 0.0 if with_gradients else compute_relative_error(upstream_outputs[name], expected)
        errors[name] = (
            compute_relative_error(variant_outputs[name], upstream_outputs[name] if with_gradients else expected),
            of_upstream,
        )
    if with_gradients:
        for model, model_outputs in ((variant_model, variant_outputs), (upstream, upstream_outputs)):
            model.zero_grad()
            torch.manual_seed(0)
            output = next(iter(model_outputs.values()))
            (output if "loss" in model_outputs else (output * torch.randn_like(output)).mean()).backward()
        upstream_outputs = {
            name: weight.grad for name, weight in upstream.named_parameters() if weight.grad is not None
        }
        variant_outputs = {
            name: weight.grad for name, weight in variant_model.named_parameters() if name in upstream_outputs
        }
        # Only gradients with equal shapes are compared, because a shared head has the gradient of all its copies.
        common_names = [
            name for name in variant_outputs if variant_outputs[name].shape == upstream_outputs[name].shape
        ]
        actual, expected = (
            torch.cat([tensors[name].flatten() for name in common_names])
            for tensors in (variant_outputs, upstream_outputs)
        )
        errors["gradients"] = (compute_relative_error(actual, expected), 0.0)
    return errors


def get_limit(dtype: str, of_upstream: float) -> float:
    """Return the limit of our error, given the error of Transformers."""
    return FLOAT32_LIMIT if dtype == "float32" else MAX_UPSTREAM_RATIO * of_upstream + ABSOLUTE_TOLERANCES[dtype]


def generates_same_tokens(variant_model: Any, upstream: Any, batch: dict[str, Any]) -> bool | None:
    """Return whether both generate the same tokens, greedily and with beams, or None without an encoder-decoder."""
    if not (variant_model.can_generate() and variant_model.config.is_encoder_decoder):
        return None
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "input_features") if name in batch}
    for beams in (1, 3):
        options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "num_beams": beams}
        if not torch.equal(variant_model.generate(**inputs, **options), upstream.generate(**inputs, **options)):
            return False
    return True


def measure_real_parity(architecture: Architecture, device: str, dtype: str) -> dict[str, Any]:
    """Return the errors at a real shape, padded to 512 tokens, of multi-head attention and of grouped heads.

    The grouped heads are compared with a Transformers model that has copies of each key/value head.
    """
    head, errors = next(iter(architecture.heads)), {}
    ids = torch.randint(5, 32000, (REAL_BATCH, REAL_LENGTH), device=device)
    lengths = torch.tensor([REAL_LENGTH, REAL_LENGTH - 100, REAL_LENGTH // 2, 20], device=device)
    mask = (torch.arange(REAL_LENGTH, device=device) < lengths[:, None]).long()
    batch = {"input_ids": ids, "attention_mask": mask}
    batch |= {"decoder_input_ids": ids[:, :128]} if "decoder_input_ids" in architecture.make_batch(head) else {}
    for name, upstream, variant_model in (
        ("multi-head", *make_pair(architecture, head)),
        ("6 heads", *make_shared_heads(architecture, head, 6)),
    ):
        with torch.no_grad():
            exact = compute_outputs(upstream.to(device), batch)
        for implementation in IMPLEMENTATIONS:
            for model in (upstream, variant_model):
                model.set_attn_implementation(implementation)
                model.to(device, getattr(torch, dtype))
            model_errors = compare(variant_model, upstream, batch, exact, with_gradients=dtype == "float32")
            errors |= {f"{name}, {implementation}, {output}": error for output, error in model_errors.items()}
    misses = [
        name
        for name, (variant_error, upstream_error) in errors.items()
        if not variant_error <= get_limit(dtype, upstream_error)
    ]
    return {"errors": errors, "misses": misses, "met": not misses}


def make_shared_heads(architecture: Architecture, head: str, kv_heads: int) -> tuple[Any, Any]:
    """Return a Transformers model with equal key/value heads in each group, and ours with one head per group."""
    upstream, wide = make_pair(architecture, head)
    torch.manual_seed(0)
    variant_model = getattr(hf_attn_variants, f"AttnVariant{head}")(
        architecture.make_config(head=head, num_key_value_heads=kv_heads)
    ).eval()
    plain = {
        name: value
        for name, value in upstream.state_dict().items()
        if value.shape == variant_model.state_dict()[name].shape
    }
    variant_model.load_state_dict(plain, strict=False)
    with torch.no_grad():
        modules = {path: module for _, path, module in wide.named_attention_modules()}
        for site, path, module in variant_model.named_attention_modules():
            heads = site.get_heads(variant_model.config, path)
            groups = site.get_heads(wide.config, path).key // heads.key
            for role in (site.key, site.value):
                for name, value in module.get_submodule(role).named_parameters():
                    copies = value.unflatten(0, (heads.key, -1)).repeat_interleave(groups, 0).flatten(0, 1)
                    modules[path].get_submodule(role).get_parameter(name).copy_(copies)
    upstream.load_state_dict(wide.state_dict())
    return upstream, variant_model


def measure_variant_parity(architecture: Architecture, variant: str, device: str, dtype: str) -> dict[str, Any]:
    """Return the errors of a variant on the device in a dtype, relative to its outputs on the CPU in float32."""
    head = BASE_HEADS[architecture.name]
    model, batch = architecture.make_model(head, variant), architecture.make_batch(head)
    with torch.no_grad():
        expected = next(iter(compute_outputs(model, batch).values()))
        model.to(device, getattr(torch, dtype))
        errors = {}
        for implementation in IMPLEMENTATIONS:
            model.set_attn_implementation(implementation)
            actual_outputs = compute_outputs(model, to_device(batch, device, dtype))
            errors[implementation] = compute_relative_error(next(iter(actual_outputs.values())), expected)
    return {"errors": errors, "met": max(errors.values()) <= VARIANT_LIMITS[dtype]}


if __name__ == "__main__":
    main(make_cells)
