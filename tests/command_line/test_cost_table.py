"""Check the counts of `inspect` against models and torch's operation counter."""

import json
import re

import pytest
import torch
from architectures import ALBERT, ARCHITECTURES, BERT, T5, VARIANTS
from fixtures.caches import get_cache, get_cache_name, with_cache
from relatives import RELATIVES
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

from hf_attn_variants import AttnVariantAlbertModel, AttnVariantBertModel, cli
from hf_attn_variants.conversion import convert_checkpoint
from hf_attn_variants.inspection import attention_projection_flops
from hf_attn_variants.inspection.costs import (
    compute_cost_table,
    compute_kv_cache_bytes_per_token,
    count_attention_parameters,
    count_flops_per_token,
    get_variant_name,
)

LENGTH, SOURCE = 7, 5
BASES = {"bert": "BertForMaskedLM", "albert": "AlbertForMaskedLM", "t5": "T5ForConditionalGeneration"}


def test_cost_table_supports_unequal_heads_of_encoder_and_decoder():
    """Check four heads in the encoder and twelve in the decoder; talking heads need equal counts."""
    bart = next(architecture for architecture in RELATIVES if architecture.name == "bart")
    table = compute_cost_table(bart.make_upstream_model("BartForConditionalGeneration").config.to_dict())
    heads = [row.fields["num_key_value_heads"] for row in table.rows if "num_key_value_heads" in row.fields]
    assert heads == [12, 6, 4, 3, 2, 1] and not any("talking_heads" in row.fields for row in table.rows)


def count_flops(run):
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        run()
    return counter.get_total_flops()


def make_model(architecture, head, variant):
    # The tests use two sentences of equal length without padding, so all tokens have the same cost.
    return architecture.make_model(head, variant, attn_implementation="eager")


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("architecture", [BERT, ALBERT], ids=lambda row: row.name)
def test_encoder_flops_equal_the_torch_counter(architecture, variant):
    model = make_model(architecture, BASES[architecture.name], variant)
    ids = torch.randint(5, 60, (2, LENGTH))
    assert count_flops_per_token(model, LENGTH, LENGTH) == {
        "encoder": count_flops(lambda: model(input_ids=ids)) / ids.numel()
    }


@pytest.mark.parametrize("variant", VARIANTS)
def test_encoder_decoder_flops_equal_the_torch_counter(variant):
    model = make_model(T5, "T5ForConditionalGeneration", variant)
    source, target = torch.randint(5, 60, (2, SOURCE)), torch.randint(5, 60, (2, LENGTH))
    flops = count_flops_per_token(model, LENGTH, SOURCE)
    together = count_flops(lambda: model(input_ids=source, decoder_input_ids=target, use_cache=False))
    assert flops["encoder"] * source.numel() + flops["decoder"] * target.numel() == together
    # Count the encoder, and the latents, keys and values of cross-attention.
    encoder = count_flops(lambda: model.encoder(source))
    cross = [module for site, _, module in model.named_attention_modules() if site.name == "cross"]
    memory = torch.zeros(2, SOURCE, model.config.d_model)
    latent = getattr(model.decoder, "cross_kv_a_proj", torch.nn.Identity())
    encoder += count_flops(lambda: [(m.k(c), m.v(c)) for c in [latent(memory)] for m in cross])
    dynamic = [p for m in cross for name, p in m.named_parameters() if name in ("m2l_proj", "m2w_proj")]
    encoder += sum(2 * p.numel() * source.numel() for p in dynamic)
    assert flops["encoder"] * source.numel() == encoder


def test_window_flops_and_cache_count_only_the_window():
    """Check the logits and sums of the keys in the window, and the cache, which has one token less."""
    window = {"attention_pattern": "sliding_window", "attention_window": 8}
    config = BERT.make_config("gqa", attention_window=8, attention_pattern="sliding_window", num_global_tokens=1)
    rows = [compute_cost_table(item.to_dict(), length=100).current for item in (BERT.make_config("gqa"), config)]
    saved = (100 - 10) * 2 * 48 * 2 * config.num_hidden_layers  # of 100 tokens, w + 1 + 1 global token are used
    assert rows[0].flops_per_token["encoder"] - rows[1].flops_per_token["encoder"] == saved
    assert rows[1].name == "GQA-4 + window 8"
    config = T5.make_config("mqa", **window).to_dict() | {"architectures": ["T5ForConditionalGeneration"]}
    current = compute_cost_table(config, length=100, source_length=50).current
    decoder, cross = (current.kv_cache_bytes_per_token[site] for site in ("decoder", "cross"))
    assert current.kv_cache_bytes == 7 * decoder + 50 * cross


