"""Check the common behavior of every head of every architecture, for each variant."""

import copy
from types import SimpleNamespace

import pytest
import torch
import transformers
from architectures import (
    ARCHITECTURES,
    BASE_HEADS,
    HEAD_AND_VARIANT_IDS,
    HEAD_IDS,
    HEADS,
    HEADS_AND_VARIANTS,
    LENGTH,
    VARIANTS,
)

import hf_attn_variants
from hf_attn_variants.modeling.mechanisms.talking_heads import TalkingHeadsSettings
from hf_attn_variants.modeling.variant_names import EAGER, SDPA

pytestmark = pytest.mark.cross_product

EVERY_HEAD = pytest.mark.parametrize("architecture, head", HEADS, ids=HEAD_IDS)
HEADS_WITH_VARIANTS = pytest.mark.parametrize(
    "architecture, head, variant", HEADS_AND_VARIANTS, ids=HEAD_AND_VARIANT_IDS
)
EVERY_ARCHITECTURE = pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda row: row.name)
EVERY_VARIANT = pytest.mark.parametrize("variant", VARIANTS)
# One head per architecture is enough if only the attention matters.
BASE = BASE_HEADS
# Files that ship with checkpoints of an architecture, in addition to the common ones.
FAMILY_FILES = {"bert": ["bert_family.py"], "t5": ["t5_family.py"]}


def compute_outputs(model, batch, **kwargs):
    with torch.no_grad():
        return model(**batch, **{"use_cache": False, **kwargs})


def assert_same(actual, expected, atol=1e-6):
    for value, expected_value in zip(actual.to_tuple(), expected.to_tuple(), strict=True):
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(value, expected_value, atol=atol, rtol=0)


@EVERY_HEAD
@pytest.mark.parametrize("variant", ["gqa", "gqa_talking", "dynamic"])
def test_training_step_gives_every_parameter_a_gradient(architecture, head, variant):
    model = architecture.make_model(head, variant).train()
    batch = architecture.make_batch(head, labels=True)
    result = model(**batch, use_cache=False)
    loss = result.loss if "loss" in result else result.last_hidden_state.square().mean()
    if "pooler_output" in result:
        loss = loss + result.pooler_output.square().mean()
    assert loss.isfinite()
    loss.backward()
    # The gradient of a single-class output or of the padding token may be 0, but not that of an attention parameter.
    missing = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert missing == []
    for site, name, module in model.named_attention_modules():
        for path, parameter in module.named_parameters():
            if path != f"{site.key}.bias":  # a key bias shifts all logits of a query equally
                assert parameter.grad.abs().max() > 0, f"{name}.{path}"


@HEADS_WITH_VARIANTS
def test_eager_and_sdpa_give_equal_outputs(architecture, head, variant):
    model = architecture.make_model(head, variant)
    batch = architecture.make_batch(head)
    assert model.config._attn_implementation == SDPA
    fused = compute_outputs(model, batch)
    model.set_attn_implementation("eager")
    assert model.config._attn_implementation == EAGER
    eager = compute_outputs(model, batch)
    model.set_attn_implementation("sdpa")
    again = compute_outputs(model, batch)
    # Padded positions are compared too: the key mask is the same for every query.
    assert_same(fused, eager, atol=1e-5)
    assert_same(fused, again)


@pytest.mark.thorough
@HEADS_WITH_VARIANTS
def test_saved_model_loads_with_equal_outputs(architecture, head, variant, tmp_path):
    model = architecture.make_model(head, variant)
    model.save_pretrained(tmp_path)
    layers = ("attention", "base", "fields", "mechanisms", "ops")
    names = ("configuration_attn_variants", architecture.config_class.modeling_file)
    files = {f"{name}.py" for name in (*names, *(f"attn_variants_{layer}" for layer in layers))}
    assert {path.name for path in tmp_path.glob("*.py")} == files | {*FAMILY_FILES.get(architecture.name, ())}
    again = type(model).from_pretrained(tmp_path).eval()
    batch = architecture.make_batch(head)
    assert_same(compute_outputs(model, batch), compute_outputs(again, batch))
    assert again.config.architectures == [f"AttnVariant{head}"]


