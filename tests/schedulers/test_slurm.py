"""Rendered scripts on a real Slurm of one machine: accepted, started on every node, preempted, requeued, resumed."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

import roost
from roost.schedulers.job_files import Scheduler, render
from roost.schedulers.node_requests import requests_of
from roost.trainer.records.run_folder import RunFolder
from tests.limits import HANG_S
from tests.schedulers.golden_files import FOLDER, ROOT, options
from tests.schedulers.one_machine_slurm import slurm, wait_until

pytestmark = pytest.mark.long
GPU = "CPUs=256 RealMemory=2000000 Gres=gpu:8"
NODES = [(f"n{rank}", GPU) for rank in range(16)] + [
    (f"arm{rank}", "CPUs=8 RealMemory=16000 Feature=franka") for rank in (0, 1)
]
PARTITIONS = ["PartitionName=gpu Nodes=n[0-15] Default=YES", "PartitionName=lab Nodes=arm[0-1]"]
# Stands for `roost up`, which other tests run: notes its words, saves a checkpoint at USR1, and ends on all nodes.
PROGRAM = """#!/bin/bash
echo "$SLURM_NODEID of $SLURM_JOB_NUM_NODES: $*" >> {notes}
trap 'touch {run}/checkpoints/step_1; exit 75' USR1
mkdir -p {run}/checkpoints
if [ -e {run}/checkpoints/step_1 ]; then
  [ "$SLURM_NODEID" = 0 ] && touch {run}/finished.json
  exit 0
fi
touch {run}/started.$SLURM_NODEID
while [ ! -e {run}/checkpoints/step_1 ]; do sleep 0.2; done
exit 75
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with slurm(tmp_path_factory.mktemp("slurm"), NODES, PARTITIONS) as environ:
        yield environ


def call(environ, *words):
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def wait_for_requeue(environ, job):
    """Wait until the job is in the queue again, and past the second in which a node would refuse it.

    The requeue revokes every credential of the job that is not newer than its own second, so a start in that second
    ends the job as FAILED ("Job credential revoked").
    """
    wait_until(lambda: "Restarts=1" in call(environ, "scontrol", "show", "job", job), "the job in the queue again")
    time.sleep(2)


def start_now(environ, job):
    """Let a requeued job start: Slurm sets it back by two minutes, also a moment after it is in the queue."""
    words = ["scontrol", "update", f"JobId={job}", "StartTime=now"]
    subprocess.run(words, env=environ, capture_output=True, timeout=HANG_S, check=False)  # refused while it runs
    return True


@pytest.mark.parametrize(
    ("name", "found"),
    [
        # Slurm tests each component for itself, so that two of them may name the same nodes.
        ("heterogeneous.sbatch", f"using {8 * 138 + 8 * 34 + 2 * 3} processors on arm[0-1],n[0-7]"),
        ("apptainer.sbatch", f"using {2 * 38} processors on nodes n[0-1]"),
        ("command.sbatch", f"using {2 * 38} processors on nodes n[0-1]"),
    ],
)
def test_slurm_accepts_a_script(cluster, name, found):
    assert found in call(cluster, "sbatch", "--test-only", str(FOLDER / name))


