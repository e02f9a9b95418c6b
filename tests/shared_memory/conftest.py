"""The two forms of the cross-attention cache; every test of outputs runs with both."""

import pytest

from hf_attn_variants import share_memory
from hf_attn_variants.shared_memory.attention import ENCODER_OUTPUTS, KEYS_AND_VALUES

FORMS = {"source": ENCODER_OUTPUTS, "keys": KEYS_AND_VALUES}


@pytest.fixture(params=FORMS)
def form(request, monkeypatch):
    monkeypatch.setitem(share_memory.__kwdefaults__, "cross_cache", FORMS[request.param])
    return request.param


@pytest.fixture
def source_form(monkeypatch):
    monkeypatch.setitem(share_memory.__kwdefaults__, "cross_cache", ENCODER_OUTPUTS)
