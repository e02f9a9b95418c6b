"""Check that new weights are initialized like those of Transformers, in new models and for incomplete checkpoints."""

import math

import pytest
import torch
import transformers
from architectures import ARCHITECTURES, HEAD_AND_VARIANT_IDS, HEAD_IDS, HEADS, HEADS_AND_VARIANTS, T5, VARIANTS
from relatives import RELATIVES
from torch import nn

import hf_attn_variants
from hf_attn_variants.modeling.mechanisms.talking_heads import get_talking_heads_init_std

pytestmark = pytest.mark.cross_product

EVERY_HEAD = pytest.mark.parametrize("architecture, head", HEADS, ids=HEAD_IDS)
EVERY_ARCHITECTURE = pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda row: row.name)
EVERY_VARIANT = pytest.mark.parametrize("variant", VARIANTS)


def make_from_config(model_class, config):
    """Return a model that is made only from a configuration."""
    torch.manual_seed(0)
    return model_class(config)


def load_empty_checkpoint(model_class, config):
    """Load an empty checkpoint: each parameter starts in uninitialized memory."""
    torch.manual_seed(0)
    return model_class.from_pretrained(None, config=config, state_dict={})


BOTH_WAYS = pytest.mark.parametrize("make", [make_from_config, load_empty_checkpoint])


def make_variant_and_upstream(architecture, head, variant, make):
    config = architecture.upstream_config_class(**architecture.tiny, **architecture.heads[head].config)
    return (
        make(getattr(hf_attn_variants, f"AttnVariant{head}"), architecture.make_config(variant, head)),
        make(getattr(transformers, head), config),
    )


@pytest.mark.parametrize("architecture, head, variant", HEADS_AND_VARIANTS, ids=HEAD_AND_VARIANT_IDS)
@BOTH_WAYS
def test_new_weights_have_the_standard_deviation_of_transformers(architecture, head, variant, make):
    variant_model, upstream = make_variant_and_upstream(architecture, head, variant, make)
    expected = dict(upstream.named_parameters())
    for name, parameter in variant_model.named_parameters():
        leaf = name.rpartition(".")[2]
        if name.endswith("kv_a_proj.weight"):
            deviation = parameter.shape[0] ** -0.5
        elif leaf.endswith("_proj"):
            deviation = get_talking_heads_init_std(leaf, parameter.shape, variant_model.config.talking_heads_init)
        else:
            deviation = expected[name].std(correction=0).item()
        if deviation is None:
            assert parameter.equal(torch.eye(*parameter.shape)), name
        elif deviation == 0 and leaf.endswith("_proj"):  # input-dependent terms start at zero
            assert not parameter.any(), name
        elif deviation == 0:
            assert (parameter == expected[name].flatten()[0]).all(), name
        else:
            assert parameter.std(correction=0).item() == pytest.approx(deviation, rel=0.4), name
            assert abs(parameter.mean().item()) < 5 * deviation / math.sqrt(parameter.numel()), name


@EVERY_HEAD
@BOTH_WAYS
def test_multi_head_initialization_equals_transformers(architecture, head, make):
    variant_model, upstream = make_variant_and_upstream(architecture, head, "mha", make)
    expected = upstream.state_dict()
    assert variant_model.state_dict().keys() == expected.keys()
    assert [name for name, tensor in variant_model.state_dict().items() if not tensor.equal(expected[name])] == []


@pytest.mark.parametrize("variant", ["mha", "gqa", "talking"])
@pytest.mark.parametrize("on_a_checkpoint", [False, True], ids=["from a configuration", "on a checkpoint"])
def test_t5_classifier_starts_at_chance_level(variant, on_a_checkpoint, tmp_path):
    torch.manual_seed(0)
    config, losses = T5.make_config(variant, initializer_factor=1.0), []
    hf_attn_variants.AttnVariantT5ForConditionalGeneration(config).save_pretrained(tmp_path)
    for seed in range(8):
        torch.manual_seed(seed)
        model_class = hf_attn_variants.AttnVariantT5ForSequenceClassification
        model = model_class.from_pretrained(tmp_path) if on_a_checkpoint else model_class(config)
        with torch.no_grad():
            losses.append(model.eval()(**T5.make_batch("T5ForSequenceClassification", labels=True)).loss.item())
    assert sum(losses) / len(losses) == pytest.approx(math.log(2), abs=0.3)


@EVERY_ARCHITECTURE
@pytest.mark.parametrize("init", ["identity", "random"])
def test_talking_heads_projections_have_their_initial_values(architecture, init):
    fields = {"talking_heads": "both", "talking_heads_init": init, "talking_heads_dynamic": ["x2l", "m2w"]}
    config = architecture.make_config(**fields)
    model = make_from_config(getattr(hf_attn_variants, config.auto_classes["AutoModel"]), config)
    for site, _, module in model.named_attention_modules():
        core = module.get_submodule(site.core)
        for projection in (core.logits_proj, core.weights_proj):
            if init == "identity":
                assert projection.equal(torch.eye(12))
            else:
                assert 0.7 < projection.std() * 12**0.5 < 1.3
        for projection in (core.x2l_proj, core.m2w_proj):
            if init == "identity":
                assert not projection.any()
            else:
                expected = (1e-2 / 12 / projection.shape[0]) ** 0.5
                assert 0.9 < projection.std() / expected < 1.1


