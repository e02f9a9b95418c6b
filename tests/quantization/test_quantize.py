"""`quantize` in place: what the object keeps, what goes with copies, what stays in float32, what is refused."""

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
from architectures import ARCHITECTURES
from fixtures.upstream_seq2seq import source_batch, tiny_model
from transformers import LlamaConfig, LlamaForCausalLM, MambaConfig, MambaForCausalLM, WavLMConfig, WavLMModel

from hf_attn_variants import quantize, share_memory
from hf_attn_variants.quantization import int8_weight, packed_linear
from hf_attn_variants.quantization.packed_linear import Bfloat16Linear, Int8Linear, has_fast_bfloat16
from hf_attn_variants.shared_memory.attention import cross_attentions

# The package has a function of this name.
in_place = importlib.import_module("hf_attn_variants.quantization.quantize")

T5 = next(row for row in ARCHITECTURES if row.name == "t5")
GENERATES = "T5ForConditionalGeneration"


@torch.no_grad()
def logits_of(model, name="t5"):
    ids = torch.arange(4, 19).view(3, 5)
    return model(**source_batch(name), decoder_input_ids=ids).logits


def kinds_of(model):
    return {path: type(module) for path, module in model.named_modules()}


@pytest.fixture
def outliers(monkeypatch):
    """As if the inputs of T5's `wo` and of its output layer had outliers."""
    measured = in_place.rounding_errors

    def errors(model, linears, inputs):
        found = measured(model, linears, inputs)
        return found | {path: 2.0 for path in found if path.endswith((".wo", "lm_head"))}

    monkeypatch.setattr(in_place, "rounding_errors", errors)


def test_it_is_in_place_and_the_model_stays_its_class(outliers):
    model = tiny_model("t5")
    cls, embedding, norm = type(model), model.shared.weight, model.encoder.final_layer_norm.weight
    assert quantize(model) is model and type(model) is cls
    assert model.shared.weight is embedding and model.encoder.final_layer_norm.weight is norm
    feed_forward = model.encoder.block[0].layer[1].DenseReluDense
    assert isinstance(feed_forward.wi, Int8Linear)
    for layer in (feed_forward.wo, model.lm_head):
        assert type(layer) is (Bfloat16Linear if has_fast_bfloat16() else torch.nn.Linear)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert model.dtype == torch.float32 and not model.training


def test_without_bfloat16_layers_with_outliers_stay_in_float32(outliers, monkeypatch):
    monkeypatch.setattr(in_place, "has_fast_bfloat16", lambda: False)
    model = quantize(tiny_model("t5"))
    for block in (*model.encoder.block, *model.decoder.block):
        assert type(block.layer[-1].DenseReluDense.wo) is torch.nn.Linear
        assert isinstance(block.layer[-1].DenseReluDense.wi, Int8Linear)


def test_a_tied_head_leaves_the_embeddings_alone():
    model = tiny_model("bart")
    assert model.lm_head.weight is model.model.shared.weight
    before = model.model.shared.weight.clone()
    quantize(model)
    assert isinstance(model.lm_head, Int8Linear) and torch.equal(model.model.shared.weight, before)


def test_a_map_in_two_places_is_made_once():
    model = tiny_model("t5")
    first, second = model.encoder.block
    second.layer[1].DenseReluDense.wi = first.layer[1].DenseReluDense.wi
    quantize(model)
    assert second.layer[1].DenseReluDense.wi is first.layer[1].DenseReluDense.wi
    assert isinstance(first.layer[1].DenseReluDense.wi, Int8Linear)


def test_maps_that_attention_reads_itself_stay():
    exact = quantize(T5.model(GENERATES, cross_kv_lora_rank=40, kv_lora_rank=16))
    for path, kind in kinds_of(exact).items():
        if path.endswith(("EncDecAttention.k", "EncDecAttention.v", "decoder.block.0.layer.0.SelfAttention.k")):
            assert kind is torch.nn.Linear, path
        elif path.endswith(("SelfAttention.q", "EncDecAttention.q", ".o", ".wi")):
            assert kind is Int8Linear, path
    for cross_cache, kind in (("encoder_outputs", torch.nn.Linear), ("keys_and_values", Int8Linear)):
        shared = quantize(share_memory(tiny_model("marian"), cross_cache=cross_cache))
        for _, module in cross_attentions(shared):
            assert [type(each) for each in module.key_value_projections()] == [kind] * 2
            assert isinstance(module.q_proj, Int8Linear)
        assert isinstance(shared.model.encoder.layers[0].self_attn.k_proj, Int8Linear)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", ["t5", "whisper"])
