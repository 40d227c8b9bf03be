"""It learns: streaming minibatches, and with a bar that a broken loss does not reach."""

import roost.trainer.components
from roost.learner.sample import Sample
from roost.trainer.learner_worker import LearnerWorker
from tests.trainer.live.jobs import config, spans_of, trained


def figures(run, name):
    return [record[name] for record in run.steps()]


def test_hybrid_minibatches_are_learnt_from_while_others_are_generated(model, tmp_path):
    values = config(
        model,
        {"actor": "0", "rollout": "0-1"},
        task={"_target_": "tests.trainer.live.scenarios.Slow"},
        groups=4,
        minibatch_size=8,
        behaviour="proximal",
        steps=2,
    )
    run = trained(values, tmp_path / "hybrid").run
    (_, first_end), (second, _) = spans_of(run, "learn", "actor")[:2]
    assert any(first_end < start < second for start, _ in spans_of(run, "generate", "rollout"))
    assert figures(run, "lag/max") == [0.0, 0.0]
    assert all(record["samples/learnt"] == 16 for record in run.steps())


class BackwardLearner(LearnerWorker):
    """Learns the opposite of what it should."""

    def learn(self, samples, totals):
        turned = [Sample(one.token_ids, one.turns, one.logprobs, -one.advantages, one.old_logprobs) for one in samples]
        return super().learn(turned, totals)


LEARNING = {"steps": 10, "groups": 9, "group_size": 16, "epochs": 2, "learning_rate": 2e-3, "entropy_coefficient": 0.02}


def rewards_of_learning(model, folder):
    values = config(model, {"actor": "0", "rollout": "1"}, **LEARNING)
    return figures(trained(values, folder).run, "reward/mean")


def test_it_learns(model, tmp_path):
    rewards = rewards_of_learning(model, tmp_path / "run")
    assert rewards[0] <= 0.2
    assert sum(rewards[-3:]) / 3 >= 0.55


def test_a_broken_loss_does_not_learn(model, tmp_path, monkeypatch):
    monkeypatch.setattr(roost.trainer.components, "LearnerWorker", BackwardLearner)
    rewards = rewards_of_learning(model, tmp_path / "run")
    assert sum(rewards[-3:]) / 3 < 0.2
