"""Environments that are written in plain, blocking code: each is called in a thread of its own."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from roost.procs.user_code import DaemonThread, begun
from roost.rollout.environments.environment import Environment, Environments, Observation
from roost.rollout.episode import Task


def is_blocking(environments: Any) -> bool:
    """Whether a class of environments has a plain `open`, so that all of its code is taken to block.

    >>> class Plain:
    ...     def open(self): ...
    >>> is_blocking(Plain())
    True
    """
    return not inspect.iscoroutinefunction(environments.open)


class BlockingEnvironments:
    """Environments whose calls are plain functions: the event loop, and the episodes in it, go on meanwhile."""

    def __init__(self, environments: Any) -> None:
        self._environments = environments

    async def prepare(self) -> None:
        """Where they have something to look for before anything begins."""
        await asyncio.wrap_future(begun("environments", getattr(self._environments, "prepare", lambda: None)))

    async def open(self) -> Environment:
        """One for an episode; `open` may block while all are taken."""
        thread = DaemonThread("environment")
        opening = thread.submit(self._environments.open)
        try:
            return BlockingEnvironment(await asyncio.shield(asyncio.wrap_future(opening)), thread)
        except asyncio.CancelledError:
            # It may come all the same, and then nobody is there to give it back.
            thread.submit(lambda: opening.exception() or opening.result().close())
            thread.shutdown()
            raise
        except Exception:
            thread.shutdown()
            raise

    async def close(self) -> None:
        await asyncio.wrap_future(begun("environments", self._environments.close))


class BlockingEnvironment:
    """One of them. Calls follow one another also where an episode was cancelled: what it began is waited for."""

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
        # Shielded, as a call that has not begun would otherwise be dropped: `close` has to come in any case.
        call = self._thread.submit(method, *arguments)
        return await asyncio.shield(asyncio.wrap_future(call))


def make_environments(
    config: Mapping[str, Any] | Environments, hardware: Sequence[Mapping[str, Any]] = ()
) -> Environments:
    """What a config names by `_target_`; where there is declared hardware, also made with its configs.

    Those that were made already are taken as they are. A class of plain, blocking functions is called in threads.
    """
    from hydra.utils import instantiate

    made: Environments
    if isinstance(config, Mapping):
        # Not through the config, where a `$` or a `???` in what was declared would mean something.
        more = {"hardware": [dict(each) for each in hardware]} if hardware else {}
        made = instantiate(dict(config), _convert_="all", _recursive_=False, _partial_=True)(**more)
    else:
        made = config
    return BlockingEnvironments(made) if is_blocking(made) else made
