"""Order of tasks: a permutation for each epoch, or batches with fixed shares of several kinds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

CACHED_EPOCHS = 2  # this one, and the one before or after it


class Order(Protocol):
    """Maps task numbers of a run to tasks: a pure function of its fields, so that a resumed run continues it."""

    def index(self, number: int) -> int:
        """Index of the `number`-th task of the run."""
        ...


@dataclass(frozen=True)
class TaskOrder:
    """A new permutation of all tasks in each epoch, or the same order in each.

    `used` is the number of tasks per epoch if the incomplete last batch is dropped.

    >>> order = TaskOrder(size=3, seed=7)
    >>> sorted(order.index(number) for number in range(3)), sorted(order.index(number) for number in range(3, 6))
    ([0, 1, 2], [0, 1, 2])
    >>> [TaskOrder(size=3, seed=7, shuffles=False).index(number) for number in range(5)]
    [0, 1, 2, 0, 1]
    """

    size: int
    seed: int
    shuffles: bool = True
    used: int = 0  # 0: all
    _cache: dict[int, npt.NDArray[np.uint32]] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"a scenario has {self.size} tasks; it needs at least 1")

    def index(self, number: int) -> int:
        """Index of the `number`-th task of the run."""
        epoch, place = divmod(number, self.used or self.size)
        if not self.shuffles:
            return place
        if epoch not in self._cache:
            for old in sorted(self._cache)[: max(0, len(self._cache) - CACHED_EPOCHS + 1)]:
                del self._cache[old]
            order = np.random.default_rng((self.seed, epoch)).permutation(self.size)
            self._cache[epoch] = order.astype(np.uint32)
        return int(self._cache[epoch][place])


@dataclass(frozen=True)
class MixedOrder:
    """Batches with a fixed number of tasks of each kind, spread evenly over the batch; each kind has its own epochs.

    >>> order = MixedOrder((np.arange(0, 4), np.arange(4, 6)), counts=(2, 1), seed=0, shuffles=False)
    >>> [order.index(number) for number in range(9)]
    [0, 4, 1, 2, 5, 3, 0, 4, 1]
    """

    kinds: Sequence[npt.NDArray[np.integer]]  # tasks of each kind
    counts: Sequence[int]  # of each kind in a batch
    seed: int
    shuffles: bool = True

    @cached_property
    def _pattern(self) -> list[tuple[int, int]]:
        """For each place in a batch the kind of its task, and its rank among the tasks of that kind."""
        places = [((rank + 0.5) / count, kind, rank) for kind, count in enumerate(self.counts) for rank in range(count)]
        return [(kind, rank) for _, kind, rank in sorted(places)]

    @cached_property
    def _orders(self) -> list[TaskOrder]:
        return [TaskOrder(len(tasks), sample_seed(self.seed, n), self.shuffles) for n, tasks in enumerate(self.kinds)]

    def index(self, number: int) -> int:
        batch, place = divmod(number, len(self._pattern))
        kind, rank = self._pattern[place]
        return int(self.kinds[kind][self._orders[kind].index(batch * self.counts[kind] + rank)])


def order_of(scenario: Any, split: Any, seed: int) -> Order:
    """Order of a scenario's tasks: its own `order(split, seed)` if it has one, else all tasks shuffled."""
    own = getattr(scenario, "order", None)
    order: Order = TaskOrder(scenario.size(split), seed) if own is None else own(split, seed)
    return order


def sample_seed(*parts: int) -> int:
    """Derive the seed of one completion from the numbers that identify it.

    >>> sample_seed(1, 2, 3) == sample_seed(1, 2, 3) != sample_seed(1, 3, 2)
    True
    """
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint32)[0])
