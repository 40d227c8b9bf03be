import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from roost.config.train import LossAggregation, LossSettings, RewardScope
from roost.learner.advantages import Selection
from roost.learner.losses import Totals, ValueBatch, value_loss
from roost.rollout.episode import Part, Task
from roost.trainer.batch import batch_of, with_scores
from roost.trainer.feed import Tally
from roost.trainer.metrics import (
    Learnt,
    compared_tokens,
    group_metrics,
    largest_ratios,
    learnt_metrics,
    length_metrics,
    memory_metrics,
    mismatch_metrics,
    optimizer_metrics,
    pass_metrics,
    reward_metrics,
    time_metrics,
)
from tests.trainer.example_groups import example_episode, example_group

NONE_CUT = {"samples/cut": 0.0, "samples/down_sampled": 0.0}


def test_what_was_collected():
    groups = [example_group(0, [1.0, 0.0], versions=(4, 5)), example_group(1, [0.5, 0.5], versions=(5,))]
    tally = Tally(cancelled=3, failed=2, retried=1, lost_groups=1, discarded_groups=6)
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
        "groups/replaced": 0.0,
        "groups/discarded": 6.0,
        "episode/seconds": 1.0,
        "length/completion/p50": 1.5,
        "length/completion/p90": 2.0,
        "length/completion/p99": 2.0,
        "length/completion/max": 2.0,
        **{f"length/prompt/{name}": 2.0 for name in ("p50", "p90", "p99", "max")},
        "length/truncated": 0.0,
        "pass_rate/mean": 0.25,
        "groups/solve_none": 0.5,
        "groups/solve_all": 0.0,
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
    assert reward_metrics([replace(first, episodes=tuple(episodes)), second], {"exact": {}, "polite": {}}) == {
        "reward/exact/mean": 0.5,
        "reward/exact/std": 0.5,
        "reward/exact/scored": 2.0,
        "reward/polite/scored": 0.0,
        "reward/scenario/mean": 3.0,
        "reward/scenario/std": 0.0,
        "reward/scenario/scored": 1.0,
    }
    assert reward_metrics([second]) == {}


def parted(group, parts):
    """The group, with these parts of its episodes' rewards."""
    scores = [replace(one.score, parts=part) for one, part in zip(group.episodes, parts, strict=True)]
    return replace(
        group,
        episodes=tuple(replace(one, score=score) for one, score in zip(group.episodes, scores, strict=True)),
    )


def test_the_share_of_each_reward_is_that_of_the_variance_within_groups():
    rewards = {"format": {"weight": 4.0}, "right": {}}
    group = parted(example_group(0, [5.0, 0.0]), [{"format": 1.0, "right": 1.0}, {"format": 0.0, "right": 0.0}])
    easier = parted(example_group(1, [1.0, 1.0]), [{"format": 0.0, "right": 1.0}] * 2)  # no variance within
    found = reward_metrics([group, easier], rewards)
    assert (found["reward/format/share"], found["reward/right/share"]) == (pytest.approx(0.8), pytest.approx(0.2))
    assert (found["reward/format/weight"], found["reward/right/weight"]) == (4.0, 1.0)
    assert not any(name.endswith("/share") for name in reward_metrics([easier], rewards)), "nothing is compared"


def test_replaced_groups_count_among_those_that_were_generated():
    tally = Tally()
    for number, reward in enumerate((1.0, 0.0, 0.0), 1):
        tally.add_equal(example_group(number, [reward, reward], versions=(5, 5, 5)))
    found = group_metrics([example_group(0, [1.0, 0.0], versions=(4, 5))], version=5, tally=tally)
    expected = {
        "reward/equal_groups": 0.75,
        "groups/solve_none": 0.5,
        "groups/solve_all": 0.25,
        "pass_rate/mean": 3 / 8,
        "tokens/generated": 22.0,
        "groups/replaced": 3.0,
        "reward/mean": 0.5,
        "tokens/mean": 2.0,
        "samples/finished": 2.0,
        "staleness/mean": 0.5,
    }
    assert {name: found[name] for name in expected} == expected
    assert not any(episode.sequences for group in tally.equal_groups for episode in group.episodes)


