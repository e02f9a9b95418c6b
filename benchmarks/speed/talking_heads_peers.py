"""Attention functions that the benchmarks compare, their inputs, and the timing of a step."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.page_faults import Usage, UsageRecorder, summarize_usages
from hf_attn_variants.inspection.speed import get_round_order
from hf_attn_variants.modeling.attention.attention_interface import sdpa_attention_forward
from hf_attn_variants.modeling.mechanisms.kernels.attention_kernel import init_kernel, install_kernel
from hf_attn_variants.modeling.mechanisms.kernels.kernel_table import KERNELS, get_kernel_class
from hf_attn_variants.modeling.ops.key_ranges import KeyRange
from hf_attn_variants.modeling.ops.memory_efficient_attention import talking_heads_attention
from hf_attn_variants.modeling.ops.softmax_attention import attention_with_weights
from hf_attn_variants.modeling.ops.variant_attention import AttentionHeads

WARM_UP_ROUNDS = 2
WINDOW, GLOBAL_TOKENS = 256, 1
HYBRID_WINDOW, MOST_TOKENS = 64, 2**14  # the window of hybrids, as in LoLCATs; the maximum length of linformer


def make_peers(device: str, peers: list[str]) -> dict[str, Callable]:
    """Return the peers that support the device, as functions with equal arguments and outputs [b, n, h, d].

    The arguments are query, key, value, the projections P_l and P_w, bias, scaling, is_causal and dropout.
    """

    def sdpa(query, key, value, logits_proj, weights_proj, bias, scaling, is_causal, dropout):
        # Multi-head attention does not use the talking-heads projections.
        output = F.scaled_dot_product_attention(query, key, value, bias, dropout, is_causal, scale=scaling)
        return output.transpose(1, 2)

    def naive(query, key, value, logits_proj, weights_proj, bias, scaling, is_causal, dropout):
        return attention_with_weights(
            query, key, value, None, bias, scaling=scaling, is_causal=is_causal, dropout=dropout,
            logits_proj=logits_proj.to(query.dtype), weights_proj=weights_proj.to(query.dtype),
        )[0]  # fmt: skip

    def ours(backend):
        def attend(query, key, value, logits_proj, weights_proj, bias, scaling, is_causal, dropout):
            return talking_heads_attention(
                query, key, value, None, bias, scaling=scaling, is_causal=is_causal, dropout=dropout,
                logits_proj=logits_proj, weights_proj=weights_proj, backend=backend,
            )  # fmt: skip

        return attend

    def window(query, key, value, logits_proj, weights_proj, bias, scaling, is_causal, dropout):
        # An attention module with a window and without talking heads, as the models pass it to this function.
        module = SimpleNamespace(
            config=SimpleNamespace(_output_attentions=False),
            projection_names=(),
            key_range=KeyRange.from_window(WINDOW, 1, 0 if is_causal else GLOBAL_TOKENS, is_causal),
            score=None,
            extensions={},
            kernel=None,
            is_causal=is_causal,
        )
        options = {"scaling": scaling, "dropout": dropout, "position_bias": bias}
        return sdpa_attention_forward(module, query, key, value, **options)[0]

    def window_in_blocks(query, key, value, logits_proj, weights_proj, bias, scaling, is_causal, dropout):
        # "window" does the same, except that it may use FlexAttention on CUDA.
        key_range = KeyRange.from_window(WINDOW, 1, 0 if is_causal else GLOBAL_TOKENS, is_causal)
        return talking_heads_attention(
            query, key, value, None, bias, scaling=scaling, dropout=dropout, key_range=key_range
        )

    def linear(kernel):
        modules = {}

        def attend(query, key, value, logits_proj, weights_proj, bias, scaling, is_causal, dropout):
            heads, head_dim = query.shape[1], query.shape[3]
            if not modules:
                modules["one"] = make_kernel_module(kernel, heads, head_dim, is_causal).to(query.device, query.dtype)
            return sdpa_attention_forward(modules["one"], query, key, value, scaling=scaling, position_bias=bias)[0]

        return attend

    peer_functions = {name: linear(name) for name in KERNELS}
    peer_functions |= {"sdpa": sdpa, "naive": naive, "blocked": ours("blocked"), "window": window}
    peer_functions["window in blocks"] = window_in_blocks
    if device == "cuda":
        torch._dynamo.config.cache_size_limit = 256
        peer_functions |= {"compiled": torch.compile(naive, dynamic=False), "triton": ours("triton")}
    return {name: peer_functions[name] for name in peers if name in peer_functions}


def make_kernel_module(
    name: str, heads: int, head_dim: int, is_causal: bool, features: int | None = None
) -> nn.Module:
    """Return an attention module with a kernel and without projections, as the models pass it to their function."""
    module = nn.Module()
    module.register_parameter("like", nn.Parameter(torch.zeros(())))
    module.config = SimpleNamespace(_output_attentions=False)
    fields = SimpleNamespace(attention_kernel=name, attention_kernel_features=features, attention_kernel_seed=0)
    by_layer = {"attention_kernel": name, "attention_window": HYBRID_WINDOW}
    fields.get_layer_value, fields.max_position_embeddings = (lambda field, layer: by_layer[field]), MOST_TOKENS
    kernel = get_kernel_class(name).from_config(fields, "", head_dim, "benchmark", is_causal, layer=0)
    module.heads = AttentionHeads(heads, heads, heads, heads, heads, head_dim, head_dim)
    install_kernel(module, kernel)
    init_kernel(module)
    return module


def make_inputs(shape: tuple[int, int, int, int], option: str, device: str, dtype: torch.dtype) -> dict:
    """Return random inputs of one measurement, with the memory layout of the models ([b, n, h, d], transposed)."""
    b, h, n, d = shape

    def new(*size, dtype=dtype):
        return torch.randn(size, device=device, dtype=dtype)

    inputs = {name: new(b, n, h, d).transpose(1, 2).requires_grad_() for name in ("query", "key", "value")}
    for name in ("logits_proj", "weights_proj"):
        inputs[name] = (torch.eye(h, device=device) + 0.1 * new(h, h, dtype=torch.float32)).requires_grad_()
    inputs["bias"] = new(1, h, n, n).requires_grad_() if option == "bias" else None
    others = {"scaling": d**-0.5, "is_causal": option == "causal", "dropout": 0.1 if option == "dropout" else 0.0}
    return {**inputs, **others}


def make_step(attend: Callable, inputs: dict, training: bool) -> Callable[[], None]:
    """Return a function that calls a peer, with the backward pass for training."""
    leaves = [tensor for tensor in inputs.values() if isinstance(tensor, torch.Tensor)]
    b, h, n, d = inputs["query"].shape
    d_output = torch.randn(b, n, h, d, device=leaves[0].device, dtype=leaves[0].dtype)
    return step_of(lambda: attend(**inputs), leaves, d_output, training)


def step_of(call: Callable, leaves: list[torch.Tensor], d_output: torch.Tensor, training: bool) -> Callable[[], None]:
    """Return a function that runs `call`, and for training also computes the gradients of `leaves`.

    Args:
        call: a function that returns the outputs.
        leaves: the tensors that need gradients.
        d_output: the gradient of the outputs.
        training: whether to run the backward pass.
    """

    def step():
        with torch.set_grad_enabled(training):
            output = call()
        if training:
            for leaf in leaves:
                leaf.grad = None
            output.backward(d_output)

    return step


def measure_milliseconds(step: Callable, device: str, repeats: int = 5) -> float:
    """Return the time of one step, on CUDA as the mean of `repeats` steps."""
    if device == "cpu":
        start = time.perf_counter()
        step()
        return (time.perf_counter() - start) * 1e3
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    # As in training, queued work hides the time that Python needs to launch the next step.
    torch.cuda._sleep(1_000_000)
    events[0].record()
    for _ in range(repeats):
        step()
    events[1].record()
    torch.cuda.synchronize()
    return events[0].elapsed_time(events[1]) / repeats


def measure_interleaved(
    steps: Mapping[str, Callable], device: str, rounds: int
) -> tuple[dict[str, float | None], dict[str, dict]]:
    """Time steps that take turns within each round (`get_round_order`).

    Returns:
        The median milliseconds of each step, or None if it ran out of memory, and its page faults and system time
        (`page_faults.summarize_usages`).
    """
    steps = dict(steps)
    samples: dict[str, list[float]] = {name: [] for name in steps}
    usages: dict[str, list[Usage]] = {name: [] for name in steps}
    for number in range(rounds + WARM_UP_ROUNDS):
        for name in get_round_order(list(steps), number):
            try:
                with UsageRecorder() as watch:
                    sample = measure_milliseconds(steps[name], device)
            except torch.OutOfMemoryError:
                del steps[name]
                samples[name] = usages[name] = []
                torch.cuda.empty_cache()
                continue
            if number >= WARM_UP_ROUNDS:
                samples[name].append(sample)
                usages[name].append(watch.usage)
    times = {name: statistics.median(durations) if durations else None for name, durations in samples.items()}
    return times, {name: summarize_usages(durations) for name, durations in usages.items() if durations}
