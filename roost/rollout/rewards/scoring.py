"""What answers are worth, by all rewards of a run."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING

from roost.rollout.bounded import within
from roost.rollout.rewards.errors import RewardFailed
from roost.rollout.rewards.finite import finite
from roost.rollout.rewards.remote import RemoteReward
from roost.rollout.rewards.reward import Answer, Reward
from roost.rollout.rewards.routing import Route, Routing
from roost.runtime.failure import WorkerFailed

if TYPE_CHECKING:
    from roost.runtime.group import WorkerGroup

LIMIT_S = 600.0


class Rewards:
    """Scores answers with those rewards that take their tag: local ones, and groups of `RewardWorker`s by name."""

    def __init__(
        self,
        routing: Routing,
        local: Mapping[str, Reward],
        groups: Mapping[str, WorkerGroup] | None = None,
        limit_s: float = LIMIT_S,
    ) -> None:
        self._routing, self._limit_s = routing, limit_s
        remote = {name: RemoteReward(group) for name, group in (groups or {}).items()}
        self._rewards: dict[str, Reward] = {**local, **remote}
        missing = [route.name for route in routing.routes if route.name not in self._rewards]
        if missing:
            raise ValueError(f"there is no reward {', '.join(missing)}; there is {', '.join(self._rewards) or 'none'}")

    async def score(self, answer: Answer) -> float:
        """What an answer is worth in the end; RewardFailed where a reward that takes it cannot say."""
        tag = answer.task.tag
        routes = self._routing.of(tag)
        # Each is waited for, whatever becomes of the others: none goes on unseen.
        scores = await asyncio.gather(*(self._scored(route, answer) for route in routes), return_exceptions=True)
        for score in scores:
            if isinstance(score, BaseException):
                raise score
        found = {route.name: score for route, score in zip(routes, scores, strict=True) if isinstance(score, float)}
        return finite(self._routing.total(tag, answer.reward, found), "the sum of all rewards")

    async def counts(self) -> dict[str, dict[str, int]]:
        """What the rewards count, such as answers that took too long."""
        found = {}
        for name, reward in self._rewards.items():
            counts = getattr(reward, "counts", {})
            found[name] = dict(await counts() if inspect.iscoroutinefunction(counts) else counts)
        return {name: counts for name, counts in found.items() if counts}

    async def close(self) -> None:
        await asyncio.gather(*(reward.close() for reward in self._rewards.values()))

    async def _scored(self, route: Route, answer: Answer) -> float:
        try:
            return finite(await within(self._limit_s, self._rewards[route.name].score(answer)), route.name)
        except WorkerFailed:
            raise  # of a worker that is no reward's: more is lost than this answer
        except RewardFailed as error:
            raise RewardFailed(f"reward {route.name}: {error}") from error
        except Exception as error:  # whatever a user's reward raises
            raise RewardFailed(f"reward {route.name}: {type(error).__name__}: {error}") from error
