"""Rewards that fail in a worker; in this process."""

import asyncio
from types import SimpleNamespace

from roost.rollout.episode import Task
from roost.rollout.rewards.reward import Answer, Scored
from roost.rollout.rewards.scoring import RewardWorker
from tests.rollout.script import ran


class Scoring(RewardWorker):
    """One that was not launched."""

    _setup = SimpleNamespace()


class Length:
    async def score(self, answer):
        if answer.text == "hang":
            await asyncio.Event().wait()
        if answer.text == "raise":
            raise ValueError("no such text")
        return len(answer.text)

    async def close(self):
        pass


def test_an_answer_whose_reward_hangs_gives_its_place_back():
    async def run():
        keys = {"_target_": "tests.rollout.rewards.test_worker.Length", "tags": "all"}
        worker = Scoring("length", keys, at_a_time=1, limit_s=1.0)
        return await worker.score([Answer(Task(""), text) for text in ("hang", "four", "raise")])

    assert ran(run()) == ["TimeoutError: timed out after 1 s", Scored(4.0), "ValueError: no such text"]
