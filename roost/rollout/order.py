"""In which order tasks are played: every one once before any comes again, each time in another order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from roost.config.train import DrawSettings
from roost.engines.fleet import Fleet
from roost.engines.protocol import Completion, Sampling
from roost.rollout.episode import Draw


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


class FleetDraws:
    """Opens draws for episodes. The episodes of a group go to one engine, which has their prompt in its cache."""

    def __init__(self, fleet: Fleet, settings: DrawSettings, seed: int, label: str = "group") -> None:
        self._fleet, self._settings, self._seed, self._label = fleet, settings, seed, label

    def open(self, number: int, episode: int, attempt: int) -> Draw:
        """What an attempt at an episode draws its turns from. The seed depends on nothing but the numbers."""

        async def draw(token_ids: Sequence[int], turn: int, max_tokens: int | None) -> Completion:
            settings = self._settings
            limit = settings.max_tokens if max_tokens is None else min(max_tokens, settings.max_tokens)
            sampling = Sampling(
                max_tokens=limit,
                temperature=settings.temperature,
                top_p=settings.top_p,
                top_k=settings.top_k,
                min_p=settings.min_p,
                seed=sample_seed(self._seed, number, episode, attempt, turn),
            )
            return await self._fleet.generate(token_ids, sampling, episode=f"{self._label} {number}")

        return draw

    def close(self, number: int) -> None:
        """The group is over."""
        self._fleet.end_episode(f"{self._label} {number}")
