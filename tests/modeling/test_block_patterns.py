"""Check patterns of blocks: the keys of the formula, masks and blocks of queries, and every architecture."""

from functools import partial

import pytest
import torch
from architectures import ALBERT, ARCHITECTURES, BERT, T5, make_token_ids
from fixtures.decoding import decode_in_pieces
from fixtures.gradients import assert_same_with_gradients, to_exact
from fixtures.largest_tensor import LargestTensor
from fixtures.pattern_masks import LENGTH, assert_same_under_mask, make_padding
from fixtures.saving import save_and_load
from relatives import ENCODER_DECODERS, ENCODERS, RELATIVES

from hf_attn_variants import convert
from hf_attn_variants.modeling.mechanisms.patterns import block_patterns
from hf_attn_variants.modeling.mechanisms.patterns.block_patterns import (
    BlockPattern,
    LocalBlockPattern,
    attend_to_gathered_keys,
)
from hf_attn_variants.modeling.mechanisms.patterns.pattern_table import get_pattern_class
from hf_attn_variants.modeling.ops.key_ranges import key_range_to_mask_and_bias
from hf_attn_variants.modeling.ops.softmax_attention import attention_with_weights, fused_attention
from hf_attn_variants.reference import patterns as reference_patterns
from hf_attn_variants.reference.talking_heads import attention_core

pytestmark = pytest.mark.cross_product

HEADS, D = 4, 6
# The fields of a configuration, and the functions of the formula.
PATTERNS = {
    "random_blocks": (
        {"attention_block_size": 3, "num_random_blocks": 2, "attention_seed": 5},
        [partial(reference_patterns.keys_in_random_blocks, block=3, num_random=2, seed=5)],
    ),
    "strided": ({"attention_block_size": 4}, [partial(reference_patterns.keys_in_strided_pattern, stride=4)]),
    "strided, split": (
        {"attention_block_size": 4, "split_attention_heads": True},
        [partial(reference_patterns.keys_in_strided_pattern, stride=4, part=part) for part in (1, 2)],
    ),
    "fixed": (
        {"attention_block_size": 4, "num_summary_tokens": 2},
        [partial(reference_patterns.keys_in_fixed_pattern, block=4, summary=2)],
    ),
    "fixed, split": (
        {"attention_block_size": 4, "num_summary_tokens": 1, "split_attention_heads": True},
        [partial(reference_patterns.keys_in_fixed_pattern, block=4, summary=1, part=part) for part in (1, 2)],
    ),
    "local_blocks": (
        {"attention_block_size": 5},
        [partial(reference_patterns.keys_in_local_block, block=5)],
    ),
    "dilated_blocks": (
        {"attention_block_size": 7, "attention_dilation": 3},
        [partial(reference_patterns.keys_in_dilated_block, block=7, step=3)],
    ),
}
EVERY_PATTERN = pytest.mark.parametrize("name", PATTERNS)
BOTH_WAYS = pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])


def get_pattern_fields(name, prefix=""):
    fields = {"attention_pattern": name.split(",")[0], **PATTERNS[name][0]}
    return {prefix + field: value for field, value in fields.items()}


