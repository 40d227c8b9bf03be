"""Supervised training with a real learner, and reinforcement learning that continues from it."""

import json
import shutil

import torch

from tests.trainer.live.jobs import config, trained, weights_of


def supervised(model, **keys):
    values = config(model, {"actor": "0-1"}, objective="sft", prompts_per_step=9, **keys)
    for name in ("num_generations", "max_new_tokens", "engine_options"):
        del values["train"][name]
    return values


def test_a_warm_start_answers_resumes_exactly_and_trains_on(model, tmp_path):
    keys = {"learning_rate": 3e-3, "max_steps": 12, "checkpoint_every": 6, "eval_every": 6}
    whole = trained(supervised(model, **keys), tmp_path / "whole").run
    losses = [step["loss/supervised"] for step in whole.steps()]
    assert losses[0] > 1.5 and losses[-1] < 0.5 * losses[0]
    held_out = [record["loss/held_out"] for record in whole.evaluations()]
    assert [record["step"] for record in whole.evaluations()] == [0, 6, 12] and held_out[-1] < held_out[0]

    shutil.copytree(whole.path, tmp_path / "half")
    half = trained(supervised(model, **keys), tmp_path / "half", resumes=True, from_step=6).run
    assert [step["loss/supervised"] for step in half.steps()] == losses, "the same rows in the same order"
    assert all(torch.equal(one, weights_of(whole)[name]) for name, one in weights_of(half).items())

    followed = trained(config(whole.policy, {"actor": 0, "rollout": 1}, max_steps=1, eval_tasks=9), tmp_path / "rl").run
    assert followed.steps()[0]["reward/mean"] > 0.3, "an untrained model has less than 0.1"
    assert json.loads((whole.policy / "roost.json").read_text())["form"] == "model"
