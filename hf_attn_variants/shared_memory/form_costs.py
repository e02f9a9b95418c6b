"""Which form of a cross-attention costs less: it reads the encoder's outputs, or keys and values made of them.

With b sentences of m tokens, R query rows (beams times new tokens), h heads of d numbers and outputs of D numbers, one
layer's call takes, in multiplications and in numbers read:

    the encoder's outputs:  R h (2 d D + 2 m D),  2 h d D + b m D
    keys and values:        R h 2 m d,            b m 2 h d;  and before the first call 2 b m h d D multiplications

Reading and multiplying overlap in part, so that the time is near the root of the sum of their squares. The absorbed
form multiplies h times as much and reads, where h d = D, half as much; what it saves for certain is to make keys and
values at all. Upstream makes them for each beam.
"""

import math
from typing import NamedTuple

import torch

__all__ = ["Sizes", "call_costs", "making_cost", "spent_on_source"]

# Multiplications in the time in which a processor reads a byte of a large tensor, by device: 16 floating-point
# operations (380e9 a second beside 24e9 bytes, two cores of an x86 server). A device that nobody has timed is not
# there: it keeps keys and values.
MULTIPLICATIONS_A_BYTE = {"cpu": 8.0}
# Half precision has not been timed on a CPU.
TIMED_DTYPES = (torch.float32,)
# By how much the absorbed form must be the cheaper one by this estimate.
MARGIN = 1.1
# What a single beam may lose in a call of several tokens (a prompt), as a share of what it saves by making nothing.
SHARE_OF_PROMPT = 0.1


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
    return 2.0 * sizes.memories * sizes.length * sizes.heads * sizes.head_dim * sizes.width


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
    rate = MULTIPLICATIONS_A_BYTE.get(states.device.type)
    if rate is None or states.dtype not in TIMED_DTYPES:
        return None
    numbers_read, making = rate * states.element_size(), making_cost(sizes)
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
