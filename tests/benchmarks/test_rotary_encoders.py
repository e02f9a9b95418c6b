"""Check the masked tokens and the accuracy of the benchmark that converts encoders with rotary positions."""

import gzip

import pytest
import torch
from fixtures.glue.tiny_bert import make_tiny_bert
from transformers import AutoTokenizer, BertConfig, BertForMaskedLM

from benchmarks.convert import rotary_encoders


@pytest.fixture
def blocks(tmp_path, monkeypatch):
    """The folder of a tokenizer, and four blocks of eight tokens."""
    monkeypatch.setattr(rotary_encoders, "TEST_BLOCKS", 4)
    monkeypatch.setattr(rotary_encoders, "LENGTH", 8)
    monkeypatch.setattr(rotary_encoders, "MASKED_SHARE", 0.5)
    folder = make_tiny_bert(tmp_path / "bert")
    text = tmp_path / "text.gz"
    text.write_bytes(gzip.compress(b"the cat sees a big dog\n" * 100))
    return folder, *rotary_encoders.make_test_blocks(text, folder)


def test_only_words_are_masked(blocks):
    folder, ids, is_masked = blocks
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert ids.shape == is_masked.shape == (4, 8)
    assert ids[:, 0].eq(tokenizer.cls_token_id).all() and ids[:, -1].eq(tokenizer.sep_token_id).all()
    assert is_masked.any() and not torch.isin(ids[is_masked], torch.tensor(tokenizer.all_special_ids)).any()


@torch.no_grad()
def test_accuracy_is_the_share_of_predicted_tokens(blocks):
    folder, ids, is_masked = blocks
    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = BertForMaskedLM(BertConfig(vocab_size=len(tokenizer), **sizes)).eval()
    model.cls.predictions.bias[ids[is_masked][0]] = 9.0  # the model always predicts this token
    model.save_pretrained(folder)
    expected = (ids[is_masked] == ids[is_masked][0]).float().mean()
    assert 0 < expected < 1
    assert rotary_encoders.compute_masked_accuracy(folder, ids, is_masked) == pytest.approx(expected.item())
