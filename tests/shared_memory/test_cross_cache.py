"""Check both forms of the cross-attention cache: keys and values, or the encoder outputs."""

import pytest
import torch
from fixtures.caches import get_cache
from fixtures.upstream_seq2seq import make_source_batch, make_tiny_model

from hf_attn_variants import share_memory
from hf_attn_variants.shared_memory.attention import EncoderOutputsLayer, SharedMemoryMixin

IDS = torch.randint(4, 60, (3, 30), generator=torch.Generator().manual_seed(1))


def count_upstream_calls(model, monkeypatch):
    """Return a list that grows with each call of Transformers' forward in the model's first cross-attention."""
    module = next(item for item in model.modules() if isinstance(item, SharedMemoryMixin))
    calls, forward = [], module.original_class.forward
    monkeypatch.setattr(
        module.original_class,
        "forward",
        lambda self, *args, **kw: calls.append(self is module) or forward(self, *args, **kw),
    )
    return calls


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_single_beam_calls_the_transformers_forward(name, monkeypatch):
    model, batch = share_memory(make_tiny_model(name)), make_source_batch(name)
    calls = count_upstream_calls(model, monkeypatch)
    model.generate(**batch, max_new_tokens=4, min_new_tokens=4)
    assert sum(calls) == 4
    calls.clear()
    model.generate(**batch, max_new_tokens=4, num_beams=3)
    assert not any(calls)


@pytest.mark.parametrize("name", ["t5", "bart", "whisper"])
def test_long_prompt_still_caches_the_encoder_outputs(name):
    """Check a long prompt, for which keys and values are computed temporarily: equal outputs, one cached tensor."""
    upstream, shared = (make_tiny_model(name).double() for _ in range(2))
    share_memory(shared, cross_cache="encoder_outputs")
    batch = {key: item.double() if item.is_floating_point() else item for key, item in make_source_batch(name).items()}
    reads = []
    for module in shared.modules():
        if isinstance(module, SharedMemoryMixin):
            absorbs = module._should_absorb_projections
            object.__setattr__(
                module, "_should_absorb_projections", lambda *args, one=absorbs: reads.append(one(*args)) or reads[-1]
            )
    with torch.no_grad():
        expected, actual = (model(**batch, decoder_input_ids=IDS, use_cache=True) for model in (upstream, shared))
        assert not any(reads) and reads
        torch.testing.assert_close(actual.logits, expected.logits, atol=1e-9, rtol=1e-9)
        layers = get_cache(actual).cross_attention_cache.layers
        assert {type(layer) for layer in layers} == {EncoderOutputsLayer}
        assert all(layer.encoder_outputs is layers[0].encoder_outputs for layer in layers)
        reads.clear()
        shared(**batch, decoder_input_ids=IDS[:, :1])
        assert all(reads) and reads


def test_cache_form_can_be_changed_in_place():
    model, batch = share_memory(make_tiny_model("t5")), make_source_batch("t5")
    expected = model.generate(**batch, max_new_tokens=6, num_beams=2)
    plain = {type(item).original_class for item in model.modules() if isinstance(item, SharedMemoryMixin)}
    assert share_memory(model, cross_cache="encoder_outputs") is model
    kinds = {item.cross_cache for item in model.modules() if isinstance(item, SharedMemoryMixin)}
    assert kinds == {"encoder_outputs"}
    assert torch.equal(model.generate(**batch, max_new_tokens=6, num_beams=2), expected)
    share_memory(model, False)
    assert {type(item) for item in model.modules()} >= plain
    assert not any(isinstance(item, SharedMemoryMixin) for item in model.modules())


def test_invalid_cache_form_raises_without_changes():
    model = make_tiny_model("t5")
    with pytest.raises(ValueError, match="`cross_cache`"):
        share_memory(model, cross_cache="outputs")
    assert not any(isinstance(item, SharedMemoryMixin) for item in model.modules())
