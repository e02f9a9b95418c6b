"""Compare the heads of BERT's and BART's relatives, including Whisper, with Transformers for each variant."""

import json

import pytest
import torch
from architectures import LENGTH, make_token_ids
from fixtures.caches import get_cache
from fixtures.decoding import decode_in_pieces, make_prompt
from fixtures.elsewhere import run_elsewhere
from fixtures.parity import assert_same_outputs, assert_same_parameter_gradients, load_variant, save_upstream
from hub.test_loading_elsewhere import ELSEWHERE, save_one
from relatives import ENCODER_DECODERS, RELATIVES, WHISPER

from hf_attn_variants import convert

pytestmark = pytest.mark.cross_product

EVERY_HEAD = pytest.mark.parametrize(
    "architecture, head",
    [(row, head) for row in RELATIVES for head in row.heads],
    ids=[head for row in RELATIVES for head in row.heads],
)
EVERY_ARCHITECTURE = pytest.mark.parametrize("architecture", RELATIVES, ids=lambda row: row.name)
GENERATES = pytest.mark.parametrize("architecture", ENCODER_DECODERS, ids=lambda row: row.name)


def get_exact_ranks(architecture):
    """Return every latent of the architecture, as wide as its input."""
    return dict.fromkeys(architecture.config_class.get_rank_fields(), 48)


def get_rows(site, module, heads, role):
    """Return the weight and the bias of a role, which are ranges of rows in a fused layer."""
    parameters = module.get_submodule(getattr(site, role)).parameters()
    if not site.is_fused:
        return list(parameters)
    index = ("query", "key", "value").index(role)
    return [parameter.split(heads.fused_rows)[index] for parameter in parameters]


@pytest.mark.thorough
@EVERY_HEAD
def test_every_head_equals_transformers(architecture, head, tmp_path):
    """Compare outputs of both implementations, with padding, and gradients, from a checkpoint of Transformers."""
    upstream = save_upstream(architecture, head, tmp_path)
    variant_model = load_variant(architecture, head, tmp_path)
    exact = load_variant(architecture, head, tmp_path, **get_exact_ranks(architecture))
    batch = architecture.make_batch(head, labels=True)
    for implementation in ("eager", "sdpa"):
        for model in (upstream, variant_model, exact):
            model.set_attn_implementation(implementation)
        assert_same_outputs(variant_model, upstream, batch)
        assert_same_outputs(exact, upstream, batch)
    assert_same_parameter_gradients([variant_model, exact], upstream, batch)


@pytest.mark.thorough
@EVERY_ARCHITECTURE
def test_identical_heads_convert_without_changing_outputs(architecture, tmp_path):
    head = next(iter(architecture.heads))
    model = architecture.make_model(head, "mha")
    counts = dict.fromkeys(architecture.config_class.get_kv_heads_fields(), 2)
    with torch.no_grad():
        for site, path, module in model.named_attention_modules():
            heads = site.get_heads(model.config, path)
            for role in ("key", "value"):
                for parameter in get_rows(site, module, heads, role):
                    groups = parameter.view(2, heads.key // 2, heads.head_dim, -1)
                    groups.copy_(groups[:, :1].clone())
    grouped = convert(model, method="mean", **counts)
    assert {site.get_heads(grouped.config, path).key for site, path, _ in grouped.named_attention_modules()} == {2}
    assert grouped.num_parameters() < model.num_parameters()
    assert_same_outputs(grouped.eval(), model, architecture.make_batch(head))


@pytest.mark.slow
def test_every_auto_class_loads_in_another_process(tmp_path):
    folders = []
    for row in RELATIVES:
        variant = "by layer" if row in (*ENCODER_DECODERS, WHISPER) else "gqa"
        folders.append(save_one(row, variant, "language_model", tmp_path / row.name))
    printed = run_elsewhere("-c", ELSEWHERE, *(path for paths in folders for path in paths), cwd=tmp_path / "cwd")
    assert json.loads(printed.splitlines()[-1]) == [row.config_class.auto_classes for row in RELATIVES]


@pytest.mark.thorough
@GENERATES
@pytest.mark.parametrize(
    "search", [{"num_beams": 1}, {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}]
)
@pytest.mark.parametrize("padding", ["right", "left"])
def test_generated_tokens_equal_transformers(architecture, search, padding, tmp_path):
    head = list(architecture.heads)[1]
    upstream = save_upstream(architecture, head, tmp_path)
    batch = make_prompt(architecture, head, left=padding == "left")
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False} | search
    torch.manual_seed(0)
    expected = upstream.generate(**batch, **options)
    for fields in ({}, {"cross_kv_lora_rank": 48}, get_exact_ranks(architecture)):
        variant_model = load_variant(architecture, head, tmp_path, **fields)
        torch.manual_seed(0)
        result = variant_model.generate(**batch, **options, return_dict_in_generate=True)
        assert torch.equal(result.sequences, expected)
        sentences = len(batch["input_ids"])
        cross = get_cache(result).cross_attention_cache.layers
        storages = {layer.keys.untyped_storage().data_ptr() for layer in cross}
        assert {layer.keys.shape[0] for layer in cross} == {sentences}  # one row for all beams of a sentence
        assert len(storages) == (1 if fields else 2)


@pytest.mark.parametrize("architecture", [*ENCODER_DECODERS, WHISPER], ids=lambda row: row.name)
def test_low_rank_latents_decode_the_same_with_and_without_a_cache(architecture):
    """Check architectures with value biases, in both forms."""
    head = list(architecture.heads)[1]
    ranks = {"cross_kv_lora_rank": 7, "kv_lora_rank": 5, "encoder_kv_lora_rank": 6}
    model = architecture.make_model(head, num_key_value_heads=4, encoder_num_key_value_heads=2, **ranks)
    ids = make_token_ids(3, LENGTH)
    batch = make_prompt(architecture, head)
    with torch.no_grad():
        full_output = model(**batch, decoder_input_ids=ids, use_cache=False).logits
    steps, _ = decode_in_pieces(model, ids, 1, **batch)
    torch.testing.assert_close(steps, full_output, atol=1e-4, rtol=0)


@EVERY_ARCHITECTURE
def test_fewer_heads_error_names_the_conversion(architecture, tmp_path):
    head = next(iter(architecture.heads))
    save_upstream(architecture, head, tmp_path)
    with pytest.raises(ValueError, match=r"attn-variants convert .* --num_key_value_heads 2 "):
        load_variant(architecture, head, tmp_path, num_key_value_heads=2)
    reason = "--kv_lora_rank 6 " if architecture.config_class.get_rank_fields() else "rotary part of their own"
    with pytest.raises(ValueError, match=reason):
        load_variant(architecture, head, tmp_path, kv_lora_rank=6)
