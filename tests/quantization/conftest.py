"""Let `quantize` accept the small layers of tiny models, and inputs with outliers."""

import pytest
from fixtures.logs import logged  # noqa: F401


@pytest.fixture(autouse=True)
def every_layer(monkeypatch):
    from hf_attn_variants.quantization import packed_linear, quantize

    monkeypatch.setattr(packed_linear, "MIN_WEIGHTS", 1)
    monkeypatch.setattr(quantize, "MAX_ERROR", 1.0)