def test_copies_and_pickles(name, shared):
    model = tiny_model(name)
    quantize(share_memory(model) if shared else model)
    expected, file = logits_of(model, name), io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for each in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)):
        assert torch.equal(logits_of(each, name), expected) and kinds_of(each) == kinds_of(model)
        with pytest.raises(ValueError, match="`save_pretrained`"):
            each.save_pretrained("nowhere")


def test_the_state_goes_into_another_model_of_int8(tmp_path):
    model, other = quantize(tiny_model("t5")), quantize(tiny_model("t5", seed=1))
    expected = logits_of(model)
    assert not torch.equal(logits_of(other), expected)
    torch.save(model.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert state["lm_head.weight"].dtype == torch.int8 and not other.load_state_dict(state).missing_keys
    torch.testing.assert_close(logits_of(other), expected, atol=1e-4, rtol=1e-4)
    with pytest.raises(RuntimeError, match="before `quantize`"):
        other.load_state_dict(tiny_model("t5").state_dict())
    with pytest.raises(RuntimeError, match=r"lm_head\.scales"):
        other.load_state_dict({name: value for name, value in state.items() if name != "lm_head.scales"})
    with pytest.raises(RuntimeError, match="lm_head"):
        other.load_state_dict(state | {"lm_head.weight": state["lm_head.weight"][:5]})


def test_it_is_not_saved(tmp_path):
    for model in (quantize(tiny_model("bart")), quantize(T5.model(GENERATES))):
        with pytest.raises(ValueError, match="`save_pretrained`"):
            model.save_pretrained(tmp_path / "model")
        with pytest.raises(ValueError, match="`save_pretrained`"):
            model.get_encoder().save_pretrained(tmp_path / "model")
        with pytest.raises(ValueError, match="`push_to_hub`"):
            model.push_to_hub("me/model")  # before a repository is made
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_its_type_stays(name):
    """By every method that casts, of a copy too, and before any tensor is changed."""
    model = quantize(tiny_model(name))
    pickled = pickle.loads(pickle.dumps(model))
    for each in (model, copy.deepcopy(model), pickled, model.get_encoder()):
        for cast in (
            lambda: each.to(torch.bfloat16),  # noqa: B023
            lambda: each.to("meta"),  # noqa: B023
            lambda: each.bfloat16(),  # noqa: B023
            lambda: each.double(),  # noqa: B023
        ):
            with pytest.raises(ValueError, match="int8"):
                cast()
        assert {parameter.dtype for parameter in each.parameters()} == {torch.float32}
        assert each.to("cpu") is each and each.to(torch.float32) is each
    copied = copy.deepcopy(model)
    assert vars(copied)["_apply"].module is copied and vars(pickled)["_apply"].module is pickled


def test_its_vocabulary_stays():
    for name in ("t5", "bart"):
        with pytest.raises(ValueError, match="`resize_token_embeddings`"):
            quantize(tiny_model(name)).resize_token_embeddings(70)
    encoder = quantize(tiny_model("t5", transformers.T5EncoderModel))  # which has no head
    assert encoder.resize_token_embeddings(70).num_embeddings == 70


def test_a_head_of_int8_is_not_tied_anew():
    with pytest.raises(ValueError, match="`tie_weights`"):
        quantize(tiny_model("bart")).tie_weights()
    quantize(tiny_model("t5", transformers.T5EncoderModel)).tie_weights()  # which has no head


def test_a_model_that_nobody_has_any_longer_is_gone_at_once():
    """Not when Python next looks for circles."""
    gc.disable()
    try:
        model = quantize(share_memory(tiny_model("t5")))
        found = weakref.ref(model)
        del model
        assert found() is None
    finally:
        gc.enable()


def test_it_is_not_trained():
    model = quantize(tiny_model("bart"))
    batch = source_batch("bart") | {"labels": torch.arange(4, 19).view(3, 5)}
    with pytest.raises(RuntimeError, match="does not require grad"):
        model(**batch).loss.backward()
    model.requires_grad_(True)
    with pytest.raises(RuntimeError, match="without gradients"):
        model(**batch)
    # What upstream's trainer asks first; its import takes seconds.
    check = getattr(transformers.trainer_utils, "validate_quantization_for_training", None)
    if check is not None:
        with pytest.raises(ValueError, match="fine-tuning"):
            check(model)


def test_bfloat16_is_upstreams_cast(monkeypatch, tmp_path):
    monkeypatch.setattr(in_place, "bfloat16_slowdowns", lambda threads: dict.fromkeys(in_place.TIMED_ROWS, 1.0))
    for model in (tiny_model("t5"), T5.model(GENERATES, "latent"), T5.model(GENERATES, "talking")):
        expected = logits_of(copy.deepcopy(model).to(torch.bfloat16))
        assert quantize(model, "bfloat16") is model and model.dtype == torch.bfloat16
        assert torch.equal(logits_of(model), expected)
    model.save_pretrained(tmp_path / "half")


def test_bfloat16_keeps_what_upstream_keeps(monkeypatch):
    monkeypatch.setattr(in_place, "bfloat16_slowdowns", lambda threads: dict.fromkeys(in_place.TIMED_ROWS, 1.0))
    model = tiny_model("t5")
    model._keep_in_fp32_modules_strict = {"wo"}
    wo = model.encoder.block[0].layer[1].DenseReluDense.wo
    before = wo.weight.clone()
    quantize(model, torch.bfloat16)
    assert wo.weight.dtype == torch.float32 and torch.equal(wo.weight, before)
    assert logits_of(model).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["llama", "m2m_100"])