@pytest.mark.thorough
@HEADS_WITH_VARIANTS
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_output_attentions_returns_weights_of_all_layers(architecture, head, variant, implementation):
    model = architecture.make_model(head, variant)
    model.set_attn_implementation(implementation)
    batch = architecture.make_batch(head)
    plain, result = compute_outputs(model, batch), compute_outputs(model, batch, output_attentions=True)
    maps = {name: layers for name, layers in result.items() if name.endswith("attentions") and layers}
    assert maps
    for weights in (weights for layers in maps.values() for weights in layers):
        assert weights.shape[1:] == (model.config.num_value_heads, LENGTH, LENGTH)
        if model.config.talking_heads in (None, "logits"):
            torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]), atol=1e-5, rtol=0)
    assert all(len(layers) == model.config.num_hidden_layers for layers in maps.values())
    for name, value in plain.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(result[name], value, atol=1e-5, rtol=0)

    # Set the flag before the model is built, because encoder-decoders of Transformers copy their configuration.
    configured = architecture.make_model(head, variant, output_attentions=True)
    configured.set_attn_implementation(implementation)
    again = compute_outputs(configured, batch)
    for name, layers in maps.items():
        torch.testing.assert_close(again[name], layers)


@EVERY_ARCHITECTURE
@EVERY_VARIANT
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_model_runs_in_half_precision(architecture, variant, dtype):
    model = architecture.make_model(BASE[architecture.name], variant)
    batch = architecture.make_batch(BASE[architecture.name])
    exact = compute_outputs(model, batch).last_hidden_state
    half = compute_outputs(copy.deepcopy(model).to(dtype), batch).last_hidden_state
    assert half.dtype == dtype
    torch.testing.assert_close(half.float(), exact, atol=40 * torch.finfo(dtype).eps * exact.abs().max(), rtol=0)


@EVERY_ARCHITECTURE
@EVERY_VARIANT
def test_parameter_count_equals_the_formula(architecture, variant):
    """Check the count by heads and ranks: key/value heads, output heads, latents, and projections across heads."""
    head = BASE[architecture.name]
    plain, model = architecture.make_model(head), architecture.make_model(head, variant)
    config, difference, latents = model.config, 0, {}
    for (site, path, module), (_, _, multi_head_module) in zip(
        model.named_attention_modules(), plain.named_attention_modules(), strict=True
    ):
        heads = site.get_heads(config, path)
        query, output = module.get_submodule(site.query), module.get_submodule(site.output)
        key_inputs, has_bias = multi_head_module.get_submodule(site.key).in_features, query.bias is not None
        rank = key_inputs if heads.rank is None else heads.rank
        d, d_v = config.get_attention_head_dim(), config.get_attention_value_dim()
        rows = (2 * config.num_attention_heads * d, key_inputs), (heads.key * d + heads.value * d_v, rank)
        before, after = (count * (inputs + has_bias) for count, inputs in rows)
        difference += before - after
        if rank < key_inputs:
            latents[site.get_latent_projection_path(path)] = rank * key_inputs
        unread = config.num_attention_heads * d - config.num_value_heads * d_v
        difference += unread * output.out_features
        h_k, h, h_v = config.num_attention_heads, config.num_softmax_heads, config.num_value_heads
        sizes = {"l": h_k * h, "w": h * h_v}
        difference -= sizes["l"] * (config.talking_heads in ("logits", "both"))
        difference -= sizes["w"] * (config.talking_heads in ("weights", "both"))
        inputs = {"x": query.in_features, "m": key_inputs}
        difference -= sum(inputs[name[0]] * sizes[name[2]] for name in config.talking_heads_dynamic)
        assert multi_head_module.get_submodule(site.query).weight.shape == query.weight.shape
    difference += position_bias_difference(plain, model) - sum(latents.values())
    assert plain.num_parameters() - model.num_parameters() == difference


