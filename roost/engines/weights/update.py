"""`WeightUpdate`: a policy version with the sources of its weights, and the senders that hold them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from roost.engines.protocol import Engine, EngineError, UpdateFailed
from roost.engines.weights.carriers import BroadcastCarrier, Carrier
from roost.engines.weights.checkpoint import write_checkpoint
from roost.engines.weights.group import VllmWeightGroup, WeightGroup
from roost.engines.weights.payload import BUCKET_BYTES, GroupInvitation
from roost.engines.weights.probe import Probe
from roost.engines.weights.send import Sent, send
from roost.engines.weights.source import WeightSource
from roost.placement.routes import WeightRoute


class Sender(Protocol):
    """Holder of a version's weights that can send them; in a job, the learner."""

    def route_to(self, server: str) -> WeightRoute:
        """Weight route to a server by its name."""
        ...

    async def send(self, engines: Sequence[Engine], version: int) -> Sent:
        """Send the version to engines; the result lists those that failed."""
        ...

    async def write(self, model: str, folder: str) -> None:
        """Write the weights as a checkpoint, with the other files of the model's folder."""
        ...


class LocalSender:
    """Sender of weights held by this process."""

    def __init__(
        self, source: WeightSource, route: WeightRoute, carrier: Callable[[], Carrier], bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        self.source = source
        self._route = route
        self._new_carrier = carrier
        self._bucket_bytes = bucket_bytes

    def route_to(self, server: str) -> WeightRoute:
        return self._route

    async def send(self, engines: Sequence[Engine], version: int) -> Sent:
        return await send(
            engines, self.source, version, self._new_carrier(), self._bucket_bytes, with_fingerprints=True
        )

    async def write(self, model: str, folder: str) -> None:
        try:
            await asyncio.to_thread(write_checkpoint, self.source, model, folder)
        except EngineError:
            raise
        except Exception as error:
            raise UpdateFailed(f"cannot write a checkpoint of the weights: {error}") from error


@dataclass(frozen=True)
class WeightUpdate:
    """A policy version with everything engines need to load it.

    `sender` holds the weights, `checkpoint` is a folder that engines can start from, `adapter` the folder of a LoRA
    adapter for engines that hold the base model. The probe has the log-probs that an engine on this version must give.
    """

    version: int
    probe: Probe
    sender: Sender | None = None
    checkpoint: str | None = None
    adapter: str | None = None

    def __post_init__(self) -> None:
        if self.version < 0:
            raise ValueError(f"a policy version is 0 or more, not {self.version}")
        if self.sender is None and self.checkpoint is None and self.adapter is None:
            raise ValueError(f"version {self.version} has no weights: give a sender, a checkpoint or an adapter")


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
            raise RuntimeError("no broadcast group is open; call send")
        return BroadcastCarrier(self._group.broadcast)


def _own_group(invitation: GroupInvitation, device: torch.device) -> WeightGroup:
    return WeightGroup(invitation, 0, device, JOIN_LIMIT_S)
