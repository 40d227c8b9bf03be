"""One world that is served: its state is here, and its code runs in a sandbox of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from roost.app_world.evaluate import Report, evaluate
from roost.app_world.serving.limits import ServingLimits
from roost.app_world.serving.refused import Refused
from roost.app_world.serving.told import told_execution
from roost.app_world.state import Json, Snapshot
from roost.app_world.tasks.task import AppTask
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
    async def begun(cls, task: AppTask, limits: ServingLimits, clock: Callable[[], float]) -> ServedWorld:
        """A world as the task wants it, with a sandbox that waits for code."""
        world = cls(task, limits, clock)
        world._sandbox = await Sandbox.start(limits.sandbox, world._call, allows_weak=limits.allows_weak)
        return world

    @property
    def is_completed(self) -> bool:
        return self._world.is_completed

    @property
    def sandbox_pid(self) -> int | None:
        """Of the process that runs its code; None where there is none until the next execution."""
        return self._sandbox.pid

    def touch(self) -> None:
        """Somebody asked for something."""
        self._used_at = self._clock()

    def is_idle(self) -> bool:
        """Whether nobody has asked for anything in too long, and nothing is being done."""
        return not self._turn.locked() and self._clock() - self._used_at > self._limits.idle_s

    async def execute(self, code: str) -> str:
        """What the agent is shown of its code. One piece runs at a time."""
        if len(code) > self._limits.code_chars:  # the agent's mistake, not the client's
            return f"[The code has {len(code)} characters; {self._limits.code_chars} are allowed. Nothing was run.]"
        async with self._turn:
            try:
                return told_execution(await self._sandbox.execute(code))
            finally:
                self.touch()

    def evaluate(self) -> Report:
        return evaluate(self.task, self._world)

    def save_state(self, name: str) -> None:
        """Keep what the apps hold now under a name."""
        if name not in self._states and len(self._states) >= self._limits.states:
            raise Refused(400, f"{self._limits.states} states are kept already; use one of {sorted(self._states)}")
        self._states[name] = self._world.snapshot()

    async def load_state(self, name: str) -> None:
        """Bring the apps back to what was kept; variables of the code stay."""
        if name not in self._states:
            raise Refused(404, f"no state {name!r} was saved; there are: {', '.join(sorted(self._states)) or 'none'}")
        async with self._turn:
            self._world = World.from_snapshot(self._states[name])

    async def close(self) -> None:
        await self._sandbox.close()

    async def _call(self, app: str, api: str, arguments: dict[str, Any]) -> Json:
        """What the code in the sandbox asks for."""
        return self._world.call(app, api, arguments)
