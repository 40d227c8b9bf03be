"""The loop with a critic, and with optimizer steps that fail."""

import contextlib
import math
from typing import ClassVar

import pytest

from roost.config.train import AdvantageEstimator, AdvantageSettings
from roost.trainer.guards import Diverged, check_policy
from tests.rollout.script import ran
from tests.trainer import test_loop
from tests.trainer.test_loop import Model, Run, settings_of, trained


@pytest.mark.parametrize("is_truncated", [False, True])
def test_a_critic_is_asked_for_the_states_in_which_a_limit_ended_episodes(is_truncated):
    settings = settings_of(advantage=AdvantageSettings(AdvantageEstimator.GAE))
    run = trained(settings, has_critic=True, is_truncated=is_truncated)
    assert [ids[:1] for ids in run.critic.valued[:4]] == [[7]] * 4
    assert [ids[:2] for ids in run.critic.valued[4:]] == ([[8, 9]] * 4 if is_truncated else [])
    assert sum(map(len, run.critic.learnt)) == 4, "what is only asked for its value is not learnt from"


def test_a_critic_may_learn_alone_first():
    gae = AdvantageSettings(AdvantageEstimator.GAE)
    run = trained(settings_of(max_steps=3, critic_warmup_steps=2, advantage=gae), has_critic=True)
    assert (len(run.critic.learnt), len(run.policy.learnt)) == (3, 1)
    assert (run.critic.positions, run.policy.positions) == ([0, 1, 2], [0]), (
        "the policy's schedule begins when it learns"
    )


@pytest.mark.parametrize(("warmup", "rejected"), [(0, 1.0), (1, None)], ids=["both", "critic alone"])
def test_a_critic_learns_from_tokens_that_the_policy_rejects(warmup, rejected):
    loss = {"rollout_rejection": {"token": [2.0, 3.0]}}
    settings = settings_of(critic_warmup_steps=warmup, loss=loss, advantage=AdvantageSettings(AdvantageEstimator.GAE))
    run = trained(settings, has_critic=True)
    assert (len(run.critic.learnt), len(run.policy.learnt)) == (1, 0)
    metrics = run.recorded[0][1]
    assert metrics.get("steps/rejected") == metrics.get("loss/rejected") == rejected


def test_a_critic_learns_on_where_the_policy_stops_early():
    gae = AdvantageSettings(AdvantageEstimator.GAE)
    run = trained(settings_of(minibatches=4, advantage=gae), has_critic=True, over_kl=(2,))
    assert (len(run.critic.learnt), len(run.policy.learnt)) == (4, 2)


def test_a_critic_that_breaks_alone_ends_the_run(monkeypatch):
    monkeypatch.setattr(Breaking, "skips", {1, 2})
    monkeypatch.setattr(test_loop, "Model", Breaking)
    gae, loss = AdvantageSettings(AdvantageEstimator.GAE), {"rollout_rejection": {"token": [2.0, 3.0]}}
    with pytest.raises(Diverged, match="2 optimizer steps in a row"):
        trained(settings_of(minibatches=2, max_skipped_steps=2, advantage=gae, loss=loss), has_critic=True)


def test_a_critic_learns_from_the_same_samples():
    run = trained(settings_of(minibatches=2, advantage=AdvantageSettings(AdvantageEstimator.GAE)), has_critic=True)
    assert "critic values" in run.events
    assert run.critic.learnt == run.policy.learnt
    metrics = run.recorded[0][1]
    assert metrics["critic/loss"] == metrics["loss/total"] == 2


class Breaking(Model):
    """Skips optimizer steps: those with these numbers."""

    skips: ClassVar = set()

    async def learn(self, samples, totals, position):
        recorded = await super().learn(samples, totals, position)
        is_skipped = len(self.learnt) in self.skips
        return recorded | {"skipped": float(is_skipped), "loss": math.nan if is_skipped else 0.5, "grad/norm": 1.0}


@pytest.mark.parametrize(
    ("skips", "most", "rows", "message"),
    [
        pytest.param({2, 3, 5, 6}, 3, [1, 1, 2, 0], "", id="never so many in a row"),
        pytest.param(
            {3, 4, 5, 6, 7, 8}, 3, [0, 2, 1], r"diverged in step 3 \(.*\): 3 optimizer steps in a row", id="too many"
        ),
        pytest.param({1, 2, 3, 4, 5, 6, 7, 8}, 0, [2, 2, 2, 2], "", id="it never stops"),
        pytest.param({2}, 1, [1], r"diverged in step 1 \(.*\): 1 optimizer step in a row", id="one is too many"),
    ],
)
def test_a_run_whose_optimizer_steps_are_skipped_stops(monkeypatch, skips, most, rows, message):
    monkeypatch.setattr(Breaking, "skips", skips)
    monkeypatch.setattr(test_loop, "Model", Breaking)
    run = Run(settings_of(max_steps=4, minibatches=2, max_skipped_steps=most, max_staleness=0, ppo_epochs=1))
    with pytest.raises(Diverged, match=message) if message else contextlib.nullcontext():
        ran(run.go())
    assert [metrics.get("steps/skipped") for _, metrics, _ in run.recorded] == rows
    assert run.events.count("after learning") == len(rows) - bool(message), "no checkpoint of the last step"


def test_a_policy_that_gives_no_numbers_ends_the_run_with_its_step_on_file(monkeypatch):
    async def weight_update(self, version):
        check_policy([-1.0, math.nan], version)

    monkeypatch.setattr(Model, "weight_update", weight_update)
    run = Run(settings_of(max_steps=4))
    with pytest.raises(Diverged, match=r"diverged in step 1 \(.*\): the weights of policy version 1 .* Likely cause"):
        ran(run.go())
    assert [state.step for state, _, _ in run.recorded] == [1]
    assert "after step" not in run.events, "its checkpoint never becomes whole"
