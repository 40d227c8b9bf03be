"""Columns of numbers as arithmetic progressions: what is regular is said in a few numbers, however long it is."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from roost.cluster.resources import Ints


class Progression(NamedTuple):
    """`length` numbers from `start` on, each `step` above the one before."""

    start: int
    step: int
    length: int


def progressions(numbers: Ints, fewest_apart: int = 2) -> Iterator[Progression]:
    """The numbers in order, cut greedily; one with another step than 1 has at least `fewest_apart` numbers.

    >>> [tuple(part) for part in progressions(np.array([0, 1, 2, 5, 5, 9]))]
    [(0, 1, 3), (5, 0, 2), (9, 1, 1)]
    >>> [tuple(part) for part in progressions(np.array([0, 5, 10, 11, 12]), fewest_apart=4)]
    [(0, 1, 1), (5, 1, 1), (10, 1, 3)]
    """
    steps = np.diff(numbers)
    # Where the step changes, a progression ends.
    ends = [*(np.flatnonzero(steps[1:] != steps[:-1]) + 1).tolist(), len(numbers) - 1]
    position = 0
    while position < len(numbers):
        end = ends[bisect_left(ends, position + 1)] if position < len(steps) else position
        step = int(steps[position]) if end > position else 1
        if step != 1 and end - position + 1 < fewest_apart:
            end, step = position, 1
        yield Progression(int(numbers[position]), step, end - position + 1)
        position = end + 1
