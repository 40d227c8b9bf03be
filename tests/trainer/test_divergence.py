"""When training is over because its numbers are not finite, and what is said of it."""

import contextlib
import math

import pytest

from roost.config.train import LearnerSettings, OptimizerSettings, TrainSettings
from roost.trainer.guards import (
    MAX_OUTLIERS,
    Diverged,
    SkippedSteps,
    check_policy,
    check_skipped,
    explained,
    likely_cause,
)


def settings_of(weight_dtype="float32", **optimizer):
    return TrainSettings(LearnerSettings("model", weight_dtype, optimizer=OptimizerSettings(**optimizer)))


@pytest.mark.parametrize(
    ("settings", "metrics", "cause"),
    [
        pytest.param(settings_of(learning_rate=1e10), {}, "learning_rate is 1e+10", id="rate"),
        pytest.param(settings_of(learning_rate=1e10), {"reward/mean": math.nan}, "rewards that are not", id="reward"),
        pytest.param(settings_of("float16"), {}, "float16 overflows", id="float16"),
        pytest.param(settings_of(max_grad_norm=0.0), {}, "gradients are not clipped", id="not clipped"),
        pytest.param(settings_of(), {"reward/mean": 0.5}, "learning_rate (1e-06) is too high", id="unknown"),
    ],
)
def test_the_likely_cause(settings, metrics, cause):
    assert cause in likely_cause(settings, metrics)
    error = explained(Diverged("3 optimizer steps skipped"), settings, 4, metrics)
    assert str(error).startswith(
        "training diverged in step 4 (loss nan, gradient norm nan): 3 optimizer steps skipped. "
    )
    assert cause in str(error)


def test_a_step_of_the_critic_counts_as_well():
    described = {"skipped": 0.0, "critic/skipped": 1.0}
    assert SkippedSteps().after(described, 1).in_row == 1


@pytest.mark.parametrize(("in_row", "stops"), [(2, False), (3, True), (9, True)])
def test_so_many_in_a_row_are_too_many(in_row, stops):
    with pytest.raises(Diverged, match=f"{in_row} optimizer steps in a row") if stops else contextlib.nullcontext():
        check_skipped(SkippedSteps(in_row), settings_of())


def test_outliers_without_end_stop_a_run_that_learns_nothing():
    skipped = SkippedSteps()
    for _ in range(MAX_OUTLIERS - 1):
        skipped = skipped.after({"skipped": 0.0, "steps/outlier": 1.0}, 1)
    check_skipped(skipped, settings_of())
    check_skipped(skipped.after({"skipped": 0.0, "steps/outlier": 0.0}, 2), settings_of())
    with pytest.raises(Diverged, match="set skip_outlier_gradients to false"):
        check_skipped(skipped.after({"steps/outlier": 1.0}, 2), settings_of())


@pytest.mark.parametrize("odd", [math.nan, -math.inf])
def test_a_policy_without_finite_log_probabilities_goes_to_no_engine(odd):
    check_policy((-1.0, -2.5), 3)
    with pytest.raises(Diverged, match="policy version 3"):
        check_policy((-1.0, odd), 3)
