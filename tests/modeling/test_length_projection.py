"""Check keys and values that are projected along the length (Linformer): the formula, models and errors."""

import pytest
import torch
from architectures import ALBERT, BERT, make_token_ids
from fixtures.gradients import assert_same_with_gradients, to_exact
from fixtures.kernel_modules import make_kernel_module
from fixtures.saving import save_and_load
from relatives import ENCODER_DECODERS, ENCODERS, WHISPER

import hf_attn_variants
from hf_attn_variants.modeling.attention.mechanism_attention import attend_with_kernel, compute_kernel_weights
from hf_attn_variants.modeling.mechanisms.kernels.linformer_kernel import LinformerKernel, create_segment_means
from hf_attn_variants.reference.linear import linformer_attention

pytestmark = pytest.mark.cross_product

BART = ENCODER_DECODERS[0]
LINFORMER = {"attention_kernel": "linformer", "attention_kernel_features": 6}
ENCODER = {f"encoder_{name}" if name == "attention_kernel" else name: value for name, value in LINFORMER.items()}


@pytest.mark.parametrize("m, groups", [(11, 2), (20, 4), (1, 1)])
def test_length_projection_equals_the_formula(m, groups):
    module = make_kernel_module(LinformerKernel(7, False, 0, length=20), 4, groups, 6)
    assert module.length_proj.equal(create_segment_means(7, 20))
    module.length_proj.data.add_(torch.randn(7, 20), alpha=0.3)
    leaves = [torch.randn(3, heads, m, 6).requires_grad_() for heads in (4, groups, groups)]
    padding = torch.stack([torch.arange(m) < m, torch.arange(m) >= m - 4, torch.arange(m) < 0])
    exact = to_exact([*leaves, module.length_proj])
    expected, weights = linformer_attention(*exact[:3], exact[3][:, :m], scale=0.4, padding=padding)
    mask = padding[:, None, None]
    actual, state = attend_with_kernel(module, *leaves, mask, 0.4)
    assert state is None
    trained = [*leaves, module.length_proj]
    assert_same_with_gradients(actual, expected.transpose(1, 2), trained, exact, gradient_atol=3e-5)
    actual_weights = compute_kernel_weights(module, *leaves[:2], mask, 0.4)
    torch.testing.assert_close(actual_weights.double(), weights, atol=1e-5, rtol=0)


def test_length_projection_starts_as_means_of_segments():
    torch.testing.assert_close(create_segment_means(2, 5), torch.tensor([[1 / 3] * 3 + [0] * 2, [0] * 3 + [0.5] * 2]))
    assert create_segment_means(4, 4).equal(torch.eye(4))


@pytest.mark.parametrize("architecture", (BERT, ALBERT, *ENCODERS, BART, WHISPER), ids=lambda row: row.name)
def test_length_projection_encoders_equal_the_formula(architecture):
    head = next(iter(architecture.heads))
    is_pair = architecture in (BART, WHISPER)
    model = architecture.make_model(head, "gqa", **(ENCODER if is_pair else LINFORMER))
    batch = architecture.make_batch(head) | ({"use_cache": False} if is_pair else {})
    with torch.no_grad():
        actual, full_output = model(**batch)[0], model(**batch, output_attentions=True)
        torch.testing.assert_close(actual, full_output[0], atol=1e-4, rtol=0)
        if not is_pair:  # tokens in the padding do not affect the outputs
            real = batch["attention_mask"].bool()
            again = batch["input_ids"].masked_fill(~real, 7)
            torch.testing.assert_close(model(**batch | {"input_ids": again})[0][real], actual[real])
    projection_names = [name for name, _ in model.named_parameters() if name.endswith("length_proj")]
    assert projection_names and (not is_pair or all("encoder" in name for name in projection_names))


def test_length_projection_is_saved_trained_and_exported(tmp_path):
    model = BERT.make_model("BertModel", "gqa", **LINFORMER)
    ids = make_token_ids(2, 9)
    model(ids).last_hidden_state.square().sum().backward()
    assert model.encoder.layer[1].attention.self.length_proj.grad[:, :9].abs().sum() > 0
    other = make_token_ids(2, 23)
    save_and_load(model, tmp_path, {"input_ids": other})
    length = torch.export.Dim("length", min=3, max=32)
    program = torch.export.export(model, (ids,), dynamic_shapes={"input_ids": {1: length}}, strict=False)
    with torch.no_grad():
        torch.testing.assert_close(program.module()(other)[0], model(other)[0], atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="`attention_kernel_features` must be"):
        hf_attn_variants.AttnVariantBertModel.from_pretrained(tmp_path, attention_kernel_features=5)


def test_texts_longer_than_the_projection_raise_an_error():
    module = make_kernel_module(LinformerKernel(2, False, 0, length=4), 1, 1, 2)
    states = torch.randn(1, 1, 5, 2)
    with pytest.raises(ValueError, match="got 5"):
        attend_with_kernel(module, states, states, states, None, 1.0)
