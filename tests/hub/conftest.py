"""A local Hub, its client, and small checkpoints to push."""

import shutil

import pytest
from architectures import BERT, T5
from fixtures.glue.tiny_bert import make_tiny_bert
from hub.local_hub import TOKEN, LocalHub
from transformers import BertTokenizerFast

from hf_attn_variants import convert


@pytest.fixture
def hub():
    with LocalHub() as server:
        yield server


@pytest.fixture
def api(hub, monkeypatch, tmp_path):
    """A real client of the local Hub; the test session itself is offline."""
    from huggingface_hub import HfApi, constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
    return HfApi(endpoint=hub.url, token=TOKEN)


@pytest.fixture(scope="session")
def converted(tmp_path_factory):
    """The folder of a tiny BERT with a tokenizer, converted to 2 key/value heads; tests do not write to it."""
    folder = tmp_path_factory.mktemp("converted")
    convert(make_tiny_bert(folder / "source"), num_key_value_heads=2, output_dir=folder / "bert-gqa2")
    return folder / "bert-gqa2"


@pytest.fixture
def folder(converted, tmp_path):
    """A copy of `converted` that a test may change."""
    return shutil.copytree(converted, tmp_path / "bert-gqa2")


@pytest.fixture(scope="session")
def t5_variant(tmp_path_factory, converted):
    """A tiny T5 with grouped and talking heads, saved with a tokenizer."""
    folder = tmp_path_factory.mktemp("t5") / "t5-gqa"
    T5.make_model("T5ForConditionalGeneration", "gqa_talking").save_pretrained(folder)
    BertTokenizerFast.from_pretrained(converted).save_pretrained(folder)
    return folder


@pytest.fixture
def plain_bert(tmp_path):
    """A tiny BERT of Transformers, without our code."""
    BERT.make_upstream_model("BertForSequenceClassification").save_pretrained(tmp_path / "plain")
    return tmp_path / "plain"
