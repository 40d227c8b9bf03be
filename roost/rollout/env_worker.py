"""Workers that host environments or run episodes where the plan places them, and their driver-side handles."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from roost.procs.user_code import GRACE_S, call, call_async
from roost.rollout.environments.environment import Environment, Environments, Observation, make_environments
from roost.rollout.episode import Episode, Scenario, Task
from roost.rollout.episode_runner import (
    EpisodeFailed,
    EpisodeRequest,
    LocalEpisodeRunner,
    close_scenario,
    describe_error,
    whole_traceback,
)
from roost.rollout.gateway import Contact, GatewaySamplers
from roost.runtime.result import ref_future
from roost.runtime.worker import Worker, WorkerGroup
from roost.transport.context import WaitedTooLong, WorkerFailed

IDLE_S = 3600.0  # an environment not called for this long is closed
SWEEP_EVERY_S = 30.0
RESTART_S = 10.0  # a lost host is avoided for this long, if there are others
REOPEN_LIMIT_S = 60.0  # for a host to come back, before an episode fails without an environment
REOPEN_EVERY_S = 0.5
CLOSE_LIMIT_S = 5.0  # for environments that are still open when the run is over


class EnvironmentFailed(RuntimeError):
    """A remote environment raised an error, or its host was lost."""


class HostLost(EnvironmentFailed):
    """The process that hosts the environment died; it is restarted."""


class EnvWorker(Worker):
    """Hosts the environments of many episodes. Errors of an environment are returned, and do not fail the worker."""

    def __init__(self, config: Mapping[str, Any], paths: Sequence[str] = (), idle_s: float = IDLE_S) -> None:
        super().__init__()
        import_from(paths)
        self._config, self._idle_s = dict(config), idle_s
        self._environments: Environments | None = None
        self._opening: dict[str, asyncio.Task[Environment]] = {}
        self._open: dict[str, Environment] = {}
        self._given_up: set[str] = set()  # keys given up while they were being opened
        self._under_way: dict[str, asyncio.Task[Any]] = {}
        self._used: dict[str, float] = {}  # when each was last called
        self._sweeping: asyncio.Task[None] | None = None

    async def prepare(self) -> str:
        """Create the source of environments, to find errors early. Return the error; empty if there is none.

        Also call its `prepare`, if it has one, for example to check robots.
        """
        try:
            prepare = getattr(self._built(), "prepare", None)
            if prepare is not None:
                await call_async(prepare)
        except Exception as error:  # anything a user's class raises
            return describe_error(error)
        return ""

    def _built(self) -> Environments:
        if self._environments is None:  # e.g. after a restart of the worker
            self._environments = call(make_environments, self._config, self.hardware_infos)
        return self._environments

    async def open_one(self, key: str) -> tuple[str, Any]:
        """Open an environment under this key."""
        if self._sweeping is None:
            self._sweeping = asyncio.create_task(self._sweep())
        try:
            self._opening[key] = asyncio.create_task(call_async(self._built().open))
            self._open[key] = await self._opening[key]
        except asyncio.CancelledError:
            return "the episode was cancelled", None
        except Exception as error:  # anything a user's class raises
            return describe_error(error), whole_traceback(error)
        finally:
            self._opening.pop(key, None)
            is_given_up = key in self._given_up
            self._given_up.discard(key)
        self._used[key] = time.monotonic()
        if is_given_up:  # too late to cancel
            await self.call(key, "close")
        return "", None

    async def give_up(self, key: str) -> None:
        """Close an environment that is no longer needed: a cancelled episode must not keep a robot."""
        if key in self._opening:
            self._given_up.add(key)
            self._opening[key].cancel()
        elif key in self._open:
            await self.call(key, "close")

    async def call(self, key: str, method: str, *arguments: Any) -> tuple[str, Any]:
        """Call a method of an environment. Return (error, value), with an empty error on success.

        A cancelled episode may close its environment during a step. Calls are sequential, so the step is cancelled.
        """
        environment = self._open.pop(key, None) if method == "close" else self._open.get(key)
        if environment is None:
            return "the environment's process is gone, or it was closed", None
        if method == "close":
            self._used.pop(key, None)
            await self._end_call(key)
        call = self._under_way[key] = asyncio.create_task(_called(environment, method, arguments))
        try:
            return "", await call
        except asyncio.CancelledError:
            return "the episode was cancelled", None
        except Exception as error:  # anything a user's class raises
            return describe_error(error), whole_traceback(error)
        finally:
            if self._under_way.get(key) is call:
                del self._under_way[key]
            if key in self._used:
                self._used[key] = time.monotonic()

    async def _end_call(self, key: str) -> None:
        """Cancel the running call of an environment; abandon it if it cannot be cancelled."""
        call = self._under_way.pop(key, None)
        if call is not None:
            call.cancel()
            await asyncio.wait([call], timeout=GRACE_S)

    async def finish(self) -> None:
        """Close all environments: robots must stand still when the run is over."""
        for opening in self._opening.values():
            opening.cancel()
        closing = [asyncio.ensure_future(self.call(key, "close")) for key in list(self._open)]
        if closing:
            await asyncio.wait(closing, timeout=CLOSE_LIMIT_S)  # one that hangs does not block the others
        if self._environments is not None:
            await call_async(self._environments.close)
            self._environments = None

    async def _sweep(self) -> None:
        """Close environments that dead agents left open."""
        while True:
            await asyncio.sleep(min(self._idle_s / 4, SWEEP_EVERY_S))
            now = time.monotonic()
            idle = [key for key, used in self._used.items() if now - used > self._idle_s]
            for key in [key for key in idle if key not in self._under_way]:
                await self.call(key, "close")


async def _called(environment: Environment, method: str, arguments: Sequence[Any]) -> Any:
    return await call_async(getattr(environment, method), *arguments)


def import_from(paths: Sequence[str]) -> None:
    """Extend sys.path with the driver's folders that exist on this node."""
    sys.path += [path for path in paths if path not in sys.path and Path(path).is_dir()]


