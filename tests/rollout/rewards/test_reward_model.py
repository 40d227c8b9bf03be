"""A sequence classifier as a reward, on the CPU."""

import asyncio

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


def test_a_model_that_is_not_there():
    with pytest.raises(RewardFailed, match="cannot be loaded"):
        asyncio.run(RewardModel("/no/such/model").prepare())
