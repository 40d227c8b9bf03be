"""Served worlds: the state is in this process, code runs in a sandbox per world."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from roost.app_world.evaluate import Report, evaluate
from roost.app_world.serving.command_line import ServingLimits
from roost.app_world.serving.replies import Refused, execution_text
from roost.app_world.state import Json, Snapshot
from roost.app_world.tasks.task import AppTask
from roost.app_world.tasks.task_set import make_task
from roost.app_world.world import World
from roost.sandbox.sandbox import Sandbox


class ServedWorld:
    """The world of one episode."""

    def __init__(self, task: AppTask, limits: ServingLimits, clock: Callable[[], float]) -> None:
        self.task = task
        self._limits, self._clock = limits, clock
        self._world = task.open_world()
        self._states: dict[str, Snapshot] = {}
        self._turn = asyncio.Lock()
        self._sandbox: Sandbox
        self._used_at = clock()

    @classmethod
    async def start(cls, task: AppTask, limits: ServingLimits, clock: Callable[[], float]) -> ServedWorld:
        """Open a world in the task's initial state, with a sandbox that waits for code."""
        world = cls(task, limits, clock)
        world._sandbox = await Sandbox.start(limits.sandbox, world._call, allows_weak=limits.allows_weak)
        return world

    @property
    def is_completed(self) -> bool:
        return self._world.is_completed

    @property
    def sandbox_pid(self) -> int | None:
        """PID of the process that runs the code; None if there is none until the next execution."""
        return self._sandbox.pid

    def touch(self) -> None:
        """Record the time of a request."""
        self._used_at = self._clock()

    def is_idle(self) -> bool:
        """Return True if there was no request for too long and nothing is running."""
        return not self._turn.locked() and self._clock() - self._used_at > self._limits.idle_s

    async def execute(self, code: str) -> str:
        """Run code and return its output as the agent sees it. Executions are sequential."""
        if len(code) > self._limits.code_chars:  # the agent's mistake, so no error status
            return f"[The code has {len(code)} characters; {self._limits.code_chars} are allowed. Nothing was run.]"
        async with self._turn:
            try:
                return execution_text(await self._sandbox.execute(code))
            finally:
                self.touch()

    def evaluate(self) -> Report:
        return evaluate(self.task, self._world)

    def save_state(self, name: str) -> None:
        """Save the state of the apps under a name."""
        if name not in self._states and len(self._states) >= self._limits.states:
            raise Refused(
                400, f"{self._limits.states} states are saved already; overwrite one of {sorted(self._states)}"
            )
        self._states[name] = self._world.snapshot()

    async def load_state(self, name: str) -> None:
        """Restore a saved state of the apps; variables of the code are kept."""
        if name not in self._states:
            raise Refused(404, f"no state {name!r} was saved; there are: {', '.join(sorted(self._states)) or 'none'}")
        async with self._turn:
            self._world = World.from_snapshot(self._states[name])

    async def close(self) -> None:
        await self._sandbox.close()

    async def _call(self, app: str, api: str, arguments: dict[str, Any]) -> Json:
        """Answer an API call of the code in the sandbox."""
        return self._world.call(app, api, arguments)


logger = logging.getLogger(__name__)


class Worlds:
    """Opens, finds and closes worlds, up to the limit."""

    def __init__(self, limits: ServingLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits, self._clock = limits, clock
        self._open: dict[str, ServedWorld] = {}
        self._start_tokens: dict[str, object] = {}  # token of each start in progress; removed on close or restart
        self._starting = 0

    def __len__(self) -> int:
        return len(self._open)

    async def begin(self, episode: str, task_id: str) -> ServedWorld:
        """Open a new world; close an earlier one of the episode."""
        task = known_task(task_id)
        await self.close(episode)
        if len(self._open) + self._starting >= self.limits.worlds:
            raise Refused(503, f"all {self.limits.worlds} worlds are in use; close some, or allow more with --worlds")
        me = self._start_tokens[episode] = object()
        self._starting += 1
        try:
            world = await ServedWorld.start(task, self.limits, self._clock)
        finally:
            self._starting -= 1
            is_wanted = self._start_tokens.get(episode) is me
            if is_wanted:
                del self._start_tokens[episode]
        if not is_wanted:  # e.g. the client was cancelled meanwhile
            await world.close()
            raise Refused(409, f"episode {episode!r} was closed or restarted while it was starting")
        self._open[episode] = world
        return world

    def find(self, episode: str, task_id: str) -> ServedWorld:
        """Return the world of an episode. Raise Refused if there is none or it has another task."""
        world = self._open.get(episode)
        if world is None:
            why = f"it was closed, not used for {self.limits.idle_s:g} s, or never initialized"
            raise Refused(404, f"episode {episode!r} has no world: {why}; call /initialize first")
        if world.task.id != task_id:
            raise Refused(400, f"episode {episode!r} has task {world.task.id}, not {task_id}")
        world.touch()
        return world

    async def close(self, episode: str) -> None:
        """Close the world of an episode, if there is one."""
        self._start_tokens.pop(episode, None)
        world = self._open.pop(episode, None)
        if world is not None:
            await world.close()

    async def close_all(self) -> None:
        self._start_tokens.clear()
        await self._close_these(list(self._open))

    async def close_idle(self) -> None:
        """Close idle worlds."""
        await self._close_these([episode for episode, world in self._open.items() if world.is_idle()])

    async def _close_these(self, episodes: list[str]) -> None:
        """Close worlds; an error in one does not keep the others from closing."""
        closed = await asyncio.gather(*map(self.close, episodes), return_exceptions=True)
        for episode, outcome in zip(episodes, closed, strict=True):
            if isinstance(outcome, Exception):
                logger.warning("the world of episode %s did not close: %s", episode, outcome)


def known_task(task_id: str) -> AppTask:
    """Return the task with this ID. Raise Refused if there is none."""
    try:
        return make_task(task_id)
    except ValueError as error:
        raise Refused(404, str(error)) from error