def mask_of(name, n, causal, heads=HEADS, layer=0, global_tokens=0):
    """Return the mask of the formula, [1 or h, n, n]."""
    formulas = [partial(keys, causal=causal) for keys in PATTERNS[name][1]]
    if name == "random_blocks":
        formulas = [partial(keys, layer=layer) for keys in formulas]
    masks = [reference_patterns.pattern_mask(n, keys, global_tokens=global_tokens) for keys in formulas]
    masks = [mask.tril() if causal else mask for mask in masks]
    if len(masks) == 2:
        masks = [masks[0]] * (heads - heads // 2) + [masks[1]] * (heads // 2)
    return torch.stack(masks)


def make_pattern(name, causal, layer=0, **fields):
    config = BERT.make_config("mha", **get_pattern_fields(name), **fields)
    return get_pattern_class(config.attention_pattern).get_key_range(config, "", HEADS, layer, causal)


@EVERY_PATTERN
@BOTH_WAYS
@pytest.mark.parametrize("n", [1, 4, 23])
def test_pattern_keys_equal_the_formula(name, causal, n):
    places = torch.arange(n)
    for layer, global_tokens in ((0, 0), (3, 0 if causal else 2)):
        pattern = make_pattern(name, causal, layer, num_global_tokens=global_tokens)
        expected = mask_of(name, n, causal, layer=layer, global_tokens=global_tokens)
        allowed = pattern.get_allowed_mask(places, places)
        assert allowed.equal(expected if pattern.heads else expected[0])
        assert pattern.get_allowed_mask(places[n // 2 :], places).equal(allowed[..., n // 2 :, :])
        everything = torch.ones(n, n).bool().tril() if causal else torch.ones(n, n).bool()
        assert allowed.any(-1).all() and (not pattern.covers_all_keys(n, n) or allowed.equal(everything))


@EVERY_PATTERN
@BOTH_WAYS
def test_pattern_key_count_equals_the_formula(name, causal):
    n, places = 400, torch.arange(400)
    pattern = make_pattern(name, causal)
    in_the_midst = pattern.get_allowed_mask(places[n // 2 : n // 2 + 60], places).float().sum(-1).mean()
    # Causal strided and fixed patterns select only earlier tokens, which are half of all tokens on average.
    assert in_the_midst - 1 <= pattern.count_attended_keys(n) <= 2.2 * in_the_midst
    assert pattern.count_attended_keys(2) == 2


def make_call(n, groups=2, biased=True):
    torch.manual_seed(0)
    leaves = [torch.randn(3, heads, n, D) for heads in (HEADS, groups, groups)]
    leaves += [torch.randn(1, HEADS, 1, 2 * n - 1)] if biased else []
    places = torch.arange(n)
    padding = torch.stack([places < n, places < n // 2, places >= n - 4])
    return [leaf.requires_grad_() for leaf in leaves], padding


def compute_by_formula(leaves, allowed, padding):
    exact = to_exact(leaves)
    n = leaves[0].shape[2]
    distance = torch.arange(n) - torch.arange(n)[:, None]
    bias = exact[3][:, :, 0, distance + n - 1] if len(exact) > 3 else None
    allowed = (allowed & padding[:, None, None]).expand(3, HEADS, n, n)
    mask = torch.zeros(allowed.shape, dtype=torch.float64).masked_fill(~allowed, -torch.inf)
    output, _ = attention_core(*exact[:3], scale=0.4, bias=bias, mask=mask)
    return output.transpose(1, 2), exact


@EVERY_PATTERN
@BOTH_WAYS
@pytest.mark.parametrize("groups, biased", [(4, False), (1, True)])
def test_pattern_attention_with_mask_or_blocks_equals_the_formula(name, causal, groups, biased, gathered_blocks):
    leaves, padding = make_call(23, groups, biased)
    expected, exact = compute_by_formula(leaves, mask_of(name, 23, causal), padding)
    pattern, mask, bias = make_pattern(name, causal), padding[:, None, None], leaves[3] if biased else None
    dense, dense_bias = key_range_to_mask_and_bias(pattern, *leaves[:2], mask, bias)
    actual, _ = attention_with_weights(*leaves[:3], dense, dense_bias, scaling=0.4)
    assert_same_with_gradients(actual, expected, leaves, exact)
    actual = attend_to_gathered_keys(partial(fused_attention, scaling=0.4), pattern, leaves[:3], mask, bias)
    assert_same_with_gradients(actual, expected, leaves, exact)


@EVERY_PATTERN
@pytest.mark.parametrize("queries", [2, 5, 17])
def test_pattern_attention_after_a_cache_equals_the_full_text(name, queries, gathered_blocks):
    leaves, padding = make_call(23)
    expected, _ = compute_by_formula(leaves, mask_of(name, 23, True), padding)
    states, pattern = (leaves[0][:, :, -queries:], *leaves[1:3]), make_pattern(name, True)
    attend = partial(fused_attention, scaling=0.4)
    actual = attend_to_gathered_keys(attend, pattern, states, padding[:, None, None], leaves[3])
    torch.testing.assert_close(actual.double(), expected[:, -queries:], atol=1e-5, rtol=0)


def test_pattern_dropout_is_the_same_in_the_backward_pass(gathered_blocks):
    leaves, padding = make_call(24, biased=False)
    attend = partial(fused_attention, scaling=0.4, dropout=0.25)
    torch.manual_seed(1)
    output = attend_to_gathered_keys(attend, make_pattern("fixed", False), leaves[:3], padding[:, None, None], None)
    (gradient,) = torch.autograd.grad(output.square().sum() / 2, leaves[2])
    torch.testing.assert_close((gradient * leaves[2]).sum(), output.square().sum())


def test_pattern_blocks_allocate_no_quadratic_tensor():
    sizes = []
    for n in (1024, 2048):
        leaves, padding = make_call(n)
        attend = partial(fused_attention, scaling=0.4)
        with LargestTensor() as largest:
            pattern = BlockPattern(LocalBlockPattern, 32)
            attend_to_gathered_keys(attend, pattern, leaves[:3], padding[:, None, None], leaves[3]).sum().backward()
        sizes.append(largest.numel)
    assert sizes[1] <= 2 * sizes[0] and sizes[1] < 2048 * 2048 / 8


CASES = [
    *((row, "gqa", "local_blocks") for row in (BERT, ALBERT, *ENCODERS, T5, *ENCODER_DECODERS)),
    *((row, kind, name) for row in (BERT, T5) for kind in ("gqa", "latent") for name in ("fixed", "strided, split")),
    *((row, "talking", name) for row in (BERT, T5) for name in ("fixed, split", "strided")),
]  # fmt: skip
CASE_IDS = [f"{row.name}-{variant}-{name}" for row, variant, name in CASES]


@pytest.mark.parametrize("architecture, variant, name", CASES, ids=CASE_IDS)
def test_encoder_with_block_pattern_equals_plain_encoder_under_the_mask(architecture, variant, name, gathered_blocks):
    prefix = "encoder_" if hasattr(architecture.config_class, "encoder_attention_pattern") else ""
    head = next(iter(architecture.heads))
    models = [architecture.make_model(head, variant, **fields) for fields in (get_pattern_fields(name, prefix), {})]
    heads = models[0].config.get_query_heads(f"{prefix}num_key_value_heads")
    stacks = [model.get_encoder() if prefix else model for model in models]
    inputs = {"input_ids": make_token_ids(3, LENGTH)}
    assert_same_under_mask(*stacks, inputs, make_padding(), mask_of(name, LENGTH, False, heads)[None])


def test_random_blocks_differ_between_layers_and_seeds(gathered_blocks):
    ids = make_token_ids(2, LENGTH)
    model = BERT.make_model(
        "BertModel", **get_pattern_fields("random_blocks"), num_global_tokens=1, attn_implementation="eager"
    )
    with torch.no_grad():
        result = model(ids, output_attentions=True)
        for layer, weights in enumerate(result.attentions):
            expected = mask_of("random_blocks", LENGTH, False, layer=layer, global_tokens=1)
            assert (weights != 0).equal(expected.expand(weights.shape))
        other = BERT.make_model(
            "BertModel", **get_pattern_fields("random_blocks") | {"attention_seed": 6}, num_global_tokens=1
        )
        other.load_state_dict(model.state_dict())
        assert (other(ids)[0] - result[0]).abs().max() > 1e-3


@EVERY_PATTERN
@pytest.mark.parametrize(
    "architecture, head",
    [(BERT, "BertLMHeadModel"), (T5, "T5ForConditionalGeneration")],
    ids=["bert", "t5"],
)
def test_decoder_with_block_pattern_equals_the_full_forward_with_a_cache(architecture, head, name, gathered_blocks):
    model = architecture.make_model(head, "gqa", **get_pattern_fields(name))
    batch = architecture.make_batch(head)
    ids_name = "decoder_input_ids" if "decoder_input_ids" in batch else "input_ids"
    mask = {} if ids_name != "input_ids" else {"attention_mask": make_padding(left=True)}
    ids = make_token_ids(3, LENGTH)
    batch.pop("attention_mask" if mask else ids_name)
    batch.pop(ids_name, None)
    steps, _ = decode_in_pieces(model, ids, [6, 1, 6, 9, 1], ids_name, mask, **batch)
    with torch.no_grad():
        full_output = model(**batch, **{ids_name: ids}, **mask, use_cache=False).logits
        read = make_padding(left=True).bool() if mask else torch.ones(3, LENGTH).bool()
        torch.testing.assert_close(steps[read], full_output[read], atol=1e-5, rtol=0)
        changed = ids.index_fill(1, torch.tensor(LENGTH - 1), 7)
        later = model(**batch, **{ids_name: changed}, **mask, use_cache=False).logits
        torch.testing.assert_close(later[:, :-1][read[:, :-1]], full_output[:, :-1][read[:, :-1]])


def test_long_pattern_masks_give_a_warning_and_blocks_do_not(caplog, monkeypatch):
    from hf_attn_variants.modeling.ops import key_ranges as module

    printed = []
    monkeypatch.setattr(module.logger, "warning_once", printed.append)
    model = BERT.make_model(
        "BertModel", max_position_embeddings=2100, num_hidden_layers=1, **get_pattern_fields("local_blocks")
    )
    ids = make_token_ids(1, 2060)
    with torch.no_grad():
        by_blocks = model(ids)[0]
        assert printed == []
        model.set_attn_implementation("eager")
        torch.testing.assert_close(model(ids)[0], by_blocks, atol=1e-5, rtol=0)
    assert "attention_pattern='local_blocks' creates a mask with 2060 x 2060 elements" in printed[0]


def test_conversion_adds_and_saves_a_block_pattern(tmp_path):
    plain = BERT.make_model("BertModel")
    model = convert(plain, **get_pattern_fields("random_blocks")).eval()
    ids = make_token_ids(2, LENGTH)
    again = save_and_load(model, tmp_path, {"input_ids": ids})
    assert not again(ids)[0].allclose(plain(ids)[0])


def test_prefix_keys_with_encoder_patterns_raise_an_error(gathered_blocks):
    pattern, query, key = make_pattern("fixed", False), torch.randn(1, HEADS, 9, D), torch.randn(1, HEADS, 12, D)
    assert not block_patterns.should_gather_keys(pattern, query, key, None)
    assert block_patterns.should_gather_keys(pattern, key, key, None)
    with pytest.raises(ValueError, match="`attention_pattern`"):
        key_range_to_mask_and_bias(pattern, query, key, None, None)


def test_every_architecture_supports_block_patterns():
    for architecture in (*ARCHITECTURES, *RELATIVES):
        assert architecture.make_config("mha", **get_pattern_fields("fixed")).attention_pattern == "fixed"
