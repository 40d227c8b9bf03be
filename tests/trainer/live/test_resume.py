"""Runs that stop and go on: as if nothing had been, and with no group lost or used twice."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from roost.trainer.run_folder import RunFolder
from tests.trainer.live.jobs import OFFLOADS, config, learnt_groups, trained, weights_of

ROOT = Path(__file__).parents[3]
ROOST = [sys.executable, "-c", "from roost.cli.main import run; run()"]


def values(model, steps, **more):
    return config(model, {"actor,rollout": "0"}, 1, actor=OFFLOADS, steps=steps, epochs=2, checkpoint_every=1, **more)


@pytest.fixture(scope="module")
def uninterrupted(model, tmp_path_factory):
    return trained(values(model, 4), tmp_path_factory.mktemp("runs") / "uninterrupted").run


def all_groups(run):
    return sorted(number for taken in learnt_groups(run).values() for number in taken)


def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(model, uninterrupted, tmp_path):
    folder = tmp_path / "run"
    trained(values(model, 2), folder)
    run = trained(values(model, 4), folder, resumes=True).run
    ours, theirs = weights_of(run), weights_of(uninterrupted)
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(theirs[name]) for name in ours)
    assert learnt_groups(run) == learnt_groups(uninterrupted)
    assert [step["reward/mean"] for step in run.steps()] == [step["reward/mean"] for step in uninterrupted.steps()]
    assert len(list(run.checkpoints.iterdir())) == 3, "checkpoints are kept to a limit"


def start(folder, config_file, *more):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [*ROOST, "train", str(config_file), "--runs", str(folder.parent), "--name", folder.name, *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        cwd=ROOT,
    )


def read_until(process, text):
    """Lines up to one that has the text."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        if text in line:
            return lines
    raise AssertionError("".join(lines))


@pytest.mark.parametrize(
    ("number", "ends_well"), [(signal.SIGTERM, True), (signal.SIGKILL, False)], ids=["term", "kill"]
)
def test_a_driver_that_is_ended_goes_on_where_it_was(model, tmp_path, number, ends_well):
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(values(model, 1000)))
    process = start(tmp_path / "run", file)
    try:
        read_until(process, "step 3/")
        process.send_signal(number)
        rest = process.communicate(timeout=120)[0]
        assert (process.returncode == 0) is ends_well, rest
    finally:
        process.kill()
        process.wait()
    done = RunFolder.open(tmp_path / "run").steps()[-1]["step"]
    run = trained(values(model, done + 2), tmp_path / "run", resumes=True).run
    assert [step["step"] for step in run.steps()] == list(range(1, done + 3))
    assert all_groups(run) == list(range(4 * (done + 2)))
