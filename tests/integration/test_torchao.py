"""Check torchao: int8 weights change grouped and talking heads no more than the multi-head original.

torchao is not a requirement of the tests, because Transformers imports it in every process if it is installed.
"""

import pytest
import torch
from fixtures.caches import get_cache, with_cache
from transformers import AutoModel, AutoTokenizer, TorchAoConfig

from hf_attn_variants import AttnVariantBertModel, AttnVariantT5Config, AttnVariantT5ForConditionalGeneration, convert

quantization = pytest.importorskip("torchao.quantization")

SHAPE = {"d_model": 256, "d_kv": 32, "d_ff": 64, "num_layers": 2, "num_heads": 8, "vocab_size": 60}
SHAPE |= {"decoder_start_token_id": 0}
SENTENCES = ["Two dogs run in the snow.", "The stock market fell sharply on Monday."]


def load_in_int8(folder):
    config = TorchAoConfig(quantization.Int8WeightOnlyConfig())
    return AutoModel.from_pretrained(folder, quantization_config=config, device_map="cpu").eval()


def compute_error(model, quantized, inputs):
    expected, actual = (item(**inputs).last_hidden_state for item in (model, quantized))
    return (actual - expected).norm() / expected.norm()


@pytest.mark.parametrize("talking_heads", [None, "both"])
@torch.no_grad()
def test_torchao_int8_error_is_as_small_as_for_multi_head(talking_heads, minilm, tmp_path):
    convert(minilm, num_key_value_heads=4, talking_heads=talking_heads, output_dir=tmp_path / "gqa4")
    model = AutoModel.from_pretrained(tmp_path / "gqa4").eval()
    quantized = load_in_int8(tmp_path / "gqa4")
    assert type(quantized) is AttnVariantBertModel
    attention = quantized.encoder.layer[0].attention.self
    assert "Int8" in type(attention.key.weight.data).__name__ and attention.key.weight.shape == (128, 384)
    if talking_heads:
        assert type(attention.logits_proj.data) is torch.Tensor
    inputs = AutoTokenizer.from_pretrained(tmp_path / "gqa4")(SENTENCES, padding=True, return_tensors="pt")
    of_the_original = compute_error(AutoModel.from_pretrained(minilm).eval(), load_in_int8(minilm), inputs)
    assert 0 < compute_error(model, quantized, inputs) < 1.5 * of_the_original < 0.1


@pytest.mark.parametrize("rank", [256, 64], ids=["exact", "low rank"])
@torch.no_grad()
def test_torchao_int8_latent_projections_are_called(rank, tmp_path):
    """Check latents whose int8 weights cannot be folded into the query."""
    ranks = {"cross_kv_lora_rank": rank, "kv_lora_rank": 64}
    config = AttnVariantT5Config(**SHAPE, **ranks)
    torch.manual_seed(0)
    model = AttnVariantT5ForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path / "latent")
    settings = TorchAoConfig(quantization.Int8WeightOnlyConfig())
    quantized = type(model).from_pretrained(tmp_path / "latent", quantization_config=settings, device_map="cpu").eval()
    key = quantized.decoder.block[0].layer[1].EncDecAttention.k
    assert "Int8" in type(key.weight.data).__name__ and key.weight.shape == (256, rank)
    source, target = torch.randint(5, 60, (2, 2, 20))
    memory = quantized.encoder(source)
    full = quantized(encoder_outputs=memory, decoder_input_ids=target, use_cache=False).logits
    cache, pieces = None, []
    for token in target.split(1, dim=1):
        result = quantized(encoder_outputs=memory, decoder_input_ids=token, **with_cache(cache))
        cache, pieces = get_cache(result), [*pieces, result.logits]
    torch.testing.assert_close(torch.cat(pieces, dim=1), full, atol=1e-4 * full.abs().max().item(), rtol=0)
    expected = model(input_ids=source, decoder_input_ids=target).logits
    assert 0 < (full - expected).norm() / expected.norm() < 0.05
