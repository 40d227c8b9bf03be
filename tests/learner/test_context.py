"""Ranks that share the tokens of their batches learn as one does."""

import dataclasses

import numpy as np
import pytest

from roost.config.job import ParallelSizes
from roost.config.train import AdapterSettings, ImportanceSamplingLevel, LossSettings
from roost.learner.forward import Head
from roost.learner.learner import Learner
from roost.learner.parallel.context import ContextGroup
from roost.learner.sample import pack
from tests.learner.random_samples import CPU, random_samples, settings_of, totals_of
from tests.learner.ranks import in_turn, learn_and_keep, on_ranks, weights

# The samples of four ranks in each step: once one rank has all, and lengths that do not divide.
SHARES = [
    [random_samples(12, 5, seed=1), random_samples(7, seed=2), random_samples(33, 2, seed=3), []],
    [random_samples(30, 30, 9, seed=4), [], [], []],
    [
        random_samples(6, seed=5),
        random_samples(31, 5, seed=6),
        random_samples(17, seed=7),
        random_samples(3, 40, seed=8),
    ],
]
TOTALS = [totals_of([sample for share in shares for sample in share]) for shares in SHARES]
BY_SEQUENCE = LossSettings(importance_sampling_level=ImportanceSamplingLevel.SEQUENCE, entropy_coef=0.01)
# Two ranks per group, and four with fewer KV heads than ranks; layers recomputed, sequences whose tokens lie on
# several ranks weighed as one, sliding windows, an adapter, a critic.
CASES = {
    "two of four": ("qwen2", 2, {"tie_word_embeddings": True}, {}, Head.POLICY),
    "four": ("qwen2", 4, {}, {"activation_checkpointing": True, "loss": BY_SEQUENCE}, Head.POLICY),
    "qwen3": ("qwen3", 2, {}, {"loss": BY_SEQUENCE}, Head.POLICY),
    "llama": ("llama", 2, {}, {"adapter": AdapterSettings(lora_rank=4)}, Head.POLICY),
    "critic": ("qwen2", 2, {}, {}, Head.VALUE),
}


@pytest.fixture(scope="module")
def settings(models):
    return {
        name: settings_of(models(family, **sizes), parallel=ParallelSizes(context=size), **changes)
        for name, (family, size, sizes, changes, _) in CASES.items()
    }


def shares_of(name):
    """Samples of each step and rank; a critic's have returns and values."""
    if CASES[name][-1] is Head.POLICY:
        return SHARES
    return [[[with_returns(sample) for sample in share] for share in shares] for shares in SHARES]


def with_returns(sample):
    values = np.linspace(0, 1, len(sample), dtype=np.float32)
    return dataclasses.replace(sample, returns=values, values=values / 2)


@pytest.fixture(scope="module")
def on_four(settings, tmp_path_factory):
    """Results of four ranks in each case: one start for all, as importing torch is slow."""
    folder = tmp_path_factory.mktemp("context")
    works = [
        (learn_and_keep, settings[name], shares_of(name), TOTALS, str(folder / name), case[-1])
        for name, case in CASES.items()
    ]
    found = on_ranks(4, in_turn, works)
    return {name: [rank[number] for rank in found] for number, name in enumerate(CASES)}


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_ranks_that_share_tokens_are_as_one(settings, on_four, name):
    head, shares = CASES[name][-1], shares_of(name)
    alone = Learner(dataclasses.replace(settings[name], parallel=ParallelSizes()), CPU, head)
    learnt = [
        alone.learn([sample for share in of_step for sample in share], total)
        for of_step, total in zip(shares, TOTALS, strict=True)
    ]
    for rank, found in enumerate(on_four[name]):
        for one, other in zip(found["learnt"], learnt, strict=True):
            assert one == pytest.approx(other, rel=1e-4, abs=1e-5)
        own = weights(alone)
        for key, weight in found["weights"].items():
            np.testing.assert_allclose(weight, own[key], rtol=0, atol=1e-5, err_msg=key)
        say = alone.score if head is Head.POLICY else alone.values
        for one, other in zip(found["said"], say(shares[0][rank]), strict=True):
            np.testing.assert_allclose(one, other, atol=1e-4)
        assert found["learnt again"] == pytest.approx(found["learnt"][-1])


def test_tokens_and_rows_are_cut_at_any_place():
    packed = pack(random_samples(5, 9, 3, seed=1))
    for size in (2, 3, 4, 7):
        parts = [ContextGroup(size, rank, None).cut(packed) for rank in range(size)]
        assert len({len(part.token_ids) for part, _ in parts}) == 1
        tokens = np.concatenate([part.token_ids for part, _ in parts])
        np.testing.assert_array_equal(tokens[: len(packed.token_ids)], packed.token_ids)
        share = len(parts[0][0].token_ids)
        rows = np.concatenate([part.rows + rank * share for rank, (part, _) in enumerate(parts)])
        np.testing.assert_array_equal(rows, packed.rows)
        np.testing.assert_array_equal(np.concatenate([part.targets for part, _ in parts]), packed.targets)
        assert [part.borders[-1] for part, _ in parts] == [size * share] * size