def test_groups_of_one_are_not_equal_groups():
    alone, equal, other = (example_group(0, rewards) for rewards in ([1.0], [1.0, 1.0], [1.0, 0.0]))

    def share(*groups, among=RewardScope.GROUP):
        return group_metrics(groups, 0, Tally(), among).get("reward/equal_groups")

    assert share(alone, equal, other) == 0.5
    assert share(alone, alone) is None
    assert share(equal, other, among=RewardScope.BATCH) is None, "a critic learns from them all the same"


def test_where_no_groups_are_compared_shares_are_of_the_variance_of_all_samples():
    rewards = {"format": {"weight": 4.0}, "right": {}}
    groups = [
        parted(example_group(number, [value]), [{"format": part, "right": part}])
        for number, (value, part) in enumerate([(5.0, 1.0), (0.0, 0.0)])
    ]
    shares = {name: 0.8 if "format" in name else 0.2 for name in ("reward/format/share", "reward/right/share")}
    found = {among: reward_metrics(groups, rewards, among) for among in (RewardScope.GROUP, RewardScope.BATCH)}
    assert {name: found[RewardScope.BATCH][name] for name in shares} == pytest.approx(shares)
    assert not shares.keys() & found[RewardScope.GROUP].keys()
    assert not shares.keys() & reward_metrics(groups, rewards, RewardScope.NONE).keys(), "rewards do not count"


def test_pass_rates_by_tag_and_by_difficulty():
    tasks = [Task("a", {"level": 3}, "math"), Task("b", {"row_tag": "code", "difficulty": "hard"}, "other"), Task("c")]
    groups = [
        replace(example_group(number, rewards), task=task)
        for number, (task, rewards) in enumerate(zip(tasks, ([1.0, 1.0], [1.0, 0.5], [0.0, 0.0]), strict=True))
    ]
    assert pass_metrics(groups) == {
        "pass_rate/mean": 0.5,
        "groups/solve_none": pytest.approx(1 / 3),
        "groups/solve_all": pytest.approx(1 / 3),
        "pass_rate/tag/math": 1.0,
        "pass_rate/tag/code": 0.5,
        "pass_rate/difficulty/3": 1.0,
        "pass_rate/difficulty/hard": 0.5,
    }
    assert pass_metrics([]) == {}


def learnt_at(versions, apart, number=0):
    """A part of a step, whose learner's log-probs are this much above the engine's."""
    batch = batch_of([example_group(number, [1.0], versions=versions)])
    old = [sample.logprobs + np.concatenate([[0, 0], apart]).astype(np.float32) for sample in batch.samples]
    scored = with_scores(batch, old=old)
    return Learnt(scored.samples, Selection(np.arange(1), 0, 0), 0, [], sources=scored.sources)


def test_mismatch_by_position_and_by_staleness():
    early, late = [0.1] * 16, [0.5, 0.7]
    part = learnt_at((3,) * 16 + (4, 4), early + late)
    found = learnt_metrics([part], are_same_weights=False, version=4)
    assert {name: found[name] for name in found if name.startswith(("drift/position", "drift/staleness"))} == {
        "drift/position/0": pytest.approx(0.1, rel=1e-3),
        "drift/position/16": pytest.approx(0.6, rel=1e-3),
        "drift/staleness/0": pytest.approx(0.6, rel=1e-3),
        "drift/staleness/1": pytest.approx(0.1, rel=1e-3),
    }
    fresh = learnt_metrics([learnt_at((4, 4), [0.1, 0.1])], version=4)
    assert not any("/staleness/" in name for name in fresh), "all tokens have the same"


