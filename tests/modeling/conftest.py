"""What the modeling tests share."""

import pytest
import torch


@pytest.fixture
def small_blocks(monkeypatch):
    """Talking-heads kernels that walk the small inputs of a test in several blocks, and remember no earlier call."""
    from hf_attn_variants.modeling import talking_heads_blocked, talking_heads_choice, talking_heads_triton

    torch.manual_seed(0)
    # Several blocks of rows, and several sequences of which the last block has fewer, at the sizes of these tests.
    monkeypatch.setitem(talking_heads_blocked.BLOCK_ELEMENTS, "cpu", 200)
    monkeypatch.setattr(talking_heads_blocked, "ROWS", (3, 2))
    monkeypatch.setattr(talking_heads_triton, "WORKSPACE_BYTES", 700)
    monkeypatch.setattr(talking_heads_choice, "_agreed", {})


@pytest.fixture
def set_threads():
    """Sets the number of threads for one test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(params=["chosen", "absorbed", "expanded", "kept"])
def form(request, monkeypatch):
    """The form in which latents are attended to, whatever it costs: the inputs of tests are too small to meet all."""
    from hf_attn_variants.modeling import latent_attention

    forced = request.param

    def absorbs(module, query, latent, maps, options):
        plain = all(latent_attention._is_plain(each, latent) for each in maps)
        return forced == "absorbed" and plain and not ("m2l" in module.dynamic_names and maps[0].bias is not None)

    if forced != "chosen":
        monkeypatch.setattr(latent_attention, "_absorbs", absorbs)
        monkeypatch.setattr(latent_attention, "is_short", lambda latent: forced == "kept")
    return forced
