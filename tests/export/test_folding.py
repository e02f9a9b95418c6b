"""Check exports of attention extensions, which are folded into projections or raise an error."""

import pytest
import torch
import transformers
from architectures import BERT, T5
from export.test_ctranslate2 import assert_same_tokens, load_with_batch, needs_engine, read_heads
from export.test_onnx import ROWS
from fixtures.ctranslate2_models import make_word_tokenizer, save_writer
from fixtures.extensions import EXTENSION_ROWS, get_extension_parameters, make_random_model
from relatives import ENCODER_DECODERS, ENCODERS, MODERNBERT, ROTARY
from safetensors.torch import load_file, save_file

import hf_attn_variants
from examples.onnx_decoding import load_graph
from hf_attn_variants.export.ctranslate2 import export_ctranslate2
from hf_attn_variants.export.folding import FOLDED_FIELDS
from hf_attn_variants.export.onnx import export_onnx
from hf_attn_variants.export.plain import export_transformers

pytestmark = pytest.mark.cross_product

BART = next(row for row in ENCODER_DECODERS if row.name == "bart")
RANKS = {"kv_lora_rank": 16, "encoder_kv_lora_rank": 20, "cross_kv_lora_rank": 24}
PLACES = {"encoder_knocking_heads": "none", "knocking_heads": "value", "cross_knocking_heads": "all"}
FOLDED = (
    {"knocking_heads": "value"},
    {"knocking_heads": "all"},
    {"dex": True},
    {"knocking_heads": "all", "dex": True},
)


@pytest.mark.parametrize("row", [BERT, T5, BART, *ENCODERS, *ROTARY], ids=lambda row: row.name)
@pytest.mark.parametrize("variant", ["mha", "mqa", "latent"])
@pytest.mark.parametrize("fields", [*FOLDED, PLACES], ids=str)
@torch.no_grad()
def test_linear_extensions_are_folded_into_a_plain_checkpoint(row, variant, fields, tmp_path):
    head, is_pair = list(row.heads)[1], hasattr(row.config_class, "encoder_decoder_layers")
    fields = {name: value for name, value in fields.items() if is_pair or name in ("knocking_heads", "dex")}
    if row in ROTARY and variant == "latent":
        pytest.skip("latents cannot be combined with rotary positions")
    fields |= RANKS if variant == "latent" and is_pair else {}
    model = make_random_model(row, head, variant, **fields)
    assert get_extension_parameters(model)
    model.save_pretrained(tmp_path / "ours")
    written = export_transformers(tmp_path / "ours", tmp_path / "plain")
    assert written.architecture == head
    # The eager function of ModernBERT computes the softmax in float32.
    implementation = "sdpa" if row is MODERNBERT else "eager"
    plain, info = getattr(transformers, head).from_pretrained(
        tmp_path / "plain", output_loading_info=True, attn_implementation=implementation
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    batch = row.make_batch(head)
    real = batch["attention_mask"].bool() if row is MODERNBERT else ...
    torch.testing.assert_close(plain.eval()(**batch)[0][real], model(**batch)[0][real], atol=1e-9, rtol=0)


@needs_engine
@torch.no_grad()
def test_linear_extensions_are_folded_for_ctranslate2(tmp_path):
    folder = save_writer(tmp_path / "model", "t5", "gqa", knocking_heads="all", dex=True)
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if "knocking_heads" in name or ".dex." in name:
            tensors[name] += 0.3 * torch.randn_like(tensors[name])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    export_ctranslate2(folder, tmp_path / "ct2")
    assert {4, 12} == set(read_heads(tmp_path / "ct2").values())
    assert_same_tokens(tmp_path / "ct2", *load_with_batch(folder, tmp_path / "ct2"))


@pytest.mark.parametrize("name", [name for name, row in EXTENSION_ROWS.items() if not row.keys() & FOLDED_FIELDS])
def test_other_extensions_raise_an_error_that_names_the_field(name, tmp_path):
    [field] = EXTENSION_ROWS[name]
    T5.make_model("T5ForConditionalGeneration", **EXTENSION_ROWS[name], knocking_heads="all").save_pretrained(
        tmp_path / "t5"
    )
    with pytest.raises(ValueError, match=f"`{field}`"):
        export_transformers(tmp_path / "t5", tmp_path / "plain")
    make_word_tokenizer().save_pretrained(tmp_path / "t5")
    if needs_engine.args[0]:
        return
    with pytest.raises(ValueError, match=f"`{field}`"):
        export_ctranslate2(tmp_path / "t5", tmp_path / "ct2")
    assert not (tmp_path / "plain").exists() and not (tmp_path / "ct2").exists()


@pytest.mark.thorough
@pytest.mark.parametrize("name", EXTENSION_ROWS)
@torch.no_grad()
def test_onnx_graph_equals_the_model(name, tmp_path):
    model = make_random_model(ROWS["bert"], "BertForMaskedLM", "gqa", **EXTENSION_ROWS[name]).float()
    model.save_pretrained(tmp_path / "model")
    export_onnx(tmp_path / "model", tmp_path / "onnx")
    batch = ROWS["bert"].make_batch("BertForMaskedLM")
    batch["token_type_ids"] = torch.zeros_like(batch["input_ids"])
    [logits] = load_graph(tmp_path / "onnx/onnx/model.onnx").run(
        ["logits"], {key: v.numpy() for key, v in batch.items()}
    )
    torch.testing.assert_close(torch.from_numpy(logits), model(**batch).logits, atol=1e-4, rtol=0)


@pytest.mark.thorough
@torch.no_grad()
def test_onnx_decoder_with_gates_equals_the_model(tmp_path):
    """Check the graphs with a cache, which the export compares with the model."""
    model = make_random_model(T5, "T5ForConditionalGeneration", "gqa", output_gate="element", num_layers=1).float()
    model.save_pretrained(tmp_path / "model")
    written = export_onnx(tmp_path / "model", tmp_path / "onnx")
    assert max(error for error, _ in written.graphs.values()) < 1e-4
    assert isinstance(model, hf_attn_variants.AttnVariantT5ForConditionalGeneration)