@pytest.mark.parametrize("kernel", ["elu", "hedgehog", "favor", "rfa"])
def test_kernel_flops_and_state_equal_the_torch_counter(kernel):
    """Check sums once per key/value head, their use per query head, and the constant state size."""
    model = BERT.make_model("BertForMaskedLM", "gqa", attention_kernel=kernel, attn_implementation="eager")
    ids = torch.randint(5, 60, (2, LENGTH))
    assert count_flops_per_token(model, LENGTH, LENGTH) == {
        "encoder": count_flops(lambda: model(input_ids=ids)) / ids.numel()
    }
    head = {"is_decoder": True}
    decoder = BERT.make_model("BertLMHeadModel", "gqa", attention_kernel=kernel, **head)
    cache = get_cache(decoder(ids, use_cache=True))
    state = sum(layer.state.sums[0].nbytes for layer in cache.layers)
    config = decoder.config.to_dict() | {"architectures": ["BertLMHeadModel"]}
    for length in (10, 1000):
        current = compute_cost_table(config, length=length).current
        assert (current.kv_cache_bytes, current.kv_cache_bytes_per_token) == (state, {"self": 0})
    assert current.name == f"GQA-4 + {kernel}"


def test_linformer_flops_equal_the_torch_counter():
    fields = {"attention_kernel": "linformer", "attention_kernel_features": 5}
    model = BERT.make_model("BertForMaskedLM", "gqa", **fields)
    ids = torch.randint(5, 60, (2, LENGTH))
    heads = torch.zeros(1, 4, 2, 8)
    is_counted = (
        count_flops(lambda: scaled_dot_product_attention(heads, heads, heads)) > 0
    )  # on a CPU since torch 2.15
    fused = 0 if is_counted else 4 * 5 * 48 * model.config.num_hidden_layers
    result = count_flops(lambda: model(input_ids=ids)) / ids.numel() + fused
    assert count_flops_per_token(model, LENGTH, LENGTH) == {"encoder": result}


def test_hybrid_flops_include_the_window():
    hybrid = {"attention_kernel": "hybrid", "attention_window": 4}
    configs = [BERT.make_config("gqa", **fields) for fields in ({"attention_kernel": "hedgehog"}, hybrid)]
    rows = [compute_cost_table(item.to_dict(), length=100).current for item in configs]
    near = 5 * 4 * 48 * configs[0].num_hidden_layers  # w + 1 keys and values
    assert rows[1].flops_per_token["encoder"] - rows[0].flops_per_token["encoder"] == near
    assert rows[1].name == "GQA-4 + hybrid 4"
    decoder = BERT.make_model("BertLMHeadModel", "gqa", is_decoder=True, **hybrid)
    cache = get_cache(decoder(torch.randint(5, 60, (2, LENGTH)), use_cache=True))
    state = sum(item[0].nbytes for layer in cache.layers for item in layer.state[:3])
    config = decoder.config.to_dict() | {"architectures": ["BertLMHeadModel"]}
    assert compute_cost_table(config, length=1000).current.kv_cache_bytes == state


# One rank below the head size, one above it, and the input width.
RANKS = (4, 24, 48)


