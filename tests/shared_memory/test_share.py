"""Check `share_memory` in place and its reversal: the state of the object, copies, and errors."""

import copy
import gc
import io
import pickle
import re
import weakref

import pytest
import torch
import transformers
from fixtures.caches import get_cache, with_cache
from fixtures.upstream_seq2seq import FAMILIES, make_source_batch, make_tiny_model

import hf_attn_variants
from hf_attn_variants import share_memory
from hf_attn_variants.modeling.attention.beam_shared_rows import BeamSharedDynamicLayer, get_unrepeated_encoder_outputs
from hf_attn_variants.shared_memory.attention import SharedMemoryMixin, iterate_cross_attentions
from hf_attn_variants.shared_memory.installation import EXPANSION_METHOD

OURS = ("t5", "umt5", "bart", "mbart", "marian", "m2m_100", "pegasus", "whisper")
VARIANTS = ({}, {"num_key_value_heads": 2}, {"cross_kv_lora_rank": 32}, {"cross_kv_lora_rank": 8})
VARIANTS += ({"cross_score_function": "additive"}, {"cross_attention_kernel": "elu"}, {"value_head_dim": 6})
BEAMS = {"num_beams": 3, "max_new_tokens": 6}


def describe_modules(model):
    """Return the class of each module, and the names and identities of its attributes."""
    return {
        path: (type(module), {name: id(value) for name, value in vars(module).items()})
        for path, module in model.named_modules()
    }


def is_shared(model):
    return all(isinstance(module, SharedMemoryMixin) for _, module in iterate_cross_attentions(model))


@pytest.mark.thorough
@pytest.mark.parametrize("name", FAMILIES)
def test_unsharing_restores_the_model_exactly(name):
    model, batch = make_tiny_model(name), make_source_batch(name)
    expected = model.generate(**batch, **BEAMS, return_dict_in_generate=True, output_scores=True)
    before = describe_modules(model)  # includes attributes that the first call sets
    cls, weights = type(model), model.state_dict()
    assert share_memory(model) is model and is_shared(model)
    assert type(model) is cls and isinstance(model, getattr(transformers, FAMILIES[name].model))
    for name_now, weight in model.state_dict().items():
        assert weight.data_ptr() == weights[name_now].data_ptr()
    for _, module in iterate_cross_attentions(model):
        original_class = type(module).original_class
        assert type(module).__name__ == original_class.__name__ and isinstance(module, original_class)
    model.generate(**batch, **BEAMS)
    assert share_memory(model) is model  # a second time changes nothing
    assert share_memory(model, False) is model
    assert describe_modules(model) == before
    again = model.generate(**batch, **BEAMS, return_dict_in_generate=True, output_scores=True)
    assert torch.equal(again.sequences, expected.sequences)
    torch.testing.assert_close(again.scores, expected.scores, atol=0, rtol=0)
    assert share_memory(model, False) is model


def test_user_defined_forward_is_called_and_restored():
    model, calls = make_tiny_model("bart"), []
    upstreams = model._expand_inputs_for_generation

    def own(*args, **kwargs):
        calls.append(kwargs)
        return upstreams(*args, **kwargs)

    setattr(model, EXPANSION_METHOD, own)
    expected = make_tiny_model("bart").generate(**make_source_batch("bart"), **BEAMS)
    share_memory(model)
    assert torch.equal(model.generate(**make_source_batch("bart"), **BEAMS), expected)
    assert calls and "encoder_outputs" in calls[0]  # as Transformers calls it
    share_memory(model, False)
    assert vars(model)[EXPANSION_METHOD] is own


def test_model_works_after_an_exception_during_a_search(source_form):
    model, batch = make_tiny_model("t5"), make_source_batch("t5")
    expected = make_tiny_model("t5").generate(**batch, **BEAMS)
    before = describe_modules(model)

    class Stops(transformers.StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            if input_ids.shape[1] > 3:
                raise KeyError("in the middle")
            return torch.zeros(len(input_ids), dtype=torch.bool)

    share_memory(model)
    with pytest.raises(KeyError, match="in the middle"):
        model.generate(**batch, **BEAMS, stopping_criteria=[Stops()])
    assert torch.equal(model.generate(**batch, **BEAMS), expected)
    share_memory(model, False)
    after = describe_modules(model)
    assert {path: kind for path, (kind, _) in after.items()} == {path: kind for path, (kind, _) in before.items()}
    assert EXPANSION_METHOD not in vars(model)
    assert torch.equal(model.generate(**batch, **BEAMS), expected)


def test_exception_while_sharing_leaves_the_model_unchanged(monkeypatch):
    from hf_attn_variants.shared_memory import installation

    model = make_tiny_model("bart")
    before = describe_modules(model)
    monkeypatch.setattr(installation.SharedInputExpansion, "__init__", lambda self, model: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        share_memory(model)
    monkeypatch.undo()
    assert describe_modules(model) == before


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["t5", "marian", "whisper"])
def test_copies_and_pickles_share_independently(name, form):
    batch = make_source_batch(name)
    expected = make_tiny_model(name).generate(**batch, **BEAMS)
    model = share_memory(make_tiny_model(name))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)]
    for item in copies:
        assert type(item) is type(model) and is_shared(item) and vars(item)[EXPANSION_METHOD].module is item
        assert torch.equal(item.generate(**batch, **BEAMS), expected)
        share_memory(item, False)
        assert not any(isinstance(module, SharedMemoryMixin) for module in item.modules())
        assert EXPANSION_METHOD not in vars(item)
        assert torch.equal(item.generate(**batch, **BEAMS), expected)
    assert is_shared(model) and torch.equal(model.generate(**batch, **BEAMS), expected)


