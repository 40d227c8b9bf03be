"""The control examples: arms that are planned for machines that are not here, and that are trained on this one."""

import json
import os
import runpy
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml

import roost
from roost.rollout.environments.control import ControlScenario, write_control_model
from roost.trainer.records.run_folder import RunFolder
from tests.cli.terminal import lines_of, run
from tests.limits import HANG_S

ROOT = Path(__file__).parents[2]
CONTROL = ROOT / "examples/control"
ARM, MACHINES = CONTROL / "arm.yaml", CONTROL / "machines.yaml"
STEPS, EPISODES, EVALUATED = 2, 4, 2


def test_the_arm_is_planned_for_its_machines():
    result = run("plan", ARM, "--inventory", MACHINES)
    assert result.exit_code == 0 and "warning" not in result.stderr, result.stderr
    lines = lines_of(result.stdout)
    assert lines[:2] == [f"{ARM}: rlinf notation, disaggregated", "4 nodes, 4 accelerators, 2 Franka"]
    assert "env 0-1      2-3           1  Franka 0" in lines


@pytest.mark.parametrize(
    "arguments", [(ARM, "--inventory", MACHINES), (CONTROL / "arm_laptop.yaml",), (CONTROL / "cartpole.yaml",)], ids=str
)
def test_the_examples_have_no_findings(arguments):
    result = run("check", *arguments)
    assert result.exit_code == 0 and "0 errors, 0 warnings" in result.stdout, result.output


def test_the_arm_learns_the_same_on_one_machine():
    """On a laptop it differs from the job for real machines in where, how many and how long, not in what is learnt."""
    real, laptop = (yaml.safe_load((CONTROL / name).read_text()) for name in ("arm.yaml", "arm_laptop.yaml"))
    tasks = [job["train"]["task"] for job in (real, laptop)]
    assert tasks[1]["environment"].pop("robots") == laptop["data"]["rollout_batch_size"]
    assert tasks[0] == tasks[1] and real["algorithm"] == laptop["algorithm"]


@pytest.mark.parametrize("example", ["cartpole", "arm"])
def test_the_models_fit_their_configs(example, tmp_path):
    from transformers import AutoTokenizer

    runpy.run_path(str(CONTROL / "make_model.py"))["main"](example, str(tmp_path))
    task = yaml.safe_load((CONTROL / f"{example}.yaml").read_text())["train"]["task"]
    assert task.pop("_target_") == f"{ControlScenario.__module__}.{ControlScenario.__name__}"
    ControlScenario(AutoTokenizer.from_pretrained(tmp_path), **task)


def environ():
    """As somebody has it who has Roost installed and is in no Ray."""
    apart = ("RAY_ADDRESS", "ROOST_NODE_RANK", "ROOST_FAKE_ACCELERATORS")
    kept = {name: value for name, value in os.environ.items() if name not in apart}
    return {**kept, "PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module")
def tried(tmp_path_factory):
    """The run of the script, as a person starts it, with arms that write down what they are asked for."""
    pytest.importorskip("ray")
    folder = tmp_path_factory.mktemp("tried")
    (folder / "notes").mkdir()
    model = write_control_model(
        folder / "model", numbers=6, bins=16, actions=3, hidden_size=32, intermediate_size=32, num_hidden_layers=1
    )
    overrides = [
        f"actor.model.model_path={model}",
        f"runner.max_steps={STEPS}",
        f"data.rollout_batch_size={EPISODES}",
        f"train.eval_tasks={EVALUATED}",
        "train.task.environment.driver._target_=tests.examples.witness.Witness",
        f"+train.task.environment.driver.notes={folder / 'notes'}",
        "train.task.environment.max_steps=5",
    ]
    command = [sys.executable, CONTROL / "try_on_one_machine.py", *overrides, "--runs", folder, "--name", "arm"]
    done = subprocess.run(command, cwd=folder, env=environ(), capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return RunFolder.open(folder / "arm")


@pytest.fixture
def notes(tried):
    files = (tried.path.parent / "notes").iterdir()
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


@pytest.mark.long
def test_each_process_of_the_environments_has_its_robot(notes):
    found = {note["node"]: (note["config"]["robot_ip"], note["config"]["camera_serials"]) for note in notes}
    assert found == {
        2: ("10.10.10.1", ["322142001230", "322142001231"]),
        3: ("10.10.10.2", ["322142001232", "322142001233"]),
    }


@pytest.mark.long
def test_processes_are_where_the_plan_says(tried, notes):
    plan = roost.Plan.from_json(tried.plan_file.read_text())
    planned = {part.name: [row.cluster_node_rank for row in part.table] for part in plan.components}
    assert planned == {"actor": [0], "critic": [0], "rollout": [1, 1], "env": [2, 3]}
    assert {note["node"] for note in notes} == set(planned["env"])
    assert len({note["raylet"] for note in notes}) == 2, "the two are different machines for Ray"
    lanes = lanes_of(tried)
    assert {name: [lanes[f"{name} {rank}"] for rank in range(len(nodes))] for name, nodes in planned.items()} == planned


def lanes_of(run):
    """The node on which each process of a run's trace worked."""
    events = json.loads(run.trace_file.read_text())["traceEvents"]
    nodes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    lanes = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "thread_name"}
    return {name: int(nodes[process].split()[1]) for name, process in lanes.items()}


@pytest.mark.long
def test_robots_play_what_is_learnt_from(tried, notes):
    steps = tried.steps()
    assert [(each["samples/finished"], each["samples/failed"]) for each in steps] == [(EPISODES, 0)] * STEPS
    assert max(each["staleness/max"] for each in steps) <= 1
    assert all(each["grad/norm"] > 0 and each["critic/grad/norm"] > 0 for each in steps)
    learnt = [group for each in tried.learnt_lines for group in each["groups"]]
    assert sorted(learnt) == list(range(STEPS * EPISODES))
    played = Counter(note["node"] for note in notes)
    assert sum(played.values()) >= STEPS * EPISODES + EVALUATED and min(played.values()) > 1
    assert (tried.policy / "model.safetensors").exists()