@pytest.mark.parametrize("fields", [{}, {"num_key_value_heads": 2}, {"talking_heads": "both"}], ids=str)
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("architecture", [BERT, ALBERT], ids=lambda row: row.name)
def test_latent_encoder_flops_equal_the_torch_counter(architecture, rank, fields):
    head = BASES[architecture.name]
    model = architecture.make_model(head, kv_lora_rank=rank, attn_implementation="eager", **fields)
    ids = torch.randint(5, 60, (2, LENGTH))
    result = count_flops_per_token(model, LENGTH, LENGTH, decodes=True, batch_size=2)
    assert result == {"encoder": count_flops(lambda: model(input_ids=ids)) / ids.numel()}


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [(None, 40), (None, 4), (None, 20), (6, None), (40, 4), (6, 20)], ids=str)
@pytest.mark.parametrize("fields", [{}, {"num_key_value_heads": 2}, {"talking_heads": "both"}], ids=str)
def test_latent_flops_per_generated_token_equal_the_torch_counter(ranks, fields):
    """Check latents of 20 and 4 for ten source tokens; only the first one caches keys and values."""
    fields |= {"kv_lora_rank": ranks[0], "cross_kv_lora_rank": ranks[1], "attn_implementation": "eager"}
    model = T5.make_model("T5ForConditionalGeneration", **fields)
    source, token = torch.randint(5, 60, (2, SOURCE)), torch.randint(5, 60, (2, 1))
    cached = {}

    def step(**kwargs):
        cached.update(model(decoder_input_ids=token, use_cache=True, **kwargs))

    first = count_flops_per_token(model, 1, SOURCE, decodes=True, batch_size=2)
    executed = count_flops(lambda: step(input_ids=source))
    assert executed == first["encoder"] * source.numel() + first["decoder"] * 2
    for length in range(2, 5):
        flops = count_flops_per_token(model, length, SOURCE, decodes=True, batch_size=2)
        states = (cached["encoder_last_hidden_state"],)
        executed = count_flops(lambda: step(encoder_outputs=states, **with_cache(cached[get_cache_name()])))  # noqa: B023
        assert executed == flops["decoder"] * 2, length


def test_whole_texts_use_the_expanded_form_of_latents():
    model = make_model(T5, "T5ForConditionalGeneration", "mha")
    latents = T5.make_model(
        "T5ForConditionalGeneration", kv_lora_rank=6, cross_kv_lora_rank=4, encoder_kv_lora_rank=40
    )
    plain, result = count_flops_per_token(model, LENGTH, SOURCE), count_flops_per_token(latents, LENGTH, SOURCE)
    width, kv, layers = 40, 2 * 12 * 8, 2
    assert result["decoder"] - plain["decoder"] == 2 * layers * (6 * width + 6 * kv - width * kv)
    assert result["encoder"] - plain["encoder"] == 2 * (4 * width + layers * (4 * kv - width * kv))


def test_latent_parameters_are_counted_as_attention():
    for model in (
        T5.make_model("T5ForConditionalGeneration", kv_lora_rank=6, cross_kv_lora_rank=4, talking_heads="both"),
        BERT.make_model("BertModel", kv_lora_rank=6, per_layer_values={"num_key_value_heads": [12, 2]}),
    ):
        attention_names = (".attention.self.", ".attention.output.dense", "Attention.", "cross_kv_a_proj")
        named = ((n, p) for n, p in model.named_parameters() if any(part in n for part in attention_names))
        expected = sum(p.numel() for n, p in named if "relative_attention_bias" not in n)
        assert count_attention_parameters(model) == expected


def test_decoder_only_model_is_counted_as_a_decoder():
    model = make_model(BERT, "BertLMHeadModel", "gqa")
    ids = torch.randint(5, 60, (1, LENGTH))
    assert count_flops_per_token(model, LENGTH, LENGTH) == {
        "decoder": count_flops(lambda: model(ids, use_cache=False)) / LENGTH
    }


def test_sequence_level_heads_are_not_counted_per_token():
    base = make_model(BERT, "BertModel", "mha")
    classifier = make_model(BERT, "BertForSequenceClassification", "mha")
    tokens = make_model(BERT, "BertForTokenClassification", "mha")
    flops = [count_flops_per_token(model, 4, 4)["encoder"] for model in (base, classifier, tokens)]
    assert flops[0] == flops[1] and flops[2] == flops[0] + 2 * tokens.classifier.weight.numel()


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda row: row.name)
def test_counted_parameters_and_cache_equal_those_of_models(architecture):
    head = BASES[architecture.name]
    config = architecture.make_config("mha", head)
    config.architectures = [f"AttnVariant{head}"]
    table = compute_cost_table(
        json.loads(config.to_json_string(use_diff=False)), batch_size=3, length=10, source_length=4
    )
    grouped = ["MHA", "GQA-6", "GQA-4", "GQA-3", "GQA-2", "MQA"]
    latents = ["MHA + latent 12"]
    if architecture is T5:
        latents = [
            f"MHA + {text}" for text in ("cached encoder outputs", "cross latent 10", "cross latent 10 + latent 16")
        ]
    assert [row.name for row in table.rows] == [*grouped, *latents, "MHA + talking heads"]
    assert table.current.name == "MHA" and all(row.convertible for row in table.rows)
    for row in table.rows:
        model = architecture.make_model(head, **row.fields)
        assert row.parameters == sum(p.numel() for p in model.parameters()), row.name
        assert get_variant_name(model.config) == row.name
        if architecture is not T5:
            assert row.kv_cache_bytes is None
            continue
        cache = measure_generation_cache(model, steps=10, source=4, batch=3)
        assert row.kv_cache_bytes == cache, row.name
    assert table.compute_savings(table.rows[5])["weight_bytes"] == 4 * (
        table.rows[0].parameters - table.rows[5].parameters
    )


