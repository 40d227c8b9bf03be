"""An account of an episode: what the environment was asked and showed, what it gave, and how that is told."""

from __future__ import annotations

from typing import Any

from roost.rollout.environments.environment import Environment, Observation
from roost.rollout.scenario import Task
from roost.rollout.transcript import Transcript

MOST_SHOWN = 400  # characters of an action or an observation
MOST_STEPS = 20  # the first and the last ones are shown


class WatchedEnvironment:
    """An environment that keeps account of its steps."""

    def __init__(self, environment: Environment, transcript: Transcript) -> None:
        self._environment, self._transcript = environment, transcript
        self._steps: list[tuple[Any, Observation]] = []
        self._rewards: list[tuple[int, float]] = []  # each with the turns that the policy had had by then

    async def reset(self, task: Task, seed: int | None = None) -> Observation:
        return await self._environment.reset(task, seed)

    async def step(self, action: Any) -> Observation:
        turns = self._transcript.turns
        seen = await self._environment.step(action)
        self._steps.append((action, seen))
        self._rewards.append((turns, float(seen.reward)))
        return seen

    async def score(self) -> float:
        return await self._environment.score()

    async def close(self) -> None:
        await self._environment.close()

    @property
    def rewards_of_turns(self) -> tuple[float, ...]:
        """What each of the policy's turns earned; nothing where the environment gives no rewards for steps."""
        if not any(reward for _, reward in self._rewards):
            return ()
        of_turns = [0.0] * self._transcript.turns
        for turns, reward in self._rewards:
            of_turns[max(turns, 1) - 1] += reward
        return tuple(of_turns)

    def told(self) -> str:
        """The steps as people read them."""
        steps = [f"> {_short(action)}\n{_short(seen.content)}" for action, seen in self._steps]
        left_out = len(steps) - MOST_STEPS
        if left_out > 0:
            half = MOST_STEPS // 2
            steps = [*steps[:half], f"[{left_out} steps are not shown]", *steps[-half:]]
        return "\n".join(steps)


def _short(value: Any) -> str:
    """
    >>> _short("x" * 1000) == "x" * 400 + "…"
    True
    """
    text = str(value).strip()
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}…"
