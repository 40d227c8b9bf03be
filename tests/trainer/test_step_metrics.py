import math
from dataclasses import replace

import numpy as np
import pytest

from roost.learner.advantages import Selection
from roost.rollout.episode import Part
from roost.trainer.batch import batch_of, with_scores
from roost.trainer.feed import Tally
from roost.trainer.metrics import (
    Learnt,
    group_metrics,
    learnt_metrics,
    length_metrics,
    memory_metrics,
    mismatch_metrics,
    optimizer_metrics,
    reward_metrics,
    time_metrics,
)
from tests.trainer.example_groups import example_episode, example_group

NONE_CUT = {"samples/cut": 0.0, "samples/down_sampled": 0.0}


def test_what_was_collected():
    groups = [example_group(0, [1.0, 0.0], versions=(4, 5)), example_group(1, [0.5, 0.5], versions=(5,))]
    tally = Tally(cancelled=3, failed=2, retried=1, lost_groups=1, equal_groups=4, discarded_groups=6)
    assert group_metrics(groups, version=5, tally=tally) == {
        "reward/mean": 0.5,
        "reward/std": pytest.approx(0.125**0.5),
        "reward/max": 1.0,
        "reward/min": 0.0,
        "reward/equal_groups": 0.5,
        "staleness/mean": pytest.approx(2 / 6),
        "staleness/max": 1.0,
        "tokens/generated": 6.0,
        "tokens/mean": 1.5,
        "samples/finished": 4.0,
        "samples/cancelled": 3.0,
        "samples/failed": 2.0,
        "samples/retried": 1.0,
        "groups/lost": 1.0,
        "groups/replaced": 4.0,
        "groups/discarded": 6.0,
        "episode/seconds": 1.0,
        "length/completion/p50": 1.5,
        "length/completion/p90": 2.0,
        "length/completion/p99": 2.0,
        "length/completion/max": 2.0,
        **{f"length/prompt/{name}": 2.0 for name in ("p50", "p90", "p99", "max")},
        "length/truncated": 0.0,
    }


def test_truncated_episodes_and_long_ones_are_seen():
    def episode(made, finish):
        tokens = example_episode(1.0, versions=(0,) * made).sequences[0]
        return replace(example_episode(1.0), sequences=(replace(tokens, parts=(Part(2, 2 + made, 0, finish),)),))

    found = length_metrics([*(episode(10, "stop") for _ in range(97)), *(episode(1000, "length") for _ in range(3))])
    assert found["length/truncated"] == 0.03
    assert (found["length/completion/p50"], found["length/completion/p99"], found["length/completion/max"]) == (
        10.0,
        1000.0,
        1000.0,
    )
    assert found["length/prompt/max"] == 2.0


def test_memory_is_that_of_the_rank_with_the_most():
    ranks = [{"allocated": 1.0 * 2**30, "peak": 3.0 * 2**30}, {"allocated": 2.0 * 2**30, "peak": 2.0 * 2**30}]
    assert memory_metrics("actor", ranks) == {"memory/actor/allocated": 2.0, "memory/actor/peak": 3.0}


def test_what_each_reward_gave():
    first, second = example_group(0, [1.0, 0.0]), example_group(1, [0.5])
    given = [{"exact": 1.0}, {"exact": 0.0, "scenario": 3.0}]
    episodes = [
        replace(episode, score=replace(episode.score, parts=parts))
        for episode, parts in zip(first.episodes, given, strict=True)
    ]
    assert reward_metrics([replace(first, episodes=tuple(episodes)), second], ["exact", "polite"]) == {
        "reward/exact/mean": 0.5,
        "reward/exact/scored": 2.0,
        "reward/polite/scored": 0.0,
        "reward/scenario/mean": 3.0,
        "reward/scenario/scored": 1.0,
    }
    assert reward_metrics([second]) == {}


def test_nothing_collected_is_told_without_an_error():
    found = group_metrics([], version=5, tally=Tally())
    assert math.isnan(found["reward/mean"])
    assert all(value == 0.0 for name, value in found.items() if not name.startswith("reward/"))


