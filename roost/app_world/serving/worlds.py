"""All worlds of a server, by episode."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from roost.app_world.serving.limits import ServingLimits
from roost.app_world.serving.refused import Refused
from roost.app_world.serving.served_world import ServedWorld
from roost.app_world.tasks.task import AppTask
from roost.app_world.tasks.task_set import make_task

logger = logging.getLogger(__name__)


class Worlds:
    """Begins, finds and closes worlds, and never holds more than its limit."""

    def __init__(self, limits: ServingLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits, self._clock = limits, clock
        self._open: dict[str, ServedWorld] = {}
        self._begun_by: dict[str, object] = {}  # who begins an episode; gone once that is closed, or begun again
        self._beginning = 0

    def __len__(self) -> int:
        return len(self._open)

    async def begin(self, episode: str, task_id: str) -> ServedWorld:
        """A new world; one that the episode had before is closed."""
        task = known_task(task_id)
        await self.close(episode)
        if len(self._open) + self._beginning >= self.limits.worlds:
            raise Refused(503, f"all {self.limits.worlds} worlds are taken; close some, or allow more with --worlds")
        me = self._begun_by[episode] = object()
        self._beginning += 1
        try:
            world = await ServedWorld.begun(task, self.limits, self._clock)
        finally:
            self._beginning -= 1
            is_wanted = self._begun_by.get(episode) is me
            if is_wanted:
                del self._begun_by[episode]
        if not is_wanted:  # as by a client that was cancelled meanwhile
            await world.close()
            raise Refused(409, f"episode {episode!r} was closed, or begun again, before it had begun")
        self._open[episode] = world
        return world

    def find(self, episode: str, task_id: str) -> ServedWorld:
        """The world of an episode, which is to be that of a task."""
        world = self._open.get(episode)
        if world is None:
            why = f"it was closed, not used for {self.limits.idle_s:g} s, or never initialized"
            raise Refused(404, f"episode {episode!r} has no world: {why}; ask /initialize for one")
        if world.task.id != task_id:
            raise Refused(400, f"episode {episode!r} plays task {world.task.id}, not {task_id}")
        world.touch()
        return world

    async def close(self, episode: str) -> None:
        """Close the world of an episode, where there is one."""
        self._begun_by.pop(episode, None)
        world = self._open.pop(episode, None)
        if world is not None:
            await world.close()

    async def close_all(self) -> None:
        self._begun_by.clear()
        await self._close_these(list(self._open))

    async def close_idle(self) -> None:
        """Close what was forgotten."""
        await self._close_these([episode for episode, world in self._open.items() if world.is_idle()])

    async def _close_these(self, episodes: list[str]) -> None:
        """One that does not close well does not keep the others from it."""
        closed = await asyncio.gather(*map(self.close, episodes), return_exceptions=True)
        for episode, outcome in zip(episodes, closed, strict=True):
            if isinstance(outcome, Exception):
                logger.warning("the world of episode %s did not close: %s", episode, outcome)


def known_task(task_id: str) -> AppTask:
    """The task with this id, if there is one."""
    try:
        return make_task(task_id)
    except ValueError as error:
        raise Refused(404, str(error)) from error
