"""The protocol of rewards: what an answer is worth, where others than the scenario know it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from roost.procs.user_code import called
from roost.rollout.scenario import Task


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of an episode, to be scored."""

    task: Task  # its data holds what the reward needs: the right answer, unit tests, a rubric
    text: str  # what the policy said, as the scenario wants it judged
    reward: float = 0.0  # what the scenario gave it


class Reward(Protocol):
    """Scores answers. `_target_` names its class, or a function; many answers are scored at a time.

    class Length:
        def __init__(self, most=100):
            self._most = most

        async def score(self, answer):
            return min(len(answer.text), self._most) / self._most

        async def close(self):
            pass

    One that takes long until it can score, as it loads a model, may do that in an asynchronous `prepare()`.
    """

    async def score(self, answer: Answer) -> float:
        """What the answer is worth."""
        ...

    async def close(self) -> None:
        """End what it holds: processes, connections."""
        ...


async def prepare_reward(reward: Reward) -> None:
    """Have a reward do what it does before the first answer, if it does such a thing."""
    prepare = getattr(reward, "prepare", None)
    if prepare is not None:
        await called(prepare)
