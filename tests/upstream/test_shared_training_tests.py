"""Apply the ideas of Transformers' shared tests of losses and gradients to our models."""

import pytest
import torch
from architectures import make_token_ids
from fixtures.checkpointing import checkpoint_layers
from fixtures.tested_architectures import (
    EVERY_ARCHITECTURE,
    EVERY_VARIANT,
    GENERATES,
    assert_same,
    get_no_dropout_fields,
    get_second_head,
    get_tensors,
    make,
    parametrize_heads,
)

CLASSIFIERS = parametrize_heads(lambda heads: [head for head in heads if head.endswith("ForSequenceClassification")])
WRITES_ALONE = parametrize_heads(
    lambda heads: [head for head in heads if head.endswith(("ForCausalLM", "LMHeadModel"))]
)
PROBLEMS = {
    "regression": (1, torch.tensor([0.5, -1.0, 2.0])),
    "single_label_classification": (3, torch.tensor([0, 2, 1])),
    "multi_label_classification": (3, torch.tensor([[1.0, 0, 1], [0, 0, 1], [1, 1, 0]])),
}


@EVERY_ARCHITECTURE
@EVERY_VARIANT
def test_gradients_reach_returned_states_and_weights(architecture, variant):
    """Check `test_retain_grad_hidden_states_attentions`: the model uses the states and weights that it returns."""
    head = next(iter(architecture.heads))
    model = make(architecture, head, variant)
    model.set_attn_implementation("eager")
    output = model(**architecture.make_batch(head), output_hidden_states=True, output_attentions=True)
    returned = {
        name: output[name] for name in output if name.endswith(("hidden_states", "attentions")) and output[name]
    }
    assert len(returned) >= 2
    for values in returned.values():
        values[0].retain_grad()
    output[0].flatten()[7].backward()
    for name, values in returned.items():
        assert values[0].grad is not None and values[0].grad.abs().sum() > 0, name


@EVERY_ARCHITECTURE
def test_embeddings_pass_gradients_to_adapters(architecture):
    """Check `test_enable_input_require_grads`, also with checkpointed layers, for adapters of a frozen model."""
    head = next(iter(architecture.heads))
    model = make(architecture, head, "gqa", **get_no_dropout_fields(architecture))
    if not model.supports_gradient_checkpointing:
        pytest.skip("this model does not support gradient checkpointing")
    model.requires_grad_(False)
    model.enable_input_require_grads()
    _, _, last = list(model.named_attention_modules())[-1]
    adapter = next(item for item in last.modules() if isinstance(item, torch.nn.Linear))
    adapter.requires_grad_(True)
    result = []
    for checkpointed in (False, True):
        if checkpointed:
            checkpoint_layers(model, use_reentrant=True)  # requires an input with a gradient
        model.train(checkpointed)
        model.zero_grad()
        next(iter(get_tensors(model(**architecture.make_batch(head))).values())).square().sum().backward()
        result.append({"gradient": adapter.weight.grad.clone()})
    assert_same(*result)


@CLASSIFIERS
@pytest.mark.parametrize("problem", PROBLEMS)
def test_losses_equal_transformers_for_each_problem_type(architecture, head, problem):
    """Check `test_problem_types`."""
    size, labels = PROBLEMS[problem]
    upstream = architecture.make_upstream_model(head, num_labels=size, problem_type=problem)
    model = architecture.make_model(head, num_labels=size, problem_type=problem)
    model.load_state_dict(upstream.state_dict())
    batch = architecture.make_batch(head) | {"labels": labels}
    with torch.no_grad():
        torch.testing.assert_close(model(**batch).loss, upstream(**batch).loss, atol=1e-5, rtol=1e-5)


@GENERATES
def test_encoder_decoder_shifts_labels_once(architecture):
    """Check `test_encoder_decoder_loss_no_double_shift`."""
    head = get_second_head(architecture)
    batch = architecture.make_batch(head, labels=True)
    with torch.no_grad():
        output = make(architecture, head, "gqa")(**batch)
    expected = torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), batch["labels"].flatten())
    torch.testing.assert_close(output.loss, expected)


@WRITES_ALONE
def test_shift_labels_raise_an_error(architecture, head):
    """Check that `shift_labels` of `test_causal_lm_loss_honors_shift_labels` raises an error, because it is not
    supported.
    """
    batch = {name: make_token_ids() for name in ("input_ids", "labels", "shift_labels")}
    with pytest.raises(ValueError, match="`shift_labels`"):
        make(architecture, head, "gqa")(**batch)


@EVERY_ARCHITECTURE
def test_hidden_states_of_selected_layers_are_returned(architecture):
    """Check `test_can_capture_specific_layers_hidden_states` if Transformers supports it."""
    head = next(iter(architecture.heads))
    model, upstream = make(architecture, head, "latent"), architecture.make_upstream_model(head)
    batch = architecture.make_batch(head)
    with torch.no_grad():
        some = [upstream(**batch, output_hidden_states=layers) for layers in ([0, 2], True)]
        if not any(value is None for name in some[0] if "states" in name for value in some[0][name] or ()):
            pytest.skip("this version of Transformers returns all hidden states or none")
        result, all_states = (model(**batch, output_hidden_states=layers) for layers in ([0, 2], True))
    names = [name for name in some[0] if name.endswith("hidden_states")]
    assert names and list(result) == list(some[0])
    for name in names:
        assert [value is None for value in result[name]] == [value is None for value in some[0][name]]
        returned = [
            (value, other) for value, other in zip(result[name], all_states[name], strict=True) if value is not None
        ]
        assert returned and all(torch.equal(value, other) for value, other in returned)
