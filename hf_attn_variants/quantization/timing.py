"""Least times of short calls, measured in turn."""

import math
import time
from collections.abc import Callable
from typing import Any

__all__ = ["least_seconds"]


def least_seconds(*calls: Callable[[], Any], times: int = 5) -> list[float]:
    """Return the least time of each call in seconds.

    The calls take turns, so that a busy machine slows all of them. The first turn warms up and is not counted.

    Example:
        >>> float32, int8 = least_seconds(lambda: linear(states), lambda: int8_linear(states))
    """
    least = [math.inf] * len(calls)
    for turn in range(times + 1):
        for number, call in enumerate(calls):
            start = time.perf_counter()
            call()
            if turn:
                least[number] = min(least[number], time.perf_counter() - start)
    return least
