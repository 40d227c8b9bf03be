"""Steps that end early, and episodes that are learnt from in part."""

from dataclasses import replace

import pytest

from roost.config.train import AdvantageEstimator, AdvantageSettings, OldLogprobs
from roost.rollout.episode import Part
from roost.trainer.batch import batch_of, down_sampled, tool_error_share, with_advantages
from roost.trainer.guards import Diverged
from roost.trainer.learners import totals_of
from tests.trainer.example_groups import example_episode, example_group
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
    assert [metrics.get("steps/dropped", 0) for _, metrics, _ in run.recorded] == dropped
    assert [metrics.get("steps/over_kl", 0) for _, metrics, _ in run.recorded] == [
        float(count > 0) for count in dropped
    ]
    assert run.state.step == 2
    per_step = [range(first, first + count) for first, count in zip((0, 4), learnt, strict=True)]
    assert run.policy.positions == [position for each in per_step for position in each], "dropped ones count, too"


def test_a_stop_lasts_over_the_parts_of_a_step():
    """Streaming: minibatches are learnt from while others are still generated."""
    advantage = AdvantageSettings(AdvantageEstimator.GROUP_MEAN)
    settings = settings_of(minibatches=4, prompts_per_step=4, advantage=advantage)
    loss = {"old_logprobs": OldLogprobs.ROLLOUT}
    run = trained(settings_of(minibatches=4, prompts_per_step=4, advantage=advantage, loss=loss), over_kl=(2,))
    assert len(run.policy.learnt) == 2
    ((_, metrics, groups),) = run.recorded
    assert metrics["steps/dropped"] == 2
    assert run.policy.positions == [0, 1]
    assert groups == [0, 1, 2, 3], "they are taken all the same, for the next step begins with others"
    assert len(trained(settings).policy.learnt) == 4


def test_log_probs_that_differ_too_much_stop_the_run():
    loss = {"max_logprob_mismatch": 0.5}
    assert trained(settings_of(max_steps=2, loss=loss), mismatches=[0.4, 0.4]).state.step == 2
    with pytest.raises(Diverged, match=r"differ by 0\.6 in a token.*max_logprob_mismatch: 0\.5"):
        trained(settings_of(max_steps=2, loss=loss), mismatches=[0.4, 0.6])
    assert trained(settings_of(max_steps=2), mismatches=[0.4, 0.6]).state.step == 2, "no limit is set"


def test_without_recomputed_log_probs_the_first_step_is_checked():
    loss = {"max_logprob_mismatch": 0.5, "old_logprobs": OldLogprobs.ROLLOUT}
    run = trained(settings_of(max_steps=3, loss=loss), mismatches=[0.4, 0.6])
    assert run.events.count("policy scores") == 1
    with pytest.raises(Diverged, match="max_logprob_mismatch"):
        trained(settings_of(loss=loss), mismatches=[0.6])


def test_a_part_of_each_group_is_learnt_from():
    """Episode e of a group has the reward e."""
    advantage = AdvantageSettings(keep_generations=2, keep_others=1)
    run = trained(settings_of(num_generations=4, advantage=advantage))
    assert sorted(run.policy.learnt[0]) == [0, 1, 100, 101], (
        "of each group the first with a reward, and the one without"
    )
    ((_, metrics, _),) = run.recorded
    assert (metrics["samples/finished"], metrics["samples/learnt"], metrics["samples/down_sampled"]) == (8, 4, 4)
    assert metrics["reward/mean"] == 1.5, "of all that were generated"


def test_groups_without_a_difference_may_be_left_out():
    run = trained(settings_of(num_generations=1, advantage=AdvantageSettings(drop_equal_groups=True)))
    ((_, metrics, _),) = run.recorded
    assert (run.policy.learnt, metrics["samples/learnt"], metrics["samples/down_sampled"]) == ([], 0, 2)
    assert run.state.step == 1


def test_of_long_samples_the_first_tokens_are_learnt():
    groups = [example_group(0, [1.0, 0.0], versions=(0, 0, 0)), example_group(1, [2.0], versions=(0,))]
    batch = batch_of(groups, longest=4)
    assert [sample.token_ids.tolist() for sample in batch.samples] == [[1, 2, 100, 101], [1, 2, 110, 111], [1, 2, 200]]
    assert [sample.logprobs.tolist() for sample in batch.samples] == [[0, 0, -1, -2], [0, 0, -1, -2], [0, 0, -1]]
    assert batch.samples[0].turns.tolist() == [-1, -1, 0, 0]
    assert batch.cut == 2
    selected, _, _ = with_advantages(batch_of(groups, longest=2), AdvantageSettings())
    assert totals_of(selected.samples, 8).tokens == 0, "samples that are cut within their prompt teach nothing"
    run = trained(settings_of(advantage=AdvantageSettings(max_learn_tokens=3)))
    ((_, metrics, _),) = run.recorded
    assert metrics["samples/cut"] == 4


def test_samples_whose_tools_failed_are_kept_last():
    def episode(*answers):
        parts = tuple(Part(0, 0, messages=((role, text),)) for role, text in answers)
        (tokens,) = example_episode(1.0).sequences
        return replace(example_episode(1.0), sequences=(replace(tokens, parts=parts),))

    failed = episode(("tool", "Error: no such file"), ("tool", "42"), ("user", "an error"))
    assert tool_error_share(failed) == 0.5
    assert tool_error_share(episode(("user", "error"))) == 0.5, "no tool was called"
    clean = episode(("tool", "42"))
    assert tool_error_share(clean) == 0
    group = replace(example_group(0, []), episodes=(failed, clean, example_episode(0.0), example_episode(0.0)))
    by_errors = AdvantageSettings(keep_generations=2, keep_by_tool_errors=True)
    assert down_sampled([group], by_errors)[0].episodes[0] is clean
    assert down_sampled([group], replace(by_errors, keep_by_tool_errors=False))[0].episodes[0] is failed
