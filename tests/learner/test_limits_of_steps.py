"""Optimizer steps that are not taken: ratio and KL beyond their limits, and gradients that are outliers."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from roost.config.train import LossAggregation, LossSettings, LrSchedulerType, OldLogprobs, OptimizerSettings
from roost.learner.learner import GradientNorms
from roost.learner.losses import PolicyBatch, Totals, policy_loss
from tests.learner.random_samples import assert_equal, random_samples, totals_of, trained

BATCHES = [random_samples(12, 9, seed=1), random_samples(20, 5, seed=2), random_samples(7, 30, seed=3)]


def loss_of(log_ratios, sequence, engine=0.0, **settings):
    """The statistics of a minibatch with these log-ratios, log-probs of the engine, and advantage -1."""
    new = torch.tensor(log_ratios, dtype=torch.float64).requires_grad_()
    old, places = torch.zeros_like(new).detach(), torch.tensor(sequence)
    batch = PolicyBatch(new, old, old + torch.tensor(engine), -torch.ones_like(old), places, places)
    loss, described = policy_loss(batch, LossSettings(**settings), Totals(len(set(sequence)), len(sequence), 4))
    loss.backward()
    return {name: float(value) for name, value in described.items()}, new.grad.tolist()


@pytest.mark.parametrize(
    ("settings", "clamped"),
    [
        ({"log_ratio_clip_high": 1.0}, [1.0, -3.0, 0.5]),
        ({"log_ratio_clip": 2.0}, [3.0, -2.0, 0.5]),
        ({"log_ratio_clip": 0.0, "log_ratio_clip_high": 0.0}, [0.0, 0.0, 0.0]),
    ],
    ids=["high", "low", "both"],
)
def test_log_ratios_are_clamped_before_they_are_exponentiated(settings, clamped):
    written = [3.0, -3.0, 0.5]
    described, gradient = loss_of(written, [0, 0, 0], **settings)
    assert described["ratio"] == pytest.approx(sum(math.exp(each) for each in clamped) / 3)
    for here, was, slope in zip(clamped, written, gradient, strict=True):
        moves = here == was and math.exp(here) > 0.8  # below the clip range a negative advantage has no gradient
        assert slope == pytest.approx(math.exp(here) / 3 if moves else 0.0)


@pytest.mark.parametrize("aggregation", list(LossAggregation))
def test_mean_ratio_is_over_tokens_and_kl_over_samples(aggregation):
    described, _ = loss_of(
        [0.3, -0.2, 0.9], [0, 0, 1], loss_aggregation=aggregation, max_mean_ratio=1.0, early_stop_kl=1.0
    )
    assert described["mean_ratio"] == pytest.approx(np.exp([0.3, -0.2, 0.9]).mean())
    assert described["sequence_kl"] == pytest.approx(-np.mean([0.3 - 0.2, 0.9])), "of sums over the tokens of a sample"


def test_rejected_tokens_do_not_count_in_the_limits():
    described, _ = loss_of(
        [0.3, 9.0, -0.2],
        [0, 0, 1],
        engine=[0.0, -9.0, 0.0],
        rollout_rejection={"token": [0.5, 2.0]},
        max_mean_ratio=1.0,
        early_stop_kl=1.0,
    )
    assert described["mean_ratio"] == pytest.approx((np.exp(0.3) + 1 + np.exp(-0.2)) / 3)
    assert described["sequence_kl"] == pytest.approx(-np.mean([0.3, -0.2]))


@pytest.mark.parametrize(
    ("limit", "name", "figure"),
    [("max_mean_ratio", "mean_ratio", "steps/over_ratio"), ("early_stop_kl", "sequence_kl", "steps/over_kl")],
)
def test_a_minibatch_beyond_a_limit_takes_no_step(learner, limit, name, figure):
    samples = BATCHES[0]
    free = learner(loss=LossSettings(**{limit: 1e9}))
    expected, described = trained(free, samples)
    value = abs(described[name])
    assert (described[figure], free.step) == (0, 1)
    assert_equal(expected, trained(learner(), samples)[0])
    held = learner(loss=LossSettings(**{limit: value / 2}))
    before = {each: weight.clone() for each, weight in held.weights()}
    weights, described = trained(held, samples)
    assert (described[figure], described["skipped"], held.step, held.skipped) == (1, 0, 0, 0)
    assert_equal(weights, before)


@pytest.mark.parametrize("rejects", [True, False])
def test_a_minibatch_of_which_every_token_is_rejected_takes_no_step(learner, rejects):
    """With the ratio to the engine this is known only after the forward pass."""
    rules = {"token": [1e20, 2e20] if rejects else [0.0, 2e20]}
    one = learner(loss=LossSettings(old_logprobs=OldLogprobs.ROLLOUT, rollout_rejection=rules))
    before = {each: weight.clone() for each, weight in one.weights()}
    weights, described = trained(one, BATCHES[0])
    assert (described["steps/rejected"], one.step) == (rejects, not rejects)
    assert described["rejected"] == pytest.approx(float(rejects)) and "kept" not in described
    if rejects:
        assert_equal(weights, before)


def test_what_is_an_outlier_among_norms():
    """By the mean and the population's standard deviation of the norms before, from the fourth on."""
    norms, seen = GradientNorms(), []
    for norm in (2.0, 9.0, 0.0, 2.4, 1.6, 2.2):
        is_far = len(seen) > 2 and norm > np.mean(seen) + 5 * np.std(seen)
        assert norms.is_outlier(norm, 0.0) == is_far
        norms.add(norm)
        seen += [norm] if norm > 0 else []
    count, mean, squares = norms.state.tolist()
    assert (count, mean, squares / count) == pytest.approx((5, np.mean(seen), np.var(seen)))
    edge = np.mean(seen) + 5 * np.std(seen)
    assert not norms.is_outlier(edge - 1e-6, 0.0)
    assert norms.is_outlier(edge + 1e-6, 0.0)
    assert norms.is_outlier(3.0, 2.5), "above the limit of the norm"


