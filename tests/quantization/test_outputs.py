"""Compare the outputs of int8 models with the same rounding in float32, for every architecture and variant."""

import copy
import gc
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from architectures import BERT, T5, VARIANTS
from fixtures.extensions import ALL_FIELDS, EXTENSION_ROWS, get_extension_parameters, make_random_model
from fixtures.rounded_maps import compute_max_error, make_rounded_model, round_weight
from fixtures.tested_architectures import ALL_ARCHITECTURES, PAIRS, get_tensors, make
from fixtures.upstream_seq2seq import FAMILIES, make_source_batch, make_tiny_model
from torch._dynamo.utils import counters

from hf_attn_variants import quantize, share_memory
from hf_attn_variants.quantization import int8_weight, packed_linear
from hf_attn_variants.quantization.int8_weight import Int8Weight, time_calls_in_turn
from hf_attn_variants.quantization.packed_linear import Bfloat16Linear, Int8Linear, supports_bfloat16

# Fields of T5 in addition to `VARIANTS`.
MORE = {
    "exact": {"cross_kv_lora_rank": 40},
    "hedgehog": {"attention_kernel": "hedgehog", "encoder_attention_kernel": "hedgehog"}
    | {"position_embedding_type": "sinusoidal"},
    "elu across": {"cross_attention_kernel": "elu"},
    "windows": {"encoder_attention_pattern": "sliding_window", "encoder_attention_window": 2}
    | {"attention_pattern": "sliding_window", "attention_window": 4},
    "additive": {"score_function": "additive"},
    "extensions": ALL_FIELDS,
}


BACKEND_SETTINGS = {
    f"{backend.__name__}-{bits}": (backend, bits)
    for backend in int8_weight.INT8_BACKENDS
    for bits in int8_weight.MAX_MAGNITUDES
}


@pytest.fixture(params=BACKEND_SETTINGS)
def backend_setting(request, monkeypatch):
    """Use one backend and number of bits for any number of tokens, if it is correct on this processor."""
    backend, bits = BACKEND_SETTINGS[request.param]
    if backend not in int8_weight._find_correct_backends(torch.backends.quantized.engine, bits):
        pytest.skip("the backend is not correct on this processor")
    plan = int8_weight.ExecutionPlan(bits, (backend,) * len(int8_weight.ROW_COUNTS))
    monkeypatch.setattr(int8_weight, "get_current_plan", lambda: plan)
    return request.param


def find_paths(model, kind):
    return [path for path, module in model.named_modules() if isinstance(module, kind)]


@torch.no_grad()
def assert_as_rounded(float32, batch):
    """Compare an int8 model with the same rounding in float32, and both with float32."""
    quantized = quantize(copy.deepcopy(float32))
    paths = find_paths(quantized, Int8Linear)
    assert paths
    exact = get_tensors(float32(**batch))
    rounded = get_tensors(make_rounded_model(float32, paths, find_paths(quantized, Bfloat16Linear))(**batch))
    actual = get_tensors(quantized(**batch))
    assert actual.keys() == exact.keys()
    for name, value in actual.items():
        # The order of a sum sometimes moves an input to another grid value. This matters less than rounding itself.
        error, step = (value - rounded[name]).abs(), (rounded[name] - exact[name]).abs()
        assert error.max() <= 1.2 * step.max() and error.median() <= 0.25 * step.median() + 1e-6, name
        assert value.isfinite().all()


@pytest.mark.cross_product
@pytest.mark.parametrize("variant", ["gqa", "latent"])
@pytest.mark.parametrize("architecture", ALL_ARCHITECTURES, ids=lambda row: row.name)
def test_int8_architectures_equal_the_rounded_reference(architecture, variant):
    head = list(architecture.heads)[1]
    assert_as_rounded(make(architecture, head, variant), architecture.make_batch(head))


@pytest.mark.parametrize("variant", VARIANTS)
def test_int8_variants_equal_the_rounded_reference(variant):
    for architecture, head in ((T5, "T5ForConditionalGeneration"), (BERT, "BertForMaskedLM")):
        assert_as_rounded(architecture.make_model(head, variant), architecture.make_batch(head))


