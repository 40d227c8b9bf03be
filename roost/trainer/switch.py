"""Who has the devices: engines and learner both, or one after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from roost.engines.fleet import Fleet
from roost.engines.residency import HandOver
from roost.engines.weights.release import Release
from roost.trainer.learners import ALL_PARTS, Learners

WEIGHT = "weight"
BESIDE_WEIGHTS = ("grad", "optimizer")


@dataclass(frozen=True, slots=True)
class DeviceSwitch:
    """The learner's side of a hand-over, for everybody who shares devices with engines.

    Engines leave, the learner loads; the learner moves gradients and moments to the host, engines take the new weights
    from it, and it moves its weights to the host as well.
    """

    hand_over: HandOver
    offloads: Mapping[str, Sequence[str]]  # what each of them moves to the host while engines work, by its name

    @property
    def is_shared(self) -> bool:
        """Whether one waits for the other."""
        return self.hand_over.is_needed

    async def to_learner(self, fleet: Fleet, learners: Sequence[Learners]) -> None:
        """The engines make room; everybody who shares devices with them comes back to these."""
        await self.hand_over.to_learner(fleet)
        if self.is_shared:
            await self.load(learners)

    async def to_engines(self, fleet: Fleet, learners: Sequence[Learners], release: Release) -> None:
        """The engines come back, with the new policy."""
        if self.is_shared:
            await self.offload(learners, BESIDE_WEIGHTS)
        await self.hand_over.to_engines(fleet, release, lambda: self.offload(learners, (WEIGHT,)))

    async def load(self, learners: Sequence[Learners]) -> None:
        """Everybody moves to the device what was on the host."""
        loads = ((each, self.offloads.get(each.name, ())) for each in learners)
        await asyncio.gather(*(each.load(parts) for each, parts in loads if parts))

    async def offload(self, learners: Sequence[Learners], among: Sequence[str] = ALL_PARTS) -> None:
        """Everybody moves to the host what is to go there, of these parts."""
        moves = ((each, [part for part in among if part in self.offloads.get(each.name, ())]) for each in learners)
        await asyncio.gather(*(each.offload(parts) for each, parts in moves if parts))
