"""Check attention extensions, such as gates and sinks: start, gradients, formulas, caches and combinations."""

import copy

import pytest
import torch
from architectures import ARCHITECTURES, BERT, T5, make_token_ids
from fixtures.caches import get_cache, with_cache
from fixtures.decoding import (
    decode_at_once,
    decode_in_steps,
    generate_with_each_cache,
    make_decoder_batch,
    make_prompt,
)
from fixtures.extensions import (
    ALL_FIELDS,
    EXTENSION_ROWS,
    check_attention_modules,
    get_extension_parameters,
    make_random_model,
)
from modeling.test_composition import ALONE, SAMPLES, list_conflicts
from relatives import ENCODER_DECODERS, MODERNBERT, NOMIC_BERT, RELATIVES
from transformers import StaticCache

import hf_attn_variants
from hf_attn_variants import convert
from hf_attn_variants.hub.card import generate_model_card
from hf_attn_variants.inspection.costs import (
    compute_cost_table,
    count_attention_parameters,
    describe_extensions,
    get_variant_name,
)
from hf_attn_variants.modeling.mechanisms.attention_extension import WEIGHT_STAGE
from hf_attn_variants.modeling.mechanisms.clipped_softmax import set_clipping_progress
from hf_attn_variants.training.engine.optimization import get_no_decay_parameter_names

pytestmark = pytest.mark.cross_product

BART = next(row for row in ENCODER_DECODERS if row.name == "bart")
EACH_EXTENSION = pytest.mark.parametrize("name", EXTENSION_ROWS)
FIELD_SETS = EXTENSION_ROWS | {"all": ALL_FIELDS}
EACH_SET = pytest.mark.parametrize("name", FIELD_SETS)
PLAIN_SOFTMAX = [0.0, 1.0]
SIDES = ("right", "left", "none")


def make_batch(row, head, side="right"):
    """Return float64 inputs with padding on one side."""
    batch = row.make_batch(head)
    if side == "left":
        batch["attention_mask"] = batch["attention_mask"].flip(1)
    if side == "none":
        batch.pop("attention_mask", None)
    return {name: item.double() if item.is_floating_point() else item for name, item in batch.items()}


def get_fields_at_start(fields):
    return fields | ({"clipped_softmax": PLAIN_SOFTMAX} if "clipped_softmax" in fields else {})


@pytest.mark.parametrize("row", [*ARCHITECTURES, *RELATIVES], ids=lambda row: row.name)
@EACH_SET
@torch.no_grad()
def test_model_starts_with_the_outputs_of_transformers(row, name):
    head = next(iter(row.heads))
    upstream = row.make_upstream_model(head).double()
    config = row.make_config(head=head, **get_fields_at_start(FIELD_SETS[name]))
    variant_model = getattr(hf_attn_variants, f"AttnVariant{head}")(config).double().eval()
    result = variant_model.load_state_dict(upstream.state_dict(), strict=False)
    assert not result.unexpected_keys and {*result.missing_keys} == {*get_extension_parameters(variant_model)}
    for implementation in ("eager", "sdpa"):
        # The eager function of ModernBERT computes the softmax in float32.
        upstream.set_attn_implementation("sdpa" if row is MODERNBERT else "eager")
        variant_model.set_attn_implementation(implementation)
        batch = make_batch(row, head)
        actual, expected = variant_model(**batch)[0], upstream(**batch)[0]
        # Transformers' attention functions differ for queries without allowed keys, which occur only at padding.
        mask = batch.get("attention_mask", expected)
        real = mask.bool() if mask.shape == actual.shape[:2] else ...
        torch.testing.assert_close(actual[real], expected[real], atol=1e-12, rtol=0)


