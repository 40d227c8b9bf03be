"""`roost up` on four hosts with addresses of their own, under the variables of several schedulers."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from tests.limits import HANG_S
from tests.network import Network, can_make_namespaces

psutil = pytest.importorskip("psutil")
pytest.importorskip("ray")

ROOT = Path(__file__).parents[3]
COMMANDS = Path(__file__).with_name("commands.py")
TRAIN = [sys.executable, "-m", "roost", "train"]
HOSTS = {"gpu1": 2, "gpu2": 10, "cpu1": 9, "cpu2": 4}

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not can_make_namespaces(), reason="needs root and iproute2 to make network namespaces"),
]


def slurm(network, rank, host):
    """A heterogeneous job of two components."""
    return {
        "SLURM_JOB_ID": "71",
        "SLURM_HET_SIZE": "2",
        "SLURM_JOB_NODELIST_HET_GROUP_0": "gpu[1-2]",
        "SLURM_JOB_NODELIST_HET_GROUP_1": "cpu[1-2]",
        "SLURMD_NODENAME": host,
        "SLURM_NODEID": str(rank % 2),
        "SLURM_CPUS_PER_TASK": "1",
    }


def skypilot(network, rank, host):
    return {
        "SKYPILOT_NODE_RANK": str(rank),
        "SKYPILOT_NUM_NODES": "4",
        "SKYPILOT_NODE_IPS": "\n".join(map(network.address, HOSTS)),
        "SKYPILOT_TASK_ID": "sky-2026-11-17",
    }


def kubernetes(network, rank, host):
    return {"JOB_COMPLETION_INDEX": str(rank), "HOSTNAME": f"train-{rank}", "MASTER_ADDR": network.address("gpu1")}


def left_in_shared_memory():
    """Files that no process of the machine uses."""
    used = ""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it has exited
            used += maps.read_text(errors="replace")
    return {file for file in Path("/dev/shm").iterdir() if str(file) not in used}


class Job:
    """`roost up` on every host; the variables of the scheduler differ, the line is the same."""

    def __init__(self, network, folder, environment, *command, options=(), hosts=tuple(HOSTS)):
        self.network, self.folder, self.file = network, folder, folder / "file"
        self._shared_memory = set(Path("/dev/shm").iterdir())
        shared = {name: value for name, value in os.environ.items() if not name.startswith(("ROOST_", "RAY_"))}
        shared |= {"RAY_AUTH_TOKEN": uuid.uuid4().hex, "ROOST_FAKE_ACCELERATORS": "1", "COLUMNS": "200"}
        shared |= {"RAY_TMPDIR": str(folder), "PYTHONPATH": str(ROOT)}
        words = [sys.executable, "-m", "roost", "up", *options, "--", *map(str, command)]
        self.processes = {}
        for rank, host in enumerate(HOSTS):
            if host in hosts:
                with (folder / f"{host}.out").open("w") as printed:
                    self.processes[host] = subprocess.Popen(
                        network.command(host, *words),
                        cwd=folder,
                        env=shared | environment(network, rank, host),
                        stdout=printed,
                        stderr=printed,
                        start_new_session=True,
                    )

    def said(self, host=None):
        names = HOSTS if host is None else [host]
        return "\n".join((self.folder / f"{name}.out").read_text() for name in names if name in self.processes)

    def wait_for(self, condition):
        deadline = time.monotonic() + HANG_S
        while not condition():
            assert time.monotonic() < deadline, self.said()
            assert all(process.poll() is None for process in self.processes.values()), self.said()
            time.sleep(0.1)

    def kill(self, host, part):
        """SIGKILL a process of the host: the launcher, or one whose program has the name."""
        if part == "launcher":
            self.processes[host].kill()
            return
        for pid in self.network.pids(host):
            if Path(psutil.Process(pid).cmdline()[0]).name == part:
                os.kill(pid, signal.SIGKILL)
                return
        raise AssertionError(f"no {part} on {host}")

    def codes(self):
        return {host: process.wait(HANG_S) for host, process in self.processes.items()}

    def left(self):
        """Processes, folders and shared memory."""
        processes = [pid for host in HOSTS for pid in self.network.pids(host)]
        return [*processes, *self.folder.glob("*roost-ray-*"), *left_in_shared_memory() - self._shared_memory]

    def check_nothing_is_left(self):
        deadline = time.monotonic() + HANG_S
        while left := self.left():
            assert time.monotonic() < deadline, left
            time.sleep(0.1)

    def said_after(self, host, text):
        """The line that a launcher printed after another one."""
        lines = [line for line in self.said(host).splitlines() if line.startswith("roost: ")]
        return lines[next(number for number, line in enumerate(lines) if text in line) + 1]


@pytest.fixture(scope="module")
def network():
    made = Network(HOSTS)
    yield made
    made.close()


@pytest.fixture
def folder():
    # Ray's sockets lie below this folder, and the path of a Unix socket has little room.
    made = Path("/tmp") / f"up{uuid.uuid4().hex[:6]}"
    made.mkdir()
    yield made
    subprocess.run(["rm", "-rf", str(made)], check=True)


@pytest.fixture
def start(network, folder):
    def begin(*words, **options):
        return Job(network, folder, *words, **options)

    yield begin
    network.kill_all()


def test_a_command_over_all_nodes_under_skypilot(start, network, folder):
    job = start(skypilot, sys.executable, COMMANDS, "who", folder / "file", 7, options=("--ports", "21000-21199"))
    assert job.codes() == dict.fromkeys(HOSTS, 7), job.said()
    found = json.loads(job.file.read_text())
    assert found["nodes"] == [[str(rank), network.address(host)] for rank, host in enumerate(HOSTS)]
    assert all(resources["GPU"] == 1 for resources in found["resources"].values())
    assert "4 nodes joined" in job.said("gpu1")
    assert "to connect on port 21000" in job.said("gpu1")
    assert len(found["ports"]) >= 13 and all(21016 <= port <= 21199 for port in found["ports"]), found["ports"]
    job.check_nothing_is_left()


def test_arithmetic_is_trained_over_a_heterogeneous_slurm_job(start, folder):
    pytest.importorskip("torch")
    from roost.rollout.arithmetic import write_arithmetic_model

    model = write_arithmetic_model(folder / "model", hidden_size=32, intermediate_size=32, num_hidden_layers=1)
    changes = {
        "cluster.num_nodes": 4,
        "cluster.num_gpus_per_node": 1,
        "cluster.component_placement.actor": "0-1",
        "cluster.component_placement.rollout": "2-3",
        "actor.model.model_path": model,
        "algorithm.group_size": 4,
        "data.rollout_batch_size": 4,
        "runner.max_steps": 2,
    }
    words = [f"{key}={value}" for key, value in changes.items()]
    job = start(slurm, *TRAIN, ROOT / "examples/arithmetic/rlinf.yaml", *words, "--runs", folder / "runs")
    assert job.codes() == dict.fromkeys(HOSTS, 0), job.said()
    run = folder / "runs/arithmetic"
    assert (run / "policy/model.safetensors").exists()
    assert json.loads((run / "finished.json").read_text()) == {"step": 2}
    assert "4 nodes joined" in job.said("gpu1")
    job.check_nothing_is_left()


def test_a_signal_on_any_node_reaches_the_command_under_slurm(start, network, folder):
    """srun signals every process: those of Ray survive it, and the command gets one."""
    job = start(slurm, sys.executable, COMMANDS, "wait", folder / "file", 75)
    job.wait_for(job.file.exists)
    found = [psutil.Process(pid) for host in ("gpu2", "cpu1", "cpu2", "gpu1") for pid in network.pids(host)]
    assert {"raylet", "gcs_server"} <= {process.name() for process in found}
    for process in found:
        with contextlib.suppress(psutil.NoSuchProcess):  # the job ends meanwhile
            if process.cmdline()[1:2] != [str(COMMANDS)]:
                process.send_signal(signal.SIGUSR1)
    assert job.codes() == dict.fromkeys(HOSTS, 75), job.said()
    assert job.file.with_suffix(".signal").read_text() == "SIGUSR1"
    assert job.said("gpu1").count("SIGUSR1") == 1, "one is passed on"
    job.check_nothing_is_left()


@pytest.mark.parametrize(
    ("host", "part", "cause"),
    [
        ("cpu1", "launcher", "is gone: its `roost up` was killed"),
        ("gpu2", "raylet", "Ray's raylet was ended by SIGKILL"),
        ("gpu1", "gcs_server", "Ray's gcs_server was ended by SIGKILL"),
        ("gpu1", "launcher", "the head at 10.213.77.2 is gone: its `roost up` was killed"),
    ],
)
def test_whatever_is_killed_everything_ends_under_kubernetes(start, folder, host, part, cause):
    job = start(kubernetes, sys.executable, COMMANDS, "wait", folder / "file", 0, options=("--nodes", "4"))
    job.wait_for(job.file.exists)
    job.kill(host, part)
    codes = job.codes()
    expected = dict.fromkeys(HOSTS, 1) | ({host: -signal.SIGKILL} if part == "launcher" else {})
    assert codes == expected, job.said()
    for other in HOSTS:
        if other != host or part != "launcher":
            after = "running" if other == "gpu1" else "Ray runs on"
            assert cause in job.said_after(other, after), job.said(other)
    job.check_nothing_is_left()


def test_a_node_that_never_comes_is_named(start):
    hosts = ("gpu1", "gpu2", "cpu2")
    job = start(slurm, "true", options=("--timeout", "8"), hosts=hosts)
    assert job.codes() == dict.fromkeys(hosts, 1)
    for host in hosts:
        assert "node 2 (cpu1) has not connected after 8 s" in job.said(host)
    job.check_nothing_is_left()
