"""Apply the ideas of Transformers' shared model tests to each architecture with grouped heads and with latents.

Transformers' shared tests are not part of the installed package. These tests cover the ideas that the tests in
`modeling/` and `integration/` do not check for every architecture.
"""

import pytest
import torch
from architectures import LENGTH, VOCABULARY, make_token_ids
from fixtures.checkpointing import checkpoint_layers
from fixtures.tested_architectures import (
    ALL_ARCHITECTURES,
    EVERY_ARCHITECTURE,
    EVERY_HEAD,
    EVERY_VARIANT,
    GENERATES,
    PAIRS,
    SOME_HEADS,
    TEXT_ARCHITECTURES,
    TOLERANCE,
    assert_same,
    get_no_dropout_fields,
    get_second_head,
    get_tensors,
    get_variant_fields,
    make,
    make_new_model,
)
from torch import nn
from transformers import initialization

import hf_attn_variants


@pytest.mark.thorough
@EVERY_HEAD
def test_training_gives_every_parameter_a_gradient(architecture, head):
    """Check `test_training`, also with checkpointed layers (`test_training_gradient_checkpointing`)."""
    batch, actual = architecture.make_batch(head, labels=True), []
    model = make(architecture, head, "latent", **get_no_dropout_fields(architecture)).train()
    checkpointed = [False, True] if model.supports_gradient_checkpointing else [False]
    for on in checkpointed:
        if on:
            checkpoint_layers(model)
        model.zero_grad()
        torch.manual_seed(3)
        output = model(**batch)
        (output["loss"] if "loss" in output else next(iter(output.values())).square().sum()).backward()
        actual.append(
            {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
        )
    without = sorted(name for name, grad in actual[0].items() if grad is None)
    upstream = architecture.make_upstream_model(head)
    output = upstream(**batch)
    (output["loss"] if "loss" in output else next(iter(output.values())).square().sum()).backward()
    unused = {name for name, parameter in upstream.named_parameters() if parameter.grad is None}
    # A decoder without an encoder has no latent of encoder outputs.
    expected_names = {name for name in set(without) - unused if not name.endswith("cross_kv_a_proj.weight")}
    assert not expected_names, sorted(expected_names)
    assert head.endswith("ForCausalLM") or not any(name.endswith("cross_kv_a_proj.weight") for name in without)
    if len(actual) == 2:
        assert_same(*({name: grad for name, grad in item.items() if grad is not None} for item in actual))


@pytest.fixture
def seeded_draws(monkeypatch):
    """Draw each weight from the same seed, in any order (`seeded_weight_init`)."""

    def seeded(function):
        def draw(*args, **kwargs):
            torch.manual_seed(0)
            return function(*args, **kwargs)

        return draw

    for name, function in initialization.TORCH_INIT_FUNCTIONS.items():
        monkeypatch.setitem(initialization.TORCH_INIT_FUNCTIONS, name, seeded(function))
        monkeypatch.setattr(torch.nn.init, name, seeded(function))


@pytest.mark.thorough
@SOME_HEADS
def test_missing_weights_are_initialized_like_a_new_model(architecture, head, seeded_draws):
    """Check `test_can_init_all_missing_weights` with an empty checkpoint."""
    model_class = getattr(hf_attn_variants, f"AttnVariant{head}")
    config = architecture.make_config(head=head, **get_variant_fields(architecture, "latent"))
    new = model_class(config)
    loaded = model_class.from_pretrained(None, config=config, state_dict={})
    assert_same(new.state_dict(), loaded.state_dict(), atol=0, rtol=0)
    buffers = [dict(model.named_buffers()) for model in (new, loaded)]
    assert buffers[0].keys() == buffers[1].keys()
    assert all(torch.equal(value, buffers[1][name]) for name, value in buffers[0].items())


@pytest.mark.thorough
@SOME_HEADS
def test_save_and_load_keeps_the_model(architecture, head, tmp_path):
    """Check `test_save_load`, `_keys_to_ignore_on_save` and `test_tied_weights_keys`, in several files."""
    model = make_new_model(architecture, head, "gqa")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    assert_same(model.state_dict(), loaded.state_dict(), atol=0, rtol=0)
    pointers = [
        {name: item.data_ptr() for name, item in m.state_dict(keep_vars=True).items()} for m in (model, loaded)
    ]
    ties = [{frozenset(n for n in at if at[n] == at[name]) for name in at} for at in pointers]
    assert ties[0] == ties[1]
    with torch.no_grad():
        batch = architecture.make_batch(head)
        assert_same(get_tensors(model(**batch)), get_tensors(loaded.eval()(**batch)))


@EVERY_ARCHITECTURE
@EVERY_VARIANT
def test_eager_equals_sdpa(architecture, variant):
    """Check `test_eager_matches_sdpa_inference`: padded on the right and on the left, with and without gradients."""
    head = next(iter(architecture.heads))
    model, batch = make(architecture, head, variant), architecture.make_batch(head)
    flipped = {name: value.flip(-1) if name == "attention_mask" else value for name, value in batch.items()}
    for inputs in (batch, flipped):
        attention_mask = inputs.get("attention_mask")
        actual = []
        for implementation in ("eager", "sdpa"):
            model.set_attn_implementation(implementation)
            with torch.no_grad():
                output = next(iter(get_tensors(model(**inputs)).values()))
            # Outputs at padded positions are ignored.
            is_of_text = attention_mask is not None and "decoder_input_ids" not in inputs
            actual.append(output * attention_mask[..., None] if is_of_text and output.dim() == 3 else output)
        torch.testing.assert_close(*actual, **TOLERANCE)


@EVERY_ARCHITECTURE
@EVERY_VARIANT
def test_batched_row_equals_the_single_row(architecture, variant):
    """Check `test_batching_equivalence`."""
    head = next(iter(architecture.heads))
    model, batch = make(architecture, head, variant), architecture.make_batch(head)
    with torch.no_grad():
        batch_output = get_tensors(model(**batch))
        for row in range(len(next(iter(batch.values())))):
            alone = get_tensors(model(**{name: value[row : row + 1] for name, value in batch.items()}))
            assert_same({name: value[row : row + 1] for name, value in batch_output.items()}, alone)


@EVERY_ARCHITECTURE
@EVERY_VARIANT
def test_hidden_states_and_attentions_have_the_expected_shapes(architecture, variant):
    """Check `test_hidden_states_output`, `test_attention_outputs` and `test_model_outputs_equivalence`."""
    head = next(iter(architecture.heads))
    model, batch = make(architecture, head, variant), architecture.make_batch(head)
    upstream = architecture.make_upstream_model(head)
    upstream.set_attn_implementation("eager")
    flags = {"output_hidden_states": True, "output_attentions": True}
    with torch.no_grad():
        output, upstream_output = model(**batch, **flags), upstream(**batch, **flags)
        as_tuple = model(**batch, **flags, return_dict=False)
    assert list(output) == list(upstream_output)
    for name, value in upstream_output.items():
        if isinstance(value, tuple):
            # Transformers 5.15 and 5.17 do not return the attention weights of T5's decoder.
            assert not value or [item.shape for item in output[name]] == [item.shape for item in value], name
    for value, unnamed in zip(output.to_tuple(), as_tuple, strict=True):
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, unnamed)


