"""Check `quantize` in place: the state of the object, copies, layers that stay in float32, and errors."""

import copy
import gc
import importlib
import io
import logging
import pickle
import re
import weakref

import pytest
import torch
import transformers
from architectures import T5
from fixtures.upstream_seq2seq import make_source_batch, make_tiny_model
from transformers import LlamaConfig, LlamaForCausalLM, MambaConfig, MambaForCausalLM, WavLMConfig, WavLMModel

from hf_attn_variants import quantize, share_memory
from hf_attn_variants.quantization import int8_weight, packed_linear
from hf_attn_variants.quantization.packed_linear import Bfloat16Linear, Int8Linear, has_fast_bfloat16
from hf_attn_variants.shared_memory.attention import iterate_cross_attentions

# Import the module by its path, because the package has a function of the same name.
in_place = importlib.import_module("hf_attn_variants.quantization.quantize")

GENERATES = "T5ForConditionalGeneration"


@torch.no_grad()
def compute_logits(model, name="t5"):
    ids = torch.arange(4, 19).view(3, 5)
    return model(**make_source_batch(name), decoder_input_ids=ids).logits


def get_module_types(model):
    return {path: type(module) for path, module in model.named_modules()}


@pytest.fixture
def outliers(monkeypatch):
    """Pretend that the inputs of T5's `wo` and of its output layer have outliers."""
    measured = in_place.measure_rounding_errors

    def errors(model, linears, inputs):
        result = measured(model, linears, inputs)
        return result | {path: 2.0 for path in result if path.endswith((".wo", "lm_head"))}

    monkeypatch.setattr(in_place, "measure_rounding_errors", errors)


def test_quantize_works_in_place_and_keeps_the_class(outliers):
    model = make_tiny_model("t5")
    cls, embedding, norm = type(model), model.shared.weight, model.encoder.final_layer_norm.weight
    assert quantize(model) is model and type(model) is cls
    assert model.shared.weight is embedding and model.encoder.final_layer_norm.weight is norm
    feed_forward = model.encoder.block[0].layer[1].DenseReluDense
    assert isinstance(feed_forward.wi, Int8Linear)
    for layer in (feed_forward.wo, model.lm_head):
        assert type(layer) is (Bfloat16Linear if has_fast_bfloat16() else torch.nn.Linear)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert model.dtype == torch.float32 and not model.training


def test_layers_with_outliers_stay_in_float32_without_bfloat16(outliers, monkeypatch):
    monkeypatch.setattr(in_place, "has_fast_bfloat16", lambda: False)
    model = quantize(make_tiny_model("t5"))
    for block in (*model.encoder.block, *model.decoder.block):
        assert type(block.layer[-1].DenseReluDense.wo) is torch.nn.Linear
        assert isinstance(block.layer[-1].DenseReluDense.wi, Int8Linear)


def test_quantized_tied_head_keeps_the_embeddings():
    model = make_tiny_model("bart")
    assert model.lm_head.weight is model.model.shared.weight
    before = model.model.shared.weight.clone()
    quantize(model)
    assert isinstance(model.lm_head, Int8Linear) and torch.equal(model.model.shared.weight, before)


def test_shared_layer_is_quantized_once():
    model = make_tiny_model("t5")
    first, second = model.encoder.block
    second.layer[1].DenseReluDense.wi = first.layer[1].DenseReluDense.wi
    quantize(model)
    assert second.layer[1].DenseReluDense.wi is first.layer[1].DenseReluDense.wi
    assert isinstance(first.layer[1].DenseReluDense.wi, Int8Linear)


def test_layers_whose_weights_attention_reads_stay_in_float32():
    exact = quantize(T5.make_model(GENERATES, cross_kv_lora_rank=40, kv_lora_rank=16))
    for path, kind in get_module_types(exact).items():
        if path.endswith(("EncDecAttention.k", "EncDecAttention.v", "decoder.block.0.layer.0.SelfAttention.k")):
            assert kind is torch.nn.Linear, path
        elif path.endswith(("SelfAttention.q", "EncDecAttention.q", ".o", ".wi")):
            assert kind is Int8Linear, path
    for cross_cache, kind in (("encoder_outputs", torch.nn.Linear), ("keys_and_values", Int8Linear)):
        shared = quantize(share_memory(make_tiny_model("marian"), cross_cache=cross_cache))
        for _, module in iterate_cross_attentions(shared):
            assert [type(item) for item in module.key_value_projections()] == [kind] * 2
            assert isinstance(module.q_proj, Int8Linear)
        assert isinstance(shared.model.encoder.layers[0].self_attn.k_proj, Int8Linear)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", ["t5", "whisper"])
