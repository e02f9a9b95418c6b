"""Check that code around a model gets one row per beam, as in Transformers. Only attention modules share rows."""

import copy

import pytest
import torch
from fixtures.caches import get_cache, with_cache
from fixtures.upstream_seq2seq import make_source_batch, make_tiny_model

import hf_attn_variants
from hf_attn_variants import share_memory

BEAMS = {"num_beams": 3, "max_new_tokens": 6, "do_sample": False}
WIDTH = 32


def make_variant_model(family, **fields):
    """Return a model of this package with the weights and the outputs of the tiny Transformers model."""
    upstream = make_tiny_model(family)
    config_class = getattr(hf_attn_variants, f"AttnVariant{type(upstream.config).__name__}")
    model = getattr(hf_attn_variants, f"AttnVariant{type(upstream).__name__}")(
        config_class.from_upstream(upstream.config, **fields)
    )
    model.load_state_dict(upstream.state_dict(), strict="cross_talking_heads" not in fields)
    model.generation_config = upstream.generation_config
    return model.eval()


MODELS = {
    "share_memory": lambda family: share_memory(make_tiny_model(family)),
    "share_memory of encoder outputs": lambda family: share_memory(
        make_tiny_model(family), cross_cache="encoder_outputs"
    ),
    "ours": make_variant_model,
    "ours with a latent": lambda family: make_variant_model(family, cross_kv_lora_rank=WIDTH),
    "ours with talking heads": lambda family: make_variant_model(
        family, cross_talking_heads="both", talking_heads_init="identity"
    ),
}
EACH_SHARING_MODEL = pytest.mark.parametrize("name", [name for name in MODELS if "talking heads" not in name])
each_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
each_family = pytest.mark.parametrize("family", ["t5", "bart", "umt5"])


def get_cross_attention_layers(model, **options):
    result = model.generate(**make_source_batch("t5"), **BEAMS, return_dict_in_generate=True, **options)
    return get_cache(result).cross_attention_cache.layers


def expand_inputs(model, batch, rows=2):
    """Return the encoder outputs and the mask of a batch, with several rows per sentence, as `generate` makes them."""
    inputs = {"encoder_outputs": model.get_encoder()(**batch), "attention_mask": batch["attention_mask"]}
    return model._expand_inputs_for_generation(expand_size=rows, is_encoder_decoder=True, **inputs)[1]


def as_subclass(model, **methods):
    """Give a live model a user's class, derived from its class."""
    model.__class__ = type(type(model).__name__, (type(model),), methods)
    return model


@each_family
@each_model
def test_per_row_adapters_work_with_beams(family, make):
    peft = pytest.importorskip("peft")
    names = ["one", "two", "__base__"]
    batch, tokens = make_source_batch(family), []
    for model in (make_tiny_model(family), make(family)):
        targets = ["q", "k", "v"] if family != "bart" else ["q_proj", "k_proj", "v_proj"]
        settings = peft.LoraConfig(r=2, lora_alpha=16, target_modules=targets)
        adapted = peft.get_peft_model(model, settings, adapter_name="one")
        adapted.add_adapter("two", settings)
        draw = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "lora_" in name:
                    parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.3)
        tokens.append(adapted.eval().generate(**batch, adapter_names=names, **BEAMS))
    assert torch.equal(*tokens)


