"""Check that every field has an effect in every architecture, and that misspelled fields raise errors."""

import json

import pytest
import torch
import transformers
from architectures import ARCHITECTURES, BERT, make_token_ids
from fixtures.field_values import FIELDS, get_required_fields, make_tiny_config_values, value_of
from relatives import RELATIVES

from hf_attn_variants import convert
from hf_attn_variants.modeling.attention.model_mixin import AttnVariantModelMixin
from hf_attn_variants.training.engine.models import _check_override_names

pytestmark = pytest.mark.cross_product

ROWS = (*ARCHITECTURES, *RELATIVES)
EVERY_ROW = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
PREFIXES = ("encoder_", "decoder_", "cross_")


def compute_state_and_output(row, **fields):
    """Return the state of a seeded model and its output for a text."""
    torch.manual_seed(0)
    head = next(iter(row.heads))
    model = row.make_model(head, **make_tiny_config_values(row, **fields))
    torch.manual_seed(1)
    batch = row.make_batch(head)
    ids = make_token_ids(1, 23)
    batch = {name: (ids if name.endswith("input_ids") else value[:1]) for name, value in batch.items()}
    batch.pop("attention_mask", None)
    with torch.no_grad():
        return {**model.state_dict(), "output": model(**batch)[0]}


def differ(first, second):
    return first.keys() != second.keys() or any(
        first[name].shape != tensor.shape or not torch.equal(first[name], tensor) for name, tensor in second.items()
    )


@EVERY_ROW
@pytest.mark.parametrize("field", FIELDS)
def test_every_field_changes_the_model(row, field):
    value, beside = value_of(row, field), get_required_fields(field)
    if field not in row.config_class.get_variant_fields():
        with pytest.raises(ValueError, match=f"`{field}`"):
            row.make_config(**{field: value})
        return
    if field.startswith("cross_") and "encoder_talking_heads" not in row.config_class.get_variant_fields():
        return  # an encoder has no cross-attention
    try:
        changed = compute_state_and_output(row, **beside | {field: value})
    except ValueError as error:
        assert f"`{field}" in str(error) and field in MAY_BE_REFUSED, error
        return
    without = {name: item for name, item in beside.items() if name != field or item != value}
    has_effect = field not in WITHOUT_EFFECT or row.name not in DECODERS
    assert differ(changed, compute_state_and_output(row, **without)) == has_effect


# The relatives of BART do not support this field.
MAY_BE_REFUSED = ("position_embedding_type",)
# Only encoders use global tokens.
WITHOUT_EFFECT = ("num_global_tokens",)
DECODERS = [row.name for row in ROWS if hasattr(row.config_class, "encoder_decoder_layers")]


@EVERY_ROW
@pytest.mark.parametrize("prefix", PREFIXES)
def test_prefixed_field_exists_or_raises_an_error(row, prefix):
    known = row.config_class.get_variant_fields()
    for field in FIELDS:
        name = prefix + field
        if name not in known:
            with pytest.raises(ValueError, match=f"`{name}` .*Did you mean"):
                row.config_class.check_field_names([name])


UPSTREAM = {
    name
    for row in ROWS
    for name in (*row.upstream_config_class().to_dict(), *row.upstream_config_class.attribute_map)
    if name not in FIELDS
}
# Names in configurations on the Hub that no current class reads.
NOTES = (
    *("task_specific_params", "n_positions", "output_past", "static_position_embeddings", "normalize_embedding"),
    *("add_bias_logits", "extra_pos_embeddings", "classif_dropout", "add_final_layer_norm", "normalize_before"),
    *("directionality", "pooler_fc_size", "pooler_num_attention_heads", "tie_weights_", "summary_type"),
    *("gradient_checkpointing", "force_bos_token_to_be_generated", "tokenizer_class", "encoder_num_attention_heads"),
)


@EVERY_ROW
def test_transformers_field_names_are_not_misspellings(row):
    assert len(UPSTREAM) > 90
    row.config_class.check_field_names({*UPSTREAM, *NOTES, *transformers.GenerationConfig().to_dict()} - {*FIELDS})


@EVERY_ROW
def test_transformers_and_own_configurations_load_without_warnings(row, tmp_path, logged):
    logged.clear()
    row.upstream_config_class(**row.tiny).save_pretrained(tmp_path / "upstream")
    row.config_class.from_pretrained(tmp_path / "upstream", num_key_value_heads=2).save_pretrained(tmp_path / "ours")
    row.config_class.from_pretrained(tmp_path / "ours")
    assert logged.messages == []


STORED = {"decoder_talking_heads": "both", "my_note": "a"}


@pytest.mark.thorough
@EVERY_ROW
def test_stored_names_without_effect_give_one_warning(row, tmp_path, logged):
    head = next(iter(row.heads))
    model = row.make_model(head)
    model.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | STORED))
    logged.clear()
    assert isinstance(type(model).from_pretrained(tmp_path), AttnVariantModelMixin)
    assert sum("`decoder_talking_heads`" in item for item in logged.messages) == len(logged.messages) == 1


def test_conversion_and_override_errors_name_the_field(tmp_path):
    upstream = BERT.make_upstream_model("BertModel")
    for name in ("encoder_talking_heads", "talking_head", "v_head_dim"):
        with pytest.raises(ValueError, match=f"`{name}`"):
            convert(upstream, **{name: 4})
        with pytest.raises(ValueError, match=f"`{name}`"):
            _check_override_names({name: 4}, upstream.config, BERT.config_class)
    model = BERT.make_model("BertModel")
    model.config.talking_heads_init = "random"  # the fields are checked again when a model is made
    with pytest.raises(ValueError, match="`talking_heads_init`"):
        type(model)(model.config)
