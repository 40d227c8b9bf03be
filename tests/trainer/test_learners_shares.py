from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from roost.config.job import MeshSizes, ParallelSizes
from roost.config.train import ImportanceSamplingLevel, LossSettings
from roost.learner.sample import Sample
from roost.trainer.batch import batch_of
from roost.trainer.learners import Learners, shares, totals_of
from tests.rollout.script import ran
from tests.trainer.example_groups import example_episode, example_group

SIZES = st.integers(1, 3)
MESHES = st.builds(MeshSizes, replicate=SIZES, shard=SIZES, context=SIZES, tensor=SIZES)


@given(st.lists(st.integers(1, 100), max_size=30), MESHES)
def test_every_sample_goes_to_one_rank_and_all_groups_have_about_as_many_tokens(lengths, mesh):
    parts = shares(lengths, mesh)
    assert len(parts) == mesh.data * mesh.model
    assert sorted(index for part in parts for index in part) == list(range(len(lengths)))
    assert all(part == sorted(part) for part in parts)
    filled = [sum(lengths[index] for index in part) for part in parts]
    groups = [filled[start : start + mesh.model] for start in range(0, len(filled), mesh.model)]
    for each in (*groups, [sum(group) for group in groups]):
        assert max(each) - min(each) <= max(lengths, default=0)


def test_the_size_of_a_minibatch_is_that_of_what_the_policy_made():
    episodes = [example_episode(0.0, versions) for versions in ((0, 0, 0), (0,), ())]
    group = example_group(0, [])
    samples = batch_of([type(group)(0, group.task, 0, tuple(episodes))]).samples
    totals = totals_of(samples, longest=50)
    assert (totals.sequences, totals.tokens, totals.longest) == (2, 4, 50)


def test_rejected_tokens_are_counted_where_the_learners_log_probs_are_known():
    """Of two samples the engine and the learner agree on the second alone."""
    zeros = np.zeros(3, np.float32)
    turns, ids = np.array([-1, 0, 0]), np.arange(3)
    old = [np.log([1.0, 0.9, 0.1]).astype(np.float32), np.log([1.0, 0.5, 0.5]).astype(np.float32)]
    samples = [Sample(ids, turns, np.full(3, np.log(0.5), np.float32), zeros, old_logprobs=each) for each in old]
    rule = LossSettings(rollout_rejection={"token": [0.5, 1.5]})
    found = totals_of(samples, 9, rule)
    assert (found.tokens, found.kept.sequences, found.kept.tokens) == (4, 1, 2)
    assert totals_of([replace(each, old_logprobs=None) for each in samples], 9, rule).kept.tokens == 4
    weighted = LossSettings(rollout_is=ImportanceSamplingLevel.TRAJECTORY, rollout_is_batch_normalize=True)
    assert totals_of(samples, 9, weighted).mean_weight == pytest.approx((0.36 + 1) / 2)


class Ranks:
    """A group of workers, each of which answers with the first token of an answer that it was asked about."""

    def __init__(self, count):
        self.world_size = count
        self.asked = {}

    def execute_on(self, rank):
        group = self

        class Selected:
            async def score(self, samples, as_reference):
                group.asked[rank] = (len(samples), as_reference)
                return ([sample.token_ids[2:3] for sample in samples],)

            async def learn(self, samples, totals, position):
                group.asked[rank] = (len(samples), totals.tokens, position)
                return ({"loss": float(rank)},)

        return Selected()


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_what_ranks_answer_comes_back_in_the_order_of_the_samples(ranks):
    samples = batch_of([example_group(0, [0.0] * 3, versions=(0,) * 5), example_group(1, [0.0, 1.0])]).samples
    group = Ranks(ranks)
    found = ran(Learners(group, ParallelSizes(), None, None).score(samples, True))
    assert [int(array[0]) for array in found] == [int(sample.token_ids[2]) for sample in samples]
    assert sorted(group.asked) == list(range(ranks)), "a rank without samples is called too: the others wait for it"
    assert {as_reference for _, as_reference in group.asked.values()} == {True}


def test_all_ranks_learn_with_the_size_of_the_whole():
    samples = batch_of([example_group(0, [0.0] * 5, versions=(0, 0))]).samples
    group = Ranks(2)
    described = ran(Learners(group, ParallelSizes(), None, None).learn(samples, totals_of(samples, 9), 7))
    assert sum(count for count, *_ in group.asked.values()) == 5
    assert {described[1:] for described in group.asked.values()} == {(10, 7)}
    assert described == {"loss": 0.0}


def test_no_group_of_ranks_idles_while_another_has_two_samples():
    samples = batch_of([example_group(0, [0.0] * 4)]).samples
    group = Ranks(8)
    ran(Learners(group, ParallelSizes(context=2), None, None).score(samples))
    counts = [count for _, (count, _) in sorted(group.asked.items())]
    assert [first + second for first, second in zip(counts[::2], counts[1::2], strict=True)] == [1, 1, 1, 1]