@pytest.mark.parametrize("row", [BERT, MODERNBERT, NOMIC_BERT, T5, BART], ids=lambda row: row.name)
@EACH_EXTENSION
def test_new_parameters_have_gradients_and_change_the_logits(row, name):
    head = list(row.heads)[1]
    fields = get_fields_at_start(EXTENSION_ROWS[name])
    model = getattr(hf_attn_variants, f"AttnVariant{head}")(row.make_config(head=head, **fields)).eval()
    parameters, batch = get_extension_parameters(model), row.make_batch(head, labels=True)
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-2) if parameters else None
    start = model(**batch)[1].detach()
    for step in range(2 if parameters else 0):
        model(**batch).loss.backward()
        for key, parameter in parameters.items():
            # The first gradient of the matrix of DEX is 0 because its factors start at 0.
            starts_later = step == 0 and key.endswith("dex.weight")
            assert parameter.grad.isfinite().all() and (parameter.grad.any() or starts_later), key
        optimizer.step()
        optimizer.zero_grad()
    if not parameters:  # a clipped softmax has no parameters
        model = type(model)(row.make_config(head=head, **EXTENSION_ROWS[name])).eval()
    assert (model(**batch)[1] - start).abs().max() > 1e-5


def test_sink_at_zero_can_grow_after_it_became_negative():
    model = BERT.make_model("BertForMaskedLM", attention_sink=True)
    parameters = get_extension_parameters(model).values()
    for parameter in parameters:
        torch.nn.init.constant_(parameter, -0.1)
    negative = model(**BERT.make_batch("BertForMaskedLM")).logits
    model(**BERT.make_batch("BertForMaskedLM", labels=True)).loss.backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in parameters)
    for parameter in parameters:
        torch.nn.init.zeros_(parameter)
    assert model(**BERT.make_batch("BertForMaskedLM")).logits.equal(negative)


@pytest.mark.parametrize("row", [BERT, T5, BART], ids=lambda row: row.name)
@pytest.mark.parametrize("side", SIDES)
@EACH_SET
def test_attention_modules_equal_the_formulas(row, side, name):
    head = next(iter(row.heads))
    model, batch = make_random_model(row, head, "gqa", **FIELD_SETS[name]), make_batch(row, head, side)
    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        assert check_attention_modules(model, batch) == len(list(model.named_attention_modules()))


@pytest.mark.parametrize("row", [BERT, T5, BART], ids=lambda row: row.name)
@EACH_SET
def test_extensions_with_value_heads_of_another_size_equal_the_formulas(row, name):
    head = next(iter(row.heads))
    assert check_attention_modules(make_random_model(row, head, "values", **FIELD_SETS[name]), make_batch(row, head))


@EACH_SET
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_fully_masked_row_stays_finite(name, implementation):
    model = make_random_model(BERT, "BertForMaskedLM", **FIELD_SETS[name])
    model.set_attn_implementation(implementation)
    batch = make_batch(BERT, "BertForMaskedLM")
    batch["attention_mask"][1] = 0
    model.train()(**batch).logits.square().sum().backward()
    assert all(item.grad is None or item.grad.isfinite().all() for item in model.parameters())
    assert model(**batch).logits.isfinite().all()


def get_head_fields(row):
    return {"decoder_attention_heads": 8, "encoder_attention_heads": 8} if row is BART else {"num_heads": 8}


@pytest.mark.parametrize("row", [T5, BART], ids=lambda row: row.name)
@pytest.mark.parametrize("kv_heads", [8, 2, 1])
@EACH_SET
@torch.no_grad()
def test_cached_decoding_equals_uncached_decoding(row, kv_heads, name):
    head = list(row.heads)[1]
    fields = {**get_head_fields(row), "num_key_value_heads": kv_heads, **FIELD_SETS[name]}
    model = make_random_model(row, head, **fields)
    batch = make_decoder_batch(row, head)
    expected = decode_at_once(model, batch)
    torch.testing.assert_close(decode_in_steps(model, batch)[0], expected, atol=1e-9, rtol=0)
    for beams in (1, 4):
        generate_with_each_cache(model, make_prompt(row, head), static=True, num_beams=beams)


