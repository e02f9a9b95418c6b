"""Check the diagrams that show which query heads share a key/value head."""

import pytest
from architectures import BERT, T5

from hf_attn_variants.hub.card import format_heads_diagram


def split_cells(line):
    return [cell.split() for cell in line.split("|")[1:-1]]


@pytest.mark.parametrize("kv_heads", [12, 4, 1])
def test_diagram_shows_each_group_above_its_head(kv_heads):
    queries, keys = format_heads_diagram(BERT.make_config(num_key_value_heads=kv_heads)).splitlines()
    size = 12 // kv_heads
    assert split_cells(queries) == [[f"q{i}" for i in range(g * size, (g + 1) * size)] for g in range(kv_heads)]
    assert split_cells(keys) == [[f"kv{g}"] for g in range(kv_heads)]
    assert [at for at, c in enumerate(queries) if c == "|"] == [at for at, c in enumerate(keys) if c == "|"]


def test_diagram_abbreviates_many_heads():
    config = BERT.config_class(hidden_size=256, num_attention_heads=64, num_key_value_heads=16)
    diagram = format_heads_diagram(config)
    assert max(map(len, diagram.splitlines())) <= 110
    assert "q0..q3" in diagram and "q60..q63" in diagram and "kv15" in diagram


def test_t5_has_a_diagram_per_place_and_talking_heads_a_chain():
    diagram = format_heads_diagram(T5.make_config("gqa_talking"))
    assert diagram.index("decoder") < diagram.index("encoder:")
    assert "logits of 12 heads --P_l [12 x 6]--> softmax of 6 heads --P_w [6 x 8]--> weights of 8 heads" in diagram
    only = format_heads_diagram(BERT.make_config("weights"))
    assert "logits of 12 heads --> softmax of 12 heads --P_w [12 x 8]--> weights of 8 heads" in only


def test_diagram_groups_layers_with_equal_heads():
    diagram = format_heads_diagram(
        BERT.make_config(num_hidden_layers=3, per_layer_values={"num_key_value_heads": [4, 1, 4]})
    )
    first, second = diagram.split("\n\n")
    assert first.startswith("layers 0, 2:\n") and second.startswith("layer 1:\n")
    assert split_cells(first.splitlines()[2]) == [[f"kv{i}"] for i in range(4)]
    assert split_cells(second.splitlines()[2]) == [["kv0"]]


def test_diagram_names_latents_below_the_heads():
    config = T5.make_config(cross_kv_lora_rank=40, per_layer_values={"kv_lora_rank": [None, 8]})
    *_, latents = format_heads_diagram(config).split("\n\n")
    assert latents.splitlines() == [
        "Keys and values of the decoder's self-attention are computed from a latent of dimension 8 (layer 1) for each "
        "token.",
        "Keys and values of all cross-attention modules are computed from the input itself for each source token.",
    ]
    assert "latent" not in format_heads_diagram(T5.make_config())
    assert "computed from" not in format_heads_diagram(T5.make_config())
