"""Adapter for environments with blocking methods: each runs in its own thread."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from roost.procs.user_code import DaemonThread, begun
from roost.rollout.environments.environment import Environment, Environments, Observation
from roost.rollout.episode import Task


def is_blocking(environments: Any) -> bool:
    """Return True if `open` is not a coroutine function; then all methods are assumed to block.

    >>> class Plain:
    ...     def open(self): ...
    >>> is_blocking(Plain())
    True
    """
    return not inspect.iscoroutinefunction(environments.open)


class BlockingEnvironments:
    """Runs blocking environments in threads, so that the event loop is not blocked."""

    def __init__(self, environments: Any) -> None:
        self._environments = environments

    async def prepare(self) -> None:
        """Call `prepare`, if the environments have one."""
        await asyncio.wrap_future(begun("environments", getattr(self._environments, "prepare", lambda: None)))

    async def open(self) -> Environment:
        """Open an environment for an episode; `open` may block while all are in use."""
        thread = DaemonThread("environment")
        opening = thread.submit(self._environments.open)
        try:
            return BlockingEnvironment(await asyncio.shield(asyncio.wrap_future(opening)), thread)
        except asyncio.CancelledError:
            # It may still open after the cancellation, and must be closed then.
            thread.submit(lambda: opening.exception() or opening.result().close())
            thread.shutdown()
            raise
        except Exception:
            thread.shutdown()
            raise

    async def close(self) -> None:
        await asyncio.wrap_future(begun("environments", self._environments.close))


class BlockingEnvironment:
    """A blocking environment. Calls are sequential even after a cancellation: a started call is awaited."""

    def __init__(self, environment: Any, thread: DaemonThread) -> None:
        self._environment, self._thread = environment, thread

    async def reset(self, task: Task, seed: int | None = None) -> Observation:
        seen: Observation = await self._called(self._environment.reset, task, seed)
        return seen

    async def step(self, action: Any) -> Observation:
        seen: Observation = await self._called(self._environment.step, action)
        return seen

    async def score(self) -> float:
        return float(await self._called(self._environment.score))

    async def close(self) -> None:
        try:
            await self._called(self._environment.close)
        finally:
            self._thread.shutdown()

    async def _called(self, method: Callable[..., Any], *arguments: Any) -> Any:
        # Shielded, because cancellation would drop a queued call, and `close` must always run.
        call = self._thread.submit(method, *arguments)
        return await asyncio.shield(asyncio.wrap_future(call))


def make_environments(
    config: Mapping[str, Any] | Environments, hardware: Sequence[Mapping[str, Any]] = ()
) -> Environments:
    """Instantiate the `_target_` of a config, with the configs of declared hardware if there are any.

    An instance is returned as it is. Classes with blocking methods are wrapped to run in threads.
    """
    from hydra.utils import instantiate

    built: Environments
    if isinstance(config, Mapping):
        # Not passed through the config, where `$` or `???` in a declared value would be interpreted.
        more = {"hardware": [dict(each) for each in hardware]} if hardware else {}
        built = instantiate(dict(config), _convert_="all", _recursive_=False, _partial_=True)(**more)
    else:
        built = config
    return BlockingEnvironments(built) if is_blocking(built) else built
