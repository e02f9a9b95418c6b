"""Check the decoding kernels for latents: the formula, the calls that use them, and a compiled decoding step.

The kernels run on a GPU, or in Triton's interpreter. The interpreter needs another process, because Triton reads its
environment variable when it is imported. It computes bfloat16 products incorrectly, so the tests use float16.
"""

import pytest
import torch
from fixtures.talking_heads_calls import CUDA, INTERPRETED, needs_triton, run_in_interpreter
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoConfig, AutoModelForSeq2SeqLM

from hf_attn_variants.modeling.ops import backend_choice, latent_decoding
from hf_attn_variants.modeling.ops.latent_decoding import (
    LaunchSettings,
    attend_to_one_latent,
    run_latent_kernels,
    should_use_latent_kernels,
)
from hf_attn_variants.modeling.ops.softmax_attention import attention_with_weights

DEVICE = "cuda" if CUDA else "cpu"
# (batch, rows, keys, width). Widths are powers of two, sums of two powers, or need padding. 20 rows need two blocks.
SIZES = [(2, 12, 90, 48), (1, 20, 70, 96), (3, 8, 64, 32), (2, 3, 33, 24)]
T5 = {"d_model": 64, "d_kv": 16, "d_ff": 32, "num_layers": 2, "num_heads": 4, "vocab_size": 60, "pad_token_id": 0}


@pytest.fixture(autouse=True)
def nothing_agreed_yet(monkeypatch):
    monkeypatch.setattr(latent_decoding, "_latent_trial_results", {})


def make_inputs(memories=2, rows=4, keys=40, width=32):
    query, latent = torch.randn(memories, 1, rows, width), torch.randn(memories, 1, keys, width)
    return query.to(DEVICE, torch.float16), latent.to(DEVICE, torch.float16)


def make_mask(kind, query, latent):
    memories, _, rows, _ = query.shape
    shape = (memories, 1, rows, latent.shape[2])
    if kind == "padding":
        return (torch.arange(shape[-1]) < torch.tensor([[shape[-1] - 20 * i] for i in range(memories)]))[
            :, None, None
        ].to(DEVICE)
    if kind == "rows":
        mask = torch.rand(shape) > 0.3
        # One row has no allowed keys, and another one has none in the first part of the keys.
        mask[0, :, 1], mask[:, :, 0, :32] = False, False
        return mask.to(DEVICE)
    if kind == "additive":
        return torch.randn(shape).masked_fill(torch.rand(shape) < 0.3, -torch.inf).to(DEVICE, torch.float16)
    return None


def compute_by_formula(query, latent, mask, scaling):
    logits = query.double() @ latent.double().mT * scaling
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask.double()
    return logits.softmax(-1).nan_to_num(0.0) @ latent.double()


@needs_triton
@pytest.mark.parametrize("programs", [1, 64], ids=["one part", "parts"])
@pytest.mark.parametrize("kind", [None, "padding", "rows", "additive"])
@pytest.mark.parametrize("sizes", SIZES)
def test_triton_latent_kernels_equal_the_formula(sizes, kind, programs):
    query, latent = make_inputs(*sizes)
    mask, scaling = make_mask(kind, query, latent), sizes[-1] ** -0.5
    actual = run_latent_kernels(query, latent, mask, scaling, LaunchSettings(16, 16, 4, 2, programs))
    torch.testing.assert_close(actual.double(), compute_by_formula(query, latent, mask, scaling), rtol=2e-3, atol=2e-3)


