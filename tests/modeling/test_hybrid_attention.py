"""Check a softmax in a window plus a kernel outside of it: the formula, models, and errors."""

import pytest
import torch
from architectures import ALBERT, BERT, make_token_ids
from fixtures.decoding import generate_with_each_cache, make_prompt
from fixtures.gradients import assert_same_with_gradients, to_exact
from fixtures.kernel_modules import make_kernel_module
from fixtures.largest_tensor import LargestTensor
from fixtures.saving import save_and_load
from relatives import ENCODER_DECODERS, ENCODERS
from torch import nn

import hf_attn_variants
from hf_attn_variants.modeling.attention.mechanism_attention import attend_with_kernel, compute_kernel_weights
from hf_attn_variants.modeling.mechanisms.kernels import hybrid_kernel
from hf_attn_variants.reference import linear as reference_linear

pytestmark = pytest.mark.cross_product

HEADS, D, SCALING = 4, 6, 0.4
BART = ENCODER_DECODERS[0]
LEARNED = ("query_kernel_proj", "key_kernel_proj", "window_log_factor")
HYBRID = {"attention_kernel": "hybrid", "attention_window": 4}
BOTH_WAYS = pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch):
    monkeypatch.setattr(hybrid_kernel, "MIN_BLOCK_LENGTH", 3)


def make_attention(window, groups=2, causal=False):
    return make_kernel_module(hybrid_kernel.HybridKernel(9, causal, 3, window), HEADS, groups, D, noise=0.3)


def make_call(n, groups=2):
    """Return queries, keys and values, and masks without padding, with padding on each side, and of padding only."""
    torch.manual_seed(1)
    leaves = [torch.randn(4, heads, n, D).requires_grad_() for heads in (HEADS, groups, groups)]
    places = torch.arange(n)
    return leaves, torch.stack([places < n, places < n // 2, places >= n - 2, places < 0])


def compute_by_formula(module, states, padding):
    exact = to_exact([*states, *(getattr(module, name) for name in LEARNED)])
    Q, K, V, *maps, log_gamma = exact
    phi = [reference_linear.hedgehog_features(x, W) for x, W in zip((Q, K), maps, strict=True)]
    options = {"scale": SCALING, "causal": module.kernel.is_causal, "padding": padding}
    output, weights = reference_linear.hybrid_attention(
        *phi, Q, K, V, module.kernel.window, log_gamma.exp(), **options
    )
    return output.transpose(1, 2), weights, exact


@BOTH_WAYS
@pytest.mark.parametrize("n, window, groups", [(41, 4, 2), (41, 10, 4), (7, 2, 1), (1, 4, 2), (5, 40, 2)])
def test_hybrid_attention_equals_the_formula(n, window, groups, causal):
    module = make_attention(window, groups, causal)
    leaves, padding = make_call(n, groups)
    expected, weights, exact = compute_by_formula(module, leaves, padding)
    mask = padding[:, None, None]
    actual, _ = attend_with_kernel(module, *leaves, mask, SCALING)
    trained = [*leaves, *(getattr(module, name) for name in LEARNED)]
    assert_same_with_gradients(actual, expected, trained, exact, gradient_atol=3e-5)
    actual_weights = compute_kernel_weights(module, *leaves[:2], mask, SCALING)
    torch.testing.assert_close(actual_weights.double(), weights, atol=1e-5, rtol=0)


def test_hybrid_limits_are_window_and_kernel_attention():
    """Check that an infinite gamma leaves only the window's softmax, and gamma 0 only the keys outside of it."""
    module, (states, _) = make_attention(4), make_call(20)
    query, key, value = states
    places = torch.arange(20)
    near = (places - places[:, None]).abs() <= 2
    key_heads, value_heads = (item.repeat_interleave(2, 1) for item in (key, value))
    with torch.no_grad():
        module.window_log_factor.fill_(80)
        actual, _ = attend_with_kernel(module, *states, None, SCALING)
        window = nn.functional.scaled_dot_product_attention(query, key_heads, value_heads, near, scale=SCALING)
        torch.testing.assert_close(actual, window.transpose(1, 2), atol=1e-5, rtol=0)
        module.window_log_factor.fill_(-torch.inf)
        actual, _ = attend_with_kernel(module, *states, None, SCALING)
        phi_q = reference_linear.hedgehog_features(query, module.query_kernel_proj)
        phi_k = reference_linear.hedgehog_features(key, module.key_kernel_proj).repeat_interleave(2, 1)
        weights = (phi_q @ phi_k.mT).masked_fill(near, 0)
        outside = weights / weights.sum(-1, keepdim=True) @ value_heads
        torch.testing.assert_close(actual, outside.transpose(1, 2), atol=1e-5, rtol=0)


def test_hybrid_state_continues_from_its_last_token():
    module = make_attention(6, causal=True)
    states, _ = make_call(30)
    padding = torch.arange(30) >= torch.tensor([0, 3, 14, 27])[:, None]
    expected, _, _ = compute_by_formula(module, states, padding)
    state, outputs, sizes = None, [], set()
    for begin, end in ((0, 2), (2, 11), (11, 27), (27, 28), (28, 29), (29, 30)):
        call = (item[:, :, begin:end] for item in states)
        output, state = attend_with_kernel(module, *call, padding[:, None, None, :end], SCALING, state)
        outputs.append(output)
        sizes.add(tuple(item.shape for item in state))
    torch.testing.assert_close(torch.cat(outputs, 1).double(), expected, atol=1e-5, rtol=0)
    assert len(sizes) == 1
    assert sum(item[0].numel() for item in state[:3]) == module.kernel.count_state_values(module.heads)


@BOTH_WAYS
def test_hybrid_attention_allocates_no_quadratic_tensor(causal):
    module, sizes = make_attention(4, causal=causal), []
    for n in (256, 512):
        leaves, padding = make_call(n)
        with LargestTensor() as largest:
            attend_with_kernel(module, *leaves, padding[:, None, None], SCALING)[0].sum().backward()
        sizes.append(largest.numel)
    assert sizes[1] <= 2 * sizes[0] < 256 * 256 * HEADS


@BOTH_WAYS
def test_hybrid_attention_supports_half_precision_and_compilation(causal):
    module = make_attention(4, causal=causal)
    halves = [item.detach().bfloat16() for item in make_call(20)[0]]
    exact, _ = attend_with_kernel(module, *(item.float() for item in halves), None, SCALING)
    half, _ = attend_with_kernel(module, *halves, None, SCALING)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), exact, atol=1e-2, rtol=1e-2)
    compiled = torch.compile(attend_with_kernel, backend="aot_eager", fullgraph=True)
    states = [item.float() for item in halves]
    torch.testing.assert_close(compiled(module, *states, None, SCALING)[0], exact)