def test_deleted_sharing_model_is_freed_immediately():
    """Check that `del` frees the model without garbage collection, as needed for GPU memory."""
    gc.disable()
    try:
        model = share_memory(make_tiny_model("t5"))
        result = weakref.ref(model)
        del model
        assert result() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ["t5", "whisper"])
def test_trainer_trains_and_evaluates_a_sharing_model(name, tmp_path):
    """Check that training steps are bitwise equal, and that evaluation with beams gives equal tokens."""
    batch = make_source_batch(name)
    rows = [{key: value[i] for key, value in batch.items()} | {"labels": torch.arange(4, 9)} for i in range(3)]
    options = {"predict_with_generate": True, "generation_num_beams": 3, "generation_max_length": 7, "max_steps": 2}
    options |= {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "use_cpu": True, "seed": 0}
    result = []
    for change in (lambda model: model, share_memory):
        model = change(make_tiny_model(name))
        args = transformers.Seq2SeqTrainingArguments(str(tmp_path), learning_rate=1e-2, **options)
        trainer = transformers.Seq2SeqTrainer(model, args, train_dataset=rows, eval_dataset=rows)
        trainer.train()
        result.append((model.state_dict(), trainer.predict(rows).predictions))
    (weights, tokens), (shared_weights, shared_tokens) = result
    assert all(torch.equal(shared_weights[key], weight) for key, weight in weights.items())
    key, first = next(iter(weights.items()))
    assert (shared_tokens == tokens).all() and not torch.equal(make_tiny_model(name).state_dict()[key], first)


@pytest.mark.parametrize("name", ["t5", "bart", "whisper"])
def test_saved_sharing_model_equals_transformers(name, tmp_path):
    make_tiny_model(name).save_pretrained(tmp_path / "plain")
    share_memory(make_tiny_model(name)).save_pretrained(tmp_path / "shared")
    names = sorted(path.name for path in (tmp_path / "plain").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "shared").iterdir())
    for item in names:
        assert (tmp_path / "plain" / item).read_bytes() == (tmp_path / "shared" / item).read_bytes()


class OwnModel(transformers.T5ForConditionalGeneration):
    """A user's class with an additional method."""

    def forward(self, *args, **kwargs):
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(*args, **kwargs)


def test_subclasses_can_share_memory(form):
    model = share_memory(make_tiny_model("t5", OwnModel))
    assert type(model) is OwnModel
    model.load_state_dict(
        make_tiny_model("t5").state_dict()
    )  # Transformers initializes a user's class with other weights
    expected = make_tiny_model("t5").generate(**make_source_batch("t5"), **BEAMS)
    assert torch.equal(model.generate(**make_source_batch("t5"), **BEAMS), expected) and model.calls > 1
    share_memory(model, False)
    for _, module in iterate_cross_attentions(model):  # a subclass without its own `forward`
        module.__class__ = OwnAttention
    share_memory(model)
    assert torch.equal(model.generate(**make_source_batch("t5"), **BEAMS), expected)
    share_memory(model, False)
    assert all(type(module) is OwnAttention for _, module in iterate_cross_attentions(model))


class OwnAttention(transformers.models.t5.modeling_t5.T5Attention):
    """An attention subclass without its own `forward`."""


class OtherAttention(transformers.models.t5.modeling_t5.T5Attention):
    """An attention subclass with its own `forward`."""

    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


