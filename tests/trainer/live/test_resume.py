"""Runs that stop and go on: as if nothing had been, and with no group lost or used twice."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from roost.procs.signals import REQUEUE_CODE
from roost.trainer.records.checkpoints import Checkpoints, best_checkpoint, describe_policy
from roost.trainer.records.run_folder import RunFolder
from tests.limits import HANG_S
from tests.trainer.live.jobs import OFFLOADS, config, learnt_groups, trained, weights_of

ROOT = Path(__file__).parents[3]
ROOST = [sys.executable, "-c", "from roost.cli.main import run; run()"]


STEPS = 4


def values(model):
    return config(model, {"actor,rollout": "0"}, actor=OFFLOADS, max_steps=STEPS, ppo_epochs=2, checkpoint_every=1)


def start(folder, config_file):
    """The command line, in a process of its own."""
    return subprocess.Popen(
        [*ROOST, "train", str(config_file), "--runs", str(folder.parent), "--name", folder.name],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )


def ended_after(process, text, number):
    """Send a signal when a line with the text was printed; the rest of what it prints."""
    lines = []
    try:
        for line in process.stdout:
            lines.append(line)
            if text in line:
                process.send_signal(number)
                return process.communicate(timeout=HANG_S)[0]
        raise AssertionError("".join(lines))
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def config_file(model, tmp_path):
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(values(model)))
    return file


@pytest.fixture(scope="module")
def uninterrupted(model, tmp_path_factory):
    return trained(values(model), tmp_path_factory.mktemp("runs") / "uninterrupted").run


@pytest.mark.long
def test_a_killed_run_goes_on_as_if_nothing_had_been_bit_for_bit(model, config_file, tmp_path, uninterrupted):
    ended_after(start(tmp_path / "killed", config_file), "step 2/", signal.SIGKILL)
    assert len(RunFolder.open(tmp_path / "killed").steps()) < STEPS
    run = trained(values(model), tmp_path / "killed", resumes=True).run
    ours, theirs = weights_of(run), weights_of(uninterrupted)
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(theirs[name]) for name in ours)
    assert learnt_groups(run) == learnt_groups(uninterrupted)
    assert [step["reward/mean"] for step in run.steps()] == [step["reward/mean"] for step in uninterrupted.steps()]
    kept = {one.step for one in Checkpoints(run.checkpoints, 1).found()}
    assert kept == {2, 3, 4, best_checkpoint(run).step}, "checkpoints are kept to a limit"


@pytest.mark.long
def test_a_preempted_run_goes_on_by_the_same_command_bit_for_bit(config_file, tmp_path, uninterrupted):
    process = start(tmp_path / "run", config_file)
    told = ended_after(process, "step 1/", signal.SIGUSR1)
    assert process.returncode == REQUEUE_CODE and "the same command continues" in told, told
    run = RunFolder.open(tmp_path / "run")
    done = len(run.steps())
    assert done < STEPS and Checkpoints(run.checkpoints, 1).newest().read_state().step == done
    again = start(tmp_path / "run", config_file)
    told, _ = again.communicate(timeout=HANG_S)
    assert again.returncode == 0 and f"continuing from step {done}" in told, told
    ours, theirs = weights_of(run), weights_of(uninterrupted)
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(theirs[name]) for name in ours)
    assert learnt_groups(run) == learnt_groups(uninterrupted)
    assert not run.preempted_file.exists()


@pytest.mark.long
def test_a_run_that_is_told_to_stop_saves_and_stops(config_file, tmp_path):
    process = start(tmp_path / "run", config_file)
    output = ended_after(process, "step 1/", signal.SIGINT)
    assert process.returncode == 0, output
    run = RunFolder.open(tmp_path / "run")
    done = len(run.steps())
    assert done < STEPS and f"stopped at step {done}" in output and "--resume" in output
    newest = Checkpoints(run.checkpoints, 1).newest()
    assert newest is not None and newest.read_state().step == done
    assert run.report_file.exists()
    assert f"step {done} of {STEPS}" in describe_policy(run.policy) and weights_of(run), "what was learnt is not lost"


@pytest.mark.long
def test_a_run_that_is_killed_while_it_uploads_goes_on_elsewhere_from_the_store_alone(
    config_file, tmp_path, uninterrupted
):
    """Killed at the mark of the second checkpoint it uploads; the machine that continues it has an empty folder.

    The newest checkpoint is uploaded first, so which two they are depends on how fast uploads are.
    """
    pytest.importorskip("moto")
    from tests.object_store import ObjectStore

    store = ObjectStore()
    store.client().create_bucket(Bucket="lab")
    command = [*ROOST, "train", str(config_file), "--runs", "s3://lab/runs", "--name", "killed"]
    env = os.environ | {"PYTHONPATH": str(ROOT)} | store.env()
    marks = []
    with subprocess.Popen([*command, "--scratch", str(tmp_path / "one")], stdout=subprocess.PIPE, env=env) as first:

        def on_write(number, path):
            if "/step-" in path and path.endswith("complete.json") and path not in marks:
                marks.append(path)
            if len(marks) < 2:
                return None
            first.kill()
            return "503"

        with store.doing(on_write):
            first.communicate(timeout=HANG_S)
    assert first.returncode == -signal.SIGKILL
    assert [name for name in store.names("lab") if name.endswith("complete.json")] == [marks[0].removeprefix("/lab/")]
    second = subprocess.run(
        [*command, "--scratch", str(tmp_path / "two"), "--resume"],
        env=env,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert second.returncode == 0, second.stdout + second.stderr
    assert "downloading s3://lab/runs/killed" in second.stdout
    assert "uploaded s3://lab/runs/killed" in second.stdout
    download = [*ROOST, "download", "s3://lab/runs/killed", str(tmp_path / "seen")]
    subprocess.run(download, env=env, check=True, timeout=HANG_S)
    run = RunFolder(tmp_path / "seen")
    assert all(weights_of(run)[name].equal(weight) for name, weight in weights_of(uninterrupted).items())
    assert learnt_groups(run) == learnt_groups(uninterrupted)
    assert run.report_file.exists()
    assert run.finished_at() == STEPS
    store.close()