class RemoteEnvironments:
    """Client of a group of `EnvWorker`s; it can be sent to other processes."""

    def __init__(self, hosts: Sequence[Any]) -> None:
        self._hosts = list(hosts)
        self._open = [0] * len(hosts)
        self._lost_at = [-math.inf] * len(hosts)

    async def open(self) -> Environment:
        """Open an environment on the host with the fewest open ones, as far as this process knows.

        A lost host restarts; until then use the others, or retry.
        """
        give_up_at = time.monotonic() + REOPEN_LIMIT_S
        while True:
            now = time.monotonic()
            rank = min(range(len(self._hosts)), key=lambda rank: self._load(rank, now))
            try:
                return await self._open_on(rank)
            except HostLost:
                self._lost_at[rank] = time.monotonic()
                if self._lost_at[rank] > give_up_at:
                    raise
            if all(self._is_starting(rank, time.monotonic()) for rank in range(len(self._hosts))):
                await asyncio.sleep(REOPEN_EVERY_S)

    def _load(self, rank: int, now: float) -> tuple[bool, int, float]:
        return self._is_starting(rank, now), self._open[rank], random.random()

    def _is_starting(self, rank: int, now: float) -> bool:
        return now - self._lost_at[rank] < RESTART_S

    async def _open_on(self, rank: int) -> Environment:
        key = uuid.uuid4().hex
        self._open[rank] += 1
        try:
            await ask(self._hosts[rank].open_one.remote(key))
        except BaseException:
            self._open[rank] -= 1
            self._hosts[rank].give_up.remote(key)  # fire and forget
            raise
        return _RemoteEnvironment(self, rank, key)

    async def close(self) -> None:
        """Do nothing: the hosts end with the run."""

    async def call(self, rank: int, key: str, method: str, *arguments: Any) -> Any:
        if method == "close":
            self._open[rank] -= 1
        return await ask(self._hosts[rank].call.remote(key, method, *arguments))


def run_in_environment(scenario: Scenario, environments: Environments) -> None:
    """Make the scenario use these environments."""
    use = getattr(scenario, "use_environments", None)
    if use is None:
        raise TypeError(
            f"{type(scenario).__name__} has no use_environments(environments), so it cannot run in those of "
            "the component env; give it one, or leave env out of the placement"
        )
    use(environments)


class _RemoteEnvironment:
    """One environment on a host."""

    def __init__(self, hosts: RemoteEnvironments, rank: int, key: str) -> None:
        self._hosts, self._rank, self._key = hosts, rank, key

    async def reset(self, task: Task, seed: int | None = None) -> Observation:
        seen: Observation = await self._call("reset", task, seed)
        return seen

    async def step(self, action: Any) -> Observation:
        seen: Observation = await self._call("step", action)
        return seen

    async def score(self) -> float:
        return float(await self._call("score"))

    async def close(self) -> None:
        await self._call("close")

    async def _call(self, method: str, *arguments: Any) -> Any:
        return await self._hosts.call(self._rank, self._key, method, *arguments)


async def ask(ref: Any) -> Any:
    """Return the value of a call to a host. Raise EnvironmentFailed or HostLost."""
    import ray

    try:
        _, (error, value) = await ref  # the first is the duration of the call
    except ray.exceptions.RayError as lost:
        raise HostLost(f"the environment's process is gone: {str(lost).splitlines()[0]}") from lost
    if error:
        failed = EnvironmentFailed(error)
        if value:
            failed.add_note(f"In the environment's process:\n{value}")
        raise failed
    return value


OVER = "the run is over"
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
        """Create the scenario, let it use remote environments if there are any, and connect to the gateway."""
        async with self._preparing:  # many episodes may notice a restart at the same time
            if self._is_over:
                return
            if self._scenario is None:
                self._scenario = await asyncio.to_thread(call, self._make, self._task, self._model)
                if environments is not None:
                    run_in_environment(self._scenario, environments)
            if self._contact != contact:
                old, self._samplers, self._contact = self._samplers, GatewaySamplers(contact), contact
                if old is not None:
                    await old.close()

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
        self._prepare_arguments = (contact, environments)
        self._in_flight = [0] * group.world_size
        self._lost_at = [-math.inf] * group.world_size
        self._cancelling: set[asyncio.Future[None]] = set()
        self._is_over = False

    async def prepare(self) -> None:
        """Wait until every worker has its scenario."""
        await self._group.prepare(*self._prepare_arguments)

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
            lost = f"its worker {self._group.name}:{rank} was lost: {error.first.summary}"
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
                await worker.prepare(*self._prepare_arguments)
                answer = (await worker.run_episode(key, label, request))[0]
        except asyncio.CancelledError:
            self._cancel_soon(worker.cancel(key))
            raise
        return answer if answer is not None else EpisodeFailed("its worker restarted again")

    def _cancel_soon(self, result: Any) -> None:
        """Send a cancellation without waiting for it; a lost worker is reported elsewhere."""

        async def call() -> None:
            with contextlib.suppress(WorkerFailed, WaitedTooLong):
                await result

        task = asyncio.ensure_future(call())
        self._cancelling.add(task)
        task.add_done_callback(self._cancelling.discard)


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