@pytest.mark.parametrize(
    ("described", "expected"),
    [
        pytest.param([], {}, id="no optimizer step"),
        pytest.param(
            [{"loss": 1.0, "policy_loss": 3.0, "lr": 0.1}, {"loss": 2.0, "policy_loss": 5.0, "lr": 0.3}],
            {"loss/total": 1.5, "loss/policy": 4.0, "learning_rate": pytest.approx(0.2)},
            id="the mean over steps",
        ),
        pytest.param([{"skipped": 1.0}, {"skipped": 0.0}, {"skipped": 1.0}], {"steps/skipped": 2.0}, id="skipped"),
        pytest.param([{"max/ratio": 1.5}, {"max/ratio": 4.0}], {"loss/ratio_max": 4.0}, id="the largest maximum"),
        pytest.param([{"tokens": 9.0, "sequences": 2.0, "entropy": 2.0}], {"entropy": 2.0}, id="sizes are not told"),
        pytest.param([{"kl": 2.0}, {"loss": 4.0}], {"loss/kl": 2.0, "loss/total": 4.0}, id="not in every step"),
        pytest.param([{"critic/loss": 4.0, "clipped": 0.5}], {"critic/loss": 4.0, "loss/clipped": 0.5}, id="rooms"),
    ],
)
def test_what_was_learnt(described, expected):
    assert optimizer_metrics(described) == expected


def test_the_parts_of_a_step_are_told_together():
    samples = batch_of([example_group(0, [1.0, 0.0])]).samples
    some = Selection(np.arange(5), too_small=2, not_positive=1)
    none = Selection(np.arange(0), too_small=4, not_positive=0)
    parts = [Learnt(samples, some, 1, [{"loss": 1.0}, {"loss": 2.0}]), Learnt(samples, none, 2, [])]
    counts = {"samples/learnt": 5.0, "samples/left_out": 7.0, "samples/alone": 3.0} | NONE_CUT
    assert learnt_metrics(parts) == {"loss/total": 1.5, **counts}
    apart = with_scores(batch_of([example_group(0, [1.0])]), old=[np.zeros(len(samples[0]), np.float32)]).samples
    described = learnt_metrics([Learnt(apart, some, 0, [])], are_same_weights=False)
    assert {name.split("/")[0] for name in described} == {"samples", "drift"}, (
        "engines are not blamed for older weights"
    )
    assert learnt_metrics([]) == {"samples/learnt": 0.0, "samples/left_out": 0.0, "samples/alone": 0.0} | NONE_CUT


def test_mismatch_is_of_the_tokens_that_both_know():
    batch = batch_of([example_group(0, [1.0, 0.0], versions=(0, 0))])
    assert mismatch_metrics(batch.samples) == {}
    same = with_scores(batch, old=[sample.logprobs for sample in batch.samples])
    wrong_prompt = with_scores(batch, old=[_with_prompt(sample.logprobs, 99.0) for sample in batch.samples])
    assert mismatch_metrics(same.samples) == mismatch_metrics(wrong_prompt.samples)
    other = [replace(same.samples[0], old_logprobs=same.samples[0].logprobs + 0.5), batch.samples[1]]
    assert mismatch_metrics(other) != mismatch_metrics(same.samples)
    assert all(name.startswith("mismatch/") for name in mismatch_metrics(other))
    unknown = replace(same.samples[1], logprobs=np.full_like(same.samples[1].logprobs, np.nan))
    assert mismatch_metrics([other[0], unknown]) == mismatch_metrics(other), "its log-probs were not requested"
    assert mismatch_metrics([unknown]) == {}


def _with_prompt(logprobs, value):
    return np.concatenate([np.full(2, value, np.float32), logprobs[2:]])


@pytest.mark.parametrize(
    ("seconds", "whole", "expected"),
    [
        pytest.param(
            {"learn": 2.0, "generate": 1.0, "evaluate": 9.0},
            4.0,
            {"time/step": 4.0, "time/generate": 1.0, "time/learn": 2.0, "tokens/per_second": 25.0},
            id="phases of a step",
        ),
        pytest.param({}, 0.0, {"time/step": 0.0, "tokens/per_second": 0.0}, id="no time at all"),
    ],
)
def test_where_the_time_went(seconds, whole, expected):
    assert time_metrics(seconds, whole, tokens=100.0) == expected
