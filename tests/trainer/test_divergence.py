"""When training is over because its numbers are not finite, and what is said of it."""

import math

import pytest

from roost.spec.training import LearnerSettings, OptimizerSettings, TrainSettings
from roost.trainer.divergence import Diverged, SkippedSteps, check_policy, likely_cause, too_many_skipped


def settings_of(weight_type="float32", **optimizer):
    return TrainSettings(LearnerSettings("model", weight_type, optimizer=OptimizerSettings(**optimizer)))


@pytest.mark.parametrize(
    ("settings", "figures", "cause"),
    [
        pytest.param(settings_of(learning_rate=1e10), {}, "learning_rate is 1e+10", id="rate"),
        pytest.param(settings_of(learning_rate=1e10), {"reward/mean": math.nan}, "rewards that are not", id="reward"),
        pytest.param(settings_of("float16"), {}, "float16 overflows", id="float16"),
        pytest.param(settings_of(max_grad_norm=0.0), {}, "gradients are not clipped", id="not clipped"),
        pytest.param(settings_of(), {"reward/mean": 0.5}, "learning_rate (1e-06) is too high", id="unknown"),
    ],
)
def test_the_likely_cause(settings, figures, cause):
    assert cause in likely_cause(settings, figures)
    assert cause in str(too_many_skipped(SkippedSteps(3), settings, 4, figures))


def test_a_step_of_the_critic_counts_as_well():
    told = {"skipped": 0.0, "critic/skipped": 1.0}
    assert SkippedSteps().after(told, 1).in_row == 1


@pytest.mark.parametrize("odd", [math.nan, -math.inf])
def test_a_policy_without_finite_log_probabilities_goes_to_no_engine(odd):
    check_policy((-1.0, -2.5), 3)
    with pytest.raises(Diverged, match="policy version 3"):
        check_policy((-1.0, odd), 3)