@pytest.mark.parametrize("architecture", TEXT_ARCHITECTURES, ids=lambda row: row.name)
def test_inputs_embeds_equal_input_ids(architecture):
    """Check `test_inputs_embeds_matches_input_ids`."""
    head = next(iter(architecture.heads))
    model = make(architecture, head, "latent")
    ids = make_token_ids()
    others = {"decoder_input_ids": make_token_ids()} if architecture in PAIRS else {}
    with torch.no_grad():
        embedded = model(inputs_embeds=model.get_input_embeddings()(ids), **others)
        assert_same(get_tensors(model(input_ids=ids, **others)), get_tensors(embedded))


@GENERATES
@pytest.mark.parametrize("beams", [1, 2])
def test_generation_from_inputs_embeds_returns_the_expected_shapes(architecture, beams):
    """Check `test_generate_from_inputs_embeds` and the shapes of `generate`, greedily and with beams."""
    model = make(architecture, get_second_head(architecture), "latent")
    model.set_attn_implementation("eager")
    ids, steps = make_token_ids(), 4
    options = {"max_new_tokens": steps, "min_new_tokens": steps, "num_beams": beams, "do_sample": False}
    expected = model.generate(input_ids=ids, **options)
    embedded = model.get_input_embeddings()(ids)
    flags = {"output_scores": True, "output_attentions": True, "output_hidden_states": True}
    actual = model.generate(inputs_embeds=embedded, **options, **flags, return_dict_in_generate=True)
    assert torch.equal(actual.sequences, expected)
    rows, config = len(ids) * beams, model.config
    assert [score.shape for score in actual.scores] == [(rows, VOCABULARY)] * steps
    layers = len(actual.decoder_attentions[0])
    for step, (self_attentions, cross, states) in enumerate(
        zip(actual.decoder_attentions, actual.cross_attentions, actual.decoder_hidden_states, strict=True)
    ):
        heads = config.decoder_attention_heads if hasattr(config, "decoder_attention_heads") else config.num_heads
        assert [item.shape for item in self_attentions] == [(rows, heads, 1, step + 1)] * layers
        assert [item.shape for item in cross] == [(rows, heads, 1, LENGTH)] * layers
        assert [item.shape for item in states] == [(rows, 1, config.d_model)] * (layers + 1)


