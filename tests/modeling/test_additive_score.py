"""Check additive scores: outputs and gradients, memory, every architecture, and caches."""

import json

import pytest
import torch
from architectures import ARCHITECTURES, BERT, T5, make_token_ids
from fixtures.decoding import generate_with_each_cache, make_prompt
from fixtures.gradients import assert_same_with_gradients, to_exact
from fixtures.largest_tensor import LargestTensor
from fixtures.saving import save_and_load
from relatives import ENCODER_DECODERS, RELATIVES, ROTARY, WHISPER

import hf_attn_variants
from hf_attn_variants import convert
from hf_attn_variants.export.plain import export_transformers
from hf_attn_variants.hub.card import generate_model_card
from hf_attn_variants.inspection.costs import describe_scores
from hf_attn_variants.modeling.architectures import t5_family
from hf_attn_variants.modeling.attention import attention_interface
from hf_attn_variants.modeling.mechanisms import additive_score
from hf_attn_variants.modeling.mechanisms.additive_score import AdditiveScore
from hf_attn_variants.modeling.ops.softmax_attention import attention_with_weights
from hf_attn_variants.reference import scores as reference_scores
from hf_attn_variants.reference.talking_heads import attention_core

pytestmark = pytest.mark.cross_product

ADDITIVE = {"score_function": "additive"}
HEADS, D = 4, 6


def make_score(groups):
    torch.manual_seed(0)
    score = AdditiveScore(HEADS, groups, D, torch.empty(0))
    score.init_variant_parameters()
    return score


@pytest.mark.parametrize("elements", [1, 3 * HEADS * 9 * D * 4, 2**22], ids=["rows", "blocks", "one"])
@pytest.mark.parametrize("groups", [4, 2, 1])
def test_additive_scores_equal_the_formula(groups, elements, monkeypatch):
    monkeypatch.setattr(additive_score, "_SCORE_BLOCK_ELEMENTS", elements)
    score = make_score(groups)
    leaves = [torch.randn(3, heads, n, D) for heads, n in ((HEADS, 11), (groups, 9), (groups, 9))]
    leaves = [*(leaf.requires_grad_() for leaf in leaves), *score.parameters()]
    exact = to_exact(leaves)
    mask = torch.ones(3, 1, 11, 9).bool()
    mask[1, ..., 5:] = mask[2] = False
    bias = torch.randn(1, HEADS, 11, 9)
    added = bias.double() + torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -torch.inf)
    query, key, value, W, U, v = exact
    expected = reference_scores.additive_attention(query, key, value, W, U, v, mask=added).transpose(1, 2)
    actual, _ = attention_with_weights(*leaves[:3], mask, bias, scaling=7.0, score=score)
    assert_same_with_gradients(actual, expected, leaves, exact)
    with torch.no_grad():
        again, _ = attention_with_weights(*leaves[:3], mask, bias, scaling=7.0, score=score)
    torch.testing.assert_close(again, actual)


def test_additive_scores_allocate_no_tensor_of_queries_by_keys_by_d(monkeypatch):
    n, score = 200, make_score(2)
    query, key, value = (torch.randn(1, heads, n, D).requires_grad_() for heads in (HEADS, 2, 2))
    monkeypatch.setattr(additive_score, "_SCORE_BLOCK_ELEMENTS", 2 * HEADS * n * D)
    with LargestTensor() as largest:
        attention_with_weights(query, key, value, scaling=1.0, score=score)[0].sum().backward()
    assert largest.numel == HEADS * n * n  # the logits
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: sizes.append(tensor.numel()) or tensor, lambda x: x):
        score(query, key)
    assert max(sizes) <= HEADS * n * D


def test_compiled_additive_scores_equal_eager_ones():
    score, query, key = make_score(2), torch.randn(2, HEADS, 7, D), torch.randn(2, 2, 5, D)
    compiled = torch.compile(score, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(query, key), score(query, key))


