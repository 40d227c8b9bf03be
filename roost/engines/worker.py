"""Engines on a cluster: a worker at each planned placement owns one server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roost.engines.command import ServerSpec
from roost.engines.planned import EnginePlan
from roost.engines.protocol import EngineError
from roost.engines.server_process import START_LIMIT_S, STARTS, LocalOwner, new_key, with_key
from roost.net.addresses import node_address
from roost.procs.child import left_keepers
from roost.runtime.worker import GroupSpec, LaunchOptions, Worker, WorkerGroup
from roost.transport.context import WorkerFailed

if TYPE_CHECKING:
    from roost.runtime.cluster import Cluster
    from roost.runtime.result import GroupResult

WORKER_RESTARTS = 100
RELAUNCH_LIMIT_S = 300.0  # for Ray to start or restart a worker
GONE_LIMIT_S = 20.0  # for a worker that is not known to restart, as the report may be late
ANSWER_LIMIT_S = 60.0
STOP_LIMIT_S = 120.0  # more than it takes to kill a server and all of its processes
PREDECESSOR_LIMIT_S = 60.0
LOOK_EVERY_S = 0.5


@dataclass(frozen=True, slots=True)
class Answer:
    """URL or error of a worker's server, returned because a failed engine is not a failed worker."""

    url: str = ""
    error: str = ""


class EngineWorker(Worker):
    """Owns one server, which sees the devices of this worker and ends with it."""

    def __init__(self, servers: Sequence[ServerSpec], is_reached_from_afar: bool) -> None:
        super().__init__()
        spec = servers[self._rank]
        if is_reached_from_afar:
            spec = replace(spec, host=node_address())
        self._log_folder = Path(self.worker_info.log_path).parent
        self._owner = LocalOwner(spec, self._log_folder)

    async def start_server(self, model: str | None = None) -> Answer:
        try:
            await self._wait_for_predecessor()
            return Answer(url=await self._owner.start(model))
        except EngineError as error:
            return Answer(error=str(error))

    async def _wait_for_predecessor(self) -> None:
        """Until the server of a worker that died on this place has ended: it holds the memory of the device."""
        if self._owner.pid is not None:
            return
        deadline = time.monotonic() + PREDECESSOR_LIMIT_S
        while left := await asyncio.to_thread(left_keepers, self._owner.spec.name, self._log_folder):
            if time.monotonic() > deadline:
                raise EngineError(
                    f"{self._owner.spec.name}: the previous worker's server did not end within "
                    f"{PREDECESSOR_LIMIT_S:g} s; its keepers are processes {left}"
                )
            await asyncio.sleep(LOOK_EVERY_S)

    async def stop_server(self) -> Answer:
        try:
            await self._owner.stop()
        except EngineError as error:
            return Answer(error=str(error))
        return Answer()

    async def server_is_running(self) -> bool:
        return await self._owner.is_running()


class WorkerLost(EngineError):
    """The worker that owns a server died, or does not answer; its server ends with it."""

    def __init__(self, message: str, returns: bool) -> None:
        super().__init__(message)
        self.returns = returns  # Ray starts it again


class WorkerOwner:
    """A server that a worker of a group owns, seen from the driver. A worker that died is started again by Ray."""

    def __init__(self, group: WorkerGroup, rank: int, spec: ServerSpec) -> None:
        self.spec = spec
        self._group, self._rank = group.name, rank
        self._host = group.hosts[rank]
        self._worker: Any = group.execute_on(rank)

    async def start(self, model: str | None = None) -> str:
        for _ in range(STARTS - 1):
            try:
                return await self._start(model)
            except WorkerLost as error:
                if not error.returns:
                    raise
        return await self._start(model)

    async def _start(self, model: str | None) -> str:
        await self._wait_for_worker()
        answer: Answer = await self._ask(self._worker.start_server(model), START_LIMIT_S + ANSWER_LIMIT_S)
        return _checked(answer).url

    async def stop(self) -> None:
        try:
            _checked(await self._ask(self._worker.stop_server(), STOP_LIMIT_S))
        except WorkerLost:
            return  # the keeper of its server ends that with the worker

    async def is_running(self) -> bool:
        try:
            return bool(await self._ask(self._worker.server_is_running(), ANSWER_LIMIT_S))
        except WorkerLost:
            return False  # a server does not outlive its worker

    async def _wait_for_worker(self) -> None:
        """Until the worker answers: one that died is being started again on its place, if Ray may do so."""
        began = asyncio.get_running_loop().time()
        while True:
            waited_s = asyncio.get_running_loop().time() - began
            try:
                await self._ask(self._worker.server_is_running(), max(RELAUNCH_LIMIT_S - waited_s, LOOK_EVERY_S))
                return
            except WorkerLost as error:
                if waited_s > (RELAUNCH_LIMIT_S if error.returns else GONE_LIMIT_S):
                    raise EngineError(f"{error}, and did not come back within {waited_s:.0f} s") from error
            await asyncio.sleep(LOOK_EVERY_S)

    async def _ask(self, result: GroupResult, limit_s: float) -> Any:
        name = f"its worker {self._group}:{self._rank}"
        try:
            return (await _within(limit_s, result))[0]
        except WorkerFailed as error:
            if any(failure.address.group != self._group for failure in error.failures):
                raise
            returns = any(failure.will_restart for failure in error.failures)
            raise WorkerLost(f"{name} was lost: {error.first.summary}", returns) from error
        except TimeoutError as error:
            import ray

            ray.kill(self._host, no_restart=False)  # it hangs; Ray starts another in its place
            raise WorkerLost(f"{name} did not answer within {limit_s:g} s and was killed", returns=True) from error


async def _within(limit_s: float, result: GroupResult) -> list[Any]:
    try:
        async with asyncio.timeout(limit_s):
            return await result
    except TimeoutError:
        if not result.done():
            raise
    return await result  # the answer came in time, but this event loop was blocked


def _checked(answer: Answer) -> Answer:
    if answer.error:
        raise EngineError(answer.error)
    return answer


@dataclass(frozen=True, slots=True)
class EngineGroup:
    """The workers of an engine component, to be launched with the rest of a plan, and then the owners for a fleet.

    engines = EngineGroup.of(plan_engines(plan, "rollout", defaults), cluster)
    workers = {"rollout": engines.workers(), "actor": Actor.create_group()}
    groups = cluster.launch(plan, workers, engines.options("rollout"))
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

    @staticmethod
    def options(component: str) -> dict[str, LaunchOptions]:
        """Launch options of the workers: one that dies is restarted on its place."""
        return {component: LaunchOptions(restarts=WORKER_RESTARTS)}

    def another(self, spec: ServerSpec) -> EngineGroup:
        """A group of one more engine, which takes the job's key."""
        return replace(self, servers=(replace(spec, api_key=self.servers[0].api_key),))

    def owners(self, group: WorkerGroup) -> list[WorkerOwner]:
        return [WorkerOwner(group, rank, spec) for rank, spec in enumerate(self.servers)]
