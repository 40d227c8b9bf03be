"""The protocol of environments: one is opened for each episode, and closed when the episode is over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from roost.rollout.episode import Task


@dataclass(frozen=True, slots=True)
class Observation:
    """What an environment shows, at first or after a step."""

    content: Any  # text, an array, or a mapping of them: what the agent of this environment understands
    reward: float = 0.0  # of the step alone
    is_over: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)
    is_truncated: bool = False  # it is over only because a limit was reached: the task itself would have gone on


class Environment(Protocol):
    """The world of one episode. Calls follow one another: reset, steps, score, close.

    class Guess:
        async def reset(self, task, seed=None):
            self._wanted, self._tries = task.data["number"], 0
            return Observation("a number from 1 to 9?")

        async def step(self, action):
            self._tries += 1
            return Observation("higher" if int(action) < self._wanted else "lower", is_over=int(action) == self._wanted)

        async def score(self):
            return 1.0 / self._tries

        async def close(self):
            pass
    """

    async def reset(self, task: Task, seed: int | None = None) -> Observation:
        """Begin the task; the same seed begins it in the same way."""
        ...

    async def step(self, action: Any) -> Observation:
        """Do something, and see what comes of it."""
        ...

    async def score(self) -> float:
        """What the episode is worth as it is now."""
        ...

    async def close(self) -> None:
        """Give back what it holds; called once, however the episode ended."""
        ...


class Environments(Protocol):
    """Where the environments of many concurrent episodes come from: `_target_` names a class of this kind.

    One is made in each process that hosts environments, with the config's other keys; where the process holds declared
    devices, such as robots, also with `hardware`, their configs.
    """

    async def open(self) -> Environment:
        """One for an episode; waits while all are taken."""
        ...

    async def close(self) -> None:
        """End everything: servers, simulators, connections."""
        ...
