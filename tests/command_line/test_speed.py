"""`attn-variants benchmark`: whom it times, what it prints, what it refuses."""

import json

import pytest
from architectures import ALBERT, BERT, T5

from hf_attn_variants import cli
from hf_attn_variants.inspection.speed import measure_speed

BASES = {"bert": "BertModel", "albert": "AlbertModel", "t5": "T5ForConditionalGeneration"}
SMALL = ["--batch_size", "2", "--length", "8", "--rounds", "2", "--max_new_tokens", "3", "--device", "cpu"]


@pytest.mark.parametrize("architecture", [BERT, ALBERT, T5], ids=lambda row: row.name)
def test_upstream_is_the_baseline_and_every_variant_is_timed(architecture, tmp_path, capsys):
    architecture.upstream_model(BASES[architecture.name]).save_pretrained(tmp_path)
    assert cli.main(["benchmark", str(tmp_path), *SMALL, "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in table["rows"]}
    assert next(iter(rows)) == "upstream" and {"MHA", "MQA", "MHA + talking heads"} <= rows.keys()
    assert rows["upstream"]["speedup"] == 1.0
    for row in rows.values():
        assert len(row["all_milliseconds"]) == 2
        assert min(row["all_milliseconds"]) <= row["milliseconds"] <= max(row["all_milliseconds"])
        tokens = 2 * (3 if architecture is T5 else 8)
        assert row["tokens_per_second"] == pytest.approx(tokens / row["milliseconds"] * 1e3)
    assert table["work"] == ("generate" if architecture is T5 else "forward")


def test_a_variant_checkpoint_is_compared_with_its_multi_head_model(tmp_path, capsys):
    BERT.model("BertModel", "gqa").save_pretrained(tmp_path)
    assert cli.main(["benchmark", str(tmp_path), *SMALL, "--no_talking_heads"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "AttnVariantBertModel" in lines[0] and lines[3].startswith("MHA") and lines[3].endswith("1.00x")
    assert not any("talking" in line or "upstream" in line for line in lines)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"rounds": 0}, "`rounds` must be at least 1; got 0"),
        ({"length": 10**6}, "the model has"),
        ({"kv_heads": [5], "length": 8}, "must divide"),
    ],
)
def test_numbers_that_do_not_fit(options, message):
    with pytest.raises(ValueError, match=message):
        measure_speed(BERT.upstream_model("BertModel").config.to_dict(), **options)
