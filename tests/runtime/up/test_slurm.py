"""`roost up` under a real Slurm on this machine: a heterogeneous step of srun over three of its daemons."""

import json
import os
import socket
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from tests.limits import HANG_S
from tests.schedulers.one_machine_slurm import slurm

pytest.importorskip("ray")

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[3]
COMMANDS = Path(__file__).with_name("commands.py")
NODES = [(name, "CPUs=4 RealMemory=2000") for name in ("gpu1", "cpu1", "cpu2")]
PARTITION = "PartitionName=all Nodes=ALL Default=YES OverSubscribe=YES MaxTime=INFINITE State=UP"


def own_address():
    """Address of this machine: names of Slurm's nodes lead nowhere here."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.connect(("192.0.2.1", 9))  # sends nothing
        return asking.getsockname()[0]


@pytest.fixture
def folder():
    # Ray's sockets lie below this folder, and the path of a Unix socket has little room.
    made = Path("/tmp") / f"up{uuid.uuid4().hex[:6]}"
    made.mkdir()
    yield made
    subprocess.run(["rm", "-rf", str(made)], check=True)


def test_a_heterogeneous_step_of_srun(folder):
    with slurm(folder, NODES, [PARTITION]) as environ:
        environ = {name: value for name, value in environ.items() if not name.startswith(("ROOST_", "RAY_"))}
        environ |= {"RAY_AUTH_TOKEN": uuid.uuid4().hex, "RAY_TMPDIR": str(folder), "PYTHONPATH": str(ROOT)}
        environ |= {"ROOST_HEAD_ADDRESS": own_address(), "ROOST_FAKE_ACCELERATORS": "0"}
        words = [sys.executable, "-m", "roost", "up", "--", sys.executable, COMMANDS, "who", folder / "file", 7]
        up = [*map(str, words)]
        step = ["--ntasks-per-node=1", "--mem=100", "--cpus-per-task=2"]
        srun = ["srun", "-N1", "-w", "gpu1", *step, *up, ":", "-N2", "-w", "cpu[1-2]", *step, *up]
        done = subprocess.run(srun, env=environ, capture_output=True, text=True, timeout=HANG_S, cwd=folder)
    assert done.returncode == 7, done.stdout + done.stderr
    assert "node 0 (gpu1)" in done.stderr
    found = json.loads((folder / "file").read_text())
    assert [rank for rank, _ in found["nodes"]] == ["0", "1", "2"]
    cpus = min(2, len(os.sched_getaffinity(0)))
    assert {rank: resources["CPU"] for rank, resources in found["resources"].items()} == dict.fromkeys("012", cpus)
    assert not list(folder.glob("roost-ray-*"))