def test_tokens_with_the_largest_ratio_are_named():
    parts = [learnt_at((0, 0, 1), [0.1, -2.0, 0.3], number=0), learnt_at((1, 1), [0.0, 0.5], number=1)]
    first, second = largest_ratios(compared_tokens(parts, version=1))
    assert first.ratio == pytest.approx(np.exp(-2.0)) and (first.position, first.staleness, first.group) == (1, 1, 0)
    assert (first.token_id, first.before) == (101, (1, 2, 100))
    assert (second.position, second.group) == (1, 1)
    assert largest_ratios(compared_tokens([learnt_at((0,), [0.0])])) == [], "they agree about every token"


def test_the_spread_of_gradient_norms_is_over_minibatches():
    assert optimizer_metrics([{"grad/norm": 1.0}, {"grad/norm": 3.0}]) == {
        "grad/norm": 2.0,
        "grad/norm_spread": pytest.approx(2**0.5 / 2),
    }
    assert "grad/norm_spread" not in optimizer_metrics([{"grad/norm": 1.0}])


@pytest.mark.parametrize(
    ("minibatches", "expected"),
    [
        pytest.param([([1.0, 2.0, 3.0, 6.0], [0.0, 2.0, 4.0, 4.0])], 1 - 1.25 / 3.5, id="one minibatch"),
        pytest.param([([1.0, 2.0], [0.0, 2.0]), ([3.0, 6.0], [4.0, 4.0])], 1 - 1.25 / 3.5, id="two"),
        pytest.param([([1.0, 3.0], [6.0, 8.0])], 1.0, id="off by a constant"),
        pytest.param([([1.0, 3.0], [2.0, 2.0])], 0.0, id="a constant"),
        pytest.param([([0.7, 0.7, 0.7], [0.0, 1.0, 2.0])], None, id="equal returns"),
    ],
)
def test_the_variance_that_the_critic_explains_is_of_the_whole_step(minibatches, expected):
    settings = LossSettings(value_clip=None, loss_aggregation=LossAggregation.TOKEN_MEAN)
    steps = []
    for returns, values in minibatches:
        each, count = torch.tensor(values), len(values)
        of_critic = ValueBatch(each, each, torch.tensor(returns), torch.zeros(count, dtype=torch.int64))
        _, stats = value_loss(of_critic, settings, Totals(sequences=1, tokens=count, longest=count))
        steps.append(
            {f"critic/{name}": value.item() for name, value in {**stats, "tokens": torch.tensor(count)}.items()}
        )
    found = optimizer_metrics(steps, settings).get("critic/explained_variance")
    assert found == (None if expected is None else pytest.approx(expected, abs=1e-6))


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


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        pytest.param(
            {}, {"loss/total": 0.2, "entropy": 0.2, "loss/sequence_kl": 0.2, "critic/value": 0.5}, id="samples"
        ),
        pytest.param(
            {"loss_aggregation": LossAggregation.TOKEN_MEAN},
            {"loss/total": 0.1, "entropy": 0.1, "loss/sequence_kl": 0.2, "critic/value": 0.25},
            id="tokens",
        ),
        pytest.param(
            {"loss_aggregation": LossAggregation.SEQ_SUM, "value_loss_aggregation": LossAggregation.SEQ_MEAN},
            {"loss/total": 0.2, "entropy": 0.1, "loss/sequence_kl": 0.2, "critic/value": 0.5},
            id="a sum over samples",
        ),
    ],
)
def test_means_over_minibatches_are_weighted_as_the_loss(loss, expected):
    sizes = ({"tokens": 90.0, "sequences": 4.0}, {"tokens": 10.0, "sequences": 1.0})
    of_critic = ({"critic/tokens": 75.0, "critic/sequences": 2.0}, {"critic/tokens": 25.0, "critic/sequences": 2.0})
    names = ("loss", "entropy", "sequence_kl", "grad/norm", "lr", "critic/value")
    steps = [
        {**size, **critic, **dict.fromkeys(names, value)}
        for size, critic, value in zip(sizes, of_critic, (0.0, 1.0), strict=True)
    ]
    found = optimizer_metrics(steps, LossSettings(**loss))
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert (found["grad/norm"], found["learning_rate"]) == (0.5, 0.5)


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
