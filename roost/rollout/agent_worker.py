"""Workers that run episodes where the plan places agents, and their driver-side handle."""

from __future__ import annotations

import asyncio
import contextlib
import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from roost.procs.user_code import call
from roost.rollout.env_worker import RemoteEnvironments, import_from, run_in_environment
from roost.rollout.episode import Episode, Scenario
from roost.rollout.episode_runner import EpisodeFailed, EpisodeRequest, LocalEpisodeRunner, close_scenario
from roost.rollout.gateway import Contact, GatewaySamplers
from roost.runtime.result import ref_future
from roost.runtime.worker import Worker, WorkerGroup
from roost.transport.failure import WaitedTooLong, WorkerFailed

OVER = "the run is over"
RESTART_S = 10.0  # a lost worker is avoided for this long, if there are others
MakeScenario = Callable[[Mapping[str, Any], str], Scenario]  # from the config's task and the model


class AgentWorker(Worker):
    """Runs episodes of the run's scenario. A failed episode is returned, and does not fail the worker."""

    def __init__(
        self, make: MakeScenario, task: Mapping[str, Any], model: str, limit_s: float, paths: Sequence[str] = ()
    ) -> None:
        super().__init__()
        import_from(paths)
        self._make, self._task, self._model, self._limit_s = make, task, model, limit_s
        self._scenario: Scenario | None = None
        self._samplers: GatewaySamplers | None = None
        self._contact: Contact | None = None
        self._preparing = asyncio.Lock()
        self._under_way: dict[str, asyncio.Task[Episode]] = {}
        self._is_over = False

    async def prepare(self, contact: Contact, environments: RemoteEnvironments | None) -> None:
        """Create the scenario, and store the gateway's contact and the environments, if they are remote."""
        async with self._preparing:  # many episodes may notice a restart at the same time
            if self._is_over:
                return
            if self._scenario is None:
                self._scenario = await asyncio.to_thread(call, self._make, self._task, self._model)
                if environments is not None:
                    run_in_environment(self._scenario, environments)
            if self._contact != contact:
                before, self._samplers, self._contact = self._samplers, GatewaySamplers(contact), contact
                if before is not None:
                    await before.close()

    async def run_episode(self, key: str, label: str, request: EpisodeRequest) -> Episode | EpisodeFailed | None:
        """Run an episode. Return the failure if there is one, or None if this worker restarted and is not prepared."""
        if self._is_over:
            return EpisodeFailed(OVER)
        if self._scenario is None or self._samplers is None:
            return None
        runner = LocalEpisodeRunner(self._scenario, self._samplers.opener(label), self._limit_s)
        running = asyncio.create_task(runner.run_episode(request))
        self._under_way[key] = running
        try:
            return await running
        except EpisodeFailed as error:
            return EpisodeFailed(str(error), error.traceback)  # without its cause, which may not be picklable
        except asyncio.CancelledError:
            return EpisodeFailed("it was cancelled")
        finally:
            del self._under_way[key]

    async def cancel(self, key: str) -> None:
        """Cancel an episode that is no longer needed."""
        if key in self._under_way:
            self._under_way[key].cancel()

    async def finish(self) -> None:
        """Cancel running episodes and close what they share, such as servers and sandboxes."""
        async with self._preparing:
            self._is_over = True
            running = list(self._under_way.values())
            for one in running:
                one.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            scenario, self._scenario = self._scenario, None
            samplers, self._samplers = self._samplers, None
            try:
                if scenario is not None:
                    await close_scenario(scenario)
            finally:
                if samplers is not None:
                    await samplers.close()


class AgentGroup:
    """Driver-side handle of the agent workers."""

    def __init__(self, group: WorkerGroup, contact: Contact, environments: RemoteEnvironments | None = None) -> None:
        self._group = group
        self._known = (contact, environments)
        self._in_flight = [0] * group.world_size
        self._lost_at = [-math.inf] * group.world_size
        self._telling: set[asyncio.Future[None]] = set()
        self._is_over = False

    async def prepare(self) -> None:
        """Wait until every worker has its scenario."""
        await self._group.prepare(*self._known)

    async def finish(self, limit_s: float) -> None:
        """Close the scenario of every worker; no episode starts any more."""
        self._is_over = True
        await finish_workers(self._group, limit_s)

    def runner(self, label: str) -> RemoteEpisodeRunner:
        return RemoteEpisodeRunner(self, label)

    async def run_episode(self, label: str, request: EpisodeRequest) -> Episode:
        """Run an episode on the least loaded worker. A lost worker fails its episodes and is restarted."""
        if self._is_over:
            raise EpisodeFailed(OVER)
        rank = self._choose(asyncio.get_running_loop().time())
        self._in_flight[rank] += 1
        try:
            answer = await self._run_on(rank, label, request)
        except WorkerFailed as error:
            if any(failure.address.group != self._group.name for failure in error.failures):
                raise
            self._lost_at[rank] = asyncio.get_running_loop().time()
            lost = f"{self._group.name}:{rank} was lost with it: {error.first.summary}"
            raise EpisodeFailed(lost, str(error)) from error
        finally:
            self._in_flight[rank] -= 1
        if isinstance(answer, EpisodeFailed):
            raise EpisodeFailed(str(answer), f"on {self._group.name}:{rank}\n{answer.traceback}")
        return answer

    def _choose(self, now: float) -> int:
        """Return the least loaded worker, preferring workers that were not lost within RESTART_S."""
        ranks = range(self._group.world_size)
        return min(ranks, key=lambda rank: (now - self._lost_at[rank] < RESTART_S, self._in_flight[rank]))

    async def _run_on(self, rank: int, label: str, request: EpisodeRequest) -> Episode | EpisodeFailed:
        worker, key = self._group.execute_on(rank), uuid.uuid4().hex
        try:
            answer: Episode | EpisodeFailed | None = (await worker.run_episode(key, label, request))[0]
            if answer is None:
                await worker.prepare(*self._known)
                answer = (await worker.run_episode(key, label, request))[0]
        except asyncio.CancelledError:
            self._tell(worker.cancel(key))
            raise
        return answer if answer is not None else EpisodeFailed("it is not prepared")

    def _tell(self, result: Any) -> None:
        """Send a call without waiting for the answer; a lost worker is reported elsewhere."""

        async def call() -> None:
            with contextlib.suppress(WorkerFailed, WaitedTooLong):
                await result

        task = asyncio.ensure_future(call())
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)


class RemoteEpisodeRunner:
    """Runs episodes on the workers of a group."""

    def __init__(self, agents: AgentGroup, label: str) -> None:
        self._agents, self._label = agents, label

    async def run_episode(self, request: EpisodeRequest) -> Episode:
        return await self._agents.run_episode(self._label, request)


async def finish_workers(group: WorkerGroup, limit_s: float) -> None:
    """Call `finish` on each worker, however the run ended, so that robots stop and servers close.

    Each call is awaited separately: a lost worker must not keep the others from finishing.
    """
    calls: list[asyncio.Future[Any]] = [asyncio.ensure_future(ref_future(host.finish.remote())) for host in group.hosts]
    await asyncio.wait(calls, timeout=limit_s)
    for one in calls:
        one.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