def measure_generation_cache(model, steps, source, batch):
    """Return the bytes of the cache of a real call."""
    ids = torch.randint(5, 60, (batch, source))
    output = model(input_ids=ids, decoder_input_ids=torch.randint(5, 60, (batch, steps)), use_cache=True)
    cache = get_cache(output)
    layers = [*cache.self_attention_cache.layers, *cache.cross_attention_cache.layers]
    storages = {t.data_ptr(): t.numel() * t.element_size() for layer in layers for t in (layer.keys, layer.values)}
    return sum(storages.values())


@pytest.mark.parametrize("fields", [{}, {"num_key_value_heads": 2}, {"cross_talking_heads": "both"}], ids=str)
def test_beam_cache_size_equals_a_real_search(fields):
    """Compare with a search: we store a source once, except with talking heads in cross-attention."""
    head = "T5ForConditionalGeneration"
    model = T5.make_model(head, "mha", **fields)
    config = json.loads(model.config.to_json_string(use_diff=False)) | {"architectures": [f"AttnVariant{head}"]}
    table = compute_cost_table(config, batch_size=2, length=5, source_length=4, num_beams=3)
    assert table.current.kv_cache_bytes == measure_beam_search_cache(model) and table.upstream_kv_cache_bytes is None
    if not fields:
        upstream = T5.make_upstream_model(head)
        described = upstream.config.to_dict() | {"architectures": [head]}
        table = compute_cost_table(described, batch_size=2, length=5, source_length=4, num_beams=3)
        assert table.upstream_kv_cache_bytes == measure_beam_search_cache(upstream) > table.current.kv_cache_bytes
        one = compute_cost_table(described, batch_size=2, length=5, source_length=4)
        assert one.upstream_kv_cache_bytes is None


