"""Engines on a cluster: a worker at each planned place owns the server there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roost.engines.errors import EngineError
from roost.engines.owner import LocalOwner, new_key, with_key
from roost.engines.planned import EnginePlan
from roost.engines.spec import ServerSpec
from roost.runtime.failure import WaitedTooLong, WorkerFailed
from roost.runtime.node_address import node_address
from roost.runtime.worker import Worker

if TYPE_CHECKING:
    from roost.runtime.cluster import Cluster
    from roost.runtime.group import GroupSpec, WorkerGroup


@dataclass(frozen=True, slots=True)
class Answer:
    """What a worker did about its server. An engine that fails must not count as a worker that failed."""

    url: str = ""
    error: str = ""


class EngineWorker(Worker):
    """Owns one server, which sees the devices of this worker and ends with it."""

    def __init__(self, servers: Sequence[ServerSpec], is_reached_from_afar: bool) -> None:
        super().__init__()
        spec = servers[self._rank]
        if is_reached_from_afar:
            spec = replace(spec, host=node_address())
        self._owner = LocalOwner(spec, Path(self.worker_info.log_path).parent)

    async def start_server(self, model: str | None = None) -> Answer:
        try:
            return Answer(url=await self._owner.start(model))
        except EngineError as error:
            return Answer(error=str(error))

    async def stop_server(self) -> Answer:
        try:
            await self._owner.stop()
        except EngineError as error:
            return Answer(error=str(error))
        return Answer()

    async def server_is_running(self) -> bool:
        return await self._owner.is_running()


class WorkerOwner:
    """A server that a worker of a group owns, seen from the driver."""

    def __init__(self, group: WorkerGroup, rank: int, spec: ServerSpec) -> None:
        self.spec = spec
        self._worker: Any = group.execute_on(rank)

    async def start(self, model: str | None = None) -> str:
        return (await self._ask(self._worker.start_server(model))).url

    async def stop(self) -> None:
        await self._ask(self._worker.stop_server())

    async def is_running(self) -> bool:
        try:
            return bool((await self._worker.server_is_running())[0])
        except (WorkerFailed, WaitedTooLong):
            return False  # a server does not outlive its worker

    @staticmethod
    async def _ask(result: Any) -> Answer:
        try:
            answer: Answer = (await result)[0]
        except (WorkerFailed, WaitedTooLong) as error:
            raise EngineError(f"the worker that owns the server is lost: {error}") from error
        if answer.error:
            raise EngineError(answer.error)
        return answer


@dataclass(frozen=True, slots=True)
class EngineGroup:
    """The workers of an engine component, to be launched with the rest of a plan, and then the owners for a fleet.

    engines = EngineGroup.of(plan_engines(plan, "rollout", defaults), cluster)
    groups = cluster.launch(plan, {"rollout": engines.workers(), "actor": Actor.create_group()})
    fleet = Fleet(engines.owners(groups["rollout"]))
    """

    servers: tuple[ServerSpec, ...]
    is_reached_from_afar: bool

    @classmethod
    def of(cls, engines: EnginePlan, cluster: Cluster) -> EngineGroup:
        """Servers listen on loopback where there is one machine only, on several on their machine's address.

        All of them require one key, which is generated here for the job.
        """
        key = new_key()
        return cls(tuple(with_key(spec, key) for spec in engines.servers), cluster.num_nodes > 1)

    def workers(self) -> GroupSpec:
        return EngineWorker.create_group(self.servers, self.is_reached_from_afar)

    def owners(self, group: WorkerGroup) -> list[WorkerOwner]:
        return [WorkerOwner(group, rank, spec) for rank, spec in enumerate(self.servers)]