@EACH_SET
@torch.no_grad()
def test_decoder_of_bert_uses_a_static_cache(name):
    model = make_random_model(BERT, "BertLMHeadModel", "gqa", is_decoder=True, **FIELD_SETS[name])
    ids, cache = make_token_ids(2, 6), StaticCache(model.config, max_cache_len=8)
    positions = torch.arange(6)[None]
    pieces = [
        model(ids[:, i : i + 1], **with_cache(cache), position_ids=positions[:, i : i + 1]).logits for i in range(6)
    ]
    torch.testing.assert_close(torch.cat(pieces, 1), model(ids, use_cache=False).logits, atol=1e-9, rtol=0)


def iterate_other_mechanisms():
    """Yield the fields and the classes of all mechanisms that are not extensions."""
    for name in ALONE:
        if SAMPLES[name][0].keys().isdisjoint(ALL_FIELDS):
            yield pytest.param(*SAMPLES[name], id=name)


@EACH_EXTENSION
@pytest.mark.parametrize("others, classes", list(iterate_other_mechanisms()))
@torch.no_grad()
def test_extension_combines_with_each_mechanism(name, others, classes):
    fields = EXTENSION_ROWS[name]
    kinds = {SAMPLES[field][1][0] for field in fields}
    if rows := list_conflicts(*classes, *kinds):
        with pytest.raises(ValueError) as error:
            BERT.make_config(**others, **fields)
        assert all(f"`{field}`" in str(error.value) for field in (*fields, rows[0].second.field))
        return
    ids, mask = make_token_ids(2, 9), torch.ones(2, 9).long()
    mask[1, 6:] = 0
    plain = BERT.make_model("BertModel", **others).double()
    config = BERT.make_config(**others, **get_fields_at_start(fields))
    model = hf_attn_variants.AttnVariantBertModel(config).double().eval()
    missing = model.load_state_dict(plain.state_dict(), strict=False)
    assert not missing.unexpected_keys and {*missing.missing_keys} == {*get_extension_parameters(model)}
    # Some mechanisms use attention functions that sum in another order.
    torch.testing.assert_close(model(ids, mask)[0], plain(ids, mask)[0], atol=1e-9, rtol=0)
    model = make_random_model(BERT, "BertModel", **others, **fields)
    outputs = {}
    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        outputs[implementation] = model(ids, mask)[0]
        alone = model(ids[1:, :6])[0] if "linformer" not in others.values() else outputs[implementation][1:, :6]
        torch.testing.assert_close(outputs[implementation][1:, :6], alone, atol=1e-9, rtol=0)
    torch.testing.assert_close(outputs["eager"], outputs["sdpa"], atol=1e-9, rtol=0)
    if "dilated_blocks" not in others.values():  # with this pattern, a token attends only to itself
        assert (outputs["eager"] - plain(ids, mask)[0]).abs().max() > 1e-6


@pytest.mark.parametrize("pattern", ["sliding_window", "local_blocks"])
@pytest.mark.parametrize("name", ["sink", "clipped"])
@torch.no_grad()
def test_weights_are_changed_in_blocks_of_patterns(pattern, name, gathered_blocks):
    size = "attention_window" if pattern == "sliding_window" else "attention_block_size"
    fields = {"attention_pattern": pattern, size: 4, **EXTENSION_ROWS[name]}
    model, ids = make_random_model(BERT, "BertModel", "gqa", **fields), make_token_ids(2, 23)

    in_blocks = model(ids)[0]
    model.set_attn_implementation("eager")
    torch.testing.assert_close(in_blocks, model(ids)[0], atol=1e-9, rtol=0)


@EACH_SET
@torch.no_grad()
def test_extensions_combine_with_summaries_and_latents_of_t5(name):
    summaries = {"attention_window": 4, "attention_block_size": 2, "attention_pattern": "transient_global"}
    for others in ({f"encoder_{key}": value for key, value in summaries.items()}, {"cross_kv_lora_rank": 16}):
        model, batch = make_random_model(T5, "T5Model", "gqa", **others, **FIELD_SETS[name]), make_batch(T5, "T5Model")
        eager = copy.deepcopy(model)
        eager.set_attn_implementation("eager")
        torch.testing.assert_close(eager(**batch)[0], model(**batch)[0], atol=1e-9, rtol=0)
        model = make_random_model(T5, "T5ForConditionalGeneration", "gqa", **others, **FIELD_SETS[name])
        generate_with_each_cache(model, make_prompt(T5, "T5Model"), num_beams=3)


