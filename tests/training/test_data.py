"""Check the order of batches, length groups and workers."""

import itertools
import multiprocessing
import os
import signal

import pytest
import torch
from accelerate import Accelerator, skip_first_batches
from torch.utils.data import IterableDataset

from hf_attn_variants.training.engine.dataloaders import EpochSampler, create_dataloader, create_stream_dataloader


def test_order_depends_only_on_seed_and_epoch():
    sampler, other = EpochSampler(50, seed=3), EpochSampler(50, seed=3)
    first = list(sampler)
    sampler.start_epoch(1)
    assert first == list(other) and sorted(first) == list(range(50)) and list(sampler) != first
    assert list(sampler) == list(sampler)
    assert list(EpochSampler(50, seed=4)) not in (first, list(sampler))


def test_length_groups_reduce_padding_and_keep_every_example():
    lengths = torch.randint(1, 60, (200,), generator=torch.Generator().manual_seed(0)).tolist()

    def padded(order):
        batches = [order[i : i + 8] for i in range(0, 200, 8)]
        return sum(len(batch) * max(lengths[i] for i in batch) for batch in batches)

    grouped = EpochSampler(200, seed=1, group_lengths=lengths, batch_size=8)
    assert sorted(grouped) == list(range(200))
    assert padded(list(grouped)) < 0.75 * padded(list(EpochSampler(200, seed=1)))
    first = list(grouped)
    grouped.start_epoch(1)
    assert list(grouped) != first


@pytest.mark.parametrize("count", [3, 8, 12, 200, 203])
def test_length_groups_are_not_sorted_by_length(count):
    lengths = torch.randint(1, 60, (count,), generator=torch.Generator().manual_seed(0)).tolist()
    order = list(EpochSampler(count, seed=1, group_lengths=lengths, batch_size=8))
    assert sorted(order) == list(range(count)) and lengths[order[0]] == max(lengths)
    longest = [max(lengths[i] for i in order[start : start + 8]) for start in range(0, count, 8)]
    # Transformers would sort these 25 batches from the longest to the shortest.
    assert count < 200 or sum(after > before for before, after in itertools.pairwise(longest)) >= 8
    assert count < 200 or max(longest[len(longest) // 2 :]) > 50


def test_iteration_does_not_change_the_global_random_state():
    data = list(range(12))
    loader = create_dataloader(data, sampler=EpochSampler(12, seed=0), batch_size=4, collate_fn=torch.tensor)
    state = torch.get_rng_state()
    assert len(list(loader)) == 3
    assert torch.equal(torch.get_rng_state(), state)


class Stream(IterableDataset):
    def __iter__(self):
        return ({"x": torch.tensor([i])} for i in range(12))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("kind", ["training", "resumed training", "stream", "evaluation"])
def test_workers_survive_a_signal_that_the_loop_handles(kind, number):
    # torchrun, schedulers and terminals send a signal to all processes of a job.
    rows = list(range(12))
    accelerator = Accelerator(cpu=True, rng_types=[])
    train = create_dataloader(rows, 1, sampler=EpochSampler(12, seed=0), collate_fn=torch.tensor)
    loader = {
        "training": train,
        "resumed training": skip_first_batches(accelerator.prepare(train), 2),
        "stream": create_stream_dataloader(accelerator, Stream(), seed=0, num_workers=1),
        "evaluation": create_dataloader(rows, 1, collate_fn=torch.tensor),
    }[kind]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # background processes ignore SIGINT
    try:
        batches = iter(loader)
    finally:
        signal.signal(signal.SIGINT, before)
    next(batches)
    workers = multiprocessing.active_children()
    for worker in workers:
        os.kill(worker.pid, number)
    assert len(workers) == 1 and len(list(batches)) == (9 if kind == "resumed training" else 11)