def test_quantized_model_can_be_copied_and_pickled(name, shared):
    model = make_tiny_model(name)
    quantize(share_memory(model) if shared else model)
    expected, file = compute_logits(model, name), io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for item in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)):
        assert torch.equal(compute_logits(item, name), expected) and get_module_types(item) == get_module_types(model)
        with pytest.raises(ValueError, match="`save_pretrained`"):
            item.save_pretrained("nowhere")


def test_state_dict_loads_into_another_int8_model(tmp_path):
    model, other = quantize(make_tiny_model("t5")), quantize(make_tiny_model("t5", seed=1))
    expected = compute_logits(model)
    assert not torch.equal(compute_logits(other), expected)
    torch.save(model.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert state["lm_head.weight"].dtype == torch.int8 and not other.load_state_dict(state).missing_keys
    torch.testing.assert_close(compute_logits(other), expected, atol=1e-4, rtol=1e-4)
    with pytest.raises(RuntimeError, match="before calling `quantize`"):
        other.load_state_dict(make_tiny_model("t5").state_dict())
    with pytest.raises(RuntimeError, match=r"lm_head\.scales"):
        other.load_state_dict({name: value for name, value in state.items() if name != "lm_head.scales"})
    with pytest.raises(RuntimeError, match="lm_head"):
        other.load_state_dict(state | {"lm_head.weight": state["lm_head.weight"][:5]})


def test_saving_a_quantized_model_raises_an_error(tmp_path):
    for model in (quantize(make_tiny_model("bart")), quantize(T5.make_model(GENERATES))):
        with pytest.raises(ValueError, match="`save_pretrained`"):
            model.save_pretrained(tmp_path / "model")
        with pytest.raises(ValueError, match="`save_pretrained`"):
            model.get_encoder().save_pretrained(tmp_path / "model")
        with pytest.raises(ValueError, match="`push_to_hub`"):
            model.push_to_hub("me/model")  # raised before a repository is created
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_casting_a_quantized_model_raises_an_error(name):
    """Check every method that casts, also of a copy; no tensor changes before the error."""
    model = quantize(make_tiny_model(name))
    pickled = pickle.loads(pickle.dumps(model))
    for item in (model, copy.deepcopy(model), pickled, model.get_encoder()):
        for method, *arguments in (("to", torch.bfloat16), ("to", "meta"), ("bfloat16",), ("double",)):
            with pytest.raises(ValueError, match="int8"):
                getattr(item, method)(*arguments)
        assert {parameter.dtype for parameter in item.parameters()} == {torch.float32}
        assert item.to("cpu") is item and item.to(torch.float32) is item
    copied = copy.deepcopy(model)
    assert vars(copied)["_apply"].module is copied and vars(pickled)["_apply"].module is pickled


def test_resizing_a_quantized_vocabulary_raises_an_error():
    for name in ("t5", "bart"):
        with pytest.raises(ValueError, match="`resize_token_embeddings`"):
            quantize(make_tiny_model(name)).resize_token_embeddings(70)
    encoder = quantize(make_tiny_model("t5", transformers.T5EncoderModel))  # without an output layer
    assert encoder.resize_token_embeddings(70).num_embeddings == 70


def test_quantized_head_is_not_tied_again():
    with pytest.raises(ValueError, match="`tie_weights`"):
        quantize(make_tiny_model("bart")).tie_weights()
    quantize(make_tiny_model("t5", transformers.T5EncoderModel)).tie_weights()  # without an output layer


def test_deleted_quantized_model_is_freed_immediately():
    """Check that freeing needs no garbage collection."""
    gc.disable()
    try:
        model = quantize(share_memory(make_tiny_model("t5")))
        result = weakref.ref(model)
        del model
        assert result() is None
    finally:
        gc.enable()


def test_training_a_quantized_model_raises_an_error():
    model = quantize(make_tiny_model("bart"))
    batch = make_source_batch("bart") | {"labels": torch.arange(4, 19).view(3, 5)}
    with pytest.raises(RuntimeError, match="does not require grad"):
        model(**batch).loss.backward()
    model.requires_grad_(True)
    with pytest.raises(RuntimeError, match="must not require gradients"):
        model(**batch)
    # Trainer calls this function first; importing Trainer would take seconds.
    check = getattr(transformers.trainer_utils, "validate_quantization_for_training", None)
    if check is not None:
        with pytest.raises(ValueError, match="fine-tuning"):
            check(model)


@pytest.fixture
def fast_bfloat16(monkeypatch):
    """Pretend that bfloat16 takes as long as float32 on this processor."""
    ratios = dict.fromkeys(in_place.TIMED_ROWS, 1.0)
    monkeypatch.setattr(in_place, "measure_bfloat16_slowdowns", lambda threads: ratios)


def test_bfloat16_equals_the_cast_of_transformers(fast_bfloat16, tmp_path):
    for model in (make_tiny_model("t5"), T5.make_model(GENERATES, "latent"), T5.make_model(GENERATES, "talking")):
        expected = compute_logits(copy.deepcopy(model).to(torch.bfloat16))
        assert quantize(model, "bfloat16") is model and model.dtype == torch.bfloat16
        assert torch.equal(compute_logits(model), expected)
    model.save_pretrained(tmp_path / "half")


def test_bfloat16_keeps_the_float32_modules_of_transformers(fast_bfloat16):
    model = make_tiny_model("t5")
    model._keep_in_fp32_modules_strict = {"wo"}
    wo = model.encoder.block[0].layer[1].DenseReluDense.wo
    before = wo.weight.clone()
    quantize(model, torch.bfloat16)
    assert wo.weight.dtype == torch.float32 and torch.equal(wo.weight, before)
    assert compute_logits(model).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["llama", "m2m_100"])
