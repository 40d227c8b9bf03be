"""Workers that host environments where the plan places them, and their client side."""

from __future__ import annotations

import asyncio
import math
import random
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from roost.procs.user_code import GRACE_S, call, called
from roost.rollout.environments.blocking import make_environments
from roost.rollout.environments.environment import Environment, Environments, Observation
from roost.rollout.episode import Scenario, Task
from roost.rollout.episode_runner import describe_error, whole_traceback
from roost.runtime.worker import Worker

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
        self._given_up: set[str] = set()  # while they were being opened
        self._under_way: dict[str, asyncio.Task[Any]] = {}
        self._used: dict[str, float] = {}  # when each was last called
        self._sweeping: asyncio.Task[None] | None = None

    async def prepare(self) -> str:
        """Create the source of environments, to find errors early. Return the error; empty if there is none.

        If it has a `prepare`, for example to look for robots, wait for it.
        """
        try:
            prepare = getattr(self._built(), "prepare", None)
            if prepare is not None:
                await called(prepare)
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
            self._opening[key] = asyncio.create_task(called(self._built().open))
            self._open[key] = await self._opening[key]
        except asyncio.CancelledError:
            return "it was given up", None
        except Exception as error:  # anything a user's class raises
            return describe_error(error), whole_traceback(error)
        finally:
            self._opening.pop(key, None)
            is_given_up = key in self._given_up
            self._given_up.discard(key)
        self._used[key] = time.monotonic()
        if is_given_up:  # but it was open already
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

        A cancelled episode may close its environment during a step: the step ends first, as calls are sequential.
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
            await asyncio.wait(closing, timeout=CLOSE_LIMIT_S)  # one that hangs keeps none of the others
        if self._environments is not None:
            await called(self._environments.close)
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
    return await called(getattr(environment, method), *arguments)


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
    """Return a worker's answer, without the time that comes with it. Raise EnvironmentFailed or HostLost."""
    import ray

    try:
        _, (error, value) = await ref
    except ray.exceptions.RayError as lost:
        raise HostLost(f"the environment's process is gone: {str(lost).splitlines()[0]}") from lost
    if error:
        failed = EnvironmentFailed(error)
        if value:
            failed.add_note(f"In the environment's process:\n{value}")
        raise failed
    return value
