"""Order of tasks: each epoch is a new permutation of all tasks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class TaskOrder:
    """Maps task numbers of a run to tasks. A pure function of the seed, so that a resumed run continues it.

    >>> order = TaskOrder(size=3, seed=7)
    >>> sorted(order.index(number) for number in range(3)), sorted(order.index(number) for number in range(3, 6))
    ([0, 1, 2], [0, 1, 2])
    """

    size: int
    seed: int

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"a scenario has {self.size} tasks; it needs at least 1")

    def index(self, number: int) -> int:
        """Index of the `number`-th task of the run."""
        epoch, place = divmod(number, self.size)
        return int(_permutation(self.size, self.seed, epoch)[place])


@lru_cache(maxsize=4)  # this and the previous epoch, for training and evaluation: large permutations are slow
def _permutation(size: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng((seed, epoch)).permutation(size)


def sample_seed(*parts: int) -> int:
    """Derive the seed of one completion from the numbers that identify it.

    >>> sample_seed(1, 2, 3) == sample_seed(1, 2, 3) != sample_seed(1, 3, 2)
    True
    """
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint32)[0])