def test_bfloat16_keeps_the_float32_buffers_of_transformers(kind, fast_bfloat16, tmp_path):
    """Check RoPE's frequencies, which stay in float32 as in `from_pretrained`; sinusoids become bfloat16."""

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=20, **sizes)) if kind == "llama" else make_tiny_model(kind)
    model.eval().save_pretrained(tmp_path)
    upstreams = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16)
    quantize(model, "bfloat16")
    expected = dict(upstreams.named_buffers())
    for path, buffer in model.named_buffers():
        assert buffer.dtype == expected[path].dtype and torch.equal(buffer, expected[path]), path
    assert torch.get_default_dtype() == torch.float32


def test_layers_whose_weights_a_function_reads_stay_in_float32():
    """Check WavLM, whose attention passes weights to a function that does not support int8 layers."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 20}
    mamba = MambaForCausalLM(MambaConfig(**sizes, state_size=4)).eval()
    sizes |= {"num_attention_heads": 2, "intermediate_size": 16, "num_conv_pos_embeddings": 4}
    sizes |= {"num_conv_pos_embedding_groups": 2, "conv_dim": (8,), "conv_kernel": (4,), "conv_stride": (2,)}
    wavlm = WavLMModel(WavLMConfig(**sizes)).eval()
    for model, inputs, float32_layers in (
        (mamba, {"input_ids": torch.arange(8)[None]}, None),  # reads weights only on a GPU
        (wavlm, {"input_values": torch.randn(1, 64)}, "encoder.layers.0.attention.q_proj"),
    ):
        with torch.no_grad():
            before = model(**inputs)[0]
            after = quantize(model)(**inputs)[0]
        assert float32_layers is None or type(model.get_submodule(float32_layers)) is torch.nn.Linear
        assert any(isinstance(module, Int8Linear) for module in model.modules())
        assert (after - before).norm() < 0.1 * before.norm()


class ReadsWeights(transformers.BertPreTrainedModel):
    """A BERT whose code reads the weights of layers instead of calling them, in three ways."""

    nested = False

    def __init__(self, config):
        super().__init__(config)
        self.bert = transformers.BertModel(config)
        layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.top = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=self.nested)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(2))
        self.down = torch.nn.Linear(16, 16)
        self.called = torch.nn.Linear(16, 16)
        self.post_init()

    def forward(self, input_ids, attention_mask):
        states = self.bert(input_ids, attention_mask=attention_mask).last_hidden_state
        states = self.top(states, src_key_padding_mask=attention_mask == 0)
        for layer in self.layers:
            states = torch.nn.functional.linear(states, layer.weight, layer.bias)
        return self.called(states @ self.get_submodule("down").weight)


def make_small_bert(cls):
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return cls(transformers.BertConfig(**sizes, intermediate_size=32)).eval()


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("nested", [False, True])
def test_layers_with_weights_read_in_other_ways_stay_in_float32(nested, monkeypatch):
    monkeypatch.setattr(ReadsWeights, "nested", nested)
    model, ids = make_small_bert(ReadsWeights), torch.arange(5, 23).view(2, 9)
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    expected = model(ids, mask)
    quantize(model, example_inputs={"input_ids": ids, "attention_mask": mask})
    assert (model(ids, mask) - expected).norm() < 0.05 * expected.norm()
    assert isinstance(model.called, Int8Linear) and isinstance(model.bert.encoder.layer[0].output.dense, Int8Linear)
    for layer in (*model.layers, model.down, model.top.layers[1].linear1):
        assert type(layer) is torch.nn.Linear


def test_processor_without_int8_products_is_reported(monkeypatch):
    monkeypatch.setattr(int8_weight, "_find_correct_backends", lambda engine, bits: [])
    model = make_tiny_model("t5")
    before = get_module_types(model)
    with pytest.raises(ValueError, match="does not support int8 products"):
        quantize(model)
    assert get_module_types(model) == before


def test_model_that_fails_with_int8_is_unchanged():
    class Suspicious(ReadsWeights):
        def forward(self, input_ids, attention_mask):
            if type(self.called) is not torch.nn.Linear:
                raise RuntimeError("not a linear layer")
            return super().forward(input_ids, attention_mask)

    model = make_small_bert(Suspicious)
    before = get_module_types(model)
    with pytest.raises(ValueError, match="not a linear layer"):
        quantize(model)
    assert get_module_types(model) == before
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_model_without_a_trial_batch_is_quantized_with_a_warning(logged):
    class Other(ReadsWeights):
        def forward(self, words):
            return super().forward(words, torch.ones_like(words))

    quantize(make_small_bert(Other))
    assert "example_inputs" in logged.text
    logged.clear()
    model = quantize(make_small_bert(Other), example_inputs={"words": torch.arange(5, 14)[None]})
    assert "example_inputs" not in logged.text
    assert type(model.down) is torch.nn.Linear and isinstance(model.called, Int8Linear)


def _sum_of(model, ids, queue):
    with torch.no_grad():
        queue.put(model(ids).last_hidden_state.sum().item())


def test_used_quantized_model_can_be_sent_to_another_process():
    model, ids = quantize(make_small_bert(transformers.BertModel)), torch.arange(5, 14)[None]
    with torch.no_grad():
        expected = model(ids).last_hidden_state.sum().item()
    context = torch.multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_sum_of, args=(model, ids, queue))
    process.start()
    assert abs(queue.get(timeout=120) - expected) < 1e-4
    process.join()


def test_input_outliers_are_detected():
    """Check an output layer whose inputs share one large value, which hides the differences of tokens."""
    linear, states = torch.nn.Linear(64, 32), torch.randn(20, 64)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = linear

        def forward(self, states):
            return self.linear(states)

    plain = packed_linear.measure_rounding_errors(Model(), {"linear": linear}, {"states": states})["linear"]
    states[:, 3] = 200.0
    outlier = packed_linear.measure_rounding_errors(Model(), {"linear": linear}, {"states": states})["linear"]
    assert plain < packed_linear.MAX_ERROR < 0.1 < outlier


@pytest.mark.parametrize(("int8", "words"), [(3.0, "3.0 times as long"), (0.5, "")])
def test_slower_int8_gives_a_warning(monkeypatch, logged, int8, words):
    monkeypatch.setattr(in_place, "time_calls_in_turn", lambda *calls: [1.0, int8])
    logged.set_level(logging.INFO, "transformers")
    quantize(make_tiny_model("bart"))
    assert words in logged.text and ("float32 on this processor" in logged.text) == bool(words)
    assert str(int8_weight.get_current_plan()) in logged.text


def test_int8_layer_returns_the_autocast_dtype():
    """Check also the first call of a process, and inputs that are not contiguous."""
    for name in ("_make_execution_plan", "_find_correct_backends", "_choose_input_bits"):
        getattr(int8_weight, name).cache_clear()
    linear = torch.nn.Linear(16, 8)
    packed, states = Int8Linear(linear), torch.randn(4, 3, 16).transpose(0, 1)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        for inputs in (states, states.bfloat16(), states[0], states[0, 0]):
            expected, actual = linear(inputs), packed(inputs)
            assert actual.dtype == expected.dtype == torch.bfloat16 and actual.shape == expected.shape
            torch.testing.assert_close(actual, expected, atol=0.05, rtol=0.05)
    with torch.no_grad():
        assert packed(states).dtype == torch.float32 and packed(states.half()).dtype == torch.float16


def test_quantized_model_reports_its_size_and_rejects_other_devices():
    model = make_tiny_model("bart")
    numbers, size = model.num_parameters(), model.get_memory_footprint()
    quantize(model)
    assert model.num_parameters() >= numbers  # int8 has a copy of tied embeddings
    assert model.num_parameters(only_trainable=True) == 0 and 0 < model.get_memory_footprint() < size
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert model.to("cpu") is model
    finally:
        torch.set_default_dtype(torch.float32)
    assert copy.deepcopy(model).to_empty(device="cpu").num_parameters() == model.num_parameters()


def test_slower_bfloat16_gives_a_warning(monkeypatch, logged):
    for ratios, warns in ((0.9, 7.3), True), ((0.5, 0.5), False):
        slowdowns = dict(zip(in_place.TIMED_ROWS, ratios, strict=True))
        monkeypatch.setattr(in_place, "measure_bfloat16_slowdowns", lambda threads, result=slowdowns: result)
        quantize(make_tiny_model("t5"), "bfloat16")
        assert ("7.3 times as long" in logged.text and "0.9 times" in logged.text) == bool(logged.text) == warns
        logged.clear()


def make_compiled_model():
    model = make_tiny_model("t5")
    model._compiled_call_impl = print  # as set by `model.compile()`
    return model


def make_hooked_model():
    model = make_tiny_model("t5")
    model.lm_head.register_forward_hook(print)
    return model


def make_broken_model():
    model = make_tiny_model("t5")
    model.lm_head.weight.data[0, 0] = float("nan")
    return model


def quantize_with_torch():
    with pytest.warns(DeprecationWarning, match=r"torch\.ao\.quantization"):
        return torch.ao.quantization.quantize_dynamic(make_tiny_model("t5"), {torch.nn.Linear})


def make_adapted_model():
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(make_tiny_model("t5"), peft.LoraConfig(target_modules=["q"], r=2)).eval()


# (function that makes the model, `dtype`, text in the error).
ERRORS = {
    "training": (lambda: make_tiny_model("t5").train(), "int8", "training mode"),
    "device": (lambda: make_tiny_model("t5").to("meta"), "int8", "meta"),
    "bfloat16": (lambda: make_tiny_model("t5").to(torch.bfloat16), "int8", "torch.bfloat16"),
    "bfloat16 twice": (lambda: make_tiny_model("t5").to(torch.bfloat16), "bfloat16", "torch.bfloat16"),
    "dtype": (lambda: make_tiny_model("t5"), "int4", "`dtype`"),
    "no model": (lambda: torch.nn.Linear(2, 2), "int8", "`model`"),
    "path": (lambda: "runs/a", "int8", "`model`"),
    "wrapped": (lambda: torch.compile(make_tiny_model("t5")), "int8", "`model`"),
    "peft": (make_adapted_model, "int8", "`model`"),
    "peft inside": (lambda: make_adapted_model().get_base_model(), "int8", "PEFT"),
    "compiled": (make_compiled_model, "int8", "compiled"),
    "hook": (make_hooked_model, "int8", "lm_head"),
    "not finite": (make_broken_model, "int8", "lm_head.weight"),
    "twice": (lambda: quantize(make_tiny_model("t5")), "int8", "already"),
    "part of one": (lambda: quantize(make_tiny_model("t5")).get_encoder(), "int8", "already"),
    "int8 to bfloat16": (lambda: quantize(make_tiny_model("t5")), "bfloat16", "already"),
    "torch": (quantize_with_torch, "int8", "already"),
}


@pytest.mark.parametrize("make, dtype, named", ERRORS.values(), ids=ERRORS)
def test_quantize_errors_leave_the_model_unchanged(make, dtype, named):
    model = make()
    before = get_module_types(model) if isinstance(model, torch.nn.Module) else None
    with pytest.raises(ValueError, match=re.escape(named)):
        quantize(model, dtype)
    assert before is None or get_module_types(model) == before


def test_model_with_only_small_layers_raises_an_error(monkeypatch):
    monkeypatch.undo()
    with pytest.raises(ValueError, match=str(packed_linear.MIN_WEIGHTS)):
        quantize(make_tiny_model("t5"))
