"""Check values of another size than keys: the formula, other fields, caches, counts and errors."""

import json
import re

import pytest
import torch
from architectures import ARCHITECTURES, BERT, T5, make_token_ids
from fixtures.decoding import (
    decode_at_once,
    decode_in_pieces,
    decode_in_steps,
    generate_with_each_cache,
    make_decoder_batch,
    make_prompt,
)
from fixtures.field_values import FIELDS, get_required_fields, make_tiny_config_values, value_of
from fixtures.saving import save_and_load
from relatives import RELATIVES, ROTARY
from torch import nn

from hf_attn_variants import convert
from hf_attn_variants.export.ctranslate2_check import check_ctranslate2_support
from hf_attn_variants.export.plain import export_transformers
from hf_attn_variants.hub.card import generate_model_card
from hf_attn_variants.inspection.costs import (
    compute_cost_table,
    compute_kv_cache_bytes,
    compute_kv_cache_bytes_per_token,
    count_attention_parameters,
)
from hf_attn_variants.modeling.architectures.t5_family import T5FamilyAttentionMixin
from hf_attn_variants.modeling.attention import attention_mixin
from hf_attn_variants.reference.talking_heads import attention_core

pytestmark = pytest.mark.cross_product

ROWS = [row for row in (*ARCHITECTURES, *RELATIVES) if row not in ROTARY]  # see test_modernbert.py
EVERY_ROW = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
ROW = {row.name: row for row in ROWS}
# The head size of the tiny models is 4, except for T5 (8) and the encoder of BART (12).
SMALL, LARGE = 3, 14
SIDES = ("right", "left")


def get_first_head(row):
    return next(iter(row.heads))


def make_batch(row, side):
    batch = row.make_batch(get_first_head(row))
    if side == "left" and "attention_mask" in batch:
        batch["attention_mask"] = batch["attention_mask"].flip(1)
    return batch


