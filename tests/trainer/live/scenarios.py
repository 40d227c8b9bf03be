"""Scenarios that go wrong, or wait for the learner, on purpose."""

import asyncio
import os
import signal
import sys
from pathlib import Path

from roost.rollout.arithmetic import Arithmetic
from roost.rollout.environments.environment import Observation
from roost.rollout.episode import Transcript
from roost.rollout.rewards.math_answer import ExactAnswer
from roost.trainer.learners import Learners


def count_learning(patch, scenario):
    """From now on `scenario.learnt` is how many minibatches were learnt from."""
    learn = Learners.learn

    async def counted(self, *of_a_minibatch):
        described = await learn(self, *of_a_minibatch)
        scenario.learnt += 1
        return described

    patch.setattr(Learners, "learn", counted)
    patch.setattr(scenario, "learnt", 0)


class Faulty(Arithmetic):
    """Some tasks always raise, some raise at their first attempt, some never end, some call sys.exit()."""

    def __init__(self, tokenizer, largest=2, raises=(), raises_once=(), hangs=(), exits=()):
        super().__init__(tokenizer, largest)
        self._exits = set(exits)
        self._raises, self._once, self._hangs = set(raises), set(raises_once), set(hangs)
        self._seen = set()

    async def run_episode(self, task, transcript):
        if task.name in self._raises:
            raise RuntimeError(f"{task.name} cannot be played")
        if task.name in self._once and task.name not in self._seen:
            self._seen.add(task.name)
            raise RuntimeError(f"{task.name} cannot be played just now")
        if task.name in self._exits:
            await asyncio.gather(self._leave(), asyncio.sleep(0))
        if task.name in self._hangs:
            await asyncio.Event().wait()
        return await super().run_episode(task, transcript)

    async def _leave(self):
        sys.exit()


class Patient(Arithmetic):
    """Of each step, the tasks of the second minibatch are not played before the first one was learnt from."""

    learnt = 0  # minibatches, two in each step

    def __init__(self, tokenizer, largest=2):
        super().__init__(tokenizer, largest)
        self._first = {}

    async def run_episode(self, task, transcript):
        first = self._first.setdefault(Patient.learnt // 2, set())
        if len(first) < 2:
            first.add(task.name)
        while task.name not in first and Patient.learnt % 2 == 0:
            await asyncio.sleep(0.01)
        return await super().run_episode(task, transcript)


class Talking(Arithmetic):
    """An episode ends when all steps before its own were learnt from; until then the policy talks to itself.

    So generation and learning overlap, however fast either is; where they take turns, episodes reach their time limit.
    """

    learnt = 0  # minibatches, one in each step

    def __init__(self, tokenizer, largest=2, episodes_of_a_step=16):
        super().__init__(tokenizer, largest)
        self._begun, self._of_a_step = 0, episodes_of_a_step

    async def run_episode(self, task, transcript):
        step, self._begun = self._begun // self._of_a_step, self._begun + 1
        score = await super().run_episode(task, transcript)
        while Talking.learnt < step:
            talk = Transcript(transcript._sample)
            talk.give(self._ids(task.name))
            await talk.take()
        return score


def once(folder, name):
    """Whether this is the first time that anybody, in any process, asks for this name."""
    try:
        (Path(folder) / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def end_process():
    os.kill(os.getpid(), signal.SIGKILL)


class Handled(Arithmetic):
    """Plays in environments of other processes. One agent's process ends in the middle of an episode."""

    def __init__(self, tokenizer, environment, folder, largest=2):
        super().__init__(tokenizer, largest)
        self._folder = folder

    def use_environments(self, environments):
        self._environments = environments

    async def run_episode(self, task, transcript):
        environment = await self._environments.open()
        try:
            await environment.reset(task)
            score = await super().run_episode(task, transcript)
            if once(self._folder, "agent"):
                end_process()
            await environment.step(score.shown)
            return score
        finally:
            await environment.close()


class Handles:
    """Environments; the process of one ends in the middle of a step, once the agent's has."""

    def __init__(self, folder):
        self._folder = folder

    async def open(self):
        return self

    async def reset(self, task, seed=None):
        return Observation(task.name)

    async def step(self, action):
        if (Path(self._folder) / "agent").exists() and once(self._folder, "env"):
            end_process()
        return Observation(action, is_over=True)

    async def score(self):
        return 0.0

    async def close(self):
        pass


class Fatal(ExactAnswer):
    """A reward; the process of one ends while it scores, once the environment's has."""

    def __init__(self, folder):
        super().__init__()
        self._folder = folder

    async def score(self, answer):
        if (Path(self._folder) / "env").exists() and once(self._folder, "reward"):
            end_process()
        return await super().score(answer)