def test_attention_module_uses_the_head_count_of_its_place():
    """Check encoders and decoders with unequal head counts."""
    counts = {"num_key_value_heads": 8, "encoder_num_key_value_heads": 4}
    values = {"num_key_value_heads": 2, "encoder_num_key_value_heads": 4, "kv_lora_rank": 16, "cross_kv_lora_rank": 64}
    config = SimpleNamespace(
        get_query_heads=counts.get,
        get_layer_value=lambda name, layer: values.get(name),
        get_attention_head_dim=lambda name: 3,
        get_attention_value_dim=lambda name: 7,
        get_talking_heads=lambda prefix, layer: TalkingHeadsSettings("both", 6, 5, dynamic=(prefix, str(layer))),
    )
    encoder, decoder, cross = hf_attn_variants.AttnVariantT5Model.attention_sites
    attention = "decoder.block.3.layer.0.SelfAttention"
    assert decoder.get_heads(config, attention) == (8, 2, 2, 6, 5, 3, 7, 16, "both", "identity", ("", "3"))
    assert cross.get_heads(config, "decoder.block.3.layer.1.EncDecAttention")[:8] == (8, 2, 2, 6, 5, 3, 7, 64)
    assert cross.get_heads(config, "decoder.block.3.layer.1.EncDecAttention").dynamic == ("cross_", "3")
    of_encoder = encoder.get_heads(config, attention.replace("decoder", "encoder"))
    assert of_encoder == (4, 4, 5, 6, 5, 3, 7, None, "both", "identity", ("encoder_", "3"))
    assert [site.stack for site in (encoder, decoder, cross)] == ["encoder", "decoder", "decoder"]
    assert [site.is_cross_attention for site in (encoder, decoder, cross)] == [False, False, True]
    (self_site, cross) = hf_attn_variants.AttnVariantBertModel.attention_sites
    for is_decoder, stack in ((False, "encoder"), (True, "decoder")):
        assert self_site.get_stack_name(SimpleNamespace(is_decoder=is_decoder)) == stack
    assert cross.is_cross_attention and cross.stack == "decoder"


def position_bias_difference(plain, model):
    """Return the difference in parameters of the relative position bias, which has one column per softmax head."""
    size = [
        sum(parameter.numel() for name, parameter in item.named_parameters() if "relative_attention_bias" in name)
        for item in (plain, model)
    ]
    return size[0] - size[1]


@EVERY_ARCHITECTURE
@EVERY_VARIANT
def test_every_talking_heads_projection_affects_outputs(architecture, variant):
    model = architecture.make_model(BASE[architecture.name], variant)
    batch = architecture.make_batch(BASE[architecture.name])
    before = compute_outputs(model, batch).last_hidden_state
    for site, name, module in model.named_attention_modules():
        core = module.get_submodule(site.core)
        for path, parameter in core.named_parameters(recurse=False):
            with torch.no_grad():
                # Adding one number to all entries would shift all logits equally and not change the outputs.
                parameter.add_(torch.randn_like(parameter))
            after = compute_outputs(model, batch).last_hidden_state
            assert (after - before).abs().max() > 1e-4, f"{name}.{path}"
            before = after


@EVERY_ARCHITECTURE
def test_transformers_configuration_raises_an_error_with_advice(architecture):
    model_class = getattr(hf_attn_variants, f"AttnVariant{BASE[architecture.name]}")
    with pytest.raises(ValueError, match="from_upstream"):
        model_class(architecture.upstream_config_class(**architecture.tiny))


@pytest.mark.thorough
@EVERY_ARCHITECTURE
@pytest.mark.parametrize("implementation", ["flash_attention_2", "flash_attention_3", "flex_attention", "paged|eager"])
def test_implementation_without_talking_heads_raises_an_error(architecture, implementation):
    head = BASE[architecture.name]
    with pytest.raises(ValueError, match="talking_heads="):
        architecture.make_model(head, "talking", attn_implementation=implementation)
    model = architecture.make_model(head, "talking")
    with pytest.raises(ValueError, match="talking_heads="):
        model.set_attn_implementation(implementation)
    # The call also raises an error if the name is set directly in the configurations.
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = implementation
    with pytest.raises(ValueError, match="talking_heads="):
        compute_outputs(model, architecture.make_batch(head))


