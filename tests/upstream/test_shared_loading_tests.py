"""Apply the ideas of Transformers' shared tests of loading weights: partial, on other devices, in other precisions."""

import pytest
import torch
from fixtures.tested_architectures import (
    ALL_ARCHITECTURES,
    EVERY_ARCHITECTURE,
    assert_same,
    get_tensors,
    get_variant_fields,
    make,
    make_new_model,
    parametrize_heads,
)
from safetensors.torch import load_file

import hf_attn_variants

# Heads that contain the base model.
HEADED = parametrize_heads(lambda heads: [heads[1], heads[-1]])


def get_base_class(architecture):
    return getattr(hf_attn_variants, f"AttnVariant{next(iter(architecture.heads))}")


@pytest.mark.thorough
@HEADED
def test_head_loads_the_weights_of_a_base_model(architecture, head, tmp_path):
    """Check `test_base_model_prefix_loads_base_weights`, `test_correct_missing_keys`, and a base model from a head."""
    model = make(architecture, head, "latent")
    prefix = f"{model.base_model_prefix}."
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")  # without computed tables
    weights = {name: value for name, value in saved.items() if name.startswith(prefix)}
    if not weights:
        pytest.skip("this class is a base model")
    without = {name.removeprefix(prefix): value for name, value in weights.items()}
    loaded, info = type(model).from_pretrained(None, config=model.config, state_dict=without, output_loading_info=True)
    assert not info["unexpected_keys"] and not any(name.startswith(prefix) for name in info["missing_keys"])
    assert_same(weights, {name: loaded.state_dict()[name] for name in weights}, atol=0, rtol=0)
    if head.endswith("ForCausalLM"):
        return  # contains only the decoder of the base model
    base, info = get_base_class(architecture).from_pretrained(tmp_path, output_loading_info=True)
    assert not set(without) & set(info["missing_keys"])
    result = base.state_dict()
    assert_same(without, {name: result[name] for name in without}, atol=0, rtol=0)


@EVERY_ARCHITECTURE
def test_mismatched_shapes_raise_an_error_or_are_initialized(architecture, tmp_path):
    """Check `test_load_with_mismatched_shapes` and `test_can_load_ignoring_mismatched_shapes`."""
    head = next(
        name for name in architecture.heads if "Classification" in name or "Conditional" in name or "MTModel" in name
    )
    model = make_new_model(architecture, head, "gqa")
    name, shape = max(model.state_dict().items(), key=lambda item: (item[1].dim() == 2, item[1].numel()))
    weights = dict(model.state_dict())
    path = next(entry for entry in weights if "attn" in entry.lower() or "attention" in entry.lower())
    weights[path] = weights[path][..., :-1].contiguous()
    options = {"config": model.config, "state_dict": weights}
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        type(model).from_pretrained(None, **options)
    loaded, info = type(model).from_pretrained(None, **options, ignore_mismatched_sizes=True, output_loading_info=True)
    assert {entry[0] for entry in info["mismatched_keys"]} == {path}
    assert loaded.state_dict()[path].shape == model.state_dict()[path].shape
    assert all(
        value.isfinite().all() for value in get_tensors(loaded.eval()(**architecture.make_batch(head))).values()
    )
    assert torch.equal(loaded.state_dict()[name], shape) or name == path


@EVERY_ARCHITECTURE
@pytest.mark.parametrize("fields", [{"num_key_value_heads": 4}, {"attention_kernel": "favor"}, {}], ids=str)
def test_all_tensors_are_parameters_or_buffers(architecture, fields):
    """Check `test_all_tensors_are_parameter_or_buffer`: a model on the meta device runs after `to_empty`."""
    if "attention_kernel" in fields and architecture.name in ("t5", "umt5"):
        fields = fields | {"position_embedding_type": "sinusoidal"}
    head = next(iter(architecture.heads))
    with torch.device("meta"):
        model = getattr(hf_attn_variants, f"AttnVariant{head}")(architecture.make_config(head=head, **fields)).eval()
    model.to_empty(device="cpu")
    model.init_weights()
    with torch.no_grad():
        assert all(value.isfinite().all() for value in get_tensors(model(**architecture.make_batch(head))).values())


