"""However a driver ends, nothing of its job stays: no process, port, shared memory or reservation."""

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest

from roost import Cluster, PackedPlacementStrategy, WaitedTooLong, Worker
from tests.limits import HANG_S

pytestmark = pytest.mark.long

DRIVER = Path(__file__).parent / "drivers" / "endless.py"


def processes_with(mark):
    """Processes that inherited a mark in their environment, by id."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue  # gone meanwhile
    return found


def shared_memory_of(processes):
    """Files of shared memory that processes use."""
    found = set()
    for pid in processes:
        try:
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        except OSError:
            continue
        found.update(line.split()[5] for line in lines if "/dev/shm/" in line and not line.endswith("(deleted)"))
    return found


def claims():
    """The ports that jobs of this machine have claimed, with the socket that holds each."""
    lines = Path("/proc/net/unix").read_text().splitlines()
    return {words[-1]: words[-2] for words in map(str.split, lines) if words[-1].startswith("@roost-port-")}


def claims_of(processes):
    sockets = set()
    for pid in processes:
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                sockets.add(str(link.readlink()).removeprefix("socket:[").removesuffix("]"))
            except OSError:
                continue
    return {port for port, socket in claims().items() if socket in sockets}


def until(condition):
    deadline = time.monotonic() + HANG_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.2)
    return condition()


def start_driver(address, mark, **environ):
    driver = subprocess.Popen(
        [sys.executable, str(DRIVER), address],
        env={**os.environ, "ROOST_TEST_MARK": mark, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # an interrupt meant for it must not reach the tests
    )
    lines = []
    for line in driver.stdout:
        lines.append(line)
        if line == "ready\n":
            return driver
    raise AssertionError("".join(lines))


ENDS = [
    pytest.param(signal.SIGINT, id="interrupted"),
    pytest.param(signal.SIGKILL, id="killed"),
]


@pytest.mark.parametrize("end", ENDS)
def test_a_job_on_a_ray_of_its_own(end):
    mark = uuid.uuid4().hex
    driver = start_driver("local", mark, ROOST_FAKE_ACCELERATORS="2")
    processes = processes_with(mark)
    memory, ports = shared_memory_of(processes), claims_of(processes)
    assert len(processes) > 5
    assert len(ports) == 3  # one where the group meets, and one of each worker
    driver.send_signal(end)
    driver.wait(HANG_S)
    assert until(lambda: not processes_with(mark)), processes_with(mark)
    assert until(lambda: not ports & set(claims())), "a process that ends shows no name before it lets go"
    assert not [path for path in memory if Path(path).exists()]


@pytest.fixture(scope="module")
def running_ray(ray_nodes):
    import ray

    mark = uuid.uuid4().hex
    ray_nodes.add(2, cpus=2, ROOST_TEST_MARK=mark)
    ray.init(address=ray_nodes.address, namespace="roost", log_to_driver=False)
    return ray_nodes, mark


class Wanting(Worker):
    def sees(self):
        return os.environ["ROOST_VISIBLE_DEVICES"]


def wanted(limit, reported):
    """Accelerators for a job of this process while another driver has a job there."""
    with Cluster(num_nodes=1, reservation_timeout=limit, say=reported.append) as cluster:
        group = Wanting.create_group().launch(cluster, name="wanting", placement_strategy=PackedPlacementStrategy(0, 0))
        return group.sees().wait()


@pytest.mark.parametrize("end", ENDS)
def test_a_job_on_a_ray_that_goes_on(running_ray, end):
    import ray
    from ray.util import placement_group_table

    nodes, mark = running_ray
    driver = start_driver(nodes.address, uuid.uuid4().hex)
    assert ray.available_resources().get("GPU", 0) == 0
    reported = []
    with pytest.raises(WaitedTooLong, match=r"no room within 2 s: node 0, .*: 1 accelerator needed, 0 of 2 free"):
        wanted(2, reported)
    assert [text for text in reported if "waiting up to 2 s for the cluster: node 0" in text]
    ports = claims_of(workers_of_jobs(nodes, mark))
    driver.send_signal(end)
    driver.wait(HANG_S)
    assert until(lambda: ray.available_resources().get("GPU", 0) == 2)
    assert until(lambda: {group["state"] for group in placement_group_table().values()} <= {"REMOVED"})
    assert until(lambda: not workers_of_jobs(nodes, mark)), workers_of_jobs(nodes, mark)
    assert until(lambda: not ports & set(claims())), "a process that ends shows no name before it lets go"
    assert wanted(HANG_S, reported) == ["0"]


def workers_of_jobs(nodes, mark):
    """Processes of Roost's actors on a Ray with a mark, and what a worker of the endless job started."""
    found = processes_with(mark)
    (raylet,) = nodes.nodes[0].all_processes["raylet"]
    for process in psutil.Process(raylet.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # gone meanwhile
            found[process.pid] = " ".join(process.cmdline())
    names = ("ray::Busy", "ray::NodeDaemon", "ray::Keeper", "time.sleep(600)")
    return {pid: line for pid, line in found.items() if any(name in line for name in names)}