@EVERY_ARCHITECTURE
@pytest.mark.parametrize("variant", ["gqa", "gqa_talking"])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("as_dict", [False, True])
def test_attention_implementation_names_resolve_to_ours(architecture, variant, implementation, as_dict):
    head = BASE[architecture.name]
    model, batch = architecture.make_model(head, variant), architecture.make_batch(head)
    expected = compute_outputs(model, batch).last_hidden_state
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = {"": implementation} if as_dict else implementation
            assert module.config._attn_implementation == {"eager": EAGER, "sdpa": SDPA}[implementation]
    torch.testing.assert_close(compute_outputs(model, batch).last_hidden_state, expected, atol=1e-5, rtol=0)


@EVERY_ARCHITECTURE
def test_trainable_mask_gets_a_gradient_with_talking_heads(architecture):
    head = BASE[architecture.name]
    batch = architecture.make_batch(head)
    length = batch["input_ids"].shape[1]
    gradients = []
    for implementation in ("sdpa", "eager"):
        model = architecture.make_model(head, "talking", attn_implementation=implementation)
        mask = torch.zeros(len(batch["input_ids"]), 1, 1, length, requires_grad=True)
        model(**batch | {"attention_mask": mask}).last_hidden_state.pow(3).sum().backward()
        gradients.append(mask.grad)
    assert gradients[0].abs().max() > 0
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-4)


@EVERY_ARCHITECTURE
@pytest.mark.parametrize("variant", ["gqa", "talking", "latent"])
def test_model_computes_shapes_on_the_meta_device(architecture, variant):
    head = BASE[architecture.name]
    # Transformers reads the values of a mask, which do not exist on the meta device.
    batch = {name: tensor for name, tensor in architecture.make_batch(head).items() if "mask" not in name}
    expected = compute_outputs(architecture.make_model(head, variant), batch).last_hidden_state.shape
    model = architecture.make_model(head, variant).to("meta")
    actual = compute_outputs(model, {name: tensor.to("meta") for name, tensor in batch.items()}).last_hidden_state
    assert actual.is_meta and actual.shape == expected


@pytest.mark.thorough
@EVERY_ARCHITECTURE
@pytest.mark.parametrize(
    "variant", ["gqa", *(pytest.param(item, marks=pytest.mark.slow) for item in ("mqa", "latent"))]
)
def test_flex_attention_supports_grouped_heads(architecture, variant):
    upstream = architecture.make_upstream_model(BASE[architecture.name])
    upstream.set_attn_implementation("flex_attention")
    batch = architecture.make_batch(BASE[architecture.name])
    try:
        compute_outputs(upstream, batch)
    except (NotImplementedError, RuntimeError) as error:
        pytest.skip(f"the model of Transformers does not support flex attention here: {str(error)[:80]}")
    model = architecture.make_model(BASE[architecture.name], variant)
    expected = compute_outputs(model, batch).last_hidden_state
    model.set_attn_implementation("flex_attention")
    with pytest.raises(ValueError, match="output_attentions"):
        compute_outputs(model, batch, output_attentions=True)
    result = compute_outputs(model, batch).last_hidden_state
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=0)


@pytest.mark.slow
@EVERY_ARCHITECTURE
@EVERY_VARIANT
def test_model_compiles_without_graph_breaks(architecture, variant):
    model = architecture.make_model(BASE[architecture.name], variant)
    batch = architecture.make_batch(BASE[architecture.name])
    expected = compute_outputs(model, batch).last_hidden_state
    torch._dynamo.reset()  # torch limits the number of recompilations over all models, whose shapes differ
    compiled = torch.compile(model, fullgraph=True)
    torch.testing.assert_close(compute_outputs(compiled, batch).last_hidden_state, expected, atol=1e-5, rtol=0)


@EVERY_ARCHITECTURE
def test_auto_classes_load_the_registered_models(architecture):
    for auto_class, name in architecture.config_class.auto_classes.items():
        model = getattr(transformers, auto_class).from_config(architecture.make_config("gqa"))
        assert type(model).__name__ == name
