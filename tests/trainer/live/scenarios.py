"""Scenarios that go wrong on purpose."""

import asyncio

from roost.rollout.arithmetic import Arithmetic


class Faulty(Arithmetic):
    """Some tasks always raise, some raise at their first attempt, some never end."""

    def __init__(self, tokenizer, largest=2, raises=(), raises_once=(), hangs=()):
        super().__init__(tokenizer, largest)
        self._raises, self._once, self._hangs = set(raises), set(raises_once), set(hangs)
        self._seen = set()

    async def play(self, task, transcript):
        if task.name in self._raises:
            raise RuntimeError(f"{task.name} cannot be played")
        if task.name in self._once and task.name not in self._seen:
            self._seen.add(task.name)
            raise RuntimeError(f"{task.name} cannot be played just now")
        if task.name in self._hangs:
            await asyncio.Event().wait()
        return await super().play(task, transcript)


class Slow(Arithmetic):
    """Half of the tasks take a while before they are played."""

    async def play(self, task, transcript):
        if int(task.name[0]) % 2 == 0:
            await asyncio.sleep(1.5)
        return await super().play(task, transcript)
