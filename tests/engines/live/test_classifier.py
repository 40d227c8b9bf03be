"""A reward model that vLLM serves, beside the same model in transformers."""

import asyncio
import os

import pytest

pytest.importorskip("torch")

from transformers import AutoModelForSequenceClassification

from roost.engines.tiny_model import write_tiny_model
from roost.rollout.episode import Task
from roost.rollout.rewards.reward import Answer
from roost.rollout.rewards.reward_model import RewardModel
from tests.engines.live.conftest import SIZES, VLLM_PYTHON

ANSWERS = [Answer(Task("2+2?"), text) for text in ("4", "it is four", "no")]


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    folder = write_tiny_model(tmp_path_factory.mktemp("classifier") / "model", **SIZES)
    AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1).save_pretrained(folder)
    return str(folder)


async def scored(reward):
    try:
        await reward.prepare()
        return await reward.score_batch(ANSWERS)
    finally:
        await reward.close()


@pytest.mark.vllm
@pytest.mark.skipif(not os.environ.get(VLLM_PYTHON), reason=f"{VLLM_PYTHON} names no interpreter")
def test_vllm_scores_as_transformers_does(classifier):
    engine = {"kind": "vllm", "python": os.environ[VLLM_PYTHON], "dtype": "float32", "args": ["--enforce-eager"]}
    served = asyncio.run(scored(RewardModel(classifier, engine=engine)))
    here = asyncio.run(scored(RewardModel(classifier)))
    assert served == pytest.approx(here, abs=1e-3)
    assert len({round(one, 2) for one in here}) == len(ANSWERS)