@pytest.mark.parametrize("name", MORE)
def test_int8_mechanisms_equal_the_rounded_reference(name, backend_setting):
    head = "T5ForConditionalGeneration"
    assert_as_rounded(T5.make_model(head, **MORE[name]), T5.make_batch(head))


@pytest.mark.parametrize("name", EXTENSION_ROWS)
@torch.no_grad()
def test_int8_models_with_extensions_keep_their_parameters(name):
    sizes = {"hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 512}
    model, batch = make_random_model(BERT, "BertModel", **sizes, **EXTENSION_ROWS[name]), BERT.make_batch("BertModel")
    expected = model.float()(**batch)[0]
    before = {key: item.clone() for key, item in get_extension_parameters(model).items()}
    quantize(model)
    assert find_paths(model, Int8Linear)
    for key, item in get_extension_parameters(model).items():
        assert item.equal(before[key]) and item.dtype == torch.float32
    real = batch["attention_mask"].bool()
    assert torch.cosine_similarity(model(**batch)[0][real], expected[real], dim=-1).min() >= 0.99


@pytest.mark.cross_product
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("shared", ["no", "before", "after"])
def test_int8_transformers_models_equal_the_rounded_reference(name, shared):
    model = make_tiny_model(name)
    batch = make_source_batch(name) | {"decoder_input_ids": torch.arange(4, 19).view(3, 5)}
    if shared == "before":
        share_memory(model)
    assert_as_rounded(model, batch)
    if shared == "after":
        expected = model(**batch).logits
        torch.testing.assert_close(share_memory(model)(**batch).logits, expected)


def test_int8_layer_error_is_within_half_a_step(backend_setting):
    generator = torch.Generator().manual_seed(3)
    for rows, width, size, bias in ((1, 64, 48, True), (7, 33, 65, False), (200, 512, 16, True)):
        linear = torch.nn.Linear(width, size, bias=bias)
        with torch.no_grad():
            linear.weight.copy_(torch.randn(size, width, generator=generator))
            linear.weight[0] *= 100  # one scale per row, so the other rows do not change
            linear.weight[1] = 0
        states = torch.randn(3, rows, width, generator=generator)
        output = Int8Linear(linear)(states)
        with torch.no_grad():
            error = (output - linear(states)).abs()
        assert (error <= compute_max_error(linear, states)).all() and error[..., 0].max() > 0
        assert output.shape == (3, rows, size) and output.dtype == torch.float32


def test_rounding_does_not_depend_on_the_weight_scale(monkeypatch):
    weight = torch.randn(70, 32, generator=torch.Generator().manual_seed(0))
    weight[5] = 0.0
    expected = Int8Weight.from_float32(weight)
    monkeypatch.setattr(int8_weight, "ROWS_PER_BLOCK", 16)
    parts = Int8Weight.from_float32(weight)
    assert all(torch.equal(one, parts.to_tensors()[name]) for name, one in expected.to_tensors().items())
    torch.testing.assert_close(expected.to_float32(), round_weight(weight), rtol=1e-6, atol=0)
    integers = expected.unpack()
    expected.compute_linear(weight[:1], None)  # packs the weight without another copy
    assert torch.equal(expected.unpack(), integers) and expected.unpack() is not integers


def test_int8_token_does_not_depend_on_other_tokens(backend_setting):
    layer, states = Int8Linear(torch.nn.Linear(64, 48)), torch.randn(5, 20, 64)
    states[3] *= 1e4
    together = layer(states)
    for row in range(5):
        assert torch.equal(layer(states[row : row + 1])[0], together[row])


@pytest.mark.parametrize("bits", int8_weight.MAX_MAGNITUDES)
def test_int8_backends_are_bitwise_equal(bits):
    """Check that the outputs do not depend on the backend, because two runs may use different backends."""
    generator = torch.Generator().manual_seed(0)
    weight = Int8Weight.from_float32(torch.randn(48, 70, generator=generator))
    states, bias = torch.randn(300, 70, generator=generator), torch.randn(48, generator=generator)
    states[7], states[9, 3] = 0.0, 1e6
    # For numbers near a half, x / step and x / step + z are rounded to different integers.
    states[11], states[11, 0] = torch.arange(70) - 35 + 0.5 + 2**-18, int8_weight.MAX_MAGNITUDES[bits]
    backends = int8_weight._find_correct_backends(torch.backends.quantized.engine, bits)
    for rows in (1, 5, 300):
        outputs = [backend(weight.unpack(), weight._scales)(states[:rows], bias, bits) for backend in backends]
        assert all(torch.equal(item, outputs[0]) for item in outputs)


def test_int8_plan_selects_a_fast_backend():
    """Check that the plan does not use a reference kernel, which takes hundreds of times as long."""
    plan = int8_weight.get_current_plan()
    linear, states = torch.nn.Linear(384, 384), torch.randn(64, 384)
    packed = Int8Linear(linear)
    with torch.no_grad():
        float32, int8 = time_calls_in_turn(lambda: linear(states), lambda: packed(states))
    assert int8 < 5 * float32, str(plan)
    assert str(plan).startswith(plan.backends[0].name)


def test_failing_or_wrong_int8_backend_is_not_used(monkeypatch):
    class Wrong(int8_weight.OneDnnBackend):
        def multiply(self, numbers, bits):
            return super().multiply(numbers, bits) / 2

    class Gone(int8_weight.OneDnnBackend):
        def multiply(self, numbers, bits):
            raise RuntimeError("no such operator")

    monkeypatch.setattr(int8_weight, "INT8_BACKENDS", (Wrong, Gone, int8_weight.QuantizedEngineBackend))
    actual = int8_weight._find_correct_backends.__wrapped__(torch.backends.quantized.engine, 7)
    assert actual == (int8_weight.QuantizedEngineBackend,)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_nonfinite_token_affects_only_itself(value, rows, backend_setting):
    layer, states = Int8Linear(torch.nn.Linear(64, 48)), torch.randn(rows, 64)
    expected = layer(states)
    states[rows - 1, 5] = value
    actual = layer(states)
    assert not actual[-1].isfinite().any()
    assert torch.equal(actual[:-1], expected[:-1])


def test_values_beyond_16_bits_do_not_overflow(backend_setting):
    linear = torch.nn.Linear(64, 48, bias=False)
    with torch.no_grad():
        linear.weight.fill_(1.0)
        linear.weight[::2] = -1.0
    for rows in (1, 3, 40):
        states = torch.ones(rows, 64)
        torch.testing.assert_close(Int8Linear(linear)(states), linear(states), rtol=1e-4, atol=1e-4)


needs_bfloat16 = pytest.mark.skipif(not supports_bfloat16(), reason="this processor has no bfloat16")
EACH_PACKED_LAYER = pytest.mark.parametrize("cls", [Int8Linear, pytest.param(Bfloat16Linear, marks=needs_bfloat16)])


@needs_bfloat16
@pytest.mark.parametrize("bias", [False, True])
def test_bfloat16_layer_equals_its_reference(bias):
    linear = torch.nn.Linear(70, 48, bias=bias)
    layer = Bfloat16Linear(linear)
    for shape in ((70,), (1, 70), (3, 7, 70), (40, 70), (2, 0, 70)):
        states = torch.randn(shape)
        states[..., 0] *= 1e6  # exceeds the range of float16, and int8 would round the others to zero
        with torch.no_grad():
            expected = linear(states)
        assert layer(states).shape == expected.shape and layer(states).dtype == torch.float32
        torch.testing.assert_close(layer(states), expected, rtol=0.02, atol=2e4)
    states = torch.randn(5, 70)
    with torch.no_grad():
        torch.testing.assert_close(layer(states), linear(states), rtol=0.02, atol=0.02)
    assert torch.equal(copy.deepcopy(layer)(states), layer(states))
    assert torch.equal(layer.weight(), linear.weight.bfloat16().float())
    other = Bfloat16Linear(torch.nn.Linear(70, 48, bias=bias))
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(states), layer(states))
    with pytest.raises(RuntimeError, match="before calling `quantize`"):
        other.load_state_dict(linear.state_dict())


