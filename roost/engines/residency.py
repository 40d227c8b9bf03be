"""Handing devices from engines to the learner and back: both stay, the engines sleep, or their servers are stopped."""

from __future__ import annotations

from dataclasses import dataclass

from roost.engines.fleet import Fleet
from roost.engines.protocol import InFlight
from roost.engines.weights.release import Release
from roost.placement.residency import Decision


@dataclass(frozen=True, slots=True)
class HandOver:
    """What engines do when a learner needs the devices that they share.

    Freeing is complete when `to_learner` returns, and the learner must have offloaded before it calls `to_engines`, so
    that the two never hold the memory at once.
    """

    decision: Decision
    sleep_level: int = 2  # new weights come anyway before the engines work again, so that none need be kept
    in_flight: InFlight = InFlight.DRAIN

    async def to_learner(self, fleet: Fleet) -> None:
        """Free the devices."""
        if self.decision is Decision.SLEEP:
            await fleet.sleep(self.sleep_level, self.in_flight)
        elif self.decision is Decision.RESTART:
            await fleet.stop_servers()
        fleet.learning_begins()

    async def to_engines(self, fleet: Fleet, release: Release) -> None:
        """Take the devices again, and bring the engines to the release."""
        if self.decision is Decision.KEEP:
            await fleet.update(release, self.in_flight)
        elif self.decision is Decision.SLEEP:
            await fleet.wake(release)
        else:
            await fleet.start_servers(release)
