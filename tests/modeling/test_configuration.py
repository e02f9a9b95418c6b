"""Check the configuration fields: errors for bad values, saved values that load again, and the multi-head default."""

import json

import pytest
from architectures import ARCHITECTURES, VARIANTS
from huggingface_hub.errors import StrictDataclassError

import hf_attn_variants

pytestmark = pytest.mark.cross_product

ALL = pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda row: row.name)


@ALL
def test_wrong_type_error_names_the_value(architecture):
    # Transformers 5.15 checks the type of this field. Later versions do not.
    with pytest.raises(
        (ValueError, StrictDataclassError), match=r"must have values of the correct type|field 'id2label'"
    ):
        architecture.config_class(**(architecture.tiny | {"id2label": 3}))


@ALL
def test_bad_value_set_later_raises_when_the_model_is_built(architecture):
    config = architecture.make_config()
    config.num_key_value_heads = 5
    model_class = getattr(hf_attn_variants, config.auto_classes["AutoModel"])
    with pytest.raises(ValueError, match="`num_key_value_heads`"):
        model_class(config)


@ALL
def test_variant_fields_map_to_their_query_head_fields(architecture):
    fields, config = architecture.config_class.get_variant_fields(), architecture.make_config("gqa_talking")
    kv_fields = config.get_kv_heads_fields()
    assert fields[: len(kv_fields)] == kv_fields
    assert not {*fields} & architecture.upstream_config_class(**architecture.tiny).to_dict().keys()
    assert [config.get_query_heads(name) for name in kv_fields] == [12] * len(kv_fields)
    counts = ("num_attention_heads", *kv_fields, "num_softmax_heads", "num_value_heads")
    assert config.get_head_count_fields() == counts


# (a name that a user may write, the field that the user means)
NEAR_NAMES = [
    ("num_kv_heads", "num_key_value_heads"),
    ("n_kv_heads", "num_key_value_heads"),
    ("kv_heads", "num_key_value_heads"),
    ("num_key_value_head", "num_key_value_heads"),
    ("decoder_num_key_value_heads", "num_key_value_heads"),
    ("talking_head", "talking_heads"),
    ("talking_heads_initialization", "talking_heads_init"),
    ("softmax_heads", "num_softmax_heads"),
    ("value_heads", "num_value_heads"),
    ("num_heads_kv", "num_key_value_heads"),
    ("num_kv_groups", "num_key_value_heads"),
    ("numkeyvalueheads", "num_key_value_heads"),
    ("num_key_value_haeds", "num_key_value_heads"),
    ("NUM_KEY_VALUE_HEADS", "num_key_value_heads"),
    ("dynamic_talking_heads", "talking_heads_dynamic"),
    ("kv_rank", "kv_lora_rank"),
    ("decoder_kv_lora_rank", "kv_lora_rank"),
]


@ALL
@pytest.mark.parametrize("name, field", NEAR_NAMES)
def test_misspelled_field_error_suggests_the_field(architecture, name, field, tmp_path):
    upstream = architecture.upstream_config_class(**architecture.tiny)
    upstream.save_pretrained(tmp_path)
    model_class = getattr(hf_attn_variants, architecture.config_class.auto_classes["AutoModel"])
    for make in (
        lambda: architecture.make_config(**{name: 5}),
        lambda: architecture.config_class.from_upstream(upstream, **{name: 5}),
        lambda: architecture.config_class.from_dict(upstream.to_dict(), **{name: 5}),
        lambda: architecture.config_class.from_pretrained(tmp_path, **{name: 5}),
        lambda: model_class.from_pretrained(tmp_path, **{name: 5}),
    ):
        with pytest.raises(ValueError, match=f"`{name}`.*`{field}`"):
            make()


@ALL
def test_field_name_with_another_word_is_not_a_misspelling(architecture):
    for name in ("num_cls_heads", "num_mlm_heads", "num_labels_heads", "talking", "heads"):
        assert getattr(architecture.make_config(**{name: 5}), name) == 5


@ALL
def test_saved_configuration_loads_with_unknown_names(architecture, tmp_path):
    saved = architecture.make_config("gqa").to_dict() | {"num_kv_heads": 5}
    file = tmp_path / "config.json"
    for left_out in ((), ("model_type",)):  # the oldest files have no model type
        file.write_text(json.dumps({name: value for name, value in saved.items() if name not in left_out}))
        config = architecture.config_class.from_pretrained(tmp_path)
        assert (config.num_kv_heads, config.num_key_value_heads) == (5, 4)
        assert architecture.config_class.from_pretrained(tmp_path, num_kv_heads=6).num_kv_heads == 6
    assert architecture.config_class(**saved).num_kv_heads == 5
    assert architecture.config_class.from_upstream(saved).num_kv_heads == 5
    assert architecture.config_class.from_upstream(config).num_key_value_heads == 4


