"""Check the errors of configurations: each input and the argument that its error names."""

import pytest
from architectures import ALBERT, ARCHITECTURES, BERT, T5
from relatives import ENCODER_DECODERS, ENCODERS, WHISPER

pytestmark = pytest.mark.cross_product

BART, UMT5, DISTILBERT = ENCODER_DECODERS[0], ENCODER_DECODERS[-1], ENCODERS[2]
RANDOM = {"talking_heads": "both", "talking_heads_init": "random"}
WINDOW = {"attention_pattern": "sliding_window", "attention_window": 4}
LOCAL = {"attention_pattern": "local_blocks", "attention_block_size": 4}
FIXED = {"attention_pattern": "fixed", "attention_block_size": 4, "num_summary_tokens": 1}
COMPRESSED = {"attention_pattern": "memory_compressed", "attention_block_size": 3}
SUMMARIES = {"attention_pattern": "transient_global", "attention_window": 4, "attention_block_size": 2}
LINFORMER = {"attention_kernel": "linformer", "attention_kernel_features": 6}
HYBRID = {"attention_kernel": "hybrid", "attention_window": 4}
SINUSOIDAL = {"position_embedding_type": "sinusoidal"}


def add_encoder_prefix(fields):
    return {f"encoder_{name}": value for name, value in fields.items()}


def make_per_layer_fields(**lists):
    return {"per_layer_values": lists}


