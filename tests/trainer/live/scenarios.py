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


class Patient(Arithmetic):
    """Of each step, the tasks of the second minibatch are not played before the first one was learnt from."""

    learnt = 0  # minibatches, two in each step; counted by the test

    def __init__(self, tokenizer, largest=2):
        super().__init__(tokenizer, largest)
        self._first = {}

    async def play(self, task, transcript):
        first = self._first.setdefault(Patient.learnt // 2, set())
        if len(first) < 2:
            first.add(task.name)
        while task.name not in first and Patient.learnt % 2 == 0:
            await asyncio.sleep(0.01)
        return await super().play(task, transcript)
