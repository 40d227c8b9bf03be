"""An engine of a fleet: its owner, its connection, and how it stands."""

from __future__ import annotations

import asyncio
from collections import deque
from enum import StrEnum

from roost.engines.capabilities import Capabilities
from roost.engines.errors import EngineLost
from roost.engines.owner import Owner
from roost.engines.protocol import Engine
from roost.engines.spec import ServerSpec
from roost.engines.weights.probe import Probe
from roost.engines.weights.release import Way
from roost.engines.work_times import WorkTimes


class Standing(StrEnum):
    """How an engine stands. Only a ready one gets work."""

    STOPPED = "stopped"
    STARTING = "starting"
    READY = "ready"
    UPDATING = "updating"
    ASLEEP = "asleep"
    LOST = "lost"  # dead or hung; being started again, or waiting for its turn on the device
    BEHIND = "behind"  # running, but without the weights of the current version
    FAILED = "failed"  # lost too often; not started again


class Member:
    """One engine of a fleet."""

    def __init__(self, owner: Owner) -> None:
        self.owner = owner
        self.standing = Standing.STOPPED
        self.version = 0
        self.adapter: str | None = None  # the name under which it serves the policy, where that is an adapter
        self.work = WorkTimes()
        self.abilities = Capabilities(frozenset())
        self.useless_ways: set[Way] = set()  # ways that a check has shown not to work with this server
        self.answers_before: tuple[float, ...] | None = None  # to the probe, before the update that is under way
        self.probe: Probe | None = None  # what the learner says of the weights that it has, where that is known
        self.baseline = 0.0  # how far its answers to a probe are from the learner's with equal weights
        self.restarts: deque[float] = deque()
        self.last_error = ""
        self.changing = asyncio.Lock()  # one change (start, update, sleep, restart) at a time
        self._engine: Engine | None = None

    @property
    def in_flight(self) -> int:
        return self.work.in_flight

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def spec(self) -> ServerSpec:
        return self.owner.spec

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise EngineLost(f"{self.name} is {self.standing}: {self.last_error or 'it has not been started'}")
        return self._engine

    @property
    def client(self) -> Engine | None:
        """The client of its server, if there is one that answered."""
        return self._engine

    @property
    def is_connected(self) -> bool:
        return self._engine is not None

    async def connect(self, engine: Engine) -> None:
        """Talk to a server that is ready; what it can do is asked, not assumed."""
        await self.disconnect()
        self._engine = engine
        self.abilities = await engine.capabilities()
        self.adapter = None

    async def disconnect(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.close()