@pytest.mark.parametrize("architecture", (BERT, ALBERT, *ENCODERS), ids=lambda row: row.name)
def test_encoder_with_hybrid_attention_equals_the_formula(architecture):
    head = next(iter(architecture.heads))
    model = architecture.make_model(head, "gqa", **HYBRID)
    batch = architecture.make_batch(head)
    real = batch["attention_mask"].bool()
    with torch.no_grad():
        actual, result = model(**batch).last_hidden_state, model(**batch, output_attentions=True)
        torch.testing.assert_close(actual[real], result.last_hidden_state[real], atol=1e-5, rtol=0)
        assert not any(weights.masked_select(~real[:, None, None]).any() for weights in result.attentions)
        for others in ({"attention_kernel": "hedgehog"}, {**HYBRID, "attention_window": 2}):
            assert not actual.allclose(architecture.make_model(head, "gqa", **others)(**batch)[0], atol=1e-3)


@pytest.mark.parametrize("architecture, head", [(BERT, "BertLMHeadModel"), (BART, "BartForConditionalGeneration")])
def test_decoder_with_hybrid_attention_generates_its_own_argmax(architecture, head):
    encoder = {f"encoder_{name}": value for name, value in HYBRID.items()} if architecture is BART else {}
    model = architecture.make_model(head, "gqa", **HYBRID, **encoder)
    for beams in (1, 3):
        generate_with_each_cache(model, make_prompt(architecture, head, left=True), 10, num_beams=beams)


def test_hybrid_windows_per_layer_are_saved_and_loaded(tmp_path):
    fields = {"attention_kernel": "hybrid", "per_layer_values": {"attention_window": [2, 6]}}
    model = BERT.make_model("BertModel", **fields)
    assert [layer.attention.self.kernel.window for layer in model.encoder.layer] == [2, 6]
    save_and_load(model, tmp_path, BERT.make_batch("BertModel"))
    with pytest.raises(ValueError, match="`attention_kernel` must be 'hybrid'"):
        hf_attn_variants.AttnVariantBertModel.from_pretrained(tmp_path, attention_kernel="hedgehog")


def test_hybrid_parameters_get_gradients_and_export_agrees():
    model = BERT.make_model("BertModel", "gqa", **HYBRID)
    ids = make_token_ids(2, 9)
    model(ids).last_hidden_state.square().sum().backward()
    assert all(item.grad is not None for name, item in model.named_parameters() if "pooler" not in name)
    length = torch.export.Dim("length", min=3, max=32)
    program = torch.export.export(model, (ids,), dynamic_shapes={"input_ids": {1: length}}, strict=False)
    other = make_token_ids(2, 23)
    with torch.no_grad():
        torch.testing.assert_close(program.module()(other)[0], model(other)[0], atol=1e-5, rtol=0)
