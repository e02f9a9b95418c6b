"""torchao: int8 weights change grouped and talking heads no more than they change the multi-head original.

Not among the tests' requirements: transformers imports torchao wherever it finds it, in every process.
"""

import pytest
import torch
from transformers import AutoModel, AutoTokenizer, TorchAoConfig

from hf_attn_variants import AttnVariantBertModel, convert

quantization = pytest.importorskip("torchao.quantization")

SENTENCES = ["Two dogs run in the snow.", "The stock market fell sharply on Monday."]


def in_int8(folder):
    config = TorchAoConfig(quantization.Int8WeightOnlyConfig())
    return AutoModel.from_pretrained(folder, quantization_config=config, device_map="cpu").eval()


def error(model, quantized, inputs):
    expected, found = (each(**inputs).last_hidden_state for each in (model, quantized))
    return (found - expected).norm() / expected.norm()


@pytest.mark.parametrize("talking_heads", [None, "both"])
@torch.no_grad()
def test_int8_weights(talking_heads, minilm, tmp_path):
    convert(minilm, num_key_value_heads=4, talking_heads=talking_heads, output_dir=tmp_path / "gqa4")
    model = AutoModel.from_pretrained(tmp_path / "gqa4").eval()
    quantized = in_int8(tmp_path / "gqa4")
    assert type(quantized) is AttnVariantBertModel
    attention = quantized.encoder.layer[0].attention.self
    assert "Int8" in type(attention.key.weight.data).__name__ and attention.key.weight.shape == (128, 384)
    if talking_heads:
        assert type(attention.logits_proj.data) is torch.Tensor
    inputs = AutoTokenizer.from_pretrained(tmp_path / "gqa4")(SENTENCES, padding=True, return_tensors="pt")
    of_the_original = error(AutoModel.from_pretrained(minilm).eval(), in_int8(minilm), inputs)
    assert 0 < error(model, quantized, inputs) < 1.5 * of_the_original < 0.1
