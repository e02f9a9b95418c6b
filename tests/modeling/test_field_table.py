"""The table of the fields: what configurations, flags and documents have of it."""

import re
from dataclasses import fields
from pathlib import Path

import pytest
from architectures import ARCHITECTURES
from relatives import RELATIVES

from hf_attn_variants.commands import convert
from hf_attn_variants.modeling.fields.field_table import FIELDS, row_of

ROOT = Path(__file__).resolve().parents[2]
NAMES = {prefix + row.name: prefix for row in FIELDS for prefix in row.prefixes}


@pytest.mark.parametrize("row", [*ARCHITECTURES, *RELATIVES], ids=lambda row: row.name)
def test_a_configuration_has_the_fields_of_its_stacks(row):
    has_stacks = hasattr(row.config_class, "encoder_decoder_layers")
    own = {each.name: each for each in fields(row.config_class) if "variant" in each.metadata}
    assert own.keys() == {name for name, prefix in NAMES.items() if has_stacks or not prefix}
    for name, each in own.items():
        prefix, entry = row_of(name)
        assert each.default == entry.default and each.metadata["variant"] == entry.described(prefix)
        assert {*each.metadata} - {"variant", "query_heads"} <= {*entry.facts}
    assert row.config_class.rank_fields() == tuple(name for name in own if name.endswith("kv_lora_rank"))


def test_every_field_that_a_conversion_gives_has_a_flag(capsys):
    with pytest.raises(SystemExit):
        convert.parse_args(["--help"])
    shown = capsys.readouterr().out
    flags = {*re.findall(r"^  --(\w+)", shown, re.MULTILINE)}
    assert {name for name in NAMES if "from_scratch" not in row_of(name)[1].facts} <= flags
    assert not {name for name in NAMES if "from_scratch" in row_of(name)[1].facts} & flags


def test_descriptions_are_one_line_each_and_no_two_are_the_same():
    described = [row_of(name)[1].described(prefix) for name, prefix in NAMES.items() if "global_tokens" not in name]
    assert len({*described}) == len(described)
    assert not [each for each in described if "\n" in each or "{layer}" in each or each.endswith(".")]


def test_the_page_of_the_fields_has_them_all():
    text = (ROOT / "docs/fields.md").read_text(encoding="utf-8")
    assert not [row.name for row in FIELDS if f"`{row.name}`" not in text]