@torch.no_grad()
def test_extensions_of_outputs_use_the_absorbed_form_of_latents(monkeypatch):
    from hf_attn_variants.modeling.attention import latent_attention

    calls = []
    absorbed = latent_attention._attend_in_absorbed_form
    monkeypatch.setattr(
        latent_attention,
        "_attend_in_absorbed_form",
        lambda *args, **options: calls.append(1) or absorbed(*args, **options),
    )
    for name, fields in EXTENSION_ROWS.items():
        calls.clear()
        model = make_random_model(BERT, "BertLMHeadModel", is_decoder=True, kv_lora_rank=8, **fields)
        ids = make_token_ids(2, 24)
        cached = model(ids[:, :23])
        step = model(ids[:, 23:], **with_cache(get_cache(cached)))
        assert bool(calls) == ("gate" in name or name == "dex")
        torch.testing.assert_close(step.logits[:, 0], model(ids).logits[:, -1], atol=1e-9, rtol=0)


def test_fields_of_a_place_apply_only_there():
    places = {"": {"encoder_output_gate": "none", "output_gate": "head", "cross_output_gate": "none"}}
    places |= {prefix: {f"{prefix}output_gate": "element"} for prefix in ("encoder_", "cross_")}
    for place, fields in places.items():
        model = T5.make_model("T5Model", **fields)
        for site, _, module in model.named_attention_modules():
            assert hasattr(module, "output_gate") == (site.field_prefix == place)
    config = T5.make_config(attention_sink=True, cross_attention_sink=False)
    model = hf_attn_variants.AttnVariantT5Model(config)
    assert len(get_extension_parameters(model)) == 4
    assert T5.make_config().to_dict().keys().isdisjoint({*ALL_FIELDS, "cross_output_gate", "encoder_attention_sink"})


BAD_VALUES = (
    {"output_gate": "sigmoi"},
    {"output_gate": "none"},
    {"attention_sink": "yes"},
    {"attention_sink": 2},
    {"clipped_softmax": [0.1, 1]},
    {"clipped_softmax": [-0.1, 0.9]},
    {"clipped_softmax": [-0.1]},
    {"clipped_softmax": -0.1},
    {"clipped_softmax": ["a", "b"]},
    {"clipped_softmax": [float("nan"), 1]},
    {"knocking_heads": "values"},
    {"dex": "all"},
)


@pytest.mark.parametrize("fields", BAD_VALUES, ids=str)
def test_invalid_values_raise_an_error_that_names_the_field(fields):
    [name] = fields
    with pytest.raises(ValueError, match=f"`{name}`"):
        BERT.make_config(**fields)
    with pytest.raises(ValueError, match=f"`cross_{name}`"):
        T5.make_config(**{f"cross_{name}": "sigmoid" if fields[name] == "none" else fields[name]})


@EACH_EXTENSION
def test_other_attention_functions_raise_only_if_they_would_ignore_the_extension(name):
    model = BERT.make_model("BertModel", **EXTENSION_ROWS[name])
    [field] = EXTENSION_ROWS[name]
    if any(WEIGHT_STAGE in module.self.extensions for _, _, module in model.named_attention_modules()):
        with pytest.raises(ValueError, match=field):
            model.set_attn_implementation("flex_attention")
    else:
        hf_attn_variants.AttnVariantBertModel._from_config(model.config, attn_implementation="flex_attention")


@EACH_SET
@torch.no_grad()
def test_weights_are_returned(name):
    model, batch = make_random_model(BERT, "BertModel", "gqa", **FIELD_SETS[name]), make_batch(BERT, "BertModel")
    weights = model(**batch, output_attentions=True).attentions[0]
    assert weights.shape == (3, 12, 9, 9) and (weights >= 0).all()
    assert name != "sink" or weights.sum(-1).max() < 1 - 1e-6


