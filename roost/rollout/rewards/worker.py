"""Worker that computes a reward where the plan places it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from roost.procs.user_code import called, within
from roost.rollout.env_worker import import_from
from roost.rollout.rewards.config import make_reward
from roost.rollout.rewards.reward import Answer, RewardFailed, Scored, as_scored, prepare_reward
from roost.rollout.rewards.scoring import LIMIT_S, score_batch
from roost.runtime.worker import Worker

AT_A_TIME = 256  # answers that a worker scores concurrently; a reward may have a lower limit


class RewardWorker(Worker):
    """Scores answers with one reward. Errors of an answer are returned, and do not fail the worker."""

    def __init__(
        self,
        name: str,
        keys: Mapping[str, Any],
        paths: Sequence[str] = (),
        at_a_time: int = AT_A_TIME,
        limit_s: float = LIMIT_S,
    ) -> None:
        super().__init__()
        import_from(paths)
        self._name, self._limit_s = name, limit_s
        self._reward = make_reward(name, keys)
        self._places = asyncio.Semaphore(at_a_time)

    async def prepare(self) -> str:
        """Prepare the reward. Return the error; empty if there is none."""
        try:
            await prepare_reward(self._reward)
        except Exception as error:  # anything a user's reward raises
            return _reason(error)
        return ""

    async def score(self, answers: Sequence[Answer]) -> list[Scored | str]:
        """Return for each answer its reward, or the error as text."""
        if not hasattr(self._reward, "score_batch"):
            return list(await asyncio.gather(*map(self._scored, answers)))
        async with self._places:
            try:
                found = await within(self._limit_s, score_batch(self._reward, answers))
                return [as_scored(one, self._name, answer.turns) for one, answer in zip(found, answers, strict=True)]
            except Exception as error:  # anything a user's reward raises
                return [_reason(error)] * len(answers)

    async def counts(self) -> dict[str, int]:
        return dict(getattr(self._reward, "counts", {}))

    async def close_reward(self) -> None:
        await called(self._reward.close)

    async def _scored(self, answer: Answer) -> Scored | str:
        async with self._places:
            try:
                # The driver has timed out by then, but a hanging answer must free its slot.
                value = await within(self._limit_s, called(self._reward.score, answer))
                return as_scored(value, self._name, answer.turns)
            except Exception as error:  # anything a user's reward raises
                return _reason(error)


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, RewardFailed) else f"{type(error).__name__}: {error}"
