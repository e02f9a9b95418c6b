"""A converted all-MiniLM-L6-v2 and small variants with tokenizers, as saved checkpoints."""

import shutil

import pytest
from architectures import T5
from fixtures.glue.tiny_bert import make_tiny_bert
from transformers import BertTokenizerFast

from hf_attn_variants import (
    AttnVariantBertForMaskedLM,
    AttnVariantBertForSequenceClassification,
    AttnVariantBertForTokenClassification,
    convert,
)


@pytest.fixture(scope="session")
def tiny_gqa(tmp_path_factory):
    """A tiny BERT with a tokenizer, converted to 2 of 4 key/value heads."""
    folder = tmp_path_factory.mktemp("tiny-gqa")
    convert(make_tiny_bert(folder / "source"), num_key_value_heads=2, output_dir=folder / "gqa2")
    return folder / "gqa2"


@pytest.fixture(scope="session")
def heads(tiny_gqa, tmp_path_factory):
    """The tiny GQA BERT with the head of each pipeline, {task: folder}."""
    folder = tmp_path_factory.mktemp("heads")
    classes = {
        "feature-extraction": None,
        "fill-mask": AttnVariantBertForMaskedLM,
        "text-classification": AttnVariantBertForSequenceClassification,
        "token-classification": AttnVariantBertForTokenClassification,
    }
    tokenizer = BertTokenizerFast.from_pretrained(tiny_gqa)
    for task, model_class in classes.items():
        if model_class is None:
            shutil.copytree(tiny_gqa, folder / task)
            continue
        model_class.from_pretrained(tiny_gqa).save_pretrained(folder / task)
        tokenizer.save_pretrained(folder / task)
    return {task: folder / task for task in classes}


@pytest.fixture(scope="session")
def tiny_t5(tmp_path_factory, tiny_gqa):
    """A tiny grouped-query T5 with the tokenizer of the tiny BERT."""
    folder = tmp_path_factory.mktemp("tiny-t5")
    tokenizer = BertTokenizerFast.from_pretrained(tiny_gqa)
    model = T5.make_model("T5ForConditionalGeneration", "gqa", vocab_size=len(tokenizer))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def minilm_gqa4(minilm, tmp_path_factory):
    """The real all-MiniLM-L6-v2, mean-pooled to 4 of 12 key/value heads."""
    folder = tmp_path_factory.mktemp("minilm") / "gqa4"
    convert(minilm, num_key_value_heads=4, output_dir=folder)
    return folder
