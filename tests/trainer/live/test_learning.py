"""It learns: streaming minibatches, and with a bar that a broken loss does not reach."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import roost.trainer.setup
from roost.engines.weights.probe import TOLERANCES
from roost.engines.weights.shards import ShardFiles
from roost.learner.sample import Sample
from roost.rollout.arithmetic import Arithmetic, write_arithmetic_model
from roost.rollout.episode import Split
from roost.trainer.learners import LearnerWorker
from tests.limits import HANG_S
from tests.trainer.live.jobs import config, trained
from tests.trainer.live.scenarios import Patient, count_learning


def metrics(run, name):
    return [record[name] for record in run.steps()]


@pytest.mark.long
def test_hybrid_minibatches_are_learnt_from_while_others_are_generated(model, tmp_path, monkeypatch):
    count_learning(monkeypatch, Patient)
    values = config(
        model,
        {"actor": "0", "rollout": "0-1"},
        task={"_target_": "tests.trainer.live.scenarios.Patient"},
        minibatch_size=8,
        old_logprobs="decoupled",
        episode_timeout_s=HANG_S,  # what waits for ever fails then, and its group would be missing
        episode_attempts=1,
        max_steps=2,
        eval_tasks=2,  # which are played at once, as the first two of anything are
    )
    run = trained(values, tmp_path / "hybrid").run
    assert Patient.learnt == 4
    assert metrics(run, "staleness/max") == [0.0, 0.0]
    assert metrics(run, "samples/learnt") == [16.0, 16.0] and metrics(run, "samples/failed") == [0.0, 0.0]


class BackwardLearner(LearnerWorker):
    """Learns the opposite of what it should."""

    def learn(self, samples, totals, position):
        turned = [Sample(one.token_ids, one.turns, one.logprobs, -one.advantages, one.old_logprobs) for one in samples]
        return super().learn(turned, totals, position)


LEARNING = {
    "max_steps": 12,
    "prompts_per_step": 9,
    "num_generations": 16,
    "ppo_epochs": 2,
    "learning_rate": 2e-3,
    "entropy_coef": 0.02,
}


def rewards_of_learning(model, folder):
    values = config(model, {"actor": "0", "rollout": "1"}, **LEARNING)
    return metrics(trained(values, folder).run, "reward/mean")


def test_it_learns(model, tmp_path):
    rewards = rewards_of_learning(model, tmp_path / "run")
    assert rewards[0] <= 0.2
    assert sum(rewards[-3:]) / 3 >= 0.55


@pytest.mark.long
def test_a_broken_loss_does_not_learn(model, tmp_path, monkeypatch):
    monkeypatch.setattr(roost.trainer.setup, "LearnerWorker", BackwardLearner)
    rewards = rewards_of_learning(model, tmp_path / "run")
    assert sum(rewards[-3:]) / 3 < 0.2


def taught_model(folder):
    """A model of other sizes that knows the nine sums of the task."""
    folder = write_arithmetic_model(folder, hidden_size=96, num_hidden_layers=1)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    tasks = [Arithmetic(tokenizer, 2).task(Split.TRAIN, index).data for index in range(9)]
    rows = [[*tokenizer(f"{one['prompt_text']}{one['answer']}").input_ids, tokenizer.eos_token_id] for one in tasks]
    ids = torch.tensor(rows)
    labels = ids.clone()
    labels[:, :4] = -100
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(80):
        loss = model(ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < 0.05
    model.save_pretrained(folder)
    return folder


@pytest.mark.long
def test_a_student_learns_from_a_teacher_without_rewards(model, tmp_path):
    keys = {**LEARNING, "max_steps": 7, "ppo_epochs": 4, "learning_rate": 3e-3, "entropy_coef": 0}
    teacher = {"model": str(taught_model(tmp_path / "teacher"))}
    placement = {"actor": "0", "rollout": "1", "teacher": "2"}
    alone = {"advantage_estimator": "teacher", "whiten_advantages": "tokens", "teacher": teacher}
    values = config(model, placement, **keys, **alone)
    run = trained(values, tmp_path / "run").run
    apart, rewards = metrics(run, "teacher/kl"), metrics(run, "reward/mean")
    assert sum(apart[-2:]) / 2 < 0.5 * apart[0]
    assert rewards[0] <= 0.2 and sum(rewards[-2:]) / 2 >= 0.4


@pytest.mark.long
def test_a_mixture_learns_by_the_experts_of_its_engine(tmp_path):
    """From a checkpoint with a tensor per expert through replayed samples and weight syncs to the exported policy."""
    mixture = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    model = write_arithmetic_model(tmp_path / "model", family="qwen3_moe", hidden_size=64, **mixture)
    values = config(model, {"actor": "0", "rollout": "1"}, **LEARNING, router_replay=True)
    run = trained(values, tmp_path / "run").run
    rewards, replaced = metrics(run, "reward/mean"), metrics(run, "experts/replaced")
    assert rewards[0] <= 0.2 and sum(rewards[-3:]) / 3 >= 0.4
    assert len(replaced) == len(rewards)  # of both epochs, so not 0 although engine and learner compute alike
    assert max(metrics(run, "mismatch/kl_k3")) < 1e-6


class PreciseLearner(LearnerWorker):
    """Computes in 32 bits for engines of 16, so that both round differently."""

    def __init__(self, settings, *more, **others):
        super().__init__(replace(settings, compute_dtype="float32"), *more, **others)

    def _shard_files(self, sender):
        return ShardFiles(self._learner.module, torch.bfloat16, sender)

    def probe(self, shows_image=False):
        return replace(super().probe(shows_image), tolerance=TOLERANCES["bfloat16"])


@pytest.mark.long
def test_divided_experts_learn_by_the_experts_of_their_engine(tmp_path, monkeypatch):
    """Two ranks with half of the experts each; replay lowers what their log-probs differ from the engine's."""
    monkeypatch.setattr(roost.trainer.setup, "LearnerWorker", PreciseLearner)
    mixture = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    model = write_arithmetic_model(tmp_path / "model", family="qwen3_moe", hidden_size=128, **mixture)
    actor = {"training_backend": "fsdp", "model": {"expert_model_parallel_size": 2}}
    settings = {**LEARNING, "max_steps": 4, "prompts_per_step": 16, "compute_dtype": "bfloat16"}
    divergence = {}
    for replays in (True, False):
        settings["router_replay"] = replays
        values = config(model, {"actor": "0-1", "rollout": "2"}, {"largest": 3}, actor, **settings)
        run = trained(values, tmp_path / f"replay {replays}").run
        divergence[replays] = sum(metrics(run, "mismatch/kl_k3")) / 4
        assert ("experts/replaced" in list(run.steps())[-1]) is replays
        assert metrics(run, "reward/mean")[-1] > metrics(run, "reward/mean")[0]
    assert divergence[True] < 0.5 * divergence[False]