@EVERY_HEAD
def test_resized_embeddings_stay_tied(architecture, head):
    """Check `test_resize_tokens_embeddings`, `test_resize_embeddings_untied` and `test_model_get_set_embeddings`."""
    model = make(architecture, head, "gqa")
    if model.get_input_embeddings() is None or not isinstance(model.get_input_embeddings(), nn.Embedding):
        pytest.skip("this model has no token embeddings")
    output = model.get_output_embeddings()
    tied = output is not None and output.weight is model.get_input_embeddings().weight
    before = model.get_input_embeddings().weight.detach().clone()
    for size in (VOCABULARY + 7, VOCABULARY - 10):
        model.resize_token_embeddings(size, mean_resizing=False)
        weight = model.get_input_embeddings().weight
        assert len(weight) == size == model.config.get_text_config().vocab_size
        num_kept_rows = min(size, VOCABULARY)
        assert torch.equal(weight[:num_kept_rows], before[:num_kept_rows])
        if output is not None:
            assert len(model.get_output_embeddings().weight) == size
            assert (model.get_output_embeddings().weight is weight) == tied
    batch = architecture.make_batch(head)
    smaller = {
        name: value % (VOCABULARY - 10) if name.endswith("input_ids") else value for name, value in batch.items()
    }
    with torch.no_grad():
        assert all(value.isfinite().all() for value in get_tensors(model(**smaller)).values())


def list_whole_layers(model):
    """Return the outermost modules that a device map does not split."""
    names = set(model._no_split_modules or ())
    actual = [path for path, module in model.named_modules() if type(module).__name__ in names]
    return [path for path in actual if not any(path.startswith(f"{other}.") for other in actual)]


@EVERY_ARCHITECTURE
def test_no_split_modules_are_found(architecture):
    """Check `test_model_parallelism`: the names of our classes select the layers that a device map keeps whole."""
    head = next(iter(architecture.heads))
    model, upstream = make(architecture, head, "gqa"), architecture.make_upstream_model(head)
    assert list_whole_layers(model) == list_whole_layers(upstream)


@pytest.mark.parametrize("architecture", ALL_ARCHITECTURES[:3] + ALL_ARCHITECTURES[6:7], ids=lambda row: row.name)
def test_weights_are_offloaded_to_the_disk(architecture, tmp_path):
    """Check `test_disk_offload_safetensors`: a layer is loaded when it runs."""
    head = next(iter(architecture.heads))
    model, batch = make_new_model(architecture, head, "latent"), architecture.make_batch(head)
    model.save_pretrained(tmp_path / "model")
    # ALBERT's layers are one module, which Transformers does not list.
    layer = (list_whole_layers(model) or ["encoder.albert_layer_groups.0"])[0]
    parts = {layer: "disk"}
    for path, module in model.named_modules():
        if [*module.parameters(recurse=False), *module.buffers(recurse=False)] and not f"{path}.".startswith(
            f"{layer}."
        ):
            parts[path] = "cpu"
    loaded = type(model).from_pretrained(tmp_path / "model", device_map=parts, offload_folder=tmp_path / "offload")
    assert loaded.hf_device_map[layer] == "disk" and loaded.get_submodule(layer) is not None
    assert {item.device.type for item in loaded.get_submodule(layer).parameters()} == {"meta"}
    with torch.no_grad():
        assert_same(get_tensors(model(**batch)), get_tensors(loaded.eval()(**batch)))