def measure_beam_search_cache(model):
    """Return the bytes of the cache after a search by three beams with six generated tokens."""
    model.generation_config.eos_token_id = None
    ids = torch.randint(5, 60, (2, 4), generator=torch.Generator().manual_seed(0))
    options = {"num_beams": 3, "max_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True}
    cache = get_cache(model.eval().generate(input_ids=ids, **options))
    layers = [*cache.self_attention_cache.layers, *cache.cross_attention_cache.layers]
    return sum(t.numel() * t.element_size() for layer in layers for t in (layer.keys, layer.values))


def test_largest_batch_fits_into_memory_with_the_weights(tmp_path, capsys):
    config = T5.make_upstream_model("T5ForConditionalGeneration").config.to_dict()
    config |= {"architectures": ["T5ForConditionalGeneration"]}
    table = compute_cost_table(config, length=10, source_length=20, num_beams=4, memory=2**20)
    for row in table.rows:
        assert 4 * row.parameters + row.largest_batch * row.kv_cache_bytes <= 2**20
        assert 4 * row.parameters + (row.largest_batch + 1) * row.kv_cache_bytes > 2**20
    assert 0 < table.upstream_largest_batch < table.current.largest_batch
    assert {row.largest_batch for row in compute_cost_table(config, memory=1).rows} == {0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    sizes = ["--length", "10", "--source_length", "20", "--num_beams", "4", "--memory"]
    assert cli.main(["inspect", str(tmp_path), *sizes, "1MiB"]) == 0
    printed = capsys.readouterr().out
    assert "largest batch" in printed and "4 beams" in printed
    cells = {line.split("  ")[0]: re.split(r"\s{2,}", line) for line in printed.splitlines() if "  " in line}
    [first, variant_cells] = [cells[name] for name in ("transformers *", "MHA")]
    assert printed.index("transformers *") < printed.index("MHA") and "transformers" not in printed.splitlines()[-1]
    assert (first[3], first[4]) == ("0 B (0%)", str(table.upstream_largest_batch))
    assert variant_cells[4] == f"{table.current.largest_batch}"
    saved = table.upstream_kv_cache_bytes - table.current.kv_cache_bytes
    assert table.compute_savings(table.current)["kv_cache_bytes"] == saved
    assert f"({saved / table.upstream_kv_cache_bytes:.0%})" in variant_cells[3]
    assert "`share_memory`" in printed
    for memory, output_text in (
        ("1KiB", f"The weights ({4 * table.current.parameters / 1024:.1f} KiB) do not fit into 1.0 KiB"),
        ("419KiB", "do not leave enough memory"),
    ):
        assert cli.main(["inspect", str(tmp_path), *sizes, memory]) == 0
        assert output_text in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.main(["inspect", str(tmp_path), *sizes, "4 gallons"])
    assert "the size must be" in capsys.readouterr().err


@pytest.mark.parametrize("flag, field", [(["--num_beams", "4"], "num_beams"), (["--memory", "1GiB"], "memory")])
def test_beams_and_memory_need_a_model_with_a_cache(tmp_path, capsys, flag, field):
    """Check an encoder, and a decoder whose dynamic terms need all past inputs."""
    uncached = T5.make_config(
        talking_heads="both", talking_heads_dynamic=["m2l"], architectures=["AttnVariantT5Model"]
    )
    for config in (BERT.make_config(head="BertModel", architectures=["AttnVariantBertModel"]), uncached):
        config.save_pretrained(tmp_path)
        assert cli.main(["inspect", str(tmp_path), *flag]) == 2
        output_text = capsys.readouterr()
        assert f"`{field}` is not supported for" in output_text.err and not output_text.out
        assert cli.main(["inspect", str(tmp_path)]) == 0
        capsys.readouterr()


def test_only_convertible_rows_are_marked_as_conversions(tmp_path):
    model = BERT.make_model("BertForMaskedLM", "gqa")
    model.save_pretrained(tmp_path / "gqa4")
    config = json.loads((tmp_path / "gqa4" / "config.json").read_text())
    rows = {row.name: row for row in compute_cost_table(config).rows}
    assert {name for name, row in rows.items() if not row.convertible} == {"GQA-6", "GQA-3"}
    assert rows["GQA-4"].current
    for name, row in rows.items():
        if row.current:
            continue
        if row.convertible:
            convert_checkpoint(tmp_path / "gqa4", output_dir=tmp_path / name, **row.fields)
        else:
            with pytest.raises(ValueError, match="must divide"):
                convert_checkpoint(tmp_path / "gqa4", output_dir=tmp_path / name, **row.fields)


def test_latent_checkpoint_is_compared_with_the_multi_head_model():
    config = T5.make_config(cross_kv_lora_rank=10, kv_lora_rank=6, num_key_value_heads=4)
    table = compute_cost_table(json.loads(config.to_json_string(use_diff=False)), length=1)
    assert table.rows[0].name == "MHA" and table.current.name == "GQA-4 + cross latent 10 + latent 6"
    assert table.rows[0].kv_cache_bytes_per_token == {"decoder": 4 * 2 * 2 * 96, "cross": 4 * 2 * 2 * 96}
    assert table.current.kv_cache_bytes_per_token == {"decoder": 4 * 2 * 6, "cross": 4 * 10}
    assert table.rows[0].convertible


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda row: row.name)
def test_per_layer_values_have_a_row_with_their_own_counts(architecture):
    shape = {"num_hidden_groups": 2} if architecture is ALBERT else {}
    heads = "decoder" if architecture is T5 else "self"
    values = {"num_key_value_heads": [4, 1], "kv_lora_rank": [None, 8]}
    head = BASES[architecture.name]
    config = architecture.make_config(head=head, per_layer_values=values, **shape)
    config.architectures = [f"AttnVariant{head}"]
    table = compute_cost_table(json.loads(config.to_json_string(use_diff=False)))
    assert table.current.name == "GQA-1..4 by layer + latent 8 in 1 of 2 layers"
    assert table.rows[0].name == "MHA" and [row.current for row in table.rows].count(True) == 1
    model = architecture.make_model(head, per_layer_values=values, **shape)
    assert table.current.parameters == sum(p.numel() for p in model.parameters())
    if architecture is T5:
        cache_bytes = table.current.kv_cache_bytes_per_token
        assert cache_bytes == {heads: 4 * (2 * 4 * 8 + 8), "cross": 4 * (2 * 4 * 8 + 2 * 8)}


def test_talking_heads_checkpoint_keeps_its_head_count():
    config = json.loads(BERT.make_config("gqa_talking").to_json_string(use_diff=False))
    table = compute_cost_table(config)
    # The number of key/value heads must divide 12 query heads and 8 value heads.
    assert [row.fields for row in table.rows[:4]] == [{"num_key_value_heads": count} for count in (12, 4, 2, 1)]
    assert [row.name for row in table.rows[4:]] == ["GQA-4 + latent 12 + talking heads"]
    assert table.current.fields == {"num_key_value_heads": 4} and "talking heads" in table.current.name


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model_type": "gpt2"}, "'gpt2' is not supported"),
        ({"num_attention_heads": 5}, "must divide `hidden_size`"),
        ({"num_attention_heads": "12"}, "configuration is invalid|whole number"),
        ({"num_hidden_layers": 10**9}, "from 0 to 10000"),
        ({"num_attention_heads": -4}, "from 1 to"),
        ({"per_layer_config": {"0": {}}, "model_type": "bert"}, "layers of different sizes"),
        ({"per_layer_values": {"num_key_value_heads": [4]}}, "list of 2 values"),
        ({"architectures": ["NoSuchModel"]}, "'NoSuchModel' is not supported"),
        ({"dtype": "int8"}, "floating-point"),
    ],
)
def test_invalid_configuration_raises_an_error(change, message):
    config = json.loads(BERT.make_config().to_json_string(use_diff=False)) | change
    with pytest.raises(ValueError, match=message):
        compute_cost_table(config)


