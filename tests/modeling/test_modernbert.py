"""Check ModernBERT: the formula with rotary positions and windows, and fused rows."""

import pytest
import torch
import transformers
from architectures import VOCABULARY
from fixtures.rotary_pairs import MODERNBERT_SIZES, ROTARY_LENGTH, make_rotary_batch
from transformers import conversion_mapping

from hf_attn_variants import AttnVariantModernBertConfig, AttnVariantModernBertModel
from hf_attn_variants.reference.talking_heads import attention_core


def make_model(**fields):
    torch.manual_seed(0)
    return AttnVariantModernBertModel(AttnVariantModernBertConfig(**MODERNBERT_SIZES | fields)).eval()


# The formula


def rotate(states, positions, theta):
    """Rotate the pairs (i, i + d / 2) of heads [b, h, n, d] by the angle position theta^(-2i / d)."""
    half = states.shape[-1] // 2
    angles = positions[..., None].double() * theta ** (-torch.arange(half).double() / half)
    factors = torch.polar(torch.ones_like(angles), angles)[:, None]
    pairs = torch.complex(states[..., :half], states[..., half:]) * factors
    return torch.cat([pairs.real, pairs.imag], -1)


def compute_expected(module, states, positions, mask, window):
    """Return the outputs of an attention module for its inputs [b, n, D], one projection after another."""
    config, kind = module.config, module.config.layer_types[module.layer_idx]
    d, d_v = config.get_attention_head_dim(), config.get_attention_value_dim()
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    values = config.num_value_heads if kv_heads == heads else kv_heads
    weight = module.Wqkv.weight
    query, key = weight[: heads * d], weight[heads * d : (heads + kv_heads) * d]
    value = weight[(heads + kv_heads) * d :]
    assert value.shape[0] == values * d_v
    theta = config.rope_parameters[kind]["rope_theta"]
    query, key = (
        rotate((states @ part.T).unflatten(-1, (-1, d)).transpose(1, 2), positions, theta) for part in (query, key)
    )
    value = (states @ value.T).unflatten(-1, (-1, d_v)).transpose(1, 2)
    near = (torch.arange(ROTARY_LENGTH)[:, None] - torch.arange(ROTARY_LENGTH)).abs()
    reach = config.local_attention // 2 if kind == "sliding_attention" else window
    allowed = (near <= reach) & mask[:, None, None].bool()
    added = torch.zeros(allowed.shape, dtype=states.dtype).masked_fill(~allowed, -torch.inf)
    projections = {"P_l": getattr(module, "logits_proj", None), "P_w": getattr(module, "weights_proj", None)}
    output, _ = attention_core(query, key, value, scale=d**-0.5, mask=added, **projections)
    return output.transpose(1, 2).flatten(2) @ module.Wo.weight.T


VARIANTS = [
    ({}, ROTARY_LENGTH),
    ({"num_key_value_heads": 2}, ROTARY_LENGTH),
    ({"num_key_value_heads": 1, "talking_heads": "both", "talking_heads_init": "random"}, ROTARY_LENGTH),
    ({"talking_heads": "weights", "talking_heads_init": "random", "num_value_heads": 4}, ROTARY_LENGTH),
    ({"num_key_value_heads": 3, "attention_pattern": "sliding_window", "attention_window": 10}, 5),
    ({"num_key_value_heads": 3, "value_head_dim": 5}, ROTARY_LENGTH),
]


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("fields, window", VARIANTS, ids=[" ".join(fields) or "mha" for fields, _ in VARIANTS])
def test_every_layer_equals_the_formula(implementation, fields, window):
    """Check the order of rows in fused projections, the RoPE bases and windows of layers, and talking heads."""
    model, batch = make_model(**fields).double(), make_rotary_batch()
    model.set_attn_implementation(implementation)
    batch["position_ids"] = torch.randint(0, 40, (3, ROTARY_LENGTH))
    real, calls = batch["attention_mask"].bool(), []
    for layer in model.layers:
        layer.attn.register_forward_hook(lambda module, args, result: calls.append((module, args[0], result[0])))
    with torch.no_grad():
        model(**batch)
        assert len(calls) == 4
        for module, states, output in calls:
            expected = compute_expected(module, states, batch["position_ids"], batch["attention_mask"], window)
            torch.testing.assert_close(output[real], expected[real], atol=1e-6, rtol=0)


