"""Broadcast weights from this process to engines, with a new process group per transfer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import torch

from roost.engines.protocol import Engine
from roost.engines.weights.buckets import BUCKET_BYTES
from roost.engines.weights.carriers import BroadcastCarrier
from roost.engines.weights.group import VllmWeightGroup, WeightGroup
from roost.engines.weights.parcel import GroupInvitation
from roost.engines.weights.release import LocalSender
from roost.engines.weights.send import Sent, send
from roost.engines.weights.source import WeightSource
from roost.placement.routes import WeightRoute

JOIN_LIMIT_S = 300.0


class BroadcastSender(LocalSender):
    """Sends to engines on other devices or machines.

    Engines come and go while the ranks of a group are fixed, so each transfer creates its own group. `processes` is
    the number of processes per engine (tensor * pipeline size). For vLLM, which creates groups differently, pass
    `VllmWeightGroup` as `open_group`.
    """

    def __init__(
        self,
        source: WeightSource,
        address: str,
        free_port: Callable[[], int],
        device: torch.device,
        processes: int = 1,
        bucket_bytes: int = BUCKET_BYTES,
        open_group: Callable[[GroupInvitation, torch.device], WeightGroup | VllmWeightGroup] | None = None,
    ) -> None:
        super().__init__(source, WeightRoute.BROADCAST, self._carrier, bucket_bytes)
        self._address, self._free_port, self._device, self._processes = address, free_port, device, processes
        self._open_group = open_group or _own_group
        self._group: WeightGroup | VllmWeightGroup | None = None

    async def send(self, engines: Sequence[Engine], version: int) -> Sent:
        self._group = await self._meet(engines)
        try:
            return await send(engines, self.source, version, self._carrier(), self._bucket_bytes, True)
        finally:
            self._group.close()
            await asyncio.gather(*(engine.leave_group() for engine in engines), return_exceptions=True)

    async def _meet(self, engines: Sequence[Engine]) -> WeightGroup | VllmWeightGroup:
        backend = "nccl" if self._device.type == "cuda" else "gloo"
        port, size = self._free_port(), 1 + self._processes * len(engines)
        invitations = [
            GroupInvitation(self._address, port, 1 + self._processes * index, size, backend)
            for index in range(len(engines))
        ]
        joining = [
            asyncio.create_task(engine.join_group(invitation))
            for engine, invitation in zip(engines, invitations, strict=True)
        ]
        try:
            group = await asyncio.to_thread(self._open_group, invitations[0], self._device)
        except BaseException:
            for task in joining:
                task.cancel()
            raise
        try:
            await asyncio.gather(*joining)
        except BaseException:
            group.close()
            raise
        return group

    def _carrier(self) -> BroadcastCarrier:
        if self._group is None:
            raise RuntimeError("weights are broadcast within a sending only")
        return BroadcastCarrier(self._group.broadcast)


def _own_group(invitation: GroupInvitation, device: torch.device) -> WeightGroup:
    return WeightGroup(invitation, 0, device, JOIN_LIMIT_S)
