"""Which form of a cross-attention costs less: it reads the encoder's outputs, or keys and values made of them.

With b sentences of m tokens, R query rows (beams times new tokens), h heads of d numbers and outputs of D numbers, one
layer's call takes, in multiplications and in numbers read:

    the encoder's outputs:  R h (2 d D + 2 m D),  2 h d D + b m D
    keys and values:        R h 2 m d,            b m 2 h d;  and before the first call 2 b m h d D multiplications

Reading and multiplying overlap in part, so that the time is near the root of the sum of their squares. The absorbed
form multiplies h times as much and reads, where h d = D, half as much; what it saves for certain is to make keys and
values at all. Upstream makes them for each beam.

How many multiplications take the time in which a byte is read differs between processors, and decides much. So it is
measured, once a process and number of threads, in some 50 ms.
"""

import functools
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

__all__ = [
    "Sizes",
    "call_costs",
    "least_seconds",
    "making_cost",
    "measure_rate",
    "multiplications_a_byte",
    "spent_on_source",
]

# Half precision has not been timed on a CPU, nor anything on a GPU: they keep keys and values.
TIMED_DEVICES, TIMED_DTYPES = ("cpu",), (torch.float32,)
# So many times as fast are the large products that make keys and values as those of the few rows of a step.
LARGE_PRODUCTS = 3.0
# What is timed: one step of so many sentences a thread, in both forms, with T5-small's heads.
TIMED_SENTENCES, TIMED_LENGTH, TIMED_HEADS, TIMED_HEAD_DIM, TIMES = 2, 1024, 8, 64, 5
# By how much the absorbed form must be the cheaper one by this estimate.
MARGIN = 1.25
# What a single beam may lose in a call of several tokens (a prompt), as a share of what it saves by making nothing.
SHARE_OF_PROMPT = 0.15


class Sizes(NamedTuple):
    """What a call's time depends on; letters as above."""

    memories: int  # b
    rows: int  # R
    heads: int  # h
    head_dim: int  # d
    length: int  # m
    width: int  # D


def call_costs(sizes: Sizes, numbers_read: float) -> tuple[float, float]:
    """Return the costs of a call that reads the encoder's outputs and of one that reads keys and values.

    Args:
        sizes: the call's.
        numbers_read: the multiplications in the time in which a number is read.
    """
    memories, rows, heads, head_dim, length, width = sizes
    inner = heads * head_dim
    source = rows * heads * 2 * width * (head_dim + length)
    source_read = numbers_read * (2 * inner * width + memories * length * width)
    keys, keys_read = rows * 2 * length * inner, numbers_read * memories * length * 2 * inner
    return MARGIN * math.hypot(source, source_read), math.hypot(keys, keys_read)


def making_cost(sizes: Sizes) -> float:
    """Return the cost of making keys and values once for each sentence."""
    return 2.0 * sizes.memories * sizes.length * sizes.heads * sizes.head_dim * sizes.width / LARGE_PRODUCTS


def spent_on_source(
    sizes: Sizes, states: torch.Tensor, spent: float | None = None, is_kept: bool = True
) -> float | None:
    """Return what reading the encoder's outputs will have cost more than keys and values; None: take these.

    That they are made later costs nothing more than it would have now, so a search may begin without them and, where
    its steps are the dearer ones, go over when it has lost as much as making them costs. Upstream makes them for
    each beam, so that two beams are never slower for it. A single beam has no such credit: it begins as it goes on.

    Args:
        sizes: the call's.
        states: the queries' inputs, which say what the numbers are and where.
        spent: what the calls before have cost more; None at the first one.
        is_kept: whether keys and values would be kept for later calls.
    """
    if states.device.type not in TIMED_DEVICES or states.dtype not in TIMED_DTYPES:
        return None
    numbers_read, making = multiplications_a_byte() * states.element_size(), making_cost(sizes)
    source, keys = call_costs(sizes, numbers_read)
    if not is_kept:
        return 0.0 if source < keys + making else None
    beams = states.shape[0] // sizes.memories
    if spent is None and beams == 1:
        step, keys_step = call_costs(sizes._replace(rows=sizes.memories), numbers_read)
        if step > keys_step:
            return None
    spent = (spent or 0.0) + max(source - keys, 0.0)
    return spent if spent <= (making if beams > 1 else SHARE_OF_PROMPT * making) else None


def multiplications_a_byte() -> float:
    """Return the multiplications in the time in which attention reads a byte, on the CPU with its threads as now."""
    return measure_rate(torch.get_num_threads())


@functools.cache
def measure_rate(threads: int) -> float:
    """Measure `multiplications_a_byte`; nothing is drawn at random.

    Args:
        threads: which torch has now.
    """
    sentences, width = TIMED_SENTENCES * threads, TIMED_HEADS * TIMED_HEAD_DIM
    source = torch.full((sentences, 1, TIMED_LENGTH, width), 0.01)
    key, value = (torch.full((sentences, TIMED_HEADS, TIMED_LENGTH, TIMED_HEAD_DIM), 0.01) for _ in range(2))
    rows = torch.full((sentences, 1, TIMED_HEADS, width), 0.01)
    queries = torch.full((sentences, TIMED_HEADS, 1, TIMED_HEAD_DIM), 0.01)
    attend = torch.nn.functional.scaled_dot_product_attention
    with torch.no_grad():
        by_source, by_keys = least_seconds(lambda: attend(rows, source, source), lambda: attend(queries, key, value))
    multiplications = sentences * TIMED_HEADS * 2 * TIMED_LENGTH * width
    bytes_read = key.nbytes + value.nbytes
    return (multiplications / by_source) / (bytes_read / by_keys)


def least_seconds(*works: Callable[[], Any]) -> list[float]:
    """Return the least time of each of some works, which take turns."""
    least = [math.inf] * len(works)
    for _ in range(TIMES + 1):  # in turn; the first time is among them, and is never the least
        for number, work in enumerate(works):
            start = time.perf_counter()
            work()
            least[number] = min(least[number], time.perf_counter() - start)
    return least
