"""Steps that end early, and episodes that are learnt from in part."""

import pytest

from roost.config.train import AdvantageEstimator, AdvantageSettings, OldLogprobs
from tests.trainer.test_loop import settings_of, trained


@pytest.mark.parametrize(
    ("over", "learnt", "dropped"),
    [
        pytest.param((), [4, 4], [0, 0], id="never"),
        pytest.param((2,), [2, 4], [2, 0], id="in the first of two epochs"),
        pytest.param((3, 6), [3, 3], [1, 1], id="in the second epoch, twice"),
    ],
)
def test_a_minibatch_beyond_the_kl_ends_its_step_alone(over, learnt, dropped):
    run = trained(settings_of(max_steps=2, ppo_epochs=2, minibatches=2, prompts_per_step=4), over_kl=over)
    assert len(run.policy.learnt) == sum(learnt)
    assert [figures.get("steps/dropped", 0) for _, figures, _ in run.told] == dropped
    assert [figures.get("steps/over_kl", 0) for _, figures, _ in run.told] == [float(count > 0) for count in dropped]
    assert run.state.step == 2


def test_a_stop_lasts_over_the_parts_of_a_step():
    """Where minibatches are learnt from while others are still generated."""
    advantage = AdvantageSettings(AdvantageEstimator.GROUP_MEAN)
    settings = settings_of(minibatches=4, prompts_per_step=4, advantage=advantage)
    loss = {"old_logprobs": OldLogprobs.ROLLOUT}
    run = trained(settings_of(minibatches=4, prompts_per_step=4, advantage=advantage, loss=loss), over_kl=(2,))
    assert len(run.policy.learnt) == 2
    ((_, figures, groups),) = run.told
    assert figures["steps/dropped"] == 2
    assert groups == [0, 1, 2, 3], "they are taken all the same, for the next step begins with others"
    assert len(trained(settings).policy.learnt) == 4
