"""Check accelerate: models in memory and on disk, and gradient checkpointing, give unchanged results."""

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from architectures import ALBERT, BERT, T5
from safetensors import safe_open
from transformers import AutoModel, AutoModelForSeq2SeqLM, AutoTokenizer

from hf_attn_variants.training.engine.models import enable_gradient_checkpointing

SENTENCES = ["Two dogs run in the snow.", "The stock market fell sharply on Monday."]


@torch.no_grad()
def test_minilm_offloaded_to_disk_gives_equal_outputs(minilm_gqa4, tmp_path):
    inputs = AutoTokenizer.from_pretrained(minilm_gqa4)(SENTENCES, padding=True, return_tensors="pt")
    expected = AutoModel.from_pretrained(minilm_gqa4).eval()(**inputs).last_hidden_state
    spread = AutoModel.from_pretrained(
        minilm_gqa4, device_map="auto", max_memory={"cpu": "60MB"}, offload_folder=tmp_path
    ).eval()
    places = set(spread.hf_device_map.values())
    assert places == {"cpu", "disk"}
    # Only whole layers are placed, so no attention module is split.
    assert all(name.count(".") <= 2 for name in spread.hf_device_map if name.startswith("encoder.layer"))
    torch.testing.assert_close(spread(**inputs).last_hidden_state, expected, atol=1e-6, rtol=0)


@pytest.mark.thorough
@pytest.mark.parametrize("variant", ["gqa", "gqa_talking"])
@pytest.mark.parametrize("offload", ["cpu", "disk"])
@torch.no_grad()
def test_offloaded_t5_generates_equal_tokens(variant, offload, tmp_path):
    T5.make_model("T5ForConditionalGeneration", variant).save_pretrained(tmp_path / "model")
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "model").eval()
    inputs = T5.make_batch("T5EncoderModel") | {"max_new_tokens": 6, "do_sample": False}
    expected = model.generate(**inputs)
    if offload == "cpu":
        cpu_offload(model, execution_device=torch.device("cpu"))
    else:
        disk_offload(model, tmp_path / "offload", execution_device=torch.device("cpu"))
    key = model.decoder.block[0].layer[0].SelfAttention.k.weight
    assert key.device.type == "meta"
    assert torch.equal(model.generate(**inputs), expected)


@pytest.mark.parametrize("variant", ["gqa", "talking"])
@pytest.mark.parametrize(
    "architecture, head",
    [(BERT, "BertForMaskedLM"), (ALBERT, "AlbertForMaskedLM"), (T5, "T5ForConditionalGeneration")],
    ids=["bert", "albert", "t5"],
)
def test_gradient_checkpointing_changes_no_gradient(architecture, head, variant):
    dropout = {"dropout_rate": 0.0} if architecture is T5 else {"hidden_dropout_prob": 0.0}
    dropout |= {} if architecture is T5 else {"attention_probs_dropout_prob": 0.0}
    gradients = []
    for checkpointing in (False, True):
        model = architecture.make_model(head, variant, **dropout).train()
        recomputed = []
        if checkpointing:
            enable_gradient_checkpointing(model)
        for _, _, attention in model.named_attention_modules():
            attention.register_forward_hook(lambda *_, calls=recomputed: calls.append(1))
        model(**architecture.make_batch(head, labels=True)).loss.backward()
        gradients.append(({name: parameter.grad for name, parameter in model.named_parameters()}, len(recomputed)))
    (plain, once), (checkpointed, calls) = gradients
    assert calls == 2 * once
    for name, gradient in plain.items():
        if gradient is not None:
            torch.testing.assert_close(checkpointed[name], gradient, atol=1e-6, rtol=0)


def test_safetensors_metadata_names_the_format(tiny_gqa, tmp_path):
    AutoModel.from_pretrained(tiny_gqa).save_pretrained(tmp_path)
    for folder in (tiny_gqa, tmp_path):  # saved by the converter and by Transformers
        with safe_open(folder / "model.safetensors", "pt") as file:
            assert file.metadata() == {"format": "pt"}
            assert file.get_slice("encoder.layer.0.attention.self.key.weight").get_shape() == [16, 32]
