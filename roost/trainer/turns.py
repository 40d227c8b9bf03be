"""Who has the devices: engines and learner both, or one after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from roost.engines.fleet import Fleet
from roost.engines.residency import HandOver
from roost.engines.weights.release import Release
from roost.trainer.learners import Learners

WEIGHT = "weight"


@dataclass(frozen=True, slots=True)
class Turns:
    """The learner's side of a hand-over, for everybody who shares devices with engines.

    Engines leave, the learner loads; the learner moves gradients and moments to the host, engines take the new weights
    from it, and it moves its weights to the host as well.
    """

    hand_over: HandOver
    offloads: Sequence[str]  # what the learner moves to the host while engines work

    @property
    def are_taken(self) -> bool:
        """Whether one waits for the other."""
        return self.hand_over.is_needed

    async def to_learner(self, fleet: Fleet, learners: Sequence[Learners]) -> None:
        """The engines make room; everybody who shares devices with them comes back to these."""
        await self.hand_over.to_learner(fleet)
        if self.are_taken and self.offloads:
            await asyncio.gather(*(each.load(self.offloads) for each in learners))

    async def to_engines(self, fleet: Fleet, learners: Sequence[Learners], release: Release) -> None:
        """The engines come back, with the new policy."""
        if self.are_taken:
            await self._offload(learners, [part for part in self.offloads if part != WEIGHT])
        weights = [part for part in self.offloads if part == WEIGHT]
        await self.hand_over.to_engines(fleet, release, lambda: self._offload(learners, weights))

    @staticmethod
    async def _offload(learners: Sequence[Learners], parts: Sequence[str]) -> None:
        if parts:
            await asyncio.gather(*(each.offload(parts) for each in learners))