@pytest.mark.parametrize("name", ["batch_size", "length", "source_length"])
def test_sizes_must_be_at_least_one(name):
    with pytest.raises(ValueError, match=f"`{name}` must be at least 1"):
        compute_cost_table(json.loads(BERT.make_config().to_json_string(use_diff=False)), **{name: 0})


def test_shared_projections_are_counted_in_flops_of_each_layer():
    bert, albert = (
        row.config_class(hidden_size=48, num_attention_heads=12, num_hidden_layers=6, intermediate_size=48)
        for row in (BERT, ALBERT)
    )
    models = [AttnVariantBertModel(bert), AttnVariantAlbertModel(albert)]
    assert [attention_projection_flops(model) for model in models] == [6 * 4 * 2 * 48 * 48] * 2


def test_models_without_cache_support_have_no_cache_row():
    config = T5.make_config(talking_heads="both", talking_heads_dynamic=["m2l"])
    table = compute_cost_table(json.loads(config.to_json_string(use_diff=False)))
    assert table.current.kv_cache_bytes is None and "decoder" in table.current.flops_per_token
    assert compute_kv_cache_bytes_per_token(T5.make_model("T5ForConditionalGeneration"), 4) is not None


@pytest.mark.parametrize(
    "fields",
    [
        {"attention_kernel": "hedgehog"},
        {"attention_pattern": "memory_compressed", "attention_block_size": 2},
        {"score_function": "additive"},
    ],
)
def test_models_with_head_parameters_are_not_marked_convertible(fields):
    config = BERT.make_config("gqa", "BertModel", **fields).to_dict()
    table = compute_cost_table(config)
    assert [row.convertible for row in table.rows] == [row.current for row in table.rows] and table.current.current


@pytest.mark.parametrize(("model_type", "head"), [("t5", "T5"), ("mt5", "MT5"), ("umt5", "UMT5")])
def test_untied_output_head_is_counted(model_type, head):
    sizes = {"vocab_size": 100, "d_model": 16, "d_kv": 4, "num_heads": 4, "d_ff": 32, "num_layers": 1}
    config = {"model_type": model_type, "architectures": [f"{head}ForConditionalGeneration"], **sizes}
    tied, untied = (
        compute_cost_table({**config, "tie_word_embeddings": tie}, "x").current.parameters for tie in (True, False)
    )
    assert untied - tied == 100 * 16