def compute_by_formula(module, query, key, value, attention_mask, scaling=None, position_bias=None, **kwargs):
    """Compute attention by the formula, with dot products in modules without a score. Masks are boolean or None."""
    n, m = query.shape[2], key.shape[2]
    allowed = torch.ones(n, m).bool() if attention_mask is None else attention_mask
    if attention_mask is None and getattr(module, "is_causal", False) and n > 1:
        allowed = allowed.tril()
    added = torch.zeros(allowed.shape).masked_fill(~allowed, -torch.inf)[(None,) * (4 - allowed.dim())]
    score = module.score
    if score is None:
        scale = scaling or query.shape[-1] ** -0.5
        output, _ = attention_core(query, key, value, scale=scale, bias=position_bias, mask=added)
        return output.transpose(1, 2), None
    added = added if position_bias is None else added + position_bias
    maps = (score.query_map, score.key_map, score.vector)
    output = reference_scores.additive_attention(query, key, value, *maps, mask=added.expand(len(query), -1, -1, -1))
    return output.transpose(1, 2), None


PLACES = {
    "everywhere": ADDITIVE,
    "": {"score_function": "additive", "encoder_score_function": "none", "cross_score_function": "none"},
    "encoder_": {"encoder_score_function": "additive"},
    "cross_": {"cross_score_function": "additive"},
}
PAIRS = (T5, *ENCODER_DECODERS, WHISPER)
CASES = [(row, "everywhere") for row in (*ARCHITECTURES, *RELATIVES) if row not in ROTARY]
CASES += [(row, place) for row in PAIRS for place in PLACES if place != "everywhere"]


@pytest.mark.parametrize("row, place", CASES, ids=[f"{row.name}-{place}" for row, place in CASES])
@torch.no_grad()
def test_additive_scores_of_every_architecture_equal_the_formula(row, place, monkeypatch, tmp_path):
    head = next(iter(row.heads))
    model, batch = row.make_model(head, "gqa", **PLACES[place]), row.make_batch(head)
    for site, _, module in model.named_attention_modules():
        has_score = module.get_submodule(site.core).score is not None
        assert has_score == (place in ("everywhere", site.field_prefix))
    actual = model(**batch)[0]
    model.set_attn_implementation("eager")
    eager = model(**batch)[0]
    model.set_attn_implementation("sdpa")

    again = save_and_load(model, tmp_path, batch)
    stored = json.loads((tmp_path / "config.json").read_text())
    assert stored["per_layer_values"] is None and again.config.per_layer_values is None
    assert {name: stored[name] for name in PLACES[place]} == PLACES[place]

    calls = []

    def counted(*args, **options):
        calls.append(args)
        return compute_by_formula(*args, **options)

    monkeypatch.setattr(t5_family, "get_attention_function", lambda name: counted)
    interface = attention_interface.ALL_ATTENTION_FUNCTIONS
    monkeypatch.setitem(interface._local_mapping, attention_interface.SDPA, counted)
    expected = model(**batch)[0]
    paths = [path for _, path, _ in model.named_attention_modules()]
    assert len(calls) == sum(model.count_module_runs(model.config, path) for path in paths)
    mask = batch.get("attention_mask", actual)
    real = mask.bool() if mask.shape == actual.shape[:2] else ...
    for item in (actual, eager):
        torch.testing.assert_close(item[real], expected[real], atol=1e-5, rtol=0)


@pytest.mark.parametrize("variant", ["mqa", "talking", "latent"])
def test_additive_scores_generate_the_same_with_and_without_a_cache(variant):
    model = T5.make_model("T5ForConditionalGeneration", variant, **ADDITIVE)
    prompt = make_prompt(T5, "T5ForConditionalGeneration")
    for beams in (1, 3):
        generate_with_each_cache(model, prompt, num_beams=beams)
    weights = model(**prompt, decoder_input_ids=make_token_ids(), output_attentions=True).decoder_attentions
    assert weights[0].shape == (3, 12, 9, 9) and not weights[0].triu(1).any()


@pytest.mark.parametrize("pattern", ["sliding_window", "local_blocks"])
def test_additive_scores_work_with_patterns(pattern, gathered_blocks):
    size = "attention_window" if pattern == "sliding_window" else "attention_block_size"
    model = BERT.make_model("BertModel", "gqa", **ADDITIVE, attention_pattern=pattern, **{size: 4})

    with torch.no_grad():
        result = model(make_token_ids(2, 23), output_attentions=True)
        assert not result.attentions[0][..., 0, 5:].any() and result.attentions[0][..., 0, :2].all()
        model.set_attn_implementation("sdpa")
        ids = make_token_ids(2, 23)
        by_blocks = model(ids)[0]
        model.set_attn_implementation("eager")
        torch.testing.assert_close(model(ids)[0], by_blocks, atol=1e-5, rtol=0)