def test_bfloat16_keeps_the_tables_that_upstream_keeps(kind, monkeypatch, tmp_path):
    """RoPE's frequencies stay in float32, as `from_pretrained` makes them; sinusoids become bfloat16."""
    monkeypatch.setattr(in_place, "bfloat16_slowdowns", lambda threads: {"all": 1.0})
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=20, **sizes)) if kind == "llama" else tiny_model(kind)
    model.eval().save_pretrained(tmp_path)
    upstreams = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16)
    quantize(model, "bfloat16")
    expected = dict(upstreams.named_buffers())
    for path, buffer in model.named_buffers():
        assert buffer.dtype == expected[path].dtype and torch.equal(buffer, expected[path]), path
    assert torch.get_default_dtype() == torch.float32


def test_maps_whose_weight_the_models_code_reads_stay():
    """WavLM's attention hands weights to a function, which fails with an int8 layer."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 20}
    mamba = MambaForCausalLM(MambaConfig(**sizes, state_size=4)).eval()
    sizes |= {"num_attention_heads": 2, "intermediate_size": 16, "num_conv_pos_embeddings": 4}
    sizes |= {"num_conv_pos_embedding_groups": 2, "conv_dim": (8,), "conv_kernel": (4,), "conv_stride": (2,)}
    wavlm = WavLMModel(WavLMConfig(**sizes)).eval()
    for model, inputs, kept in (
        (mamba, {"input_ids": torch.arange(8)[None]}, None),  # reads it on a GPU only
        (wavlm, {"input_values": torch.randn(1, 64)}, "encoder.layers.0.attention.q_proj"),
    ):
        with torch.no_grad():
            before = model(**inputs)[0]
            after = quantize(model)(**inputs)[0]
        assert kept is None or type(model.get_submodule(kept)) is torch.nn.Linear
        assert any(isinstance(module, Int8Linear) for module in model.modules())
        assert (after - before).norm() < 0.1 * before.norm()


class ReadsWeights(transformers.BertPreTrainedModel):
    """A BERT whose code reads the weights of layers instead of calling them, in three ways."""

    def __init__(self, config):
        super().__init__(config)
        self.bert = transformers.BertModel(config)
        layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.top = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
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


def small_bert(cls):
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return cls(transformers.BertConfig(**sizes, intermediate_size=32)).eval()


@torch.no_grad()
def test_layers_whose_weights_are_read_in_other_ways_stay():
    model, ids = small_bert(ReadsWeights), torch.arange(5, 14)[None]
    mask = torch.ones_like(ids)
    expected = model(ids, mask)
    quantize(model)
    assert (model(ids, mask) - expected).norm() < 0.05 * expected.norm()
    assert isinstance(model.called, Int8Linear) and isinstance(model.bert.encoder.layer[0].output.dense, Int8Linear)
    for layer in (*model.layers, model.down, model.top.layers[1].linear1):
        assert type(layer) is torch.nn.Linear


def test_a_model_that_does_not_run_with_int8_is_unchanged():
    class Suspicious(ReadsWeights):
        def forward(self, input_ids, attention_mask):
            if type(self.called) is not torch.nn.Linear:
                raise RuntimeError("not a linear layer")
            return super().forward(input_ids, attention_mask)

    model = small_bert(Suspicious)
    before = kinds_of(model)
    with pytest.raises(ValueError, match="not a linear layer"):
        quantize(model)
    assert kinds_of(model) == before
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_model_that_a_random_batch_does_not_fit_is_quantized_with_a_warning(caplog):
    class Other(ReadsWeights):
        def forward(self, words):
            return super().forward(words, torch.ones_like(words))

    transformers.logging.enable_propagation()
    with caplog.at_level(logging.WARNING, "transformers"):
        quantize(small_bert(Other))
    assert "example_inputs" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, "transformers"):
        model = quantize(small_bert(Other), example_inputs={"words": torch.arange(5, 14)[None]})
    transformers.logging.disable_propagation()
    assert "example_inputs" not in caplog.text
    assert type(model.down) is torch.nn.Linear and isinstance(model.called, Int8Linear)


def _sum_of(model, ids, queue):
    with torch.no_grad():
        queue.put(model(ids).last_hidden_state.sum().item())


def test_a_model_that_has_computed_goes_to_another_process():
    model, ids = quantize(small_bert(transformers.BertModel)), torch.arange(5, 14)[None]
    with torch.no_grad():
        expected = model(ids).last_hidden_state.sum().item()
    context = torch.multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_sum_of, args=(model, ids, queue))
    process.start()
    assert abs(queue.get(timeout=120) - expected) < 1e-4
    process.join()


def test_outliers_are_measured():
    """An output layer whose inputs share one large number, as in a flan-T5, loses what differs between tokens."""
    linear, states = torch.nn.Linear(64, 32), torch.randn(20, 64)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = linear

        def forward(self, states):
            return self.linear(states)

    plain = packed_linear.rounding_errors(Model(), {"linear": linear}, {"states": states})["linear"]
    states[:, 3] = 200.0
    outlier = packed_linear.rounding_errors(Model(), {"linear": linear}, {"states": states})["linear"]
    assert plain < packed_linear.MAX_ERROR < 0.1 < outlier


def test_int8_that_is_slower_is_warned_about(monkeypatch, caplog):
    transformers.logging.enable_propagation()
    for int8, words in ((3.0, "3.0 times as long"), (0.5, "")):
        monkeypatch.setattr(in_place, "least_seconds", lambda *calls, int8=int8: [1.0, int8])
        caplog.clear()
        with caplog.at_level(logging.INFO, "transformers"):
            quantize(tiny_model("bart"))
        assert words in caplog.text and ("not faster" in caplog.text) == bool(words)
        assert str(int8_weight.current_plan()) in caplog.text
    transformers.logging.disable_propagation()


def test_under_autocast_it_puts_out_what_a_linear_map_does():
    """Also for the first call of a process, and for inputs that do not lie in a row."""
    for cached in (int8_weight._plan, int8_weight._correct_paths, int8_weight._input_bits):
        cached.cache_clear()
    linear = torch.nn.Linear(16, 8)
    packed, states = Int8Linear(linear), torch.randn(4, 3, 16).transpose(0, 1)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        for given in (states, states.bfloat16(), states[0], states[0, 0]):
            expected, made = linear(given), packed(given)
            assert made.dtype == expected.dtype == torch.bfloat16 and made.shape == expected.shape
            torch.testing.assert_close(made, expected, atol=0.05, rtol=0.05)
    with torch.no_grad():
        assert packed(states).dtype == torch.float32 and packed(states.half()).dtype == torch.float16


def test_what_it_counts_and_where_it_may_go():
    model = tiny_model("bart")
    numbers, size = model.num_parameters(), model.get_memory_footprint()
    quantize(model)
    assert model.num_parameters() >= numbers  # of tied embeddings int8 has a copy
    assert model.num_parameters(only_trainable=True) == 0 and 0 < model.get_memory_footprint() < size
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert model.to("cpu") is model
    finally:
        torch.set_default_dtype(torch.float32)
    assert copy.deepcopy(model).to_empty(device="cpu").num_parameters() == model.num_parameters()


def test_bfloat16_that_is_slower_is_told(monkeypatch, caplog):
    ratios = dict(zip(in_place.TIMED_ROWS, (0.9, 7.3), strict=True))
    monkeypatch.setattr(in_place, "bfloat16_slowdowns", lambda threads: ratios)
    transformers.logging.enable_propagation()
    with caplog.at_level(logging.WARNING, "transformers"):
        quantize(tiny_model("t5"), "bfloat16")
    assert "7.3 times as long" in caplog.text and "0.9 times" in caplog.text
    caplog.clear()
    monkeypatch.setattr(in_place, "bfloat16_slowdowns", lambda threads: dict.fromkeys(in_place.TIMED_ROWS, 0.5))
    with caplog.at_level(logging.WARNING, "transformers"):
        quantize(tiny_model("t5"), "bfloat16")
    transformers.logging.disable_propagation()
    assert not caplog.text


def compiled():
    model = tiny_model("t5")
    model._compiled_call_impl = print  # as `model.compile()` sets
    return model


def hooked():
    model = tiny_model("t5")
    model.lm_head.register_forward_hook(print)
    return model


def broken():
    model = tiny_model("t5")
    model.lm_head.weight.data[0, 0] = float("nan")
    return model


def quantized_by_torch():
    with pytest.warns(DeprecationWarning, match=r"torch\.ao\.quantization"):
        return torch.ao.quantization.quantize_dynamic(tiny_model("t5"), {torch.nn.Linear})


def adapted():
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(tiny_model("t5"), peft.LoraConfig(target_modules=["q"], r=2)).eval()


# The model, `dtype`, and what the error names.
ERRORS = {
    "training": (lambda: tiny_model("t5").train(), "int8", "training mode"),
    "device": (lambda: tiny_model("t5").to("meta"), "int8", "meta"),
    "bfloat16": (lambda: tiny_model("t5").to(torch.bfloat16), "int8", "torch.bfloat16"),
    "bfloat16 twice": (lambda: tiny_model("t5").to(torch.bfloat16), "bfloat16", "torch.bfloat16"),
    "dtype": (lambda: tiny_model("t5"), "int4", "`dtype`"),
    "no model": (lambda: torch.nn.Linear(2, 2), "int8", "`model`"),
    "path": (lambda: "runs/a", "int8", "`model`"),
    "wrapped": (lambda: torch.compile(tiny_model("t5")), "int8", "`model`"),
    "peft": (adapted, "int8", "`model`"),
    "peft inside": (lambda: adapted().get_base_model(), "int8", "peft"),
    "compiled": (compiled, "int8", "compiled"),
    "hook": (hooked, "int8", "lm_head"),
    "not finite": (broken, "int8", "lm_head.weight"),
    "twice": (lambda: quantize(tiny_model("t5")), "int8", "already"),
    "part of one": (lambda: quantize(tiny_model("t5")).get_encoder(), "int8", "already"),
    "int8 to bfloat16": (lambda: quantize(tiny_model("t5")), "bfloat16", "already"),
    "torch": (quantized_by_torch, "int8", "already"),
}


@pytest.mark.parametrize("make, dtype, named", ERRORS.values(), ids=ERRORS)
def test_errors_leave_the_model_unchanged(make, dtype, named):
    model = make()
    before = kinds_of(model) if isinstance(model, torch.nn.Module) else None
    with pytest.raises(ValueError, match=re.escape(named)):
        quantize(model, dtype)
    assert before is None or kinds_of(model) == before


def test_a_model_of_small_layers_gains_nothing(monkeypatch):
    monkeypatch.undo()
    with pytest.raises(ValueError, match=str(packed_linear.MIN_WEIGHTS)):
        quantize(tiny_model("t5"))
