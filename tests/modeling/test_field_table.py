"""Check the table of the fields, and the configurations, flags and documents that use it."""

import re
from dataclasses import fields

import field_page
import pytest
from architectures import ARCHITECTURES
from relatives import RELATIVES, ROTARY

from hf_attn_variants import AttnVariantBertConfig
from hf_attn_variants.commands import convert
from hf_attn_variants.export.plain import NO_PLAIN_FORM
from hf_attn_variants.modeling.fields import field_table
from hf_attn_variants.modeling.fields.field_table import (
    VARIANT_FIELDS,
    VariantField,
    describe_field,
    get_card_text,
    look_up_field,
    make_dataclass_field,
)

NAMES = {prefix + row.name: prefix for row in VARIANT_FIELDS for prefix in row.prefixes}


@pytest.mark.parametrize("row", [*ARCHITECTURES, *RELATIVES], ids=lambda row: row.name)
def test_configuration_has_the_fields_of_its_architecture(row):
    has_stacks = hasattr(row.config_class, "encoder_decoder_layers")
    variant_fields = {item.name: item for item in fields(row.config_class) if "variant" in item.metadata}
    has_cross = has_stacks or hasattr(row.make_config(), "add_cross_attention")
    of_cross = {name for name, prefix in NAMES.items() if prefix == "cross_" and look_up_field(name)[1].inherits}
    expected = {name for name, prefix in NAMES.items() if has_stacks or not prefix}
    assert variant_fields.keys() == (expected | of_cross if has_cross else expected)
    for name, item in variant_fields.items():
        prefix, entry = look_up_field(name)
        assert item.default == entry.get_default(prefix) and item.metadata["variant"] is True
        assert {*item.metadata} - {"variant", "query_heads"} <= {*entry.tags}
    ranks = () if row in ROTARY else tuple(name for name in variant_fields if name.endswith("kv_lora_rank"))
    assert row.config_class.get_rank_fields() == ranks


def test_every_conversion_field_has_a_flag(capsys):
    with pytest.raises(SystemExit):
        convert.parse_args(["--help"])
    shown = capsys.readouterr().out
    flags = {*re.findall(r"^  --(\w+)", shown, re.MULTILINE)}
    assert {name for name in NAMES if "from_scratch" not in look_up_field(name)[1].tags} <= flags
    assert not {name for name in NAMES if "from_scratch" in look_up_field(name)[1].tags} & flags


def test_field_descriptions_are_unique_single_lines():
    described = [describe_field(name) for name in NAMES if "global_tokens" not in name]
    assert len({*described}) == len(described)
    assert not [item for item in described if "\n" in item or "{layer}" in item or item.endswith(".")]


def test_fields_page_is_up_to_date():
    assert field_page.PAGE.read_text(encoding="utf-8") == field_page.make_page(), "run `make fields`"
    assert all(f"`{name}`" in field_page.format_field_table() for name in NAMES)
    for table in (field_page.format_field_table(), field_page.format_pair_table()):
        assert table in field_page.make_page()


def test_fields_page_row_contains_the_values_of_the_table():
    rows = {row.split("`")[1]: row for row in field_page.format_field_table().splitlines() if "`" in row}
    ranks, init = rows["kv_lora_rank"], rows["talking_heads_init"]
    assert "`cross_kv_lora_rank` | rank of the latent from which an attention module computes keys" in ranks
    assert "| yes, except `cross_kv_lora_rank` |" in ranks
    assert '| `"identity"`, `"random"` | `"identity"` |' in init
    assert {row.count(" | ") for row in rows.values()} == {5} and "{" not in rows["attention_window"]


def test_cards_and_errors_use_the_names_of_the_table():
    printed = {name: get_card_text(name) for name in NAMES}
    assert printed["cross_kv_lora_rank"] == "latent dimension in cross-attention"
    assert printed["encoder_attention_block_size"] == "block size (tokens) in the self-attention of the encoder"
    assert printed["attention_window"] == "window size (tokens) in self-attention"
    assert printed["encoder_attention_kernel"] == "the softmax in the self-attention of the encoder"
    refused = {"talking_heads", "encoder_attention_pattern", "cross_attention_kernel", "score_function"}
    assert refused <= {*NO_PLAIN_FORM} and not {"num_key_value_heads", "kv_lora_rank"} & {*NO_PLAIN_FORM}


@pytest.mark.parametrize("default", [None, "sigmoid"])
def test_choices_of_a_new_field_are_checked(monkeypatch, default):
    choices = ("sigmoid", "tanh")
    row = VariantField("output_gate", str, default, choices=choices, tags=("by_layer",))
    monkeypatch.setitem(field_table._FIELDS_BY_NAME, "output_gate", ("", row))

    class GatedConfig(AttnVariantBertConfig):
        output_gate: str | None = make_dataclass_field("output_gate")

    by_layer = {"output_gate": ["tanh", "sigmoid"]}
    assert GatedConfig(num_hidden_layers=2, per_layer_values=by_layer).get_layer_value("output_gate", 0) == "tanh"
    assert GatedConfig().output_gate == default and GatedConfig(output_gate="tanh").output_gate == "tanh"
    with pytest.raises(ValueError, match="`output_gate`"):
        GatedConfig(output_gate="sigmoi")
    with pytest.raises(ValueError, match="`output_gate`"):
        GatedConfig(num_hidden_layers=2, per_layer_values={"output_gate": ["tanh", "sigmoi"]})
