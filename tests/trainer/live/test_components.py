"""Everybody else who may have a model: a critic, a reference, inference apart, an adapter, several learners."""

import json
import os
import time

import psutil
import pytest
from safetensors.torch import load_file

from roost.app_world.tiny_model import write_app_world_model
from roost.trainer.records.checkpoints import describe_policy
from tests.limits import HANG_S
from tests.local_ray import MARK
from tests.trainer.live.jobs import config, learnt_groups, spans_of, trained, weights_of


def metrics(run, name):
    return [record[name] for record in run.steps()]


@pytest.mark.long
def test_an_adapter_is_trained_and_inference_scores_on_a_device_of_its_own(model, tmp_path):
    values = config(
        model,
        {"actor": "0", "inference": "1", "rollout": "2"},
        lora_rank=4,
        minibatch_size=8,
        eval_every=2,
        learning_rate=1e-2,
    )
    values["algorithm"] = {"recompute_logprobs": True}
    run = trained(values, tmp_path / "run").run
    # Only if engines have each new adapter, and inference the weights with it, do they say the same of every token.
    assert max(metrics(run, "mismatch/logprob_max")) < 1e-3
    assert len(set(metrics(run, "mismatch/logprob_mean"))) == 3
    assert metrics(run, "samples/learnt") == [16.0] * 3 and metrics(run, "staleness/max") == [0.0] * 3
    assert len(spans_of(run, "score", "inference")) == 6, "two minibatches of each step"
    assert not spans_of(run, "score", "actor")[3:], "the learner scores no more than the probe of each version"
    assert [found["version"] for found in run.evaluations()] == [0, 2, 3]
    assert json.loads((run.policy / "adapter" / "adapter_config.json").read_text())["r"] == 4
    assert not (run.policy / "adapter_config.json").exists(), "it would be taken for an adapter alone"
    assert "the LoRA adapter merged in" in describe_policy(run.policy)
    before, after = load_file(model / "model.safetensors"), weights_of(run)
    assert before.keys() == after.keys() and not all(before[name].equal(after[name]) for name in before)


@pytest.mark.long
def test_two_learners_with_a_critic_and_a_reference_that_one_learner_goes_on_from(model, tmp_path):
    def values(placement, steps):
        more = {"advantage_estimator": "gae", "kl_coef": 0.01, "num_generations": 2, "checkpoint_every": 1}
        actor = {"model": {"context_parallel_size": 2 if placement is two else 1}}
        return config(model, placement, actor=actor, max_steps=steps, **more)

    two = {"actor": "0-1", "critic": "0", "reference": "1", "rollout": "1"}
    run = trained(values(two, 2), tmp_path / "run").run
    apart = metrics(run, "loss/reference_kl")
    assert apart[0] == 0.0 < apart[1], "the policy moves away from its reference"
    assert metrics(run, "mismatch/logprob_max")[1] < 1e-3
    assert all(value > 0 for value in metrics(run, "critic/grad/norm"))
    before = weights_of(run)

    one = {"actor,critic,reference": "0", "rollout": "1"}
    run = trained(values(one, 3), tmp_path / "run", resumes=True).run
    assert learnt_groups(run) == {1: [0, 1, 2, 3], 2: [4, 5, 6, 7], 3: [8, 9, 10, 11]}
    assert metrics(run, "mismatch/logprob_max")[2] < 1e-3
    assert any(not before[name].equal(weight) for name, weight in weights_of(run).items())


@pytest.mark.long
def test_agents_play_and_rewards_score_where_the_plan_puts_them(model, tmp_path):
    of_node = {"node_group": "node", "placement": "0:0-1"}
    placement = {"actor": "0", "rollout": "1", "agent": of_node, "reward": of_node}
    exact = {"_target_": "roost.rollout.rewards.math_answer.ExactAnswer", "right": 3.0, "wrong": -1.0}
    run = trained(config(model, placement, max_steps=2, rewards={"exact": exact}), tmp_path / "run").run
    assert metrics(run, "samples/finished") == [16.0] * 2 and metrics(run, "samples/failed") == [0.0] * 2
    assert [len(spans_of(run, "run_episode", f"agent {rank}")) > 8 for rank in (0, 1)] == [True, True]
    assert any(spans_of(run, "score", f"reward {rank}") for rank in (0, 1))
    assert {metrics(run, "reward/max")[0], metrics(run, "reward/min")[0]} <= {3.0, -1.0}
    assert metrics(run, "reward/exact/scored") == [16.0] * 2
    assert metrics(run, "reward/exact/mean") == metrics(run, "reward/mean")
    assert all(sample["parts"] == {"exact": sample["reward"]} for sample in run.sample_lines)
    assert learnt_groups(run) == {1: [0, 1, 2, 3], 2: [4, 5, 6, 7]}


@pytest.mark.long
def test_nothing_is_left_of_agents_that_have_servers_and_sandboxes(tmp_path):
    serving = "roost.app_world.serving"
    task = {
        "_target_": "roost.rollout.agents.scenario.AgentScenario",
        "tasks": {"_target_": f"{serving}.tasks.AppWorldTasks", "kinds": ["jot_note", "jot_task", "delete_file"]},
        "environment": {"_target_": f"{serving}.client.AppWorldEnvironments", "shows_supervisor": False},
        "agent": {
            "_target_": "roost.rollout.agents.react.ReactCoder",
            "system_prompt": "",
            "worked_example": "",
            "reminder": "",
        },
        "max_turns": 1,
    }
    model = write_app_world_model(tmp_path / "model", correct_share=1.0)
    placement = {"actor": "0", "rollout": "1", "agent": {"node_group": "node", "placement": "0:0-1"}}
    values = config(
        model, placement, max_steps=1, prompts_per_step=2, num_generations=2, max_new_tokens=8, eval_tasks=2
    )
    values["train"] |= {"task": task, "engine_options": {"max_context": 128}}
    run = trained(values, tmp_path / "run").run
    assert metrics(run, "samples/finished") == [4.0], [file.read_text() for file in run.failures.glob("*")]
    until = time.monotonic() + HANG_S
    while (left := own_processes()) and time.monotonic() < until:
        time.sleep(0.2)
    assert not left


def own_processes():
    """Roost's processes that this module has started, except those that live as long as Ray."""
    found = []
    for process in psutil.process_iter():
        try:
            words = " ".join(process.cmdline())
            is_own = process.pid != os.getpid() and process.environ().get(MARK) == os.environ[MARK]
            if is_own and "roost" in words and "roost-ray-" not in words:  # the session folder of Ray, and its reaper
                found.append(words)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            pass
    return found