@pytest.mark.parametrize("to", [["--batch"], []], ids=["at-the-time-limit", "by-hand-to-all-nodes"])
def test_a_preempted_job_is_requeued_and_resumes(cluster, tmp_path, to):
    tmp_path.chmod(0o755)
    run, notes = tmp_path / "runs" / "math", tmp_path / "notes"
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "roost"
    program.write_text(PROGRAM.format(run=run, notes=notes))
    program.chmod(0o755)
    robot = {"type": "Franka", "configs": [{"robot_ip": "10.0.0.1", "node_rank": 2}]}
    groups = [{"label": "a", "node_ranks": "0-1"}, {"label": "b", "node_ranks": 2, "hardware": robot}]
    places = {"actor": {"node_group": "a", "placement": "0-15"}, "env": {"node_group": "b", "placement": 0}}
    cluster_cfg = {"num_nodes": 3, "component_placement": places, "node_groups": groups}
    machines = {"nodes": [{"count": 2, "accelerators": 8}, {"accelerators": 0}]}
    allocation = requests_of(roost.plan({"cluster": cluster_cfg}, machines))
    chosen = options(
        workdir=str(tmp_path), scheduler_options=("b:partition=lab", "b:constraint=franka"), time="60", env={}
    )
    (tmp_path / "job.sbatch").write_text(render(Scheduler.SLURM, allocation, chosen))
    environ = {**cluster, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    job = call(environ, "sbatch", "--parsable", str(tmp_path / "job.sbatch")).strip()
    wait_until(lambda: len(list(run.glob("started.*"))) == 3, "the program on three nodes")
    words = "up --nodes 3 -- roost train job.yaml --name math --runs runs --auto-resume"
    assert sorted(notes.read_text().splitlines()) == [f"{rank} of 3: {words}" for rank in range(3)]
    call(environ, "scancel", *to, "--signal=USR1", job)
    wait_for_requeue(environ, job)
    assert (run / "checkpoints" / "step_1").exists()
    wait_until(lambda: start_now(environ, job) and (run / "finished.json").exists(), "the end of the second start")
    assert sorted(notes.read_text().splitlines()[3:]) == [f"{rank} of 3: {words}" for rank in range(3)]
    wait_until(lambda: "JobState=COMPLETED" in call(environ, "scontrol", "show", "job", job), "the end of the job")


def test_from_launch_to_a_trained_policy(cluster, tmp_path):
    """The real commands: `roost launch slurm --submit`, sbatch, srun, `roost up`, `roost train`; once preempted."""
    from roost.rollout.arithmetic import write_arithmetic_model

    tmp_path.chmod(0o755)
    model = write_arithmetic_model(tmp_path / "model", hidden_size=32, intermediate_size=32, num_hidden_layers=1)
    (tmp_path / "machines.yaml").write_text("nodes: [{accelerators: 2, accelerator_type: SIMULATED}]")
    programs = Path(sys.executable).parent
    environ = {**cluster, "PATH": f"{programs}:{os.environ['PATH']}"}
    environ = {name: value for name, value in environ.items() if name not in ("RAY_ADDRESS", "RAY_TMPDIR")}
    words = [sys.executable, "-m", "roost", "launch", "slurm", ROOT / "examples" / "arithmetic" / "rlinf.yaml",
             f"actor.model.model_path={model}", "runner.max_steps=3", "--inventory", tmp_path / "machines.yaml",
             "--env", "ROOST_FAKE_ACCELERATORS=2", "--time", "60", "--workdir", tmp_path, "--name", "sums", "--submit",
             "--out", tmp_path / "job.sbatch"]  # fmt: skip
    job = call(environ, *map(str, words)).split("Submitted batch job ")[1].split()[0]

    def state():
        return re.search(r"JobState=(\w+)", call(environ, "scontrol", "show", "job", job))[1]

    run = RunFolder(tmp_path / "runs" / "sums")
    wait_until(lambda: run.steps() or state() not in ("PENDING", "CONFIGURING", "RUNNING"), "the first step")
    call(environ, "scancel", "--batch", "--signal=USR1", job)
    wait_for_requeue(environ, job)
    assert run.finished_at() is None and any(run.checkpoints.iterdir())
    wait_until(
        lambda: start_now(environ, job) and state() not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"),
        "the end of the job",
    )
    printed = "".join(file.read_text() for file in tmp_path.glob("*.out"))
    assert state() == "COMPLETED", printed
    assert run.finished_at() == 3 and (run.policy / "model.safetensors").exists(), printed
    assert [step["step"] for step in run.steps()] == [1, 2, 3]