@EACH_PACKED_LAYER
def test_packed_weights_are_shared_by_threads_and_modes(backend_setting, cls):
    """Check inference mode, which creates another kind of tensors, and simultaneous threads."""
    linear, few, many = torch.nn.Linear(64, 48), torch.randn(3, 64), torch.randn(40, 64)
    layer = cls(linear)
    with torch.inference_mode():
        expected = layer(few), layer(many)
        inside = copy.deepcopy(layer)
    for item in (layer, inside, copy.deepcopy(layer)):
        assert torch.equal(item(few), expected[0]) and torch.equal(item(many), expected[1])
    fresh = cls(linear)
    with ThreadPoolExecutor(8) as threads:
        actual = list(threads.map(lambda place: fresh((few, many)[place % 2]), range(32)))
    assert all(torch.equal(item, expected[place % 2]) for place, item in enumerate(actual))


@EACH_PACKED_LAYER
def test_compiled_int8_model_is_one_graph_with_equal_outputs(backend_setting, cls):
    linear, states = torch.nn.Linear(64, 48), torch.randn(3, 64)
    layer = cls(linear)
    others = [cls(torch.nn.Linear(64, 48)), copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))]
    maps = torch.nn.Sequential(*others[:1], torch.nn.ReLU(), cls(torch.nn.Linear(48, 8)))
    for item in (layer, *others, maps):
        with torch.no_grad():
            torch.testing.assert_close(torch.compile(item, fullgraph=True)(states), item(states))
    half = torch.compile(layer, fullgraph=True)(states.bfloat16())
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half, layer(states.bfloat16()))
    with pytest.raises(RuntimeError, match="cannot be exported"):
        torch.export.export(layer, (states,))


