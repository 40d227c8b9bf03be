"""A whole `roost train` and what may end it: signals to its process group, and kills of the processes around it."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import psutil
import pytest
import yaml

from roost.procs.signals import REQUEUE_CODE
from roost.trainer.records.run_folder import RunFolder
from tests.limits import HANG_S
from tests.local_ray import ACCELERATORS, MARK
from tests.trainer.live.jobs import config

pytestmark = pytest.mark.long

CONTROL_SERVICE, RAY_DAEMON, NODE_DAEMON, REAPER = "gcs/gcs_server", "raylet/raylet", "ray::NodeDaemon", "reaper.py"
SERVER_KEEPER = "server_keeper.py"


@pytest.fixture(scope="module", autouse=True)
def machine():
    """No Ray of the tests' own: each run starts one."""


def until(condition, what):
    deadline = time.monotonic() + HANG_S
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.1)
    raise TimeoutError(f"{what} within {HANG_S:g} s")


class CommandRun:
    """A run on its way, in a process group of its own."""

    def __init__(self, model, folder):
        self.mark = uuid.uuid4().hex
        self.run = RunFolder(folder / "runs" / "one")
        self.temporary = Path(tempfile.mkdtemp(prefix="rt", dir="/tmp"))  # short, for the sockets in it
        job = folder / "job.yaml"
        values = config(model, {"actor": "0", "rollout": "1"}, max_steps=10_000, checkpoint_every=1)
        job.write_text(yaml.safe_dump(values))
        self.printed = (folder / "printed.txt").open("w+")
        command = [str(Path(sys.executable).with_name("roost")), "train", str(job), "--name", "one"]
        environ = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
        self.process = subprocess.Popen(
            [*command, "--runs", str(folder / "runs"), "--address", "local"],
            env={**environ, **self.variables()},
            stdout=self.printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def variables(self):
        # Ray's memory monitor would kill workers here for what other programs of the machine use.
        alone = {"ROOST_FAKE_ACCELERATORS": str(ACCELERATORS), "RAY_memory_monitor_refresh_ms": "0"}
        return {MARK: self.mark, "RAY_TMPDIR": str(self.temporary), **alone}

    def output(self):
        self.printed.seek(0)
        return self.printed.read()

    def steps(self):
        return len(self.run.steps()) if self.run.has_run else 0

    def wait_for_steps(self, count):
        def done():
            assert self.process.poll() is None, self.output()
            return self.steps() >= count

        until(done, f"{count} steps")

    def processes(self, name=""):
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and name in " ".join(process.cmdline()):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def kill(self, name):
        until(lambda: self.processes(name), f"a process {name}")[0].kill()

    def signal_group(self, number):
        os.killpg(self.process.pid, number)

    def assert_nothing_is_left(self):
        until(lambda: not self.processes(), "no process is left")
        until(lambda: not list(self.temporary.iterdir()), "no folder is left")
        self.temporary.rmdir()


@pytest.fixture
def command_run(model, tmp_path):
    run = CommandRun(model, tmp_path)
    yield run
    if run.process.poll() is None:
        run.process.kill()
        run.process.wait()


def test_a_run_survives_its_control_service_and_stops_by_a_signal_to_its_group(command_run):
    command_run.wait_for_steps(2)
    groups = {os.getpgid(process.pid) for process in command_run.processes() if process.pid != command_run.process.pid}
    assert command_run.process.pid not in groups, "only the driver is in its process group"
    sessions = [folder for folder in command_run.temporary.iterdir() if folder.name.startswith("roost-ray-")]
    assert [folder.stat().st_mode & 0o777 for folder in sessions] == [0o700]
    command_run.kill(CONTROL_SERVICE)
    until(lambda: "continuing from step" in command_run.output(), "the run goes on")
    assert "Ray's control service (GCS) on this machine died: process" in command_run.output()
    command_run.wait_for_steps(command_run.steps() + 2)
    command_run.signal_group(signal.SIGTERM)
    command_run.signal_group(signal.SIGTERM)  # as `timeout` does: to the process, then to the group
    assert command_run.process.wait(HANG_S) == REQUEUE_CODE, command_run.output()
    steps = [record["step"] for record in command_run.run.steps()]
    assert steps == list(range(1, len(steps) + 1))
    learnt = [group for record in command_run.run.learnt_lines for group in record["groups"]]
    assert len(learnt) == len(set(learnt)), "each group is learnt from once"
    assert f"preempted at step {steps[-1]}" in command_run.output()
    modes = {path: path.stat().st_mode & 0o777 for path in [command_run.run.path, *command_run.run.path.rglob("*")]}
    assert {str(path): oct(mode) for path, mode in modes.items() if mode & 0o077} == {}, "files are private"
    assert command_run.run.report_file.exists()
    states = [json.loads(file.read_text())["step"] for file in command_run.run.checkpoints.glob("*/trainer.json")]
    assert max(states) == steps[-1]
    command_run.assert_nothing_is_left()


@pytest.mark.parametrize("victim", [NODE_DAEMON, RAY_DAEMON])
def test_a_run_goes_on_without(command_run, victim):
    command_run.wait_for_steps(1)
    command_run.kill(REAPER)
    command_run.kill(SERVER_KEEPER)
    command_run.wait_for_steps(command_run.steps() + 1)
    command_run.kill(victim)
    until(lambda: "continuing from step" in command_run.output(), "the run goes on")
    command_run.wait_for_steps(command_run.steps() + 1)
    command_run.signal_group(signal.SIGKILL)
    command_run.process.wait()
    command_run.assert_nothing_is_left()
