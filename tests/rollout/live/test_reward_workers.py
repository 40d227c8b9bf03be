"""Rewards in processes of their own, on a real Ray: batches, spreading, and workers that die."""

import asyncio
import os
import signal

import pytest

pytest.importorskip("ray")

from roost import NodePlacementStrategy
from roost.rollout.episode import Task
from roost.rollout.rewards.config import Route, Routing
from roost.rollout.rewards.reward import Answer, RewardFailed
from roost.rollout.rewards.scoring import Rewards, RewardWorker, Scored
from roost.transport.context import WorkerFailed
from tests.limits import HANG_S

OWN = """
import asyncio, os, signal

class Fragile:
    async def score(self, answer):
        if answer.text == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if answer.text == "raise":
            raise ValueError("no such text")
        if answer.text == "exit":
            await asyncio.gather(self._leave())
        return os.getpid()

    async def _leave(self):
        raise SystemExit(0)

    async def close(self):
        pass
"""


@pytest.fixture(scope="module")
def own_folder(tmp_path_factory):
    """Folder of a user's reward; only the workers import from it."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "fragile_reward.py").write_text(OWN)
    return str(folder)


def launched(cluster, name, target, ranks, paths=(), restarts=0):
    group = RewardWorker.create_group(name, {"_target_": target, "tags": "all", "weight": 2}, paths)
    strategy = NodePlacementStrategy([0] * ranks)
    return group.launch(cluster, name=name, placement_strategy=strategy, restarts=restarts).wait_ready(timeout=HANG_S)


def answers(*texts, right="4"):
    return [Answer(Task("t", {"answer": right}), text) for text in texts]


async def outcomes(rewards, asked):
    """Reward of each answer, or the reason that there is none."""
    found = await asyncio.gather(*(rewards.score(answer) for answer in asked), return_exceptions=True)
    return [one.reward if isinstance(one, Scored) else one for one in found]


def test_scores_come_back_in_order_and_from_all_ranks(cluster, own_folder):
    exact = launched(cluster, "exact", "roost.rollout.rewards.math_answer.ExactAnswer", 1)
    pids = launched(cluster, "pids", "fragile_reward.Fragile", 2, [own_folder])
    try:
        routing = Routing((Route("exact", weight=0.5),))

        async def run():
            rewards = Rewards(routing, {}, {"exact": exact})
            spread = Rewards(Routing((Route("pids"),)), {}, {"pids": pids})
            asked = answers(*"abcd", "raise", "exit")
            found = await outcomes(rewards, answers("4", "5", "4.0")), await outcomes(spread, asked)
            await rewards.close()
            await spread.close()
            return found

        scores, where = asyncio.run(run())
        assert scores == [0.5, 0.0, 0.5]
        assert len(set(where[:4])) == 2
        assert isinstance(where[4], RewardFailed)
        assert "ValueError: no such text" in str(where[4])
        assert "the code raised SystemExit(0)" in str(where[5])
    finally:
        exact.close()
        pids.close()


def test_what_a_worker_had_when_it_died_is_scored_by_another(cluster, own_folder):
    group = launched(cluster, "dying", "fragile_reward.Fragile", 2, [own_folder])
    try:

        async def run():
            rewards = Rewards(Routing((Route("dying"),)), {}, {"dying": group})
            first, second = (int(pid) for pid in await outcomes(rewards, answers("a", "b")))
            os.kill(first, signal.SIGKILL)
            after = await outcomes(rewards, answers("a", "b", "c"))
            return second, after, await outcomes(rewards, answers("d"))

        second, after, later = asyncio.run(run())
        assert after == [second] * 3
        assert later == [second]
    finally:
        group.close()


def test_an_answer_that_kills_is_a_failure_and_a_worker_that_comes_back_goes_on(cluster, own_folder):
    group = launched(cluster, "coming", "fragile_reward.Fragile", 1, [own_folder], restarts=2)
    try:

        async def run():
            rewards = Rewards(Routing((Route("coming"),)), {}, {"coming": group})
            killed = await outcomes(rewards, answers("die"))
            return killed, await outcomes(rewards, answers("a"))

        (killed,), (after,) = asyncio.run(run())
        assert isinstance(killed, RewardFailed)
        assert " was lost: " in str(killed)
        assert after > 0
    finally:
        group.close()


def test_a_reward_that_cannot_be_made(cluster):
    with pytest.raises(WorkerFailed, match=r"no_such\.Reward cannot be found"):
        launched(cluster, "missing", "no_such.Reward", 1)
