"""`Release`: a policy version with the sources of its weights, and the senders that hold them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from roost.engines.protocol import Engine, EngineError, UpdateFailed
from roost.engines.weights.buckets import BUCKET_BYTES
from roost.engines.weights.carriers import Carrier
from roost.engines.weights.checkpoint import write_checkpoint
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
            raise UpdateFailed(f"no checkpoint could be written of the weights: {error}") from error


@dataclass(frozen=True)
class Release:
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
            raise ValueError(f"version {self.version} comes with no weights: give a sender, a checkpoint or an adapter")
