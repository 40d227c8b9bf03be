"""A sequence classifier as a reward, on the CPU."""

import asyncio
import time

import pytest
from transformers import AutoModelForSequenceClassification

from roost.engines.tiny_model import write_tiny_model
from roost.rollout.episode import Task
from roost.rollout.rewards.reward import Answer, RewardFailed
from roost.rollout.rewards.reward_model import RewardModel


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    folder = write_tiny_model(tmp_path_factory.mktemp("classifier") / "model")
    AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1).save_pretrained(folder)
    return str(folder)


def test_batches_score_as_single_answers(classifier):
    texts = ["4", "it is four", "no"]

    async def run(batch_size):
        reward = RewardModel(classifier, batch_size=batch_size)
        await reward.prepare()
        found = await reward.score_batch([Answer(Task("2+2?"), text) for text in texts])
        await reward.close()
        return found

    together, alone = asyncio.run(run(3)), asyncio.run(run(1))
    assert together == pytest.approx(alone, abs=1e-4)
    assert len(set(together)) == 3


def test_concurrent_batches_load_the_model_once(classifier, monkeypatch):
    loads = []
    load = AutoModelForSequenceClassification.from_pretrained

    def slow_load(*args, **keys):
        loads.append(args)
        time.sleep(0.2)
        return load(*args, **keys)

    monkeypatch.setattr(AutoModelForSequenceClassification, "from_pretrained", slow_load)

    async def run():
        reward = RewardModel(classifier)
        first = asyncio.create_task(reward.score_batch([Answer(Task("2+2?"), "4")]))
        while not loads:
            await asyncio.sleep(0.01)
        second = await reward.score_batch([Answer(Task("2+2?"), "4")])
        return await first, second

    first, second = asyncio.run(run())
    assert first == second and len(loads) == 1


def test_a_model_that_is_not_there():
    with pytest.raises(RewardFailed, match="cannot be loaded"):
        asyncio.run(RewardModel("/no/such/model").prepare())