@each_family
@each_model
@pytest.mark.parametrize("reader", ["forward", "encoder_outputs", "hook", "prepare"])
def test_subclasses_and_hooks_get_one_row_per_beam(family, make, reader):
    tokens, rows = [], []

    def forward(self, *args, encoder_outputs=None, decoder_input_ids=None, **kwargs):
        states = encoder_outputs[0]
        assert len(states) == len(decoder_input_ids)
        rows.append(len(states))
        if reader == "forward":  # different encoder outputs for each beam
            encoder_outputs = (states * torch.linspace(0.5, 1, 3).repeat_interleave(len(states) // 3)[:, None, None],)
        more = {"encoder_outputs": encoder_outputs, "decoder_input_ids": decoder_input_ids}
        return super(type(self), self).forward(*args, **more, **kwargs)

    def prepare(self, ids, encoder_outputs=None, **kwargs):
        if ids.shape[1] == 1:  # changes them in place before the first step
            encoder_outputs[0][-3:] *= 0.5
        rows.append(len(encoder_outputs[0]))
        return super(type(self), self).prepare_inputs_for_generation(ids, encoder_outputs=encoder_outputs, **kwargs)

    for model in (make_tiny_model(family), make(family)):
        if reader == "hook":
            model.get_decoder().register_forward_pre_hook(
                lambda module, args, kwargs: rows.append(len(kwargs["encoder_hidden_states"])), with_kwargs=True
            )
        elif reader == "prepare":
            as_subclass(model, prepare_inputs_for_generation=prepare)
        else:
            as_subclass(model, forward=forward)
        tokens.append(model.generate(**make_source_batch(family), **BEAMS))
    assert torch.equal(*tokens)
    assert set(rows) == {9}


@each_family
@each_model
def test_candidates_can_be_expanded_after_the_first_step(family, make):
    """Check steps like contrastive search: repeat the cache for candidates, then select one of each."""
    logits = []
    for model in (make_tiny_model(family), make(family)):
        batch = make_source_batch(family)
        with torch.no_grad():
            inputs = {"encoder_outputs": model.get_encoder()(**batch), "attention_mask": batch["attention_mask"]}
            output = model(**inputs, decoder_input_ids=torch.full((3, 1), 3), use_cache=True)
            cache = get_cache(output)
            again = inputs | {"encoder_outputs": copy.deepcopy(inputs["encoder_outputs"])}
            _, more = model._expand_inputs_for_generation(expand_size=2, is_encoder_decoder=True, **again)
            assert len(more["encoder_outputs"][0]) == len(more["attention_mask"]) == 6
            cache.batch_repeat_interleave(2)
            candidates = output.logits[:, -1].topk(2).indices.view(-1, 1)
            logits.append(model(**more, decoder_input_ids=candidates, **with_cache(cache)).logits)
            cache.batch_select_indices(torch.tensor([1, 2, 5]))
            rows = torch.tensor([[5], [6], [7]])
            logits.append(model(**inputs, decoder_input_ids=rows, **with_cache(cache)).logits)
    torch.testing.assert_close(logits[:2], logits[2:], atol=5e-5, rtol=1e-5)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@EACH_SHARING_MODEL
def test_attentions_share_rows_between_beams(name, mode):
    expected = make_tiny_model("t5").generate(**make_source_batch("t5"), **BEAMS)
    model = MODELS[name]("t5")
    with mode():
        assert all(len(layer.keys) == 3 for layer in get_cross_attention_layers(model))
        assert torch.equal(model.generate(**make_source_batch("t5"), **BEAMS), expected)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@EACH_SHARING_MODEL
def test_modified_encoder_outputs_have_one_row_per_beam(name, mode):
    def changed(model):
        more = expand_inputs(model, make_source_batch("t5"))
        more["encoder_outputs"][0][1] *= 2
        return model(**more, decoder_input_ids=torch.full((6, 1), 3), use_cache=True).logits

    with mode():
        torch.testing.assert_close(changed(MODELS[name]("t5")), changed(make_tiny_model("t5")), atol=2e-5, rtol=1e-5)


@EACH_SHARING_MODEL
def test_modified_beam_index_selects_other_rows(name):
    """Check an index tensor that first stays within sentences, and is then overwritten with one that does not."""
    ids = torch.randint(3, 20, (6, 2), generator=torch.Generator().manual_seed(0))
    logits = []
    for model in (make_tiny_model("t5"), MODELS[name]("t5")):
        rows = torch.tensor([1, 0, 3, 2, 5, 4])
        with torch.no_grad():
            more = expand_inputs(model, make_source_batch("t5"))
            cache = get_cache(model(**more, decoder_input_ids=ids, use_cache=True))
            for order in ([1, 0, 3, 2, 5, 4], [4, 5, 0, 1, 2, 3]):
                rows.copy_(torch.tensor(order))
                cache.reorder_cache(rows)
            chosen = {"encoder_outputs": (more["encoder_outputs"][0][[5, 4, 1, 0, 3, 2]],)}
            chosen["attention_mask"] = more["attention_mask"][[5, 4, 1, 0, 3, 2]]
            logits.append(model(**chosen, decoder_input_ids=ids[:, :1], **with_cache(cache)).logits)
    torch.testing.assert_close(*logits, atol=2e-5, rtol=1e-5)


def test_modified_short_latent_gives_new_keys():
    """Check keys and values that are computed once from a short latent, after the latent is overwritten."""
    model, batch = make_variant_model("t5", cross_kv_lora_rank=WIDTH), make_source_batch("t5")
    source = {name: value[:1] for name, value in batch.items()}
    ids, logits = torch.full((1, 1), 3), []
    with torch.no_grad():
        for doubles in (True, False):
            cache = get_cache(model(**source, decoder_input_ids=ids, use_cache=True))
            model(**source, decoder_input_ids=ids, **with_cache(cache))
            first = cache.cross_attention_cache.layers[0]
            if doubles:
                first.keys.mul_(2)
            else:
                first.keys = first.keys * 2
            logits.append(model(**source, decoder_input_ids=ids, **with_cache(cache)).logits)
    torch.testing.assert_close(*logits, atol=1e-5, rtol=1e-5)