def test_returned_cache_can_be_copied_and_pickled(source_form):
    """Check that copies and pickles contain keys and values as in Transformers, but no model weights."""
    upstream, shared = make_tiny_model("bart"), share_memory(make_tiny_model("bart"))
    batch, ids = make_source_batch("bart"), torch.full((3, 2), 3)
    with torch.no_grad():
        expected_cache, actual_cache = (
            get_cache(model(**batch, decoder_input_ids=ids, use_cache=True)).cross_attention_cache
            for model in (upstream, shared)
        )
    assert [layer.get_seq_length() for layer in actual_cache.layers] == [11] * 3
    assert all(layer.encoder_outputs is not None for layer in actual_cache.layers)
    for copied in (copy.deepcopy(actual_cache), pickle.loads(pickle.dumps(actual_cache)), actual_cache):
        for copied_layer, expected_layer in zip(copied.layers, expected_cache.layers, strict=True):
            torch.testing.assert_close(copied_layer.keys, expected_layer.keys)
            torch.testing.assert_close(copied_layer.values, expected_layer.values)
    assert all(layer.encoder_outputs is None for layer in actual_cache.layers)
    copied = copy.deepcopy(actual_cache)
    assert all(type(layer) is BeamSharedDynamicLayer for layer in copied.layers)


def test_cache_rows_can_be_selected_repeated_and_reset(source_form):
    shared = share_memory(make_tiny_model("bart"))
    with torch.no_grad():
        output = shared(**make_source_batch("bart"), decoder_input_ids=torch.full((3, 2), 3), use_cache=True)
    cache = get_cache(output)
    layers, states = cache.cross_attention_cache.layers, output.encoder_last_hidden_state
    for change, rows in (
        (lambda: cache.reorder_cache(torch.tensor([2, 0, 1])), [2, 0, 1]),
        (lambda: cache.batch_repeat_interleave(2), [2, 2, 0, 0, 1, 1]),
        (lambda: cache.batch_select_indices(torch.tensor([0, 5])), [2, 1]),
    ):
        change()
        assert all(torch.equal(layer.encoder_outputs, states[rows]) for layer in layers)
    keys = layers[0].keys
    cache.reorder_cache(torch.tensor([1, 1, 0]))
    assert torch.equal(layers[0].keys, keys[[1, 1, 0]])
    cache.reset()
    cache.self_attention_cache = transformers.DynamicCache()  # in some releases, a reset fills it with zeros
    assert [layer.get_seq_length() for layer in layers] == [0] * 3
    with torch.no_grad():
        again = shared(
            **make_source_batch("bart"), decoder_input_ids=torch.full((3, 2), 3), **with_cache(cache)
        ).logits
    torch.testing.assert_close(again, output.logits, atol=1e-5, rtol=1e-5)


def test_projections_with_adapters_or_hooks_are_called(source_form):
    """Check that LoRA and quantized layers get one row per sentence, and hooked ones one row per beam."""
    calls = []

    class Counted(torch.nn.Linear):
        def forward(self, states):
            calls.append(len(states))
            return super().forward(states)

    expected = make_tiny_model("t5").generate(**make_source_batch("t5"), **BEAMS)
    for hooked, rows in ((False, 3), (True, 9)):
        model = share_memory(make_tiny_model("t5"))
        for _, module in iterate_cross_attentions(model):
            module.k.__class__ = Counted
            if hooked:
                module.v.register_forward_hook(lambda *args: None)
        calls.clear()
        assert torch.equal(model.generate(**make_source_batch("t5"), **BEAMS), expected)
        assert calls and set(calls) == {rows}


def make_tiny_bert(cls=transformers.BertModel, **fields):
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    return cls(cls.config_class(**sizes, vocab_size=20, **fields))


def make_tiny_gpt2():
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 9, "bos_token_id": 0, "eos_token_id": 1}
    return transformers.GPT2Model(transformers.GPT2Config(**sizes))


def with_flash_attention():
    model = make_tiny_model("t5")
    model.config._attn_implementation_internal = "flash_attention_2"
    return model


def with_another_class():
    model = make_tiny_model("t5")
    model.decoder.block[1].layer[1].EncDecAttention.__class__ = OtherAttention
    return model


def with_another_forward():
    model = make_tiny_model("bart")
    model.model.decoder.layers[0].encoder_attn.forward = print
    return model


def make_bert2bert(cls):
    decoder = make_tiny_bert(cls, is_decoder=True, add_cross_attention=True)
    return transformers.EncoderDecoderModel(encoder=make_tiny_bert(), decoder=decoder)


