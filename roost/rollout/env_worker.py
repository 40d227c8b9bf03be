"""Environments where the plan puts them: hosted by workers, on robots or on machines of their own."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from roost.rollout.environments.environment import Environment, Environments, Observation
from roost.rollout.playing import told
from roost.rollout.scenario import Scenario, Task
from roost.runtime.worker import Worker


class EnvironmentFailed(RuntimeError):
    """What an environment that is hosted elsewhere raised, or that its host is gone."""


class EnvWorker(Worker):
    """Hosts the environments of many episodes. What one raises is an answer, not a failure of the worker."""

    def __init__(self, config: Mapping[str, Any], paths: Sequence[str] = ()) -> None:
        super().__init__()
        import_from(paths)
        self._config = dict(config)
        self._environments: Environments | None = None
        self._open: dict[int, Environment] = {}
        self._opened = 0

    async def prepare(self) -> str:
        """Make what environments come from, so that what is wrong with it is known early; what that is, or nothing."""
        try:
            self._made()
        except Exception as error:  # whatever a user's class raises
            return told(error)
        return ""

    def _made(self) -> Environments:
        if self._environments is None:  # as in a worker that was started again
            self._environments = make_environments(self._config, self.hardware_infos)
        return self._environments

    async def open_one(self) -> tuple[str, Any]:
        """The number of an environment for an episode."""
        try:
            environment = await self._made().open()
        except Exception as error:  # whatever a user's class raises
            return told(error), None
        self._opened += 1
        self._open[self._opened] = environment
        return "", self._opened

    async def call(self, number: int, method: str, *arguments: Any) -> tuple[str, Any]:
        """What a method of an environment gives, or why it gives nothing."""
        environment = self._open.pop(number, None) if method == "close" else self._open.get(number)
        if environment is None:
            return f"environment {number} is not open here", None
        try:
            return "", await getattr(environment, method)(*arguments)
        except Exception as error:  # whatever a user's class raises
            return told(error), None


def import_from(paths: Sequence[str]) -> None:
    """Let classes that a config names be found where the driver finds them, if this machine has those folders."""
    sys.path += [path for path in paths if path not in sys.path and Path(path).is_dir()]


def make_environments(config: Mapping[str, Any], hardware: Sequence[Mapping[str, Any]] = ()) -> Environments:
    """What a config names by `_target_`; where there is declared hardware, also made with its configs."""
    from hydra.utils import instantiate

    more = {"hardware": [dict(each) for each in hardware]} if hardware else {}
    made: Environments = instantiate(dict(config), _convert_="all", _recursive_=False, **more)
    return made


class RemoteEnvironments:
    """Environments of a group of `EnvWorker`s, for whoever plays; it may be sent to other processes."""

    def __init__(self, hosts: Sequence[Any]) -> None:
        self._hosts = list(hosts)
        self._open = [0] * len(hosts)

    async def open(self) -> Environment:
        """On the host with the fewest open ones, as far as this process knows."""
        rank = min(range(len(self._hosts)), key=lambda rank: (self._open[rank], random.random()))
        self._open[rank] += 1
        try:
            number = await ask(self._hosts[rank].open_one.remote())
        except BaseException:
            self._open[rank] -= 1
            raise
        return _RemoteEnvironment(self, rank, number)

    async def close(self) -> None:
        """The hosts end with the run."""

    async def call(self, rank: int, number: int, method: str, *arguments: Any) -> Any:
        if method == "close":
            self._open[rank] -= 1
        return await ask(self._hosts[rank].call.remote(number, method, *arguments))


def play_in(scenario: Scenario, environments: Environments) -> None:
    """From now on, the scenario's episodes are played in these environments."""
    use = getattr(scenario, "use_environments", None)
    if use is None:
        raise TypeError(
            f"{type(scenario).__name__} has no use_environments(environments), so that it cannot be played in those of "
            "the component env; give it one, or leave env out of the placement"
        )
    use(environments)


class _RemoteEnvironment:
    """One environment on a host."""

    def __init__(self, hosts: RemoteEnvironments, rank: int, number: int) -> None:
        self._hosts, self._rank, self._number = hosts, rank, number

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
        return await self._hosts.call(self._rank, self._number, method, *arguments)


async def ask(ref: Any) -> Any:
    """What a worker answered to a call; hosts give the time that it took with it."""
    import ray

    try:
        _, (error, value) = await ref
    except ray.exceptions.RayError as lost:
        raise EnvironmentFailed(f"the environment's process is gone: {str(lost).splitlines()[0]}") from lost
    if error:
        raise EnvironmentFailed(error)
    return value
