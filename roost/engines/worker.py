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
GONE_LIMIT_S = 20.0  # for a worker that is not known to restart, because Ray may report the restart late
ANSWER_LIMIT_S = 60.0
STOP_LIMIT_S = 120.0  # more than it takes to kill a server and all of its processes
PREVIOUS_LIMIT_S = 60.0
LOOK_EVERY_S = 0.5


@dataclass(frozen=True, slots=True)
class Answer:
    """URL or error of a worker's server. An error is returned, not raised: a failed engine is no failed worker."""

    url: str = ""
    error: str = ""


class EngineWorker(Worker):
    """Owns one server, which sees this worker's devices and ends with the worker."""

    def __init__(self, servers: Sequence[ServerSpec], is_multi_node: bool) -> None:
        super().__init__()
        spec = servers[self._rank]
        if is_multi_node:
            spec = replace(spec, host=node_address())
        self._log_folder = Path(self.worker_info.log_path).parent
        self._owner = LocalOwner(spec, self._log_folder)

    async def start_server(self, model: str | None = None) -> Answer:
        try:
            await self._wait_for_previous_server()
            return Answer(url=await self._owner.start(model))
        except EngineError as error:
            return Answer(error=str(error))

    async def _wait_for_previous_server(self) -> None:
        """Wait until the server of a previous, dead worker has ended, because it still holds device memory."""
        if self._owner.pid is not None:
            return
        deadline = time.monotonic() + PREVIOUS_LIMIT_S
        while left := await asyncio.to_thread(left_keepers, self._owner.spec.name, self._log_folder):
            if time.monotonic() > deadline:
                raise EngineError(
                    f"{self._owner.spec.name}: the previous worker's server did not end within "
                    f"{PREVIOUS_LIMIT_S:g} s; end its keepers, processes {left}"
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

    def __init__(self, message: str, will_restart: bool) -> None:
        super().__init__(message)
        self.will_restart = will_restart  # by Ray


class WorkerOwner:
    """The driver's handle of a server that a worker owns. Ray restarts a worker that died."""

    def __init__(self, group: WorkerGroup, rank: int, spec: ServerSpec) -> None:
        self.spec = spec
        self._group, self._rank = group.name, rank
        self._host = group.hosts[rank]
        self._methods: Any = group.execute_on(rank)

    async def start(self, model: str | None = None) -> str:
        for _ in range(STARTS - 1):
            try:
                return await self._start(model)
            except WorkerLost as error:
                if not error.will_restart:
                    raise
        return await self._start(model)

    async def _start(self, model: str | None) -> str:
        await self._wait_for_worker()
        answer: Answer = await self._ask(self._methods.start_server(model), START_LIMIT_S + ANSWER_LIMIT_S)
        return _checked(answer).url

    async def stop(self) -> None:
        try:
            _checked(await self._ask(self._methods.stop_server(), STOP_LIMIT_S))
        except WorkerLost:
            return  # the server's keeper ends it with the worker

    async def is_running(self) -> bool:
        try:
            return bool(await self._ask(self._methods.server_is_running(), ANSWER_LIMIT_S))
        except WorkerLost:
            return False  # a server does not outlive its worker

    async def _wait_for_worker(self) -> None:
        """Wait until the worker answers: Ray may be restarting it."""
        began = asyncio.get_running_loop().time()
        while True:
            waited_s = asyncio.get_running_loop().time() - began
            try:
                await self._ask(self._methods.server_is_running(), max(RELAUNCH_LIMIT_S - waited_s, LOOK_EVERY_S))
                return
            except WorkerLost as error:
                if waited_s > (RELAUNCH_LIMIT_S if error.will_restart else GONE_LIMIT_S):
                    raise EngineError(f"{error}, and did not come back within {waited_s:.0f} s") from error
            await asyncio.sleep(LOOK_EVERY_S)

    async def _ask(self, result: GroupResult, limit_s: float) -> Any:
        name = f"its worker {self._group}:{self._rank}"
        try:
            return (await _await_within(limit_s, result))[0]
        except WorkerFailed as error:
            if any(failure.address.group != self._group for failure in error.failures):
                raise
            will_restart = any(failure.will_restart for failure in error.failures)
            raise WorkerLost(f"{name} was lost: {error.first.summary}", will_restart) from error
        except TimeoutError as error:
            import ray

            ray.kill(self._host, no_restart=False)  # it hangs, and Ray restarts it
            raise WorkerLost(f"{name} did not answer within {limit_s:g} s and was killed", will_restart=True) from error


async def _await_within(limit_s: float, result: GroupResult) -> list[Any]:
    try:
        async with asyncio.timeout(limit_s):
            return await result
    except TimeoutError:
        if not result.done():
            raise
    return await result  # the answer came in time; this event loop was blocked


def _checked(answer: Answer) -> Answer:
    if answer.error:
        raise EngineError(answer.error)
    return answer


@dataclass(frozen=True, slots=True)
class EngineGroup:
    """Servers of an engine component: the workers to launch with the rest of a plan, then the owners for a fleet.

    engines = EngineGroup.of(plan_engines(plan, "rollout", defaults), cluster)
    workers = {"rollout": engines.workers(), "actor": Actor.create_group()}
    groups = cluster.launch(plan, workers, engines.options("rollout"))
    fleet = Fleet(engines.owners(groups["rollout"]))
    """

    servers: tuple[ServerSpec, ...]
    is_multi_node: bool

    @classmethod
    def of(cls, engines: EnginePlan, cluster: Cluster) -> EngineGroup:
        """Servers of a plan. All require one key, which is generated here for the job.

        On a cluster of one node they listen on loopback, else on their node's address.
        """
        key = new_key()
        return cls(tuple(with_key(spec, key) for spec in engines.servers), cluster.num_nodes > 1)

    def workers(self) -> GroupSpec:
        return EngineWorker.create_group(self.servers, self.is_multi_node)

    @staticmethod
    def options(component: str) -> dict[str, LaunchOptions]:
        """Launch options of the workers: Ray restarts one that dies on its placement."""
        return {component: LaunchOptions(restarts=WORKER_RESTARTS)}

    def another(self, spec: ServerSpec) -> EngineGroup:
        """A group with one engine, which has the key of these."""
        return replace(self, servers=(replace(spec, api_key=self.servers[0].api_key),))

    def owners(self, group: WorkerGroup) -> list[WorkerOwner]:
        return [WorkerOwner(group, rank, spec) for rank, spec in enumerate(self.servers)]