@needs_triton
@pytest.mark.parametrize("programs", [1, 64], ids=["one part", "parts"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_triton_latent_kernels_give_uniform_weights_under_finite_masks(dtype, programs):
    query, latent = make_inputs()
    mask = torch.zeros(2, 1, 4, 40, device=DEVICE, dtype=dtype)
    mask[0, :, 1], mask[1, :, 2, :30] = torch.finfo(dtype).min, torch.finfo(dtype).min
    actual = run_latent_kernels(query, latent, mask, 0.2, LaunchSettings(16, 16, 4, 2, programs))
    expected = attention_with_weights(query.float(), latent.float(), latent.float(), mask.float(), scaling=0.2)[0]
    torch.testing.assert_close(actual.float(), expected.transpose(1, 2), rtol=2e-3, atol=2e-3)


@needs_triton
def test_triton_latent_kernels_accept_views():
    query, latent = make_inputs()
    query_view, latent_view = query.transpose(0, 2).contiguous().transpose(0, 2), latent.mT.contiguous().mT
    expected = attend_to_one_latent(query, latent, scaling=0.2)
    assert torch.equal(attend_to_one_latent(query_view, latent_view, scaling=0.2), expected)


def make_faulty_kernel(fault):
    """Return a function with the results of a kernel that has this fault."""

    def compute(query, latent, mask, scaling, launch):
        if fault == "raises":
            raise RuntimeError("out of resource: shared memory")
        if fault == "keys beyond the end":
            latent = torch.nn.functional.pad(latent, (0, 0, 0, 3))
            mask = mask if mask is None else torch.nn.functional.pad(mask, (0, 3), value=mask.dtype == torch.bool)
        if fault == "no last key":
            latent, mask = latent[:, :, :-1], mask if mask is None else mask[..., :-1]
        if fault == "one block of a part":
            keys = latent_decoding._partition_keys(query, latent, launch)[1]
            first = torch.arange(latent.shape[2], device=latent.device) % keys < launch.block
            latent, mask = latent[:, :, first], mask if mask is None else mask[..., first]
        output = compute_by_formula(query, latent, mask, scaling * (1.05 if fault == "scaling" else 1)).to(query.dtype)
        return output * (torch.nan if fault == "is not a number" else 1)

    return compute


FAULTS = ["raises", "is not a number", "keys beyond the end", "no last key", "one block of a part", "scaling"]


@needs_triton
@pytest.mark.parametrize("masked", [False, True], ids=["", "padding"])
@pytest.mark.parametrize("memories", [2, 1000], ids=["parts", "one part"])
@pytest.mark.parametrize("fault", FAULTS)
def test_failing_triton_kernels_fall_back_to_torch_with_one_warning(monkeypatch, fault, memories, masked):
    if fault == "one block of a part" and memories > 2:
        pytest.skip("there is only one part")
    warnings = []
    monkeypatch.setattr(latent_decoding, "run_latent_kernels", make_faulty_kernel(fault))
    monkeypatch.setattr(backend_choice.logger, "warning", warnings.append)
    query, latent = make_inputs(memories, keys=100)
    mask = torch.ones(memories, 1, 1, 100, dtype=torch.bool, device=DEVICE) if masked else None
    expected = scaled_dot_product_attention(query, latent, latent, mask, scale=0.2)
    for _ in range(2):
        assert torch.equal(attend_to_one_latent(query, latent, mask, scaling=0.2), expected)
    assert len(warnings) == 1 and "The slower kernels in torch compute attention to a latent" in warnings[0]
    assert ("out of resource" if fault == "raises" else "returned different values") in warnings[0]


@needs_triton
def test_exact_triton_results_pass_the_trial(monkeypatch):
    monkeypatch.setattr(latent_decoding, "run_latent_kernels", make_faulty_kernel(None))
    for dtype in (torch.float16, torch.bfloat16):  # results differ by rounding
        for memories in (2, 1000):
            query, latent = (item.to(dtype) for item in make_inputs(memories, keys=100))
            attend_to_one_latent(query, latent, scaling=0.2)
    assert list(latent_decoding._latent_trial_results.values()) == [True] * 4


@needs_triton
def test_later_triton_failure_falls_back_to_torch(monkeypatch):
    kernels, warnings = latent_decoding.run_latent_kernels, []
    monkeypatch.setattr(backend_choice.logger, "warning", warnings.append)
    query, latent = make_inputs()
    attend_to_one_latent(query, latent, scaling=0.2)
    monkeypatch.setattr(latent_decoding, "run_latent_kernels", make_faulty_kernel("raises"))
    expected = scaled_dot_product_attention(query, latent, latent, scale=0.2)
    assert torch.equal(attend_to_one_latent(query, latent, scaling=0.2), expected) and len(warnings) == 1
    monkeypatch.setattr(latent_decoding, "run_latent_kernels", kernels)
    assert torch.equal(attend_to_one_latent(query, latent, scaling=0.2), expected) and len(warnings) == 1


@needs_triton
def test_trial_of_triton_kernels_keeps_the_random_state():
    torch.manual_seed(0)
    expected = torch.rand(3, device=DEVICE)
    torch.manual_seed(0)
    query, latent = (torch.ones(1, 1, size, 32, device=DEVICE, dtype=torch.float16) for size in (4, 40))
    attend_to_one_latent(query, latent, scaling=0.2)
    assert latent_decoding._latent_trial_results and torch.equal(torch.rand(3, device=DEVICE), expected)


@needs_triton
def test_triton_latent_kernels_serve_supported_calls_only(monkeypatch):
    monkeypatch.setattr(latent_decoding, "MIN_LATENT_BYTES", 0)
    query, latent = make_inputs()
    assert should_use_latent_kernels(query, latent, None, 0.0)
    assert not should_use_latent_kernels(query, latent, None, 0.1)
    assert not should_use_latent_kernels(query.float(), latent.float(), None, 0.0)
    assert not should_use_latent_kernels(query.clone().requires_grad_(), latent, None, 0.0)
    with torch.no_grad():
        assert should_use_latent_kernels(query.clone().requires_grad_(), latent, None, 0.0)
    assert not should_use_latent_kernels(*make_inputs(rows=17), None, 0.0)
    assert not should_use_latent_kernels(*make_inputs(width=8), None, 0.0)
    assert not should_use_latent_kernels(*make_inputs(keys=0), None, 0.0)
    with torch.autocast(DEVICE, torch.bfloat16):
        assert not should_use_latent_kernels(query, latent, None, 0.0)
    monkeypatch.setattr(latent_decoding, "MIN_LATENT_BYTES", latent.numel() * 2 + 1)
    assert not should_use_latent_kernels(query, latent, None, 0.0)  # a launch costs more than reading the latent


@needs_triton
@pytest.mark.parametrize("rank", [64, 16], ids=["exact", "latents"])
def test_compiled_step_uses_triton_kernels_with_equal_outputs(monkeypatch, rank):
    kernels, calls = latent_decoding.run_latent_kernels, []
    monkeypatch.setattr(latent_decoding, "run_latent_kernels", lambda *call: [calls.append(call), kernels(*call)][1])
    config = AutoConfig.for_model("attn_variant_t5", **T5, decoder_start_token_id=0, cross_kv_lora_rank=rank)
    torch.manual_seed(0)
    model = AutoModelForSeq2SeqLM.from_config(config).eval().to(DEVICE, torch.float16)
    ids = torch.randint(2, 60, (2, 9), device=DEVICE)
    mask = torch.ones_like(ids)
    mask[0, 6:] = 0
    call = {"encoder_outputs": model.get_encoder()(ids, mask), "attention_mask": mask}
    call["decoder_input_ids"] = torch.zeros(2, 1, dtype=torch.long, device=DEVICE)
    with torch.no_grad():
        expected = model(**call).logits
        assert not calls  # the source is too short to be worth the launches
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(**call).logits, expected, rtol=2e-2, atol=2e-2)
    assert len(calls) == 3  # one trial and two layers


@pytest.mark.thorough
@pytest.mark.skipif(INTERPRETED, reason="already runs in the interpreter")
def test_latent_kernels_pass_in_the_triton_interpreter():
    run_in_interpreter(__file__)


@pytest.mark.skipif(INTERPRETED, reason="the kernels run on a CPU in the interpreter")
def test_cpu_calls_use_torch(monkeypatch):
    monkeypatch.setattr(latent_decoding, "MIN_LATENT_BYTES", 0)
    query, latent = (torch.ones(1, 1, size, 32, dtype=torch.float16) for size in (4, 40))
    assert not should_use_latent_kernels(query, latent, None, 0.0)


@needs_triton
def test_out_of_memory_does_not_disable_triton_kernels(monkeypatch):
    kernels = latent_decoding.run_latent_kernels

    def full(*call):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(latent_decoding, "run_latent_kernels", full)
    query, latent = make_inputs()
    with pytest.raises(torch.OutOfMemoryError):
        attend_to_one_latent(query, latent, scaling=0.2)
    monkeypatch.setattr(latent_decoding, "run_latent_kernels", kernels)
    attend_to_one_latent(query, latent, scaling=0.2)
    assert list(latent_decoding._latent_trial_results.values()) == [True]
