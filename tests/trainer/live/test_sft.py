"""Supervised training with a real learner, and reinforcement learning that continues from it."""

import json
import shutil

import pytest
import torch

from roost.rollout.arithmetic import write_arithmetic_model
from tests.trainer.live.jobs import config, trained, weights_of


def supervised(model, placement, **keys):
    values = config(model, placement, objective="sft", prompts_per_step=9, **keys)
    for name in ("num_generations", "max_new_tokens", "engine_options"):
        del values["train"][name]
    return values


WARM_START = {"learning_rate": 3e-3, "max_steps": 12, "checkpoint_every": 6, "eval_every": 6}


# Two ranks learn the same as one; tests/learner/test_distributed.py compares them in less time.
@pytest.fixture(
    scope="module", params=["0", pytest.param("0-1", marks=pytest.mark.long)], ids=["one rank", "two ranks"]
)
def actor(request):
    return {"actor": request.param}


@pytest.fixture(scope="module")
def whole(model, actor, tmp_path_factory):
    """A warm start to its end."""
    return trained(supervised(model, actor, **WARM_START), tmp_path_factory.mktemp("sft") / "whole").run


def test_a_warm_start_answers_and_resumes_exactly(model, actor, whole, tmp_path):
    losses = [step["loss/supervised"] for step in whole.steps()]
    assert losses[0] > 1.5 and losses[-1] < 0.5 * losses[0]
    held_out = [record["loss/held_out"] for record in whole.evaluations()]
    assert [record["step"] for record in whole.evaluations()] == [0, 6, 12] and held_out[-1] < held_out[0]

    shutil.copytree(whole.path, tmp_path / "half")
    half = trained(supervised(model, actor, **WARM_START), tmp_path / "half", resumes=True, from_step=6).run
    assert [step["loss/supervised"] for step in half.steps()] == losses, "the same rows in the same order"
    assert all(torch.equal(one, weights_of(whole)[name]) for name, one in weights_of(half).items())
    assert json.loads((whole.policy / "roost.json").read_text())["kind"] == "model"


@pytest.mark.long
def test_a_warm_start_is_trained_on(whole, tmp_path):
    followed = trained(config(whole.policy, {"actor": 0, "rollout": 1}, max_steps=1, eval_tasks=9), tmp_path / "rl").run
    assert followed.steps()[0]["reward/mean"] > 0.3, "an untrained model has less than 0.1"


def data_file(path, sums):
    path.write_text("".join(json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) + "\n" for a, b in sums))
    return str(path)


@pytest.mark.parametrize(
    "placement",
    [
        pytest.param({"actor": 0, "teacher": 1}, id="devices of its own"),
        pytest.param({"actor": 0, "teacher": 0}, id="the learner's device", marks=pytest.mark.long),
    ],
)
def test_a_student_comes_closer_to_its_teacher_and_sets_are_evaluated_apart(model, placement, tmp_path):
    """The teacher is untrained as well, so the answers of the data teach something else."""
    large = write_arithmetic_model(tmp_path / "teacher", seed=5, hidden_size=96, num_hidden_layers=1)
    rows = [(a, b) for a in range(3) for b in range(3)]
    sets = {
        "small": data_file(tmp_path / "small.jsonl", rows[:2]),
        "large": data_file(tmp_path / "large.jsonl", [(9, 9)]),
    }
    data = {"path": data_file(tmp_path / "rows.jsonl", rows), "answer": "answer", "eval": sets}
    teacher = {"model": str(large), "weight": 0.9, "top_k": 0 if placement["teacher"] else 6}
    values = supervised(model, placement, learning_rate=3e-3, max_steps=10, eval_every=10, data=data, teacher=teacher)
    del values["train"]["task"]
    run = trained(values, tmp_path / "run").run
    steps = run.steps()
    assert (steps[-1]["data/rows"], steps[-1]["data/epoch"]) == (9, 10)
    assert steps[-1]["loss/distillation"] < 0.5 * steps[0]["loss/distillation"]
    mixed = [0.1 * step["loss/supervised"] + 0.9 * step["loss/distillation"] for step in steps]
    assert [step["loss/total"] for step in steps] == pytest.approx(mixed)
    first, last = run.evaluations()
    assert (first["step"], last["step"], first["tokens"]) == (0, 10, 2 * 2 + 3)
    for record in (first, last):
        whole = (4 * record["small/loss/held_out"] + 3 * record["large/loss/held_out"]) / 7
        assert record["loss/held_out"] == pytest.approx(whole, rel=1e-5), "a mean over tokens"
    assert first["small/loss/held_out"] != last["small/loss/held_out"]
