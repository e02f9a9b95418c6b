"""Tiny models, whose maps are all smaller than those that gain anything."""

import pytest


@pytest.fixture(autouse=True)
def every_map(monkeypatch):
    from hf_attn_variants.quantization import kept_maps

    monkeypatch.setattr(kept_maps, "LEAST_WEIGHTS", 1)
