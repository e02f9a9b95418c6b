"""Let `quantize` take the small layers of tiny models, and inputs with outliers."""

import pytest


@pytest.fixture(autouse=True)
def every_layer(monkeypatch):
    from hf_attn_variants.quantization import packed_linear, quantize

    monkeypatch.setattr(packed_linear, "LEAST_WEIGHTS", 1)
    monkeypatch.setattr(quantize, "MOST_ERROR", 1.0)
