"""Hand devices from engines to the learner and back: both stay, the engines sleep, or their servers stop."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass

from roost.engines.fleet import Fleet
from roost.engines.protocol import InFlight, UpdateFailed
from roost.engines.weights.sync import Offload
from roost.engines.weights.update import WeightUpdate
from roost.placement.memory.residency import Decision

RETRY_WAITS_S = (1.0, 5.0, 20.0)


@dataclass(frozen=True, slots=True)
class EngineSwitch:
    """Transfers shared devices between engines and learner.

    The devices are free when `to_learner` returns. Before `to_engines` the learner offloads all but its weights, and
    those when `offload` is called, so that the weights and the KV caches never exist there at once.
    """

    decision: Decision
    sleep_level: int = 2  # weights are synced before engines run again; adapters alone need level 1
    in_flight: InFlight = InFlight.DRAIN
    displaced: Collection[str] | None = None  # servers that free their devices; None: all

    @property
    def is_needed(self) -> bool:
        """True if engines and learner cannot use the devices at the same time."""
        return self.decision is not Decision.KEEP

    async def to_learner(self, fleet: Fleet) -> None:
        """Free the devices. Requests in flight are finished, or continued on other engines if updates do not drain."""
        if self.decision is Decision.SLEEP:
            in_flight = InFlight.DRAIN if self.in_flight is InFlight.DRAIN else InFlight.DROP
            await fleet.sleep(self.sleep_level, in_flight, self.displaced)
        elif self.decision is Decision.RESTART:
            await fleet.stop_servers(self.displaced)
        fleet.learning_begins()

    async def to_engines(self, fleet: Fleet, update: WeightUpdate, offload: Offload | None = None) -> None:
        """Give the devices back to the engines, and sync them to the update."""
        if self.decision is Decision.KEEP:
            await self._update(fleet, update)
        elif self.decision is Decision.SLEEP:
            await fleet.wake(update, self.in_flight, offload)
        else:
            if self.displaced is not None:
                await self._update(fleet, update)  # servers that kept running
            # A server measures the free memory of its device when it starts.
            await fleet.start_servers(update, offload)

    async def _update(self, fleet: Fleet, update: WeightUpdate) -> None:
        """Update with retries, so that engines that died during an update are restarted and then updated."""
        for wait_s in RETRY_WAITS_S:
            try:
                await fleet.update(update, self.in_flight)
                return
            except UpdateFailed as error:
                fleet.report(f"{error}; trying again in {wait_s:g} s")
            await asyncio.sleep(wait_s)
        await fleet.update(update, self.in_flight)
