"""In which order tasks are played: every one once before any comes again, each time in another order."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class TaskOrder:
    """The tasks of a run by their number. A pure function of the seed, so that a resumed run goes on where it was.

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
        """Which task is the `number`-th of the run."""
        epoch, place = divmod(number, self.size)
        return int(_permutation(self.size, self.seed, epoch)[place])


@lru_cache(maxsize=4)  # this epoch and the one before, of training and of evaluation: a large one takes long to make
def _permutation(size: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng((seed, epoch)).permutation(size)


def sample_seed(*parts: int) -> int:
    """A seed for one completion, from the numbers that name it.

    >>> sample_seed(1, 2, 3) == sample_seed(1, 2, 3) != sample_seed(1, 3, 2)
    True
    """
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint32)[0])
