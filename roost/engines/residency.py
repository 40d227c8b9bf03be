"""Handing devices from engines to the learner and back: both stay, the engines sleep, or their servers are stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass

from roost.engines.fleet import Fleet, Leave
from roost.engines.protocol import InFlight, UpdateFailed
from roost.engines.weights.release import Release
from roost.placement.memory.residency import Decision

RETRY_WAITS_S = (1.0, 5.0, 20.0)


@dataclass(frozen=True, slots=True)
class HandOver:
    """What engines do when a learner needs the devices that they share.

    Freeing is complete when `to_learner` returns. Before `to_engines` the learner has moved away all but the weights;
    these it moves away when `leave` is called, so that the two never hold the memory at once.
    """

    decision: Decision
    sleep_level: int = 2  # all weights come anew before the engines work again; adapters alone need level 1
    in_flight: InFlight = InFlight.DRAIN
    displaced: Collection[str] | None = None  # the servers that make room, where the others go on; None: all

    @property
    def is_needed(self) -> bool:
        """Whether one waits for the other."""
        return self.decision is not Decision.KEEP

    async def to_learner(self, fleet: Fleet) -> None:
        """Free the devices. What is in flight there is finished, or goes on elsewhere where updates do not wait."""
        if self.decision is Decision.SLEEP:
            in_flight = InFlight.DRAIN if self.in_flight is InFlight.DRAIN else InFlight.DROP
            await fleet.sleep(self.sleep_level, in_flight, self.displaced)
        elif self.decision is Decision.RESTART:
            await fleet.stop_servers(self.displaced)
        fleet.learning_begins()

    async def to_engines(self, fleet: Fleet, release: Release, leave: Leave | None = None) -> None:
        """Take the devices again, and bring the engines to the release."""
        if self.decision is Decision.KEEP:
            await self._update(fleet, release)
        elif self.decision is Decision.SLEEP:
            await fleet.wake(release, self.in_flight)
            if leave is not None:
                await leave()
        else:
            if self.displaced is not None:
                await self._update(fleet, release)  # those that went on
            # A server looks at how much of its device is free when it starts.
            await fleet.start_servers(release, leave)

    async def _update(self, fleet: Fleet, release: Release) -> None:
        """Engines that died under an update are started again, and then take it."""
        for wait_s in RETRY_WAITS_S:
            try:
                await fleet.update(release, self.in_flight)
                return
            except UpdateFailed as error:
                fleet.report(f"{error}; trying again in {wait_s:g} s")
            await asyncio.sleep(wait_s)
        await fleet.update(release, self.in_flight)