def compute_outputs_and_gradients(model, batch):
    """Return a model's last hidden states of real tokens, and the gradients of their weighted sum."""
    model.zero_grad()
    floats = {name: item.double() if item.is_floating_point() else item for name, item in batch.items()}
    output = model(**floats, use_cache=False)[0]
    mask = batch.get("attention_mask")
    if mask is not None and mask.shape == output.shape[:2]:
        output = output[mask.bool()]
    torch.manual_seed(2)
    (output * torch.randn_like(output)).sum().backward()
    return output.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_near(actual, expected, message=""):
    size = float(expected.abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(
        actual, expected, atol=1e-6 * max(1.0, size), rtol=0, msg=lambda text: f"{message}: {text}"
    )


# Attention by the formula


def split_heads(states, size):
    return states.unflatten(-1, (-1, size)).transpose(1, 2)


def compute_by_formula(module, maps, states, mask, memory, bias):
    """Return the outputs of all heads, one at a time (`attention_core`), from projections, inputs and a mask."""
    config, is_cross = module.config, memory is not None
    memory = states if memory is None else memory
    if hasattr(module, "kv_a_proj"):
        memory = memory @ module.kv_a_proj.weight.T
    query, key, value = (
        nn.functional.linear(x, item.weight, item.bias) for x, item in zip((states, memory, memory), maps, strict=True)
    )
    query = split_heads(query, query.shape[-1] // module.heads.query)
    key, value = split_heads(key, query.shape[-1]), split_heads(value, config.value_head_dim)
    n, m = query.shape[2], key.shape[2]
    added = torch.zeros(len(states), 1, n, m, dtype=states.dtype)
    if mask is not None:
        added = added.masked_fill(~mask, -torch.inf)
    elif module.is_causal and not is_cross:
        added = added.masked_fill(torch.ones(n, m).triu(1).bool(), -torch.inf)
    scale = 1.0 if hasattr(config, "d_kv") else query.shape[-1] ** -0.5
    output, weights = attention_core(query, key, value, scale=scale, bias=bias, mask=added)
    return output.transpose(1, 2).flatten(2), weights


def with_the_formula(monkeypatch):
    """Replace every attention by the formula, and return a list that collects the widths of value projections."""
    sizes = []

    def attend_with_projections(module, states, mask, cache, encoder_outputs, options):
        maps = [getattr(module, name) for name in module.linears]
        sizes.append(maps[2].out_features)
        return compute_by_formula(module, maps, states, mask, encoder_outputs, None)

    def compute_outputs_and_bias(self, states, memory, mask, cache, position_bias, kwargs):
        if position_bias is None and self.has_relative_attention_bias:
            length = states.shape[1]
            position_bias = self.compute_bias(length, length, states.device, 0)
        sizes.append(self.v.out_features)
        output, weights = compute_by_formula(self, (self.q, self.k, self.v), states, mask, memory, position_bias)
        return output @ self.o.weight.T, position_bias, weights

    monkeypatch.setattr(attention_mixin, "attend_with_projections", attend_with_projections)
    monkeypatch.setattr(T5FamilyAttentionMixin, "compute_outputs_and_bias", compute_outputs_and_bias)
    return sizes


@EVERY_ROW
@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("heads", [None, 4, 1], ids=["mha", "gqa", "mqa"])
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("latent", [False, True], ids=["", "latent"])
def test_value_sizes_of_every_architecture_equal_the_formula(row, size, heads, side, latent, monkeypatch):
    fields = dict.fromkeys(row.config_class.get_kv_heads_fields(), heads)
    fields |= dict.fromkeys(row.config_class.get_rank_fields() if latent else (), 16)
    model = row.make_model(get_first_head(row), value_head_dim=size, **fields).double()
    batch = make_batch(row, side)
    actual = [compute_outputs_and_gradients(model, batch)]
    model.set_attn_implementation("eager")
    actual.append(compute_outputs_and_gradients(model, batch))
    model.set_attn_implementation("sdpa")
    sizes = with_the_formula(monkeypatch)
    expected = compute_outputs_and_gradients(model, batch)
    assert sizes and all(item % size == 0 for item in sizes)
    for output, gradients in actual:
        assert_near(output, expected[0])
        assert gradients.keys() == expected[1].keys()
        for name, gradient in gradients.items():
            assert_near(gradient, expected[1][name], name)


# With every other field, small value heads equal value heads of the size of keys that are padded with zeros


def pad_heads(tensor, axis, heads, size):
    """Pad the values of each head along an axis with zeros up to `size`."""
    split = tensor.unflatten(axis, (heads, -1))
    missing = split.new_zeros(*split.shape[: axis + 1], size - split.shape[axis + 1], *split.shape[axis + 2 :])
    return torch.cat([split, missing], axis + 1).flatten(axis, axis + 1)


def widen_state(model, states):
    """Return the state dictionary with value heads that are padded with zeros to the size of keys."""
    states, config = dict(states), model.config
    for site, path, module in model.named_attention_modules():
        heads, d = site.get_heads(config, path), config.get_attention_head_dim(site.kv_heads_field)
        root = next(name for name, item in model.named_modules() if item is module) + "."
        for part in ("weight", "bias"):
            if (name := f"{root}{site.value}.{part}") in states:
                states[name] = pad_heads(states[name], 0, heads.value, d)
        name = f"{root}{site.output}.weight"
        states[name] = pad_heads(states[name], 1, heads.output, d)
        name = f"{root}{site.core + '.' if site.core else ''}compression.value_conv"
        if name in states:
            stride = states[name].shape[1] // config.value_head_dim
            states[name] = pad_heads(pad_heads(states[name], 1, stride, d), 2, 1, d)
    return states


def assert_equals_counterpart(row, fields, side):
    model = row.make_model(get_first_head(row), **fields, value_head_dim=SMALL).double()
    counterpart = row.make_model(get_first_head(row), **fields).double()
    counterpart.load_state_dict(widen_state(model, model.state_dict()))
    batch = make_batch(row, side)
    output, gradients = compute_outputs_and_gradients(model, batch)
    expected, others = compute_outputs_and_gradients(counterpart, batch)
    assert_near(output, expected)
    # The padded zeros of the counterpart have gradients, but no parameters in the model. A key bias has no gradient if
    # a latent uses the absorbed form, which may be selected for only one of the models.
    shape_mask = widen_state(model, {name: torch.ones_like(item) for name, item in model.state_dict().items()})
    parameters = [dict(item.named_parameters()) for item in (model, counterpart)]
    for name in gradients.keys() | others.keys():
        gradient = gradients.get(name, torch.zeros_like(parameters[0][name]))
        other = others.get(name, torch.zeros_like(parameters[1][name]))
        assert_near(gradient.flatten(), other[shape_mask[name].bool()], name)


@EVERY_ROW
# The parameters of some extensions have other shapes (see `test_attention_extensions.py`).
@pytest.mark.parametrize(
    "field", [name for name in FIELDS if not name.endswith(("dim", "gate", "knocking_heads", "dex"))]
)
@pytest.mark.parametrize("side", SIDES)
def test_value_size_with_another_field_equals_zero_padded_values(row, field, side):
    if field not in row.config_class.get_variant_fields():
        return
    fields = make_tiny_config_values(row, **get_required_fields(field) | {field: value_of(row, field)})
    try:
        row.make_config(**fields)
    except ValueError as error:
        with pytest.raises(ValueError, match=re.escape(str(error))):
            row.make_config(**fields, value_head_dim=SMALL)
        return
    assert_equals_counterpart(row, fields, side)


SINUSOIDS = {"position_embedding_type": "sinusoidal"}
TRANSIENT = {"encoder_attention_window": 4, "encoder_attention_block_size": 3}
EVERYWHERE = ("attention_kernel", "encoder_attention_kernel", "cross_attention_kernel")
MECHANISMS = {
    "compressed": ("bert", {"attention_pattern": "memory_compressed", "attention_block_size": 3}),
    "transient": ("t5", {"encoder_attention_pattern": "transient_global", **TRANSIENT}),
    "linformer": ("bert", {"attention_kernel": "linformer", "attention_kernel_features": 4}),
    "hybrid": ("bart", {"attention_kernel": "hybrid", "attention_window": 4}),
    **{name: ("t5", dict.fromkeys(EVERYWHERE, name) | SINUSOIDS) for name in ("relu", "hedgehog", "favor", "rfa")},
}


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("side", SIDES)
def test_value_size_works_with_kernels_scores_and_compression(name, side):
    row, fields = MECHANISMS[name]
    assert_equals_counterpart(ROW[row], fields, side)


# Decoding


DECODERS = {
    **{row.name: list(row.heads)[1] for row in ROWS if hasattr(row.config_class, "encoder_decoder_layers")},
    **{"bert": "BertLMHeadModel", "roberta": "RobertaForCausalLM", "electra": "ElectraForCausalLM"},
}
EVERY_DECODER = pytest.mark.parametrize("name", DECODERS)


def make_decoder(name, size, **fields):
    return ROW[name].make_model(DECODERS[name], value_head_dim=size, **fields)


@EVERY_DECODER
@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("heads", [None, 4, 1], ids=["mha", "gqa", "mqa"])
def test_cached_values_keep_their_size_and_outputs(name, size, heads):
    model = make_decoder(name, size, num_key_value_heads=heads)
    batch = make_decoder_batch(ROW[name], DECODERS[name])
    steps, cache = decode_in_steps(model, batch)
    torch.testing.assert_close(steps, decode_at_once(model, batch), atol=1e-4, rtol=0)
    count, d = model.config.num_key_value_heads, model.config.get_attention_head_dim()
    for part in (getattr(cache, "self_attention_cache", cache), getattr(cache, "cross_attention_cache", None)):
        for layer in part.layers if part is not None else ():
            assert layer.keys.shape[1::2] == (count, d) and layer.values.shape[1::2] == (count, size)


WINDOW = {"attention_pattern": "sliding_window", "attention_window": 4}
LATENTS = {"kv_lora_rank": 16}
GENERATIONS = {
    "mqa": {"num_key_value_heads": 1},
    "talking": {"talking_heads": "both"},
    "window": WINDOW,
    "kernel": {"attention_kernel": "elu"},
    "latent": LATENTS,
    "shared memory": {"cross_kv_lora_rank": "width"},
}


@EVERY_DECODER
@pytest.mark.parametrize("kind", GENERATIONS)
@pytest.mark.parametrize("beams", [1, 3])
def test_value_size_generates_the_same_with_and_without_a_cache(name, kind, beams):
    row = ROW[name]
    fields = make_tiny_config_values(row, **GENERATIONS[kind])
    if fields.get("cross_kv_lora_rank"):
        if "cross_kv_lora_rank" not in row.config_class.get_variant_fields():
            return
        fields["cross_kv_lora_rank"] = row.make_config().hidden_size
    prompt = make_prompt(row, DECODERS[name])
    if name in ("bert", "roberta", "electra"):
        prompt = {"input_ids": make_token_ids(2, 4)}
    static = kind in ("mqa", "talking", "latent", "shared memory")
    generate_with_each_cache(make_decoder(name, SMALL, **fields), prompt, 6, static, num_beams=beams, pad_token_id=0)


def test_value_size_applies_to_cross_attention_of_a_decoder():
    fields = {"is_decoder": True, "add_cross_attention": True, "num_key_value_heads": 4}
    model = BERT.make_model("BertLMHeadModel", value_head_dim=SMALL, **fields).double()
    plain = BERT.make_model("BertLMHeadModel", **fields).double()
    plain.load_state_dict(widen_state(model, model.state_dict()))
    ids, memory = make_token_ids(3, 7), torch.randn(3, 5, 48, dtype=torch.float64)
    mask = torch.tensor([[1] * 5, [1] * 3 + [0] * 2, [0] * 3 + [1] * 2])
    others = {"encoder_hidden_states": memory, "encoder_attention_mask": mask}
    with torch.no_grad():
        expected = plain(ids, **others, use_cache=False).logits
        assert_near(model(ids, **others, use_cache=False).logits, expected)
    assert_near(decode_in_pieces(model, ids, [4, 3], "input_ids", **others)[0], expected)


# Counts, saved models and errors


@EVERY_ROW
def test_value_size_changes_parameter_and_cache_counts(row):
    few, plain = (row.make_model(get_first_head(row), value_head_dim=size) for size in (SMALL, None))
    width, numbers, tokens = few.config.hidden_size, 0, 0
    for site, _, module in few.named_attention_modules():
        heads = few.config.get_query_heads(site.kv_heads_field)
        saved = (few.config.get_attention_head_dim(site.kv_heads_field) - SMALL) * heads
        bias = saved if module.get_submodule(site.value).bias is not None else 0
        numbers += 2 * saved * width + bias
        tokens += saved * (site.get_stack_name(few.config) == "decoder")
    assert count_attention_parameters(plain) - count_attention_parameters(few) == numbers
    assert sum(p.numel() for p in plain.parameters()) - sum(p.numel() for p in few.parameters()) == numbers
    if tokens:
        sizes = [sum(compute_kv_cache_bytes_per_token(item, 4).values()) for item in (plain, few)]
        assert sizes[0] - sizes[1] == 4 * tokens
        assert compute_kv_cache_bytes(plain, 4, 7, 7) - compute_kv_cache_bytes(few, 4, 7, 7) == 4 * 7 * tokens


def test_value_size_appears_in_flops_cards_and_tables(tmp_path):
    model = T5.make_model("T5ForConditionalGeneration", value_head_dim=SMALL)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    late = ("value_head_dim", "per_layer_values")
    configs = (config, {name: value for name, value in config.items() if name not in late})
    table, plain = (compute_cost_table(item, length=16, source_length=16) for item in configs)
    names = ("MHA", "GQA-6", "GQA-4", "GQA-3", "GQA-2", "MQA")
    assert [row.name for row in table.rows] == [f"{name} + values of {SMALL}" for name in names]
    assert [row.convertible for row in table.rows] == [True] + [False] * 5 and table.current.name.startswith("MHA")
    saved = 2 * 2 * 12 * (8 - SMALL)  # 2 layers, 2 FLOPs per multiply-add, 12 heads
    one = plain.rows[0]
    # Small values save operations in value and output projections of width 40 and in weighted sums of 16 tokens. The
    # value projection of cross-attention counts for the encoder, and the rest of cross-attention for the decoder.
    expected = {"encoder": saved * (3 * 40 + 16), "decoder": saved * (3 * 40 + 2 * 16)}
    actual = {stack: one.flops_per_token[stack] - table.rows[0].flops_per_token[stack] for stack in expected}
    assert actual == expected
    text = str(generate_model_card(tmp_path, "me/x"))
    assert f"| size of a value head | {SMALL} |" in text and f"value heads of size {SMALL}" in text


@EVERY_ROW
def test_value_size_is_saved_only_if_it_differs(row, tmp_path):
    model, batch = row.make_model(get_first_head(row), value_head_dim=SMALL), make_batch(row, "right")
    save_and_load(model, tmp_path, batch)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert (saved["value_head_dim"], saved["per_layer_values"]) == (SMALL, None)
    plain = row.make_config()
    sizes = {plain.get_attention_head_dim(name) for name in plain.get_kv_heads_fields()}
    same = row.make_config(value_head_dim=sizes.pop()) if len(sizes) == 1 else plain
    for config in (plain, same):
        values = config.to_dict()
        assert "value_head_dim" not in values
        assert type(config).from_dict(values).value_head_dim is None


def test_t5_output_projection_is_initialized_for_the_value_size():
    fields = {"d_model": 64, "num_heads": 8, "d_kv": 16, "d_ff": 64, "num_layers": 1, "initializer_factor": 1.0}
    torch.manual_seed(0)
    model = type(T5.make_model("T5Model"))(T5.config_class(**T5.tiny | fields, value_head_dim=64))
    for _, _, module in model.named_attention_modules():
        assert module.o.weight.std().item() == pytest.approx((8 * 64) ** -0.5, rel=0.05)
        assert module.v.weight.std().item() == pytest.approx(64**-0.5, rel=0.05)


def test_conversion_to_another_value_size_raises_an_error(tmp_path):
    source = BERT.make_upstream_model("BertModel")
    with pytest.raises(ValueError, match="`value_head_dim`"):
        convert(source, num_key_value_heads=4, value_head_dim=SMALL)
    same = convert(source, num_key_value_heads=4, value_head_dim=4).config
    assert same.value_head_dim is None and same.num_key_value_heads == 4
    with pytest.raises(ValueError, match="nothing to convert"):
        convert(source, value_head_dim=4)
    model = BERT.make_model("BertModel", value_head_dim=SMALL)
    with pytest.raises(ValueError, match="`value_head_dim`"):
        convert(model, num_key_value_heads=4)
    source.save_pretrained(tmp_path / "plain")
    model.save_pretrained(tmp_path / "model")
    for folder, fields in (
        ("plain", {"value_head_dim": SMALL}),
        ("plain", {"config": model.config}),
        ("model", {"config": BERT.make_config()}),
    ):
        with pytest.raises(RuntimeError, match="mismatched"):  # the error of Transformers lists the tensors
            type(model).from_pretrained(tmp_path / folder, **fields)
    assert type(model).from_pretrained(tmp_path / "plain", value_head_dim=4).config.value_head_dim is None
    with pytest.raises(ValueError, match="`value_head_dim`"):
        export_transformers(tmp_path / "model", tmp_path / "exported")
    pair = T5.make_model("T5ForConditionalGeneration", value_head_dim=SMALL)
    with pytest.raises(ValueError, match="`value_head_dim`"):
        check_ctranslate2_support(type(pair), pair.config)
    with pytest.raises(ValueError, match="value_head_dim=3"):
        type(model)._from_config(model.config, attn_implementation="flex_attention")