def test_additive_score_parameters_are_initialized_and_saved(tmp_path):
    torch.manual_seed(0)
    fields = {"hidden_size": 192, "num_attention_heads": 4, **ADDITIVE, "num_key_value_heads": 4}
    BERT.make_upstream_model("BertModel", hidden_size=192, num_attention_heads=4).save_pretrained(tmp_path / "plain")
    variant_model = hf_attn_variants.AttnVariantBertModel(BERT.make_config("mha", **fields))
    loaded = hf_attn_variants.AttnVariantBertModel.from_pretrained(tmp_path / "plain", **ADDITIVE)
    for model in (variant_model, loaded):
        for layer in model.encoder.layer:
            for parameter in layer.attention.self.score.parameters():
                assert parameter.std().item() == pytest.approx(48**-0.5, rel=0.2)
    save_and_load(loaded, tmp_path / "additive", {"input_ids": make_token_ids()})


def test_additive_scores_train_in_half_precision():
    model = T5.make_model("T5ForConditionalGeneration", "gqa", **ADDITIVE).train()
    batch = T5.make_batch("T5ForConditionalGeneration", labels=True)
    model(**batch).loss.backward()
    assert all(item.grad.abs().sum() > 0 for name, item in model.named_parameters() if ".score." in name)
    exact = model.eval()(**batch).loss
    assert model.bfloat16()(**batch).loss.float().item() == pytest.approx(exact.item(), rel=0.05)


def test_unsupported_additive_scores_raise_an_error(tmp_path):
    with pytest.raises(ValueError, match="score_function="):
        hf_attn_variants.AttnVariantBertModel._from_config(
            BERT.make_config("mha", **ADDITIVE), attn_implementation="flex_attention"
        )
    with pytest.raises(ValueError, match="`score_function`"):
        convert(BERT.make_model("BertModel"), **ADDITIVE)
    model = BERT.make_model("BertModel", **ADDITIVE)
    with pytest.raises(ValueError, match="`score_function`"):
        convert(model, num_key_value_heads=3)
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="`score_function`"):
        export_transformers(tmp_path / "model", tmp_path / "plain")


@pytest.mark.parametrize("row", PAIRS, ids=lambda row: row.name)
@pytest.mark.parametrize("beams", [1, 3])
def test_additive_cross_attention_generates_with_a_cache(row, beams):
    head = list(row.heads)[1]
    model = row.make_model(head, cross_score_function="additive", num_key_value_heads=1)
    generate_with_each_cache(model, make_prompt(row, head), static=True, num_beams=beams)


def test_scores_of_a_place_are_described_and_named_in_errors(tmp_path):
    assert T5.make_config().to_dict().keys().isdisjoint({"cross_score_function", "encoder_score_function"})
    assert T5.make_config(**ADDITIVE, cross_score_function="none", cross_attention_kernel="elu").cross_attention_kernel
    crossing = BERT.make_config(cross_score_function="additive", is_decoder=True, add_cross_attention=True)
    model = hf_attn_variants.AttnVariantBertLMHeadModel(crossing)
    scored = [path for site, path, module in model.named_attention_modules() if module.self.score is not None]
    assert len(scored) == 2 and all(path.endswith("crossattention") for path in scored)
    both = ("num_key_value_heads", "encoder_num_key_value_heads")
    assert describe_scores(T5.make_config(**ADDITIVE), both) == ["additive scores"]
    assert describe_scores(T5.make_config(**PLACES["cross_"]), both) == ["additive scores in cross-attention"]
    T5.make_config(**PLACES["encoder_"], architectures=["T5Model"]).save_pretrained(tmp_path)
    assert "and additive scores in the self-attention of the encoder" in str(generate_model_card(tmp_path, "me/x"))
    with pytest.raises(ValueError, match="`cross_score_function`"):
        convert(T5.make_model("T5Model", **PLACES["cross_"]), num_key_value_heads=4)
    with pytest.raises(ValueError, match="cross_score_function="):
        hf_attn_variants.AttnVariantT5Model._from_config(
            T5.make_config(**PLACES["cross_"]), attn_implementation="flex_attention"
        )