@ALL
def test_printed_configuration_lists_every_field(architecture):
    config = architecture.make_config("gqa_talking")
    name, _, text = repr(config).partition(" ")
    assert name == type(config).__name__
    shown = json.loads(text)
    expected = architecture.tiny | {field: getattr(config, field) for field in config.get_variant_fields()}
    assert {field: shown.get(field) for field in expected} == expected


@ALL
@pytest.mark.parametrize("variant", VARIANTS)
def test_configuration_survives_a_json_round_trip(architecture, variant, tmp_path):
    config = architecture.make_config(variant)
    config.save_pretrained(tmp_path)
    again = architecture.config_class.from_pretrained(tmp_path)
    assert again.to_dict() == config.to_dict()
    for name in architecture.config_class.get_kv_heads_fields():
        assert type(getattr(again, name)) is int


@ALL
@pytest.mark.parametrize("is_saved_variant", [False, True], ids=["upstream's", "ours"])
def test_head_count_given_while_loading_replaces_per_layer_values(architecture, is_saved_variant, tmp_path):
    config_class = architecture.config_class if is_saved_variant else architecture.upstream_config_class
    config_class(**architecture.tiny).save_pretrained(tmp_path)
    for heads in (4, 24):
        config = architecture.config_class.from_pretrained(tmp_path, num_attention_heads=heads)
        fields = ("num_attention_heads", "num_softmax_heads", "num_value_heads", *config.get_kv_heads_fields())
        assert [getattr(config, field) for field in fields] == [heads] * len(fields)
    architecture.make_config("gqa").save_pretrained(tmp_path)
    assert architecture.config_class.from_pretrained(tmp_path, num_attention_heads=24).num_key_value_heads == 4


@ALL
def test_changed_dynamic_projections_may_enable_the_cache_again(architecture, tmp_path):
    before = getattr(architecture.make_config("talking"), "use_cache", None)
    config = architecture.make_config("dynamic")
    assert not getattr(config, "use_cache", False)
    config.save_pretrained(tmp_path)
    for again in (
        architecture.config_class.from_upstream(config, talking_heads_dynamic=["x2l"]),
        architecture.config_class.from_pretrained(tmp_path, talking_heads_dynamic=["x2l"]),
    ):
        assert getattr(again, "use_cache", None) == before


@ALL
def test_from_upstream_keeps_every_value_of_the_configuration(architecture):
    upstream = architecture.upstream_config_class(**architecture.tiny, num_labels=5, initializer_range=0.5)
    config = architecture.config_class.from_upstream(upstream, num_key_value_heads=2)
    assert config.num_key_value_heads == 2
    upstream_values = {name: value for name, value in upstream.to_dict().items() if name != "model_type"}
    assert {name: config.to_dict()[name] for name in upstream_values} == upstream_values


@ALL
def test_from_upstream_rejects_another_architecture(architecture):
    with pytest.raises(ValueError, match="gpt2"):
        architecture.config_class.from_upstream({"model_type": "gpt2", "n_head": 12})


@ALL
def test_auto_map_is_copied_and_keeps_a_hub_prefix(architecture, tmp_path):
    first, second = architecture.make_config(), architecture.make_config()
    first.auto_map["AutoModel"] = "changed"
    assert second.auto_map["AutoModel"] != "changed"

    prefixed = architecture.make_config(auto_map={"AutoModel": "someone/repo--modeling.Class"})
    assert prefixed.auto_map["AutoModel"] == "someone/repo--modeling.Class"
    prefixed.save_pretrained(tmp_path)
    saved = architecture.config_class.from_pretrained(tmp_path).auto_map
    assert not any("--" in name for name in saved.values())
    assert set(second.auto_map) == {"AutoConfig", *architecture.config_class.auto_classes}


@ALL
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_output_attentions_is_allowed_under_every_implementation(architecture, implementation, tmp_path):
    config = architecture.make_config(attn_implementation=implementation)
    config.output_attentions = True
    config.save_pretrained(tmp_path)
    assert architecture.config_class.from_pretrained(tmp_path).output_attentions is True