# (fields, argument that the error names), for every architecture.
EVERYWHERE = [
    ({"num_key_value_heads": 5}, "num_key_value_heads"),
    ({"num_key_value_heads": 0}, "num_key_value_heads"),
    ({"num_key_value_heads": -2}, "num_key_value_heads"),
    ({"num_key_value_heads": "4"}, "num_key_value_heads"),
    ({"num_key_value_heads": True}, "num_key_value_heads"),
    ({"num_key_value_heads": 2.0}, "num_key_value_heads"),
    ({"talking_heads": "all"}, "talking_heads"),
    ({"talking_heads": ["both"]}, "talking_heads"),
    ({"talking_heads_init": "zeros"}, "talking_heads_init"),
    ({"talking_heads_init": "random"}, "talking_heads_init"),
    ({"num_softmax_heads": 8}, "num_softmax_heads"),
    ({"talking_heads": "weights", "num_softmax_heads": 8}, "num_softmax_heads"),
    ({"num_value_heads": 8}, "num_value_heads"),
    ({"talking_heads": "logits", "talking_heads_init": "random", "num_value_heads": 8}, "num_value_heads"),
    ({"talking_heads": "both", "num_softmax_heads": 8}, "talking_heads_init"),
    (RANDOM | {"num_value_heads": 6, "num_key_value_heads": 4}, "num_value_heads"),
    ({"talking_heads": "both", "talking_heads_dynamic": ["x2y"]}, "talking_heads_dynamic"),
    ({"talking_heads": "both", "talking_heads_dynamic": 7}, "talking_heads_dynamic"),
    ({"talking_heads": "both", "talking_heads_dynamic": [["x2l"]]}, "talking_heads_dynamic"),
    ({"talking_heads": "logits", "talking_heads_dynamic": ["m2w"]}, "talking_heads_dynamic"),
    ({"talking_heads_dynamic": ["x2l"]}, "talking_heads_dynamic"),
    ({"value_head_dim": 0}, "value_head_dim"),
    ({"value_head_dim": "4"}, "value_head_dim"),
    ({"kv_lora_rank": 10**4}, "kv_lora_rank"),
    (make_per_layer_fields(num_key_value_heads=3), "num_key_value_heads"),
    (make_per_layer_fields(num_key_value_heads=[3, 4, 6]), "num_key_value_heads"),
    ({"per_layer_values": [3]}, "per_layer_values"),
    ({"num_kv_heads": 4}, "num_kv_heads"),
]
# (architecture, fields, argument that the error names).
ERRORS = [
    (BERT, {"num_attention_heads": 2**16 + 1}, "num_attention_heads"),
    (BERT, {"num_hidden_layers": -1}, "num_hidden_layers"),
    (BERT, {"vocab_size": 0}, "vocab_size"),
    (BERT, {"num_labels": 10**9}, "num_labels"),
    (T5, {"encoder_num_key_value_heads": 5}, "encoder_num_key_value_heads"),
    (T5, {"cross_kv_lora_rank": 0}, "cross_kv_lora_rank"),
    (T5, {"encoder_kv_lora_rank": "8"}, "encoder_kv_lora_rank"),
    # Talking heads by place and by layer.
    (T5, {"talking_heads": "none"}, "talking_heads"),
    (T5, {"cross_talking_heads": "all"}, "cross_talking_heads"),
    (T5, {"cross_talking_heads_init": "random"}, "cross_talking_heads_init"),
    (T5, RANDOM | {"cross_talking_heads_init": "random"}, "cross_talking_heads"),
    (T5, {"talking_heads_init": "random", "cross_talking_heads": "both"}, "talking_heads_init"),
    (T5, {"cross_num_softmax_heads": 8}, "cross_num_softmax_heads"),
    (T5, {"encoder_talking_heads_dynamic": ["x2l"]}, "encoder_talking_heads_dynamic"),
    (
        T5,
        {"talking_heads": "both", "cross_talking_heads": "logits", "cross_talking_heads_dynamic": ["m2w"]},
        "cross_talking_heads_dynamic",
    ),
    (T5, RANDOM | {"cross_talking_heads": "both", "cross_num_value_heads": 6}, "cross_talking_heads_init"),
    (T5, make_per_layer_fields(talking_heads=["both", None]), "encoder_talking_heads"),
    (
        T5,
        RANDOM | make_per_layer_fields(num_softmax_heads=[8, 12]) | {"encoder_talking_heads": "none"},
        "num_softmax_heads",
    ),
    (T5, make_per_layer_fields(cross_talking_heads=["both"]), "cross_talking_heads"),
    (T5, make_per_layer_fields(cross_talking_heads=["both", "all"]), "cross_talking_heads"),
    (BERT, {"encoder_talking_heads": "both"}, "encoder_talking_heads"),
    (ALBERT, {"cross_talking_heads": "both"}, "cross_talking_heads"),
    (BART, {"talking_heads": "both"}, "encoder_talking_heads"),
    (WHISPER, {"talking_heads": "both"}, "encoder_talking_heads"),
    # Values by layer.
    (BERT, make_per_layer_fields(num_key_value_heads=[3, 5]), "num_key_value_heads"),
    (BERT, make_per_layer_fields(num_key_value_heads=[3, "4"]), "num_key_value_heads"),
    (BERT, make_per_layer_fields(kv_lora_rank=[8, 49]), "kv_lora_rank"),
    (BERT, make_per_layer_fields(kv_lora_rank=[8, True]), "kv_lora_rank"),
    (BERT, make_per_layer_fields(hidden_act=["relu", "gelu"]), "hidden_act"),
    (BERT, make_per_layer_fields(num_key_value_heads=[3, 4]) | {"num_key_value_heads": 2}, "num_key_value_heads"),
    (BERT, RANDOM | make_per_layer_fields(num_key_value_heads=[12, 4]) | {"num_value_heads": 6}, "num_value_heads"),
    (T5, make_per_layer_fields(cross_kv_lora_rank=[8, 16]), "cross_kv_lora_rank"),
    (BERT, {"per_layer_config": {2: {"kv_lora_rank": 4}}}, "per_layer_config"),
    (BERT, {"per_layer_config": {"first": {"kv_lora_rank": 4}}}, "per_layer_config"),
    (BERT, {"per_layer_config": {0: {"hidden_act": "relu"}}}, "hidden_act"),
    (BERT, {"per_layer_config": {0: 4}}, "per_layer_config"),
    (BERT, {"per_layer_config": [4]}, "per_layer_config"),
    # Patterns.
    (BERT, {"attention_pattern": "stripes"}, "attention_pattern"),
    (BERT, {"attention_pattern": "sliding_window"}, "attention_window"),
    (BERT, WINDOW | {"attention_window": 5}, "attention_window"),
    (BERT, WINDOW | {"attention_window": 0}, "attention_window"),
    (BERT, WINDOW | {"attention_window": True}, "attention_window"),
    (BERT, WINDOW | {"attention_dilation": 0}, "attention_dilation"),
    (BERT, WINDOW | {"num_global_tokens": -1}, "num_global_tokens"),
    (
        BERT,
        {"attention_pattern": "sliding_window"} | make_per_layer_fields(attention_window=[4, 3]),
        "attention_window",
    ),
    (BERT, WINDOW | {"talking_heads": "both", "talking_heads_dynamic": ["x2l"]}, "talking_heads_dynamic"),
    (T5, WINDOW | {"encoder_attention_pattern": "sliding_window"}, "encoder_attention_window"),
    (BERT, {"attention_pattern": "local_blocks"}, "attention_block_size"),
    (BERT, LOCAL | {"attention_block_size": 0}, "attention_block_size"),
    (BERT, {"attention_pattern": "random_blocks", "attention_block_size": 2}, "num_random_blocks"),
    (BERT, FIXED | {"num_summary_tokens": 5}, "num_summary_tokens"),
    (BERT, FIXED | {"split_attention_heads": 1}, "split_attention_heads"),
    (BERT, COMPRESSED | {"is_decoder": True}, "attention_pattern"),
    (T5, COMPRESSED, "attention_pattern"),
    (T5, add_encoder_prefix(COMPRESSED), "encoder_attention_pattern"),
    (BERT, COMPRESSED | {"kv_lora_rank": 8}, "attention_pattern"),
    (BERT, SUMMARIES, "attention_pattern"),
    (T5, SUMMARIES, "attention_pattern"),
    (BART, add_encoder_prefix(SUMMARIES), "encoder_attention_pattern"),
    (UMT5, add_encoder_prefix(SUMMARIES), "encoder_attention_pattern"),
    (T5, add_encoder_prefix(SUMMARIES) | {"encoder_kv_lora_rank": 8}, "encoder_kv_lora_rank"),
    (T5, add_encoder_prefix(SUMMARIES) | {"encoder_attention_window": None}, "encoder_attention_window"),
    (
        T5,
        add_encoder_prefix(WINDOW) | {"encoder_talking_heads": "both", "encoder_talking_heads_dynamic": ["x2l"]},
        "encoder_attention_pattern",
    ),
    (T5, {"cross_attention_window": 4}, "cross_attention_window"),
    (T5, {"cross_attention_pattern": "local_blocks"}, "cross_attention_pattern"),
    # Kernels.
    (BERT, {"attention_kernel": "exp"}, "attention_kernel"),
    (BERT, {"attention_kernel": "favor", "attention_kernel_features": 0}, "attention_kernel_features"),
    (BERT, {"attention_kernel": "favor", "attention_kernel_seed": -1}, "attention_kernel_seed"),
    (BERT, {"attention_kernel": "elu", "talking_heads": "both"}, "attention_kernel"),
    (BERT, WINDOW | {"attention_kernel": "elu"}, "attention_kernel"),
    (BERT, {"attention_kernel": "elu", "kv_lora_rank": 8}, "kv_lora_rank"),
    (BERT, {"attention_kernel": "elu", "score_function": "additive"}, "score_function"),
    (BERT, make_per_layer_fields(attention_kernel=["elu", "favor"]), "attention_kernel"),
    (BERT, make_per_layer_fields(attention_kernel=["elu", "exp"]), "attention_kernel"),
    (BERT, make_per_layer_fields(attention_kernel=["hybrid", None]), "attention_window"),
    (BERT, make_per_layer_fields(attention_kernel=["elu", None]) | {"talking_heads": "both"}, "talking_heads"),
    (BERT, make_per_layer_fields(attention_kernel=["elu", None]) | {"attention_kernel": "favor"}, "attention_kernel"),
    (T5, {"attention_kernel": "elu"}, "attention_kernel"),
    (T5, {"encoder_attention_kernel": "elu"}, "encoder_attention_kernel"),
    (T5, {"cross_attention_kernel": "elu", "cross_kv_lora_rank": 24}, "cross_kv_lora_rank"),
    (T5, {"cross_talking_heads": "both", "cross_attention_kernel": "elu"}, "cross_attention_kernel"),
    (BERT, {"attention_kernel": "hybrid"}, "attention_window"),
    (BERT, {"attention_kernel": "hybrid"} | make_per_layer_fields(attention_window=[4, None]), "attention_window"),
    (BERT, HYBRID | {"attention_window": 3}, "attention_window"),
    (BERT, HYBRID | {"attention_pattern": "sliding_window"}, "attention_pattern"),
    (BART, {"cross_attention_kernel": "hybrid"}, "cross_attention_kernel"),
    (BERT, LINFORMER | {"is_decoder": True}, "attention_kernel"),
    (BART, LINFORMER, "attention_kernel"),
    (BART, {"cross_attention_kernel": "linformer"}, "cross_attention_kernel"),
    (T5, {"encoder_attention_kernel": "linformer"}, "encoder_attention_kernel"),
    (BERT, LINFORMER | SINUSOIDAL, "attention_kernel"),
    (BERT, LINFORMER | {"attention_kernel_features": 4096}, "attention_kernel_features"),
    # Positions and scores.
    (BERT, {"position_embedding_type": "relative_key"}, "position_embedding_type"),
    (BERT, {"position_embedding_type": 1}, "position_embedding_type"),
    (T5, {"position_embedding_type": "absolute"}, "position_embedding_type"),
    (BART, SINUSOIDAL, "position_embedding_type"),
    (DISTILBERT, SINUSOIDAL | {"sinusoidal_pos_embds": True}, "sinusoidal_pos_embds"),
    (BERT, {"score_function": "dot"}, "score_function"),
    (BERT, {"score_function": "none"}, "score_function"),
    (BERT, {"score_function": 3}, "score_function"),
    (T5, {"cross_score_function": "dot"}, "cross_score_function"),
    (T5, {"cross_score_function": "additive", "cross_attention_kernel": "elu"}, "cross_score_function"),
    (T5, {"score_function": "additive", "cross_attention_kernel": "elu"}, "score_function"),
]


def make_test_ids(rows):
    return [f"{number}-{row[-1]}" for number, row in enumerate(rows)]


@pytest.mark.parametrize("row", ARCHITECTURES, ids=lambda row: row.name)
@pytest.mark.parametrize("fields, argument", EVERYWHERE, ids=make_test_ids(EVERYWHERE))
def test_invalid_field_raises_in_new_and_loaded_configurations(row, fields, argument, tmp_path):
    row.upstream_config_class(**row.tiny).save_pretrained(tmp_path)
    for make in (row.make_config, lambda **kwargs: row.config_class.from_pretrained(tmp_path, **kwargs)):
        with pytest.raises(ValueError, match=f"`{argument}"):
            make(**fields)


@pytest.mark.parametrize("row, fields, argument", ERRORS, ids=make_test_ids(ERRORS))
def test_invalid_field_of_one_architecture_raises_an_error(row, fields, argument):
    with pytest.raises(ValueError, match=f"`{argument}"):
        row.config_class(**(row.tiny | fields))
