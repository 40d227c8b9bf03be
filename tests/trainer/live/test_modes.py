"""The modes as runs: who waits for whom, and how old the policy is that made each token."""

import pytest

import roost.trainer.components
from roost.learner.sample import Sample
from roost.trainer.learner_worker import LearnerWorker
from tests.trainer.live.jobs import OFFLOADS, config, learnt_groups, spans_of, trained, weights_of

STEPS = 3


def figures(run, name):
    return [record[name] for record in run.steps()]


def overlap(one, other):
    """Whether some span of one list runs at the same time as some of the other."""
    return any(start < end_of and start_of < end for start, end in one for start_of, end_of in other)


@pytest.fixture(scope="module")
def collocated(model, tmp_path_factory):
    values = config(model, {"actor,rollout": "0"}, 1, actor=OFFLOADS, steps=STEPS)
    return trained(values, tmp_path_factory.mktemp("runs") / "collocated").run


@pytest.fixture(scope="module")
def asynchronous(model, tmp_path_factory):
    values = config(model, {"actor": "0", "rollout": "1"}, steps=STEPS, max_policy_lag=1)
    return trained(values, tmp_path_factory.mktemp("runs") / "asynchronous").run


def test_collocated_engines_sleep_while_the_learner_learns(collocated):
    learning, asleep = spans_of(collocated, "learn", "actor"), spans_of(collocated, "sleep")
    generating = spans_of(collocated, "generate", "rollout")
    assert len(asleep) == STEPS and len(learning) >= STEPS
    assert not overlap(learning, generating)
    assert figures(collocated, "lag/max") == [0.0] * STEPS
    assert len(spans_of(collocated, "load", "actor")) >= STEPS
    assert len(spans_of(collocated, "start")) == 1, "servers that can sleep are not started again"


def test_asynchronous_engines_generate_while_the_learner_learns(asynchronous):
    learning = spans_of(asynchronous, "learn", "actor")
    assert overlap(learning, spans_of(asynchronous, "generate", "rollout"))
    assert len(spans_of(asynchronous, "start")) == 1, "servers are never started again"
    assert not spans_of(asynchronous, "sleep")
    assert figures(asynchronous, "lag/max") == [0.0, 1.0, 1.0]


@pytest.mark.parametrize("mode", ["collocated", "asynchronous"])
def test_every_group_is_learnt_from_once(mode, request):
    groups = learnt_groups(request.getfixturevalue(mode))
    assert sorted(groups) == list(range(1, STEPS + 1))
    assert sorted(number for taken in groups.values() for number in taken) == list(range(4 * STEPS))


def test_a_run_leaves_everything_behind(collocated):
    for file in (
        collocated.config_file,
        collocated.plan_file,
        collocated.trace_file,
        collocated.policy / "model.safetensors",
        collocated.policy / "tokenizer.json",
    ):
        assert file.exists(), file
    assert len(collocated.steps()) == STEPS and len(collocated.evaluations()) == 1
    assert collocated.evaluations()[0]["version"] == STEPS
    assert all(0 < record["busy/actor"] <= 1 and 0 < record["busy/rollout"] <= 1 for record in collocated.steps())
    assert all(record["mismatch/logprob_max"] < 1e-3 for record in collocated.steps())


def test_hybrid_minibatches_are_learnt_from_while_others_are_generated(model, tmp_path):
    values = config(
        model,
        {"actor": "0", "rollout": "0-1"},
        task={"_target_": "tests.trainer.live.scenarios.Slow"},
        groups=4,
        minibatch_size=8,
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


LEARNING = {"steps": 12, "groups": 9, "group_size": 16, "epochs": 2, "learning_rate": 2e-3, "entropy_coefficient": 0.02}


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


def test_weights_change(collocated, model):
    from safetensors.torch import load_file

    before, after = load_file(model / "model.safetensors"), weights_of(collocated)
    assert before.keys() == after.keys()
    assert any(not before[name].equal(after[name]) for name in before)
