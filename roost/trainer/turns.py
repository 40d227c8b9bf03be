"""Who has the devices: engines and learner both, or one after the other."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from roost.engines.errors import UpdateFailed
from roost.engines.fleet import Fleet
from roost.engines.protocol import InFlight
from roost.engines.weights.release import Release
from roost.placement.residency import Decision
from roost.trainer.learners import Learners

BESIDE_WEIGHTS = ("grad", "optimizer")
RETRY_WAITS_S = (1.0, 5.0, 20.0)


@dataclass(frozen=True, slots=True)
class Turns:
    """What the plan decided about engines that share devices with the learner.

    Devices change hands in this order, so that the two never hold the memory at once: engines sleep or stop, the
    learner loads; the learner moves gradients and moments to the host, engines take the new weights from it, and the
    learner moves its weights to the host as well.
    """

    decision: Decision
    in_flight: InFlight
    offloads: Sequence[str]  # what the learner moves to the host while engines work
    displaced: Collection[str] | None = None  # the engines that make room, where the others go on
    sleep_level: int = 2

    @property
    def are_taken(self) -> bool:
        """Whether one waits for the other."""
        return self.decision is not Decision.KEEP

    @property
    def _before_sleep(self) -> InFlight:
        """Requests under way are finished first, or go on elsewhere where there is a lag."""
        return InFlight.DRAIN if self.in_flight is InFlight.DRAIN else InFlight.DROP

    async def to_learner(self, fleet: Fleet, learners: Sequence[Learners]) -> None:
        """The engines make room; everybody who shares devices with them comes back to these."""
        if self.decision is Decision.SLEEP:
            await fleet.sleep(self.sleep_level, self._before_sleep, self.displaced)
        elif self.decision is Decision.RESTART:
            await fleet.stop_servers(self.displaced)
        fleet.learning_begins()
        if self.are_taken and self.offloads:
            await asyncio.gather(*(each.load(self.offloads) for each in learners))

    async def to_engines(self, fleet: Fleet, learners: Sequence[Learners], release: Release) -> None:
        if self.are_taken:
            await self._offload(learners, [part for part in self.offloads if part in BESIDE_WEIGHTS])
        if self.decision is Decision.KEEP:
            await self._update(fleet, release)
        elif self.decision is Decision.SLEEP:
            await fleet.wake(release)
        else:
            await fleet.start_servers(release)
            if self.displaced is not None:
                await fleet.update(release, self.in_flight)  # those that went on
        if self.are_taken:
            await self._offload(learners, [part for part in self.offloads if part not in BESIDE_WEIGHTS])

    async def _update(self, fleet: Fleet, release: Release) -> None:
        """Engines that died under an update are started again, and then take it."""
        for wait_s in RETRY_WAITS_S:
            with contextlib.suppress(UpdateFailed):
                await fleet.update(release, self.in_flight)
                return
            await asyncio.sleep(wait_s)
        await fleet.update(release, self.in_flight)

    @staticmethod
    async def _offload(learners: Sequence[Learners], parts: Sequence[str]) -> None:
        if parts:
            await asyncio.gather(*(each.offload(parts) for each in learners))