def test_kernels_replace_only_the_softmax_of_global_layers():
    model, batch = make_model(attention_kernel="hedgehog", num_key_value_heads=2), make_rotary_batch()
    kernels = [layer.attn.kernel for layer in model.layers]
    assert [kernel is None for kernel in kernels] == [False, True, False, True]
    real = batch["attention_mask"].bool()
    with torch.no_grad():
        full_output = model(**batch).last_hidden_state
        alone = model(batch["input_ids"][1:2, :15]).last_hidden_state  # without padding
    torch.testing.assert_close(full_output[1][real[1]], alone[0], atol=1e-5, rtol=0)


# Fused projections


@pytest.mark.parametrize("kv_heads", [6, 2])
def test_saved_model_loads_with_equal_weights(kv_heads, tmp_path):
    """Check that no mapping of Transformers splits the fused layer into three equal parts."""
    model = make_model(num_key_value_heads=kv_heads, attention_bias=True)
    model.save_pretrained(tmp_path)
    loaded, info = AttnVariantModernBertModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    assert loaded.layers[1].attn.Wqkv.weight.shape == ((6 + 2 * kv_heads) * 8, 48)
    weights = model.state_dict()
    assert weights.keys() == loaded.state_dict().keys()
    assert all(torch.equal(value, weights[name]) for name, value in loaded.state_dict().items())
    assert conversion_mapping.get_checkpoint_conversion_mapping(model.config.model_type) is None


def test_initial_weights_have_the_spread_of_transformers():
    model = make_model(num_key_value_heads=1, initializer_cutoff_factor=2.0)
    for layer in model.layers:
        weight = layer.attn.Wqkv.weight
        assert weight.abs().max() <= 0.4 and 0.15 < weight.std() < 0.2


# Fields


@pytest.mark.parametrize(
    "fields, reason",
    [
        ({"kv_lora_rank": 16}, "rotary part of their own"),
        ({"kv_lora_rank": 48}, "rotary part of their own"),
        ({"per_layer_values": {"kv_lora_rank": [16, None, None, None]}}, "rotary part of their own"),
        ({"score_function": "additive"}, "distance of two tokens"),
        ({"attention_kernel": "elu"}, "distance of two tokens"),
        ({"per_layer_values": {"attention_kernel": ["relu", None, None, None]}}, "distance of two tokens"),
        ({"attention_kernel": "linformer"}, "rotated by different angles"),
        ({"attention_pattern": "memory_compressed", "attention_block_size": 4}, "rotated by different angles"),
        ({"position_embedding_type": "sinusoidal"}, "must be one of"),
    ],
    ids=str,
)
def test_unsupported_field_raises_an_error_with_the_reason(fields, reason):
    name = next(iter(fields))
    name = next(iter(fields[name])) if name == "per_layer_values" else name
    with pytest.raises(ValueError, match=f"`{name}` .*{reason}"):
        AttnVariantModernBertConfig(**MODERNBERT_SIZES | fields)


def test_settings_of_published_checkpoints_are_read():
    """Check the fields of answerdotai/ModernBERT-base, which was saved by an early version of its class."""
    published = {
        "model_type": "modernbert",
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "num_attention_heads": 6,
        "num_hidden_layers": 4,
        "global_attn_every_n_layers": 3,
        "global_rope_theta": 160000.0,
        "local_rope_theta": 10000.0,
        "layer_norm_eps": 1e-5,
        "position_embedding_type": "absolute",
        "gradient_checkpointing": False,
        "sparse_prediction": False,
    }
    upstream_config = transformers.ModernBertConfig.from_dict(published)
    variant_config = AttnVariantModernBertConfig.from_upstream(published, num_key_value_heads=2)
    assert variant_config.layer_types == upstream_config.layer_types
    assert variant_config.layer_types.count("full_attention") == 2
    assert variant_config.rope_parameters == upstream_config.rope_parameters
    assert variant_config.num_key_value_heads == 2
