"""Check the cache after a search: selected rows, and another search with the same cache."""

import pytest
import torch
import transformers
from fixtures.caches import CHOICES, get_cache, with_cache
from fixtures.upstream_seq2seq import make_source_batch, make_tiny_model

from hf_attn_variants import share_memory


@pytest.mark.parametrize("cross_cache", ["encoder_outputs", "keys_and_values"])
@pytest.mark.parametrize("choice", CHOICES)
def test_selected_rows_of_a_search_use_their_own_source(choice, cross_cache):
    """Check that selected rows, of 2 beams for each of 3 sentences, continue with the source of their sentence."""
    method, rows = CHOICES[choice]
    rows = torch.tensor(rows)
    upstream, shared = (make_tiny_model("bart") for _ in range(2))
    share_memory(shared, cross_cache=cross_cache)
    batch = make_source_batch("bart")
    ids = torch.randint(3, 20, (6, 3), generator=torch.Generator().manual_seed(0))
    mask = batch["attention_mask"].repeat_interleave(2, dim=0)
    logits = []
    for model in (upstream, shared):
        states = model.get_encoder()(**batch).last_hidden_state
        encoder_states = states if model is shared else states.repeat_interleave(2, dim=0)
        source_mask = batch["attention_mask"] if model is shared else mask
        with torch.no_grad():
            output = model(
                encoder_outputs=(encoder_states,), attention_mask=source_mask, decoder_input_ids=ids, use_cache=True
            )
            cache = get_cache(output)
            getattr(cache, method)(rows)
            chosen = states.repeat_interleave(2, dim=0)[rows]
            more = {"encoder_outputs": (chosen,), "attention_mask": mask[rows], "decoder_input_ids": ids[rows][:, :1]}
            logits.append(model(**more, **with_cache(cache)).logits)
    torch.testing.assert_close(*logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["t5", "bart"])
@pytest.mark.parametrize("cross_cache", ["encoder_outputs", "keys_and_values"])
def test_static_cache_can_be_used_for_several_searches(family, cross_cache):
    upstream, shared = (make_tiny_model(family) for _ in range(2))
    share_memory(shared, cross_cache=cross_cache)
    batch, caches = make_source_batch(family), []
    for model in (upstream, shared):
        parts = [transformers.StaticCache(config=model.config, max_cache_len=length) for length in (20, 11)]
        caches.append(transformers.EncoderDecoderCache(*parts))
    # The cache of Transformers always has six rows. The cache of this package supports any number of rows.
    for beams, rows, alike in ((2, [0, 1, 2], True), (2, [2, 1, 0], True), (6, [1], True), (1, [0, 1, 2], False)):
        inputs = {name: value[rows] for name, value in batch.items()}
        options = {"num_beams": beams, "max_new_tokens": 4, "min_new_tokens": 4}
        other = with_cache(caches[0]) if alike else {}
        expected = upstream.generate(**inputs, **options, **other)
        if not alike:
            caches[1].self_attention_cache = transformers.StaticCache(config=shared.config, max_cache_len=20)
        assert torch.equal(shared.generate(**inputs, **options, **with_cache(caches[1])), expected)
        for cache in caches:
            cache.reset()