@pytest.mark.parametrize("architecture", (*ARCHITECTURES, *RELATIVES), ids=lambda row: row.name)
@pytest.mark.parametrize("by_conversion", [False, True], ids=["loaded", "converted"])
def test_initial_dynamic_terms_change_no_output_and_get_gradients(architecture, by_conversion, tmp_path):
    head = next(iter(architecture.heads))
    heads = dict.fromkeys({"encoder_attention_heads", "decoder_attention_heads"} & architecture.tiny.keys(), 12)
    upstream = architecture.make_upstream_model(head, **heads)
    fields = {"talking_heads": "both", "talking_heads_dynamic": ["x2l", "m2l", "x2w", "m2w"]}
    if by_conversion:
        model = hf_attn_variants.convert(upstream, **fields).eval()
    else:
        upstream.save_pretrained(tmp_path)
        model = getattr(hf_attn_variants, f"AttnVariant{head}").from_pretrained(tmp_path, **fields).eval()
    batch = architecture.make_batch(head)
    output = model(**batch, use_cache=False) if "decoder_input_ids" in batch else model(**batch)
    torch.testing.assert_close(output[0], upstream(**batch)[0], atol=1e-5, rtol=0)
    (output[0] * torch.randn_like(output[0])).sum().backward()
    terms = [item for name, item in model.named_parameters() if name.endswith(("2l_proj", "2w_proj"))]
    assert len(terms) >= 4 and all(parameter.grad.abs().max() > 0 for parameter in terms)
    before = output[0].detach()
    with torch.no_grad():
        for parameter in terms:
            parameter -= parameter.grad / parameter.grad.norm()
    after = model(**batch, use_cache=False) if "decoder_input_ids" in batch else model(**batch)
    assert (after[0] - before).abs().max() > 1e-4


@EVERY_ARCHITECTURE
@BOTH_WAYS
def test_latent_keys_and_values_have_the_spread_of_transformers(architecture, make):
    head = next(iter(architecture.heads))
    spreads = []
    for variant in ("gqa", "latent"):
        config = architecture.make_config(variant, num_attention_heads=12, vocab_size=2000)
        model = make(getattr(hf_attn_variants, f"AttnVariant{head}"), config).eval()
        recorded = []
        for site, _, module in model.named_attention_modules():
            for path in (site.key, site.value):
                module.get_submodule(path).register_forward_hook(
                    lambda _, __, output, recorded=recorded: recorded.append(output.std().item())
                )
        ids = torch.arange(5, 1925).view(64, 30)
        model(ids, **({"decoder_input_ids": ids} if architecture is T5 else {}))
        spreads.append(recorded)
    assert len(spreads[0]) == len(spreads[1]) >= 4
    for latent, plain in zip(*reversed(spreads), strict=True):
        assert latent == pytest.approx(plain, rel=0.35)


@pytest.mark.thorough
@EVERY_ARCHITECTURE
def test_latent_model_learns_as_fast_as_multi_head(architecture):
    heads = {"bert": "BertForMaskedLM", "albert": "AlbertForMaskedLM", "t5": "T5ForConditionalGeneration"}
    batch, losses = architecture.make_batch(heads[architecture.name], labels=True), []
    for variant in ("gqa", "latent"):
        model_class = getattr(hf_attn_variants, f"AttnVariant{heads[architecture.name]}")
        model = make_from_config(model_class, architecture.make_config(variant))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for _ in range(60):
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[1] < 1.2 * losses[0] + 0.1


@EVERY_ARCHITECTURE
def test_subclass_initialization_keeps_loaded_weights(architecture, tmp_path):
    """Check that an old `_init_weights`, which ignores the loaded flag, does not change loaded weights."""
    base = getattr(hf_attn_variants, architecture.config_class.auto_classes["AutoModel"])

    class OldRules(base):
        def _init_weights(self, module):
            if isinstance(module, nn.Linear):
                module.weight.data.normal_(std=7.0)

    model = make_from_config(base, architecture.make_config("gqa"))
    model.save_pretrained(tmp_path)
    again = OldRules.from_pretrained(tmp_path)
    assert all(again.state_dict()[name].equal(tensor) for name, tensor in model.state_dict().items())


@BOTH_WAYS
def test_subclass_with_own_initialization_uses_t5_rules_for_new_heads(make):
    class WithRules(hf_attn_variants.AttnVariantT5ForSequenceClassification):
        def _init_weights(self, module):
            super()._init_weights(module)

    weight = make(WithRules, T5.make_config("gqa")).classification_head.dense.weight
    expected = make(transformers.T5ForSequenceClassification, transformers.T5Config(**T5.tiny))
    deviation = expected.classification_head.dense.weight.std().item()
    assert deviation < 0.5 and weight.std().item() == pytest.approx(deviation, rel=0.2)
