"""Which form is taken, by sizes and by what the machine is: never a loss for a single beam."""

import pytest
import torch
from fixtures.upstream_seq2seq import source_batch, tiny_model

from hf_attn_variants import share_memory
from hf_attn_variants.shared_memory import form_costs
from hf_attn_variants.shared_memory.cache_layers import SourceLayer
from hf_attn_variants.shared_memory.form_costs import Sizes, call_costs, making_cost, measure_rate, spent_on_source

# Multiplications in the time of a byte: of a server with much arithmetic, and of one with little.
MUCH, LITTLE = 8.0, 1.75
SMALL = {"heads": 8, "head_dim": 64, "width": 512}  # T5-small and opus-mt


def taken(memories, length, beams=1, tokens=1, dtype=torch.float32, device="cpu", **more):
    sizes = Sizes(memories=memories, rows=memories * beams * tokens, length=length, **SMALL)
    states = torch.empty(memories * beams, tokens, 512, dtype=dtype, device=device)
    return spent_on_source(sizes, states, **more)


@pytest.fixture(autouse=True)
def much(monkeypatch):
    monkeypatch.setattr(form_costs, "multiplications_a_byte", lambda: MUCH)


def test_by_batch_and_length():
    """Several sentences or long ones read the outputs, where arithmetic is cheap; short ones, keys."""
    assert taken(32, 512) == taken(8, 4096) == taken(32, 1024) == 0.0
    assert taken(1, 64) is None and taken(1, 256) is None and taken(8, 16) is None
    assert taken(1, 8192) == 0.0


def test_where_arithmetic_is_dear_a_single_beam_reads_keys(monkeypatch):
    monkeypatch.setattr(form_costs, "multiplications_a_byte", lambda: LITTLE)
    assert all(taken(count, length) is None for count in (1, 8, 32) for length in (64, 512, 4096))
    spent = taken(8, 512, beams=4)  # these begin with the outputs all the same, and go over sooner
    assert spent is not None and spent > making_cost(Sizes(8, 32, length=512, **SMALL)) / 100


def test_what_the_machine_is_is_measured_once():
    state = torch.get_rng_state()
    rate = measure_rate(torch.get_num_threads())
    assert 0.1 < rate < 100 and measure_rate(torch.get_num_threads()) == rate
    assert torch.equal(torch.get_rng_state(), state)


def test_a_single_beam_goes_on_as_it_began():
    """What a step loses is never more than nothing; a prompt may lose a little of what making keys would cost."""
    for memories in (1, 2, 4, 8, 32):
        for length in (16, 128, 512, 2048):
            sizes = Sizes(memories=memories, rows=memories, length=length, **SMALL)
            source, keys = call_costs(sizes, 4 * MUCH)
            assert (taken(memories, length) is None) == (source > keys)
    assert taken(32, 512, tokens=4) > 0
    assert taken(32, 512, tokens=64) is None


def test_beams_lose_at_most_what_making_keys_costs():
    spent, steps = None, 0
    while (now := taken(8, 512, beams=4, spent=spent)) is not None:
        assert now >= (spent or 0)
        spent, steps = now, steps + 1
    assert 3 < steps < 1000
    assert spent <= making_cost(Sizes(memories=8, rows=32, length=512, **SMALL))


def test_what_nobody_has_timed_keeps_keys_and_values():
    assert taken(32, 512, dtype=torch.bfloat16) is None
    assert taken(32, 512, device="meta") is None


def test_without_a_cache_keys_would_be_made_in_each_call():
    assert taken(1, 256) is None and taken(1, 256, is_kept=False) == 0.0
    assert taken(1, 256, tokens=256, is_kept=False) is None


def test_a_search_goes_over_from_outputs_to_keys(monkeypatch):
    """In the middle of it, and nothing of the tokens changes."""
    from hf_attn_variants.shared_memory import attention

    expected = tiny_model("bart").generate(**source_batch("bart"), num_beams=3, max_new_tokens=8, min_new_tokens=8)
    calls, kinds = [], set()

    def counted(sizes, states, spent=None, is_kept=True):
        calls.append(spent)
        return len(calls) if len(calls) < 8 else None  # three layers

    monkeypatch.setattr(attention, "spent_on_source", counted)
    model = share_memory(tiny_model("bart"))
    upstreams = SourceLayer._make

    def made(layer):
        kinds.add(len(calls))
        upstreams(layer)

    monkeypatch.setattr(SourceLayer, "_make", made)
    ours = model.generate(**source_batch("bart"), num_beams=3, max_new_tokens=8, min_new_tokens=8)
    assert torch.equal(ours, expected) and kinds and min(kinds) == 8
    assert calls[:3] == [None] * 3 and calls[3:6] == [1, 2, 3]


@pytest.mark.parametrize("length", [64, 4096])
def test_the_estimates_are_in_proportion(length):
    """Twice the sentences take twice the time, but for the maps, which are read once."""
    one, two = (call_costs(Sizes(memories=count, rows=count, length=length, **SMALL), 4 * MUCH) for count in (1, 2))
    assert two[1] == pytest.approx(2 * one[1]) and one[0] < two[0] < 2 * one[0]
