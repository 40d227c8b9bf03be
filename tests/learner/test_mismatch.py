"""Mismatch of engine and learner, against numbers worked by hand."""

import math

import numpy as np
import pytest

from roost.trainer.metrics import mismatch


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