@torch.no_grad()
def test_compiled_int8_layers_share_one_graph():
    torch._dynamo.reset()
    counters.clear()
    states = torch.randn(3, 64)
    for layer in (Int8Linear(torch.nn.Linear(64, 48)) for _ in range(4)):
        torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend="eager")(states), layer(states))
    assert counters["stats"]["unique_graphs"] == 1


def test_deleted_int8_layer_frees_its_memory():
    known = len(packed_linear._registered_layers)
    layer = Int8Linear(torch.nn.Linear(64, 48))
    assert len(packed_linear._registered_layers) == known + 1
    del layer
    gc.collect()
    assert len(packed_linear._registered_layers) <= known


@pytest.mark.thorough
@torch.no_grad()
@pytest.mark.parametrize("kind", ["t5", "marian", "whisper"])
def test_compiled_int8_step_generates_equal_tokens(kind):
    model, batch = quantize(share_memory(make_tiny_model(kind))), make_source_batch(kind)
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "cache_implementation": "static", "do_sample": False}
    options |= {"return_timestamps": False} if kind == "whisper" else {}
    expected = model.generate(**batch, **options)
    torch._dynamo.reset()
    model.forward = torch.compile(model.forward, fullgraph=True, backend="eager")
    assert torch.equal(model.generate(**batch, **options), expected)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("size", [1e-5, 1e-3, 1.0, 1e3])
def test_single_token_is_rounded_like_in_a_batch(bias, size, backend_setting):
    generator = torch.Generator().manual_seed(5)
    linear = torch.nn.Linear(64, 48, bias=bias)
    states = torch.randn(1, 1, 64, generator=generator) * size
    layer = Int8Linear(linear)
    with torch.no_grad():
        error = (layer(states) - linear(states)).abs()
        unlike = (layer(states) - layer(states.repeat(1, 2, 1))[:, :1]).abs()  # equal rows have equal scales
    # This replaces the default bound, so that outputs of any size are tested.
    float_error = 1e-6 * (max(size, 1.0) if bias else size)
    assert (error <= compute_max_error(linear, states) - 1e-6 + float_error).all() and error.max() > 0
    assert unlike.max() <= float_error


@pytest.mark.parametrize("bias", [False, True])
def test_many_tokens_are_processed_in_blocks_with_equal_outputs(bias, backend_setting, monkeypatch):
    layer = Int8Linear(torch.nn.Linear(40, 24, bias=bias))
    states = torch.randn(3, 17, 40) * torch.logspace(-3, 3, 17)[:, None]
    states[1, 4] = 0.0
    strided = states.transpose(0, 1).contiguous().transpose(0, 1)
    expected = layer(states)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(int8_weight, "ROUNDED_ELEMENTS", 7 * 40)  # 7 tokens per block, 2 in the last
    assert torch.equal(layer(states), expected) and torch.equal(layer(strided), expected)
    states[:] = 1.0  # more equal rows than a block has
    assert torch.equal(layer(states), layer(states[:1, :1]).expand(3, 17, 24))


