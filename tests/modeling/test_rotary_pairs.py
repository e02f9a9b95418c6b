"""Compare the encoders with rotary positions with Transformers: outputs, gradients, dropout and flex attention."""

import pytest
import torch
from architectures import make_token_ids
from fixtures.rotary_pairs import ROTARY_LENGTH, make_rotary_batch, make_rotary_pair
from relatives import MODERNBERT, NOMIC_BERT, ROTARY
from torch import nn

DROPOUT = {
    "modernbert": {"attention_dropout": 0.3, "mlp_dropout": 0.2, "embedding_dropout": 0.1},
    "nomic_bert": {"attention_probs_dropout_prob": 0.3, "hidden_dropout_prob": 0.2},
}
EVERY_ROW = pytest.mark.parametrize("row", ROTARY, ids=lambda row: row.name)


def assert_near(actual, expected):
    """Check that outputs differ by at most 1e-6 of the largest one."""
    torch.testing.assert_close(actual, expected, atol=1e-6 * float(expected.detach().abs().max()), rtol=0)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("has_position_ids", [False, True], ids=["", "position_ids"])
@pytest.mark.parametrize(
    "row, fields",
    [(MODERNBERT, {}), (MODERNBERT, {"attention_bias": True}), (NOMIC_BERT, {})],
    ids=["modernbert", "modernbert-bias", "nomic_bert"],
)
def test_outputs_and_gradients_equal_transformers(row, fields, implementation, has_position_ids):
    upstream, variant_model = make_rotary_pair(row, **fields)
    batch = make_rotary_batch()
    if has_position_ids:
        batch["position_ids"] = torch.randint(0, 40, (3, ROTARY_LENGTH))
    batch["labels"] = make_token_ids(3, ROTARY_LENGTH)
    real = batch["attention_mask"].bool()
    for model in (upstream, variant_model):
        model.set_attn_implementation(implementation)
        model.train(row is MODERNBERT)  # by default, it has no dropout
    expected, actual = upstream(**batch), variant_model(**batch)
    assert_near(actual.logits[real], expected.logits[real])
    for result in (expected, actual):
        nn.functional.cross_entropy(result.logits[real], batch["labels"][real]).backward()
    models = (variant_model, upstream)
    gradients = ({name: parameter.grad for name, parameter in model.named_parameters()} for model in models)
    torch.testing.assert_close(*gradients, atol=1e-6, rtol=1e-4)


@EVERY_ROW
def test_dropout_equals_transformers(row):
    logits = []
    for model in make_rotary_pair(row, **DROPOUT[row.name]):
        model.set_attn_implementation("eager")
        torch.manual_seed(3)
        logits.append(model.train()(**make_rotary_batch()).logits)
    assert_near(logits[1], logits[0])


@pytest.mark.thorough
@EVERY_ROW
def test_flex_attention_equals_transformers(row):
    models = make_rotary_pair(row, num_attention_heads=3)  # flex attention requires heads of at least 16 numbers
    for model in models:
        model.set_attn_implementation("flex_attention")
    # On a CPU, flex attention of torch 2.13 sometimes returns NaN unless the length is a multiple of its blocks.
    with torch.no_grad():
        ids = make_token_ids(2, 128)
        upstream, variant_model = (model(ids).logits for model in models)
    assert_near(variant_model, upstream)
