"""The form that a call takes, whatever it costs: the inputs of tests are too small to meet both."""

import pytest


@pytest.fixture(params=["chosen", "source", "keys"])
def form(request, monkeypatch):
    from hf_attn_variants.shared_memory import attention

    forced = {"source": 0.0, "keys": None}
    if request.param in forced:
        monkeypatch.setattr(attention, "spent_on_source", lambda *args, **kwargs: forced[request.param])
    return request.param


@pytest.fixture
def source_form(monkeypatch):
    from hf_attn_variants.shared_memory import attention

    monkeypatch.setattr(attention, "spent_on_source", lambda *args, **kwargs: 0.0)
