"""A world that runs nothing: it notes what it is asked, and is over when it is told `done`."""

import asyncio

from roost.rollout.environments.environment import Observation
from roost.rollout.episode import Task

TASK = Task("count to three", {"seed": 5})


class Noting:
    """An environment; `rewards` are those of its steps."""

    def __init__(self, rewards=(), first="begin", on_step=None):
        self.actions, self.calls = [], []
        self._rewards, self._first, self._on_step = list(rewards), first, on_step

    async def reset(self, task, seed=None):
        self.calls.append(("reset", task.name, seed))
        return Observation(self._first)

    async def step(self, action):
        self.actions.append(action)
        if self._on_step is not None:
            await self._on_step()
        reward = self._rewards.pop(0) if self._rewards else 0.0
        return Observation(f"saw {action}", reward, is_over="done" in str(action))

    async def score(self):
        self.calls.append("score")
        return float(len(self.actions))

    async def close(self):
        await asyncio.sleep(0)
        self.calls.append("close")


class Worlds:
    """Environments, all of which are kept to be looked at."""

    def __init__(self, make=Noting):
        self._make, self.opened, self.is_closed = make, [], False

    async def open(self):
        self.opened.append(self._make())
        return self.opened[-1]

    async def close(self):
        self.is_closed = True


class Tasks:
    """A source of tasks."""

    def __init__(self, count=3):
        self._count = count

    def size(self, split):
        return self._count

    def task(self, split, index):
        return Task(f"{split.value} {index}")


def python(code):
    return f"Now:\n```python\n{code}\n```"