@EVERY_ARCHITECTURE
def test_loading_works_under_a_device_context(architecture, tmp_path):
    """Check `test_can_load_with_device_context_manager` and `test_cannot_load_with_meta_device_context_manager`."""
    head = next(iter(architecture.heads))
    model = make_new_model(architecture, head, "latent")
    model.save_pretrained(tmp_path)
    with torch.device("cpu"):
        assert_same(model.state_dict(), type(model).from_pretrained(tmp_path).state_dict(), atol=0, rtol=0)
    with torch.device("meta"), pytest.raises(RuntimeError, match="meta"):
        type(model).from_pretrained(tmp_path)


@pytest.mark.thorough
@EVERY_ARCHITECTURE
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_float32_modules_match_transformers(architecture, dtype, tmp_path):
    """Check `test_keep_in_fp32_modules`."""
    head = next(iter(architecture.heads))
    model, upstream = make_new_model(architecture, head, "gqa"), architecture.make_upstream_model(head)
    kinds = []
    for number, entry in enumerate((model, upstream)):
        entry.save_pretrained(tmp_path / str(number))
        loaded = type(entry).from_pretrained(tmp_path / str(number), dtype=dtype)
        kinds.append({name: value.dtype for name, value in loaded.state_dict().items()})
    assert kinds[0] == kinds[1] and dtype in kinds[0].values()


@EVERY_ARCHITECTURE
def test_configuration_without_special_tokens_builds_a_model(architecture):
    """Check `test_model_forward_default_config_values`."""
    head = next(iter(architecture.heads))
    config_dict = architecture.make_config(head=head, **get_variant_fields(architecture, "gqa")).to_diff_dict()
    for name in ("pad_token_id", "eos_token_id", "bos_token_id", "sep_token_id", "tie_word_embeddings", "auto_map"):
        config_dict.pop(name, None)
    config = architecture.config_class(**config_dict)
    for name in ("pad_token_id", "eos_token_id", "bos_token_id"):
        setattr(config, name, 0)
    model = getattr(hf_attn_variants, f"AttnVariant{head}")(config).eval()
    with torch.no_grad():
        assert all(value.isfinite().all() for value in get_tensors(model(**architecture.make_batch(head))).values())


@EVERY_ARCHITECTURE
def test_unavailable_attention_implementation_changes_nothing(architecture):
    """Check `test_can_set_attention_dynamically`."""
    head = next(iter(architecture.heads))
    model = make(architecture, head, "gqa")
    with torch.no_grad():
        before = get_tensors(model(**architecture.make_batch(head)))
        with pytest.raises(ValueError, match="nonsense"):
            model.set_attn_implementation("nonsense")
        assert_same(before, get_tensors(model(**architecture.make_batch(head))), atol=0, rtol=0)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "architecture", [row for row in ALL_ARCHITECTURES if row.name not in ("t5", "umt5")], ids=lambda row: row.name
)
def test_untied_embeddings_are_saved_and_loaded(architecture, tmp_path):
    """Check `test_load_save_without_tied_weights`; Transformers always ties those of T5."""
    for head in list(architecture.heads)[:3]:
        torch.manual_seed(0)
        config = architecture.make_config(
            head=head, **get_variant_fields(architecture, "gqa"), tie_word_embeddings=False
        )
        model = getattr(hf_attn_variants, f"AttnVariant{head}")(config)
        model.save_pretrained(tmp_path / head)
        loaded, info = type(model).from_pretrained(tmp_path / head, output_loading_info=True)
        assert not any(info.values()), info
        assert_same(model.state_dict(), loaded.state_dict(), atol=0, rtol=0)