def test_int8_layers_support_other_shapes_and_types(backend_setting):
    linear = torch.nn.Linear(40, 24)
    layer, states = Int8Linear(linear), torch.randn(5, 40)
    expected = layer(states)
    torch.testing.assert_close(layer(states.view(5, 1, 1, 40)).view(5, 24), expected)
    assert layer(states[:0]).shape == (0, 24)
    assert layer(states[0]).shape == (24,)
    torch.testing.assert_close(layer(states.t().contiguous().t()), expected)
    half = layer(states.bfloat16())
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), expected, atol=0.05, rtol=0.05)


SEARCHES = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "static beams": {"num_beams": 3, "cache_implementation": "static"},
    "samples": {"do_sample": True, "num_return_sequences": 2},
}


@torch.no_grad()
def compute_scores(model, batch, sequences):
    """Return the sum of log-probabilities of the generated tokens, one row per sequence."""
    repeats = len(sequences) // len(next(iter(batch.values())))
    inputs = {name: item.repeat_interleave(repeats, dim=0) for name, item in batch.items()}
    logits = model(**inputs, decoder_input_ids=sequences[:, :-1]).logits.log_softmax(-1)
    return logits.gather(-1, sequences[:, 1:, None])[..., 0].sum(1)


@pytest.mark.cross_product
@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("kind", ["t5", "marian", "whisper", "exact", "shared"])
def test_int8_generation_scores_equal_a_full_forward(kind, search):
    """Check that a search in int8 and one call of its model give equal probabilities."""
    if kind == "exact":
        float32, batch = T5.make_model("T5ForConditionalGeneration", cross_kv_lora_rank=40), T5.make_batch("T5Model")
        batch = {name: batch[name] for name in ("input_ids", "attention_mask")}
    else:
        name = "t5" if kind == "shared" else kind
        float32, batch = make_tiny_model(name), make_source_batch(name)
    if kind == "shared":
        share_memory(float32)
    quantized = quantize(copy.deepcopy(float32))
    torch.manual_seed(0)
    options = {"max_new_tokens": 6, "min_new_tokens": 6}
    options |= {"return_timestamps": False} if kind == "whisper" else {}
    sequences = quantized.generate(**batch, **options, **SEARCHES[search])
    actual, exact = (compute_scores(model, batch, sequences) for model in (quantized, float32))
    paths = (find_paths(quantized, kind) for kind in (Int8Linear, Bfloat16Linear))
    rounded = compute_scores(make_rounded_model(float32, *paths), batch, sequences)
    # The order of a sum sometimes moves an input to another grid value.
    assert (actual - rounded).abs().max() <= 1.2 * (rounded - exact).abs().max() + 1e-4
    first, second = (quantized.generate(**batch, **options, num_beams=3) for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.cross_product
@pytest.mark.parametrize("variant", ["gqa", "latent"])
@pytest.mark.parametrize("architecture", PAIRS, ids=lambda row: row.name)
def test_quantize_dynamic_of_torch_is_supported(architecture, variant):
    """Check that the quantized layers are called, even if attention would otherwise use their weights directly."""
    head = list(architecture.heads)[1]
    model = make(architecture, head, variant)
    with pytest.warns(DeprecationWarning, match="torch.ao.quantization"):
        quantized = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)
    with torch.no_grad():
        exact, actual = (item(**architecture.make_batch(head)).logits for item in (model, quantized))
    assert 0 < (actual - exact).abs().max() < exact.std()


def test_quantization_by_torchao_is_supported():
    torchao = pytest.importorskip("torchao.quantization")
    for fields in ({}, {"cross_kv_lora_rank": 40}, {"kv_lora_rank": 16}, {"talking_heads": "both"}):
        model = T5.make_model("T5ForConditionalGeneration", **fields)
        batch = T5.make_batch("T5ForConditionalGeneration")
        with torch.no_grad():
            exact = model(**batch).logits
            torchao.quantize_(model, torchao.Int8DynamicActivationInt8WeightConfig())
            assert 0 < (model(**batch).logits - exact).abs().max() < exact.std()
