"""Mismatch of engine and learner, against numbers worked by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest

from roost.config.train import LossSettings, OldLogprobs
from roost.learner.advantages import Selection
from roost.trainer.metrics import Learnt, compared_tokens, mismatch, mismatch_by_place, mismatch_metrics, ratio_metrics
from tests.learner.random_samples import random_samples, totals_of


def test_what_is_told():
    engine, learner = np.log([0.5, 0.5, 0.5, 0.5]), np.log([0.25, 0.25, 0.5, 0.5])
    assert mismatch(engine.astype(np.float32), learner.astype(np.float32)) == pytest.approx(
        {
            "logprob_mean": math.log(2) / 2,
            "logprob_max": math.log(2),
            "logprob_p99": math.log(2),
            "probability_mean": 0.125,
            "kl_k3": (0.5 - math.log(0.5) - 1) / 2,  # of KL(engine || learner): by learner / engine, here 1/2
            "chi2": (0.25 + 1) / 2 - 1,
            "ess": 0.75**2 / 0.625,
        },
        abs=1e-6,
    )


@pytest.mark.parametrize(("apart", "expected"), [(1, 0.0), (4, 5.0)])
def test_the_99th_percentile_leaves_one_in_a_hundred_out(apart, expected):
    engine = np.zeros(201)
    engine[:apart] = -5.0
    found = mismatch(engine, np.zeros(201))
    assert (found["logprob_p99"], found["logprob_max"]) == (expected, 5.0)


@pytest.mark.parametrize(("engine", "learner"), [(-1.0, -1e4), (-1e4, -1.0)], ids=["learner below", "engine below"])
def test_huge_differences_stay_finite(engine, learner):
    assert all(math.isfinite(value) for value in mismatch(np.array([engine]), np.array([learner])).values())


def test_of_no_tokens_nothing_is_told():
    assert mismatch(np.array([]), np.array([])) == {}


def test_uneven_counts_are_refused():
    with pytest.raises(ValueError, match="2 log-probabilities of the engine, but 1 of the learner"):
        mismatch(np.zeros(2), np.zeros(1))


def test_the_ratios_of_the_loss_tell_what_recomputed_log_probs_do(learner):
    one = learner(loss=LossSettings(old_logprobs=OldLogprobs.ROLLOUT))
    samples = random_samples(40, 20, 9, 31)
    old = one.score(samples)
    found = ratio_metrics([one.learn(samples, totals_of(samples))])
    scored = [replace(sample, old_logprobs=each) for sample, each in zip(samples, old, strict=True)]
    places = mismatch_by_place(compared_tokens([Learnt(scored, Selection(np.arange(4), 0, 0), 0, [])]))
    wanted = mismatch_metrics(scored) | {f"mismatch/{name}": value for name, value in places.items()}
    names = ("chi2", "ess", "chi2_sequence", "ess_sequence", "logprob_mean", "position/0", "position/16")
    assert found == pytest.approx({f"mismatch/{name}": wanted[f"mismatch/{name}"] for name in names}, rel=1e-4)