@torch.no_grad()
def test_progress_of_clipping_starts_at_the_softmax():
    plain = BERT.make_model("BertModel").double()
    model = BERT.make_model("BertModel", clipped_softmax=[-0.2, 1.2]).double()
    batch = make_batch(BERT, "BertModel")
    distances = []
    for progress in (0.0, 0.5, 1.0):
        set_clipping_progress(model, progress)
        distances.append((model(**batch)[0] - plain(**batch)[0]).abs().max().item())
    assert distances[0] < 1e-12 < distances[1] < distances[2]
    middle = BERT.make_model("BertModel", clipped_softmax=(-0.1, 1.1)).double()
    set_clipping_progress(model, 0.5)
    torch.testing.assert_close(model(**batch)[0], middle(**batch)[0], atol=1e-12, rtol=0)


@EACH_SET
def test_conversion_adds_extensions_without_changing_outputs(name, tmp_path):
    source = BERT.make_upstream_model("BertForMaskedLM").eval()
    fields = get_fields_at_start(FIELD_SETS[name])
    converted = convert(source, **fields).eval()
    batch = BERT.make_batch("BertForMaskedLM")
    with torch.no_grad():
        torch.testing.assert_close(converted(**batch).logits, source(**batch).logits, atol=1e-5, rtol=0)
        for parameter in get_extension_parameters(converted).values():
            parameter.add_(torch.rand_like(parameter))
    assert all(getattr(converted.config, key) == value for key, value in fields.items())
    # Existing extensions are copied when heads are pooled.
    pooled = convert(converted, num_key_value_heads=4)
    for key, parameter in get_extension_parameters(converted).items():
        assert pooled.get_parameter(key).equal(parameter)


@pytest.mark.parametrize(
    "fields", [{"output_gate": "element"}, {"knocking_heads": "value"}, {"attention_sink": False}]
)
def test_conversion_cannot_change_extensions(fields):
    model = BERT.make_model("BertModel", output_gate="head", knocking_heads="all", attention_sink=True)
    with pytest.raises(ValueError, match=f"`{next(iter(fields))}` must stay"):
        convert(model, **fields)


def test_parameters_and_flops_of_extensions_are_counted():
    plain, length = BERT.make_model("BertModel"), 16
    for fields in EXTENSION_ROWS.values():
        model = BERT.make_model("BertModel", **fields)
        added = sum(parameter.numel() for parameter in get_extension_parameters(model).values())
        assert count_attention_parameters(model) - count_attention_parameters(plain) == added
    d, h, layers, costs = 4, 12, 2, {}
    for name, fields in ({"plain": {}} | EXTENSION_ROWS).items():
        table = compute_cost_table(BERT.make_config(**fields).to_dict(), length=length)
        costs[name] = table.current.flops_per_token["encoder"]
    assert costs["head gate"] - costs["plain"] == 2 * 48 * h * layers
    assert costs["element gate"] - costs["plain"] == 2 * 48 * h * d * layers
    assert costs["knocking values"] - costs["plain"] == 2 * d * d * h * layers
    assert costs["knocking all"] - costs["plain"] == 3 * 2 * d * d * h * layers
    assert costs["dex"] - costs["plain"] == 2 * d * d * h * layers
    assert costs["sink"] == costs["clipped"] == costs["plain"]


def test_cards_and_names_describe_extensions(tmp_path):
    config = BERT.make_config(**ALL_FIELDS, architectures=["BertModel"])
    expected = ["knocking heads", "attention sinks", "a clipped softmax", "output gates", "DEX"]
    assert describe_extensions(config, ("num_key_value_heads",)) == expected
    assert get_variant_name(config).endswith(" + ".join(expected))
    config.save_pretrained(tmp_path)
    card = str(generate_model_card(tmp_path, "me/x"))
    assert "output gates and DEX" in card and "2306.12929" in card
    cross = T5.make_config(cross_output_gate="head")
    both = ("num_key_value_heads", "encoder_num_key_value_heads")
    assert describe_extensions(cross, both) == ["output gates in cross-attention"]


def test_extensions_have_no_weight_decay():
    model = BERT.make_model("BertModel", **ALL_FIELDS)
    assert {*get_extension_parameters(model)} <= get_no_decay_parameter_names(model)
