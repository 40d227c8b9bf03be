"""What answers are worth, by all rewards of a run."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from roost.procs.user_code import called, within
from roost.rollout.rewards.errors import RewardFailed
from roost.rollout.rewards.finite import finite
from roost.rollout.rewards.remote import RemoteReward
from roost.rollout.rewards.reward import Answer, Reward, prepare_reward
from roost.rollout.rewards.routing import Route, Routing
from roost.transport.failure import WorkerFailed

if TYPE_CHECKING:
    from roost.runtime.group import WorkerGroup

LIMIT_S = 600.0
CLOSE_LIMIT_S = 30.0
COUNTS_LIMIT_S = 10.0  # numbers to look at: nobody waits long for them


class Scored(NamedTuple):
    """What an answer is worth, and what each reward gave it before that was weighted."""

    reward: float
    parts: dict[str, float]


class Rewards:
    """Scores answers with those rewards that take their tag: local ones, and groups of `RewardWorker`s by name."""

    def __init__(
        self,
        routing: Routing,
        local: Mapping[str, Reward],
        groups: Mapping[str, WorkerGroup] | None = None,
        limit_s: float = LIMIT_S,
    ) -> None:
        self.routing, self._limit_s = routing, limit_s
        self._counted: dict[str, int] = {}
        remote = {name: RemoteReward(group) for name, group in (groups or {}).items()}
        self._rewards: dict[str, Reward] = {**local, **remote}
        missing = [route.name for route in routing.routes if route.name not in self._rewards]
        if missing:
            raise ValueError(f"there is no reward {', '.join(missing)}; there is {', '.join(self._rewards) or 'none'}")

    async def prepare(self) -> None:
        """Have each do what it does before its first answer, such as loading a model; RewardFailed where one cannot."""
        await asyncio.gather(*(_prepared(name, reward) for name, reward in self._rewards.items()))

    async def score(self, answer: Answer) -> Scored:
        """What an answer is worth in the end, and by whom; RewardFailed where a reward that takes it cannot say."""
        tag = answer.task.tag
        routes = self.routing.of(tag)
        # Each is waited for, whatever becomes of the others: none goes on unseen.
        scores = await asyncio.gather(*(self._scored(route, answer) for route in routes), return_exceptions=True)
        for score in scores:
            if isinstance(score, BaseException):
                raise score
        found = {route.name: score for route, score in zip(routes, scores, strict=True) if isinstance(score, float)}
        total = finite(self.routing.total(tag, answer.reward, found), "the sum of all rewards")
        return Scored(total, self.routing.parts(tag, answer.reward, found))

    async def counts(self) -> dict[str, dict[str, int]]:
        """What the rewards count, such as answers that took too long; of one that cannot say, nothing."""
        told = await asyncio.gather(*map(_counts, self._rewards.values()), return_exceptions=True)
        found = zip(self._rewards, told, strict=True)
        return {name: counts for name, counts in found if not isinstance(counts, BaseException) and counts}

    async def new_counts(self) -> dict[str, int]:
        """What was counted since the last time, by the names of metrics."""
        told = await self.counts()
        now = {f"reward/{name}/count/{key}": count for name, counts in told.items() for key, count in counts.items()}
        # A worker that was started again counts from the beginning.
        new = {name: count - min(count, self._counted.get(name, 0)) for name, count in now.items()}
        self._counted |= now
        return new

    async def close(self) -> None:
        """End what the rewards hold; whatever one of them makes of it, the others end and the run is not lost."""
        closing = (within(CLOSE_LIMIT_S, called(reward.close)) for reward in self._rewards.values())
        await asyncio.gather(*closing, return_exceptions=True)

    async def _scored(self, route: Route, answer: Answer) -> float:
        try:
            return finite(await within(self._limit_s, called(self._rewards[route.name].score, answer)), route.name)
        except WorkerFailed:
            raise  # of a worker that is no reward's: more is lost than this answer
        except RewardFailed as error:
            raise RewardFailed(f"reward {route.name}: {error}") from error
        except Exception as error:  # whatever a user's reward raises
            raise RewardFailed(f"reward {route.name}: {type(error).__name__}: {error}") from error


async def _counts(reward: Reward) -> dict[str, int]:
    counts = getattr(reward, "counts", {})
    told = await within(COUNTS_LIMIT_S, counts()) if inspect.iscoroutinefunction(counts) else counts
    return {str(key): int(count) for key, count in dict(told).items()}


async def _prepared(name: str, reward: Reward) -> None:
    try:
        await prepare_reward(reward)
    except RewardFailed as error:
        raise RewardFailed(f"reward {name}: {error}") from error
