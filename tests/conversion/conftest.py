"""Tiny checkpoints to convert."""

import json
from pathlib import Path

import pytest
import torch
from architectures import BERT
from safetensors.torch import load_file, save_file

LAYER = "bert.encoder.layer.1.attention"


def load_tensors(folder):
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def load_model(auto_class, folder):
    return auto_class.from_pretrained(folder).eval()


@pytest.fixture
def make_source(tmp_path):
    """A function that saves a Transformers model with random biases as a checkpoint, and returns its folder."""

    def make(head="BertForMaskedLM", shard_size="1GB", name="source", dtype=torch.float32, **fields):
        model = BERT.make_upstream_model(head, **fields)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        model.to(dtype).save_pretrained(tmp_path / name, max_shard_size=shard_size)
        return tmp_path / name

    return make


@pytest.fixture
def edit_config():
    """A function that changes fields of a folder's config.json; a value of None removes the field."""

    def edit(folder, **fields):
        path = Path(folder) / "config.json"
        config = json.loads(path.read_text()) | fields
        path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))

    return edit


@pytest.fixture
def edit_tensors():
    """A function that rewrites a folder's model.safetensors through `change(tensors)`, which edits the dictionary."""

    def edit(folder, change):
        path = Path(folder) / "model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, metadata={"format": "pt"})

    return edit