SKIPPING = OptimizerSettings(learning_rate=1e-3, adam_epsilon=1e-4, max_grad_norm=0.0, skip_outlier_gradients=True)


def spiked(samples, times=1e4):
    return [dataclasses.replace(sample, advantages=sample.advantages * np.float32(times)) for sample in samples]


def test_an_outlier_is_skipped_and_not_counted_among_the_norms(learner):
    one, plain = learner(optimizer=SKIPPING), learner(optimizer=SKIPPING)
    for samples in BATCHES:
        assert one.learn(samples, totals_of(samples))["steps/outlier"] == 0
    described = one.learn(spiked(BATCHES[0]), totals_of(BATCHES[0]))
    assert (described["steps/outlier"], described["skipped"], one.step) == (1, 0, 3)
    assert_equal(trained(one, BATCHES[1])[0], trained(plain, *BATCHES, BATCHES[1])[0])


def test_a_norm_above_its_limit_is_an_outlier_from_the_start(learner):
    one = learner(optimizer=dataclasses.replace(SKIPPING, max_grad_norm=1e-6))
    assert one.learn(BATCHES[0], totals_of(BATCHES[0]))["steps/outlier"] == 1
    assert one.step == 0


def test_the_rate_follows_the_given_position_of_the_schedule(learner):
    falling = dataclasses.replace(SKIPPING, lr_scheduler_type=LrSchedulerType.LINEAR, total_steps=4)
    one = learner(optimizer=falling)
    rates = [one.learn(BATCHES[0], totals_of(BATCHES[0]), position)["lr"] for position in (None, 1, 3)]
    assert rates == pytest.approx([1e-3, 0.75e-3, 0.25e-3])
    assert one.step == 3


def test_a_restored_run_skips_the_same_gradients(learner, tmp_path):
    first = learner(optimizer=SKIPPING)
    for samples in BATCHES:
        first.learn(samples, totals_of(samples))
    first.save(tmp_path / "step")
    first.wait_saved()
    second = learner(optimizer=SKIPPING)
    second.restore(tmp_path / "step")
    assert torch.equal(second._norms.state, first._norms.state)
    last = spiked(BATCHES[0]), BATCHES[1]
    (expected, described), (weights, told_too) = trained(first, *last), trained(second, *last)
    assert told_too == described
    assert second.step == first.step == 4
    assert_equal(weights, expected)


def test_a_run_may_begin_to_skip_outliers(learner, tmp_path):
    first = learner(optimizer=dataclasses.replace(SKIPPING, skip_outlier_gradients=False))
    first.learn(BATCHES[0], totals_of(BATCHES[0]))
    first.save(tmp_path / "step")
    first.wait_saved()
    second = learner(optimizer=SKIPPING)
    second.restore(tmp_path / "step")
    assert second.step == 1
    assert second._norms.state.tolist() == [0, 0, 0]
