"""How far engine and learner are apart, against numbers worked by hand."""

import math

import numpy as np
import pytest

from roost.learner.mismatch import mismatch


def test_what_is_told():
    engine, learner = np.log([0.5, 0.25, 0.5, 0.5]), np.log([0.25, 0.5, 0.5, 0.5])
    half, double = 0.5 - math.log(0.5) - 1, 2.0 - math.log(2.0) - 1  # of KL(engine || learner): by learner / engine
    assert mismatch(engine.astype(np.float32), learner.astype(np.float32)) == pytest.approx(
        {
            "logprob_mean": math.log(2) / 2,
            "logprob_max": math.log(2),
            "logprob_p99": math.log(2),
            "probability_mean": 0.125,
            "kl_k3": (half + double) / 4,
        },
        abs=1e-6,
    )


def test_the_99th_percentile_leaves_one_in_a_hundred_out():
    engine = np.zeros(201)
    engine[7] = -5.0
    found = mismatch(engine, np.zeros(201))
    assert (found["logprob_p99"], found["logprob_max"]) == (0.0, 5.0)


@pytest.mark.parametrize("far", [1e4, -1e4])
def test_huge_differences_stay_finite(far):
    assert all(math.isfinite(value) for value in mismatch(np.array([-1.0]), np.array([-1.0 - abs(far)])).values())
    assert all(math.isfinite(value) for value in mismatch(np.array([-1.0 - abs(far)]), np.array([-1.0])).values())


def test_of_no_tokens_nothing_is_told():
    assert mismatch(np.array([]), np.array([])) == {}


def test_uneven_counts_are_refused():
    with pytest.raises(ValueError, match="2 log-probabilities of the engine, but 1 of the learner"):
        mismatch(np.zeros(2), np.zeros(1))
