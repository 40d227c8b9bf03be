"""The protocol of environments: one is opened for each episode and closed at its end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from roost.rollout.episode import Task


@dataclass(frozen=True, slots=True)
class Observation:
    """Observation after a reset or a step."""

    content: Any  # text, an array, or a mapping of them, as the agent expects it
    reward: float = 0.0  # of the step alone
    is_over: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)  # `metrics` are reported
    is_truncated: bool = False  # over because of a limit, not because the task ended
    answer: str | None = None  # the policy's, for rewards to score instead of its last turn


class Environment(Protocol):
    """The environment of one episode. Calls are sequential: reset, steps, score, close.

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
        """Start the task; equal seeds give equal starts."""
        ...

    async def step(self, action: Any) -> Observation:
        """Take an action and return the observation."""
        ...

    async def score(self) -> float:
        """Return the reward of the episode as of now."""
        ...

    async def close(self) -> None:
        """Release resources; called once, however the episode ended."""
        ...


class Environments(Protocol):
    """Source of environments for many concurrent episodes: `_target_` names the class.

    One is created in each process that hosts environments, with the config's other keys; if the process holds declared
    devices, such as robots, also with `hardware`, their configs.
    """

    async def open(self) -> Environment:
        """Open an environment for an episode; wait while all are in use."""
        ...

    async def close(self) -> None:
        """Close everything: servers, simulators, connections."""
        ...


class Questions:
    """Environments of tasks that are questions: the first observation is the question, and a step gives the answer.

    The answer is scored by `train.rewards`. An agent that takes no step is scored by the policy's last turn.
    """

    async def open(self) -> Environment:
        return Question()

    async def close(self) -> None:
        pass


class Question:
    """One question, which ends with its answer."""

    async def reset(self, task: Task, seed: int | None = None) -> Observation:
        return Observation(question_of(task))

    async def step(self, action: Any) -> Observation:
        return Observation("", is_over=True, answer=str(action))

    async def score(self) -> float:
        return 0.0

    async def close(self) -> None:
        pass


def question_of(task: Task) -> str:
    """The last user's message of a task from data; the name of another task.

    >>> messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
    >>> question_of(Task("sum", {"messages": messages})), question_of(Task("sum"))
    ('2+2?', 'sum')
    """
    users = [one.get("content") for one in task.data.get("messages", ()) if one.get("role") == "user"]
    return users[-1] if users and isinstance(users[-1], str) else task.data.get("prompt_text") or task.name