# (function that makes the model, text in the error).
ERRORS = {
    "encoder": (make_tiny_bert, "BertModel"),
    "encoder of an encoder-decoder": (lambda: make_tiny_model("t5", transformers.T5EncoderModel), "T5EncoderModel"),
    "encoder of ours": (
        lambda: hf_attn_variants.AttnVariantT5EncoderModel(make_variant_config("t5")),
        "T5EncoderModel",
    ),
    "decoder": (make_tiny_gpt2, "GPT2Model"),
    "decoder of an encoder-decoder": (
        lambda: transformers.BartForCausalLM(make_tiny_model("bart").config),
        "BartForCausalLM",
    ),
    "encoder of BART": (lambda: make_tiny_model("bart").get_encoder(), "BartEncoder"),
    "path": (lambda: "runs/a", "`model`"),
    "no model": (lambda: torch.nn.Linear(2, 2), "`model`"),
    "wrapped": (lambda: torch.compile(make_tiny_model("t5")), "`model`"),
    "implementation": (with_flash_attention, "flash_attention_2"),
    "another class": (with_another_class, "decoder.block.1.layer.1.EncDecAttention"),
    "another forward": (with_another_forward, "model.decoder.layers.0.encoder_attn"),
    "two models": (lambda: make_bert2bert(transformers.BertLMHeadModel), "EncoderDecoderModel"),
    "two models, one of ours": (
        lambda: make_bert2bert(hf_attn_variants.AttnVariantBertLMHeadModel),
        "EncoderDecoderModel",
    ),
}


@pytest.mark.parametrize("make, named", ERRORS.values(), ids=ERRORS)
def test_share_memory_errors_leave_the_model_unchanged(make, named):
    model = make()
    before = describe_modules(model) if isinstance(model, transformers.PreTrainedModel) else None
    with pytest.raises(ValueError, match=re.escape(named)):
        share_memory(model)
    assert before is None or describe_modules(model) == before


def make_variant_config(name, **fields):
    return getattr(hf_attn_variants, f"AttnVariant{FAMILIES[name].config}")(**FAMILIES[name].fields | fields)


def make_variant_model(name, **fields):
    torch.manual_seed(0)
    cls = getattr(hf_attn_variants, f"AttnVariant{FAMILIES[name].model}")
    return cls(make_variant_config(name, **fields)).eval()


def run_beam_search(model, name):
    """Return the tokens of a search by three beams, and the encoder rows that its attentions read."""
    rows = set()
    spy = model.register_forward_pre_hook(
        lambda module, args, named: rows.add(len(get_unrepeated_encoder_outputs(named["encoder_outputs"][0]))),
        with_kwargs=True,
    )
    result = model.generate(**make_source_batch(name), **BEAMS)
    spy.remove()
    return result, rows


@pytest.mark.thorough
@pytest.mark.parametrize("fields", VARIANTS, ids=str)
@pytest.mark.parametrize("name", OURS)
def test_own_encoder_decoders_share_memory_by_default(name, fields):
    model = make_variant_model(name, **fields)
    expected, rows = run_beam_search(model, name)
    assert rows == {3}  # sentences, not beams
    before = describe_modules(model)
    for share in (True, False, True):
        assert share_memory(model, share) is model and describe_modules(model) == before
    assert torch.equal(run_beam_search(model, name)[0], expected)


@pytest.mark.parametrize("name", OURS)
def test_talking_heads_in_cross_attention_keep_one_row_per_beam(name):
    model = make_variant_model(name, cross_talking_heads="logits")
    assert run_beam_search(model, name)[1] == {9}
    with pytest.raises(ValueError, match="cross_talking_heads="):
        share_memory(model)
    assert share_memory(model, False) is model


@pytest.mark.parametrize("name", OURS)
def test_cached_encoder_outputs_of_own_models_need_a_field(name):
    with pytest.raises(ValueError, match="`cross_kv_lora_rank=32`"):
        share_memory(make_variant_model(name), cross_cache="encoder_outputs")
    model = make_variant_model(name, cross_kv_lora_rank=32)
    assert share_memory(model, cross_cache="encoder_outputs") is model
    with pytest.raises(ValueError, match="`cross_cache`"):
        share_memory(model, cross_cache="outputs")


def test_later_wrappers_must_be_removed_before_unsharing():
    model = share_memory(make_tiny_model("bart"))
    attention = model.model.decoder.layers[0].encoder_attn
    attention.forward = attention.forward
    with pytest.raises(ValueError, match=r"model\.decoder\.layers\.0\.encoder_attn\.forward"):
        share_memory(model, False)
    assert is_shared(model)
    del attention.forward
    share_memory(model, False)
    assert not any(isinstance(module, SharedMemoryMixin) for module in model.modules())


def test_later_change_of_implementation_uses_transformers_forward(source_form):
    """Check that inputs are repeated as in Transformers if the implementation changes after sharing."""
    model, batch = share_memory(make_tiny_model("bart")), make_source_batch("bart")
    expected = make_tiny_model("bart").generate(**batch, **BEAMS)
    seen = []

    def spying(module, *args, **kwargs):
        seen.append(args[0].shape[0])
        return transformers.integrations.sdpa_attention.sdpa_attention_forward(module, *args, **kwargs)

    transformers.AttentionInterface.register("spying", spying)
    transformers.AttentionMaskInterface.register("spying", transformers.masking_utils.sdpa_mask)
    model.set_attn_implementation("spying")
    assert torch.equal(model.generate(**batch, **BEAMS), expected) and 9 in seen
