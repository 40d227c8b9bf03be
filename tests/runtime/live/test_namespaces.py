"""Ray started by hand on three hosts with addresses of their own: network namespaces of this machine."""

import json
import os
import shutil
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from tests.limits import HANG_S
from tests.network import NETWORK, Network, can_make_namespaces

DRIVERS = Path(__file__).parent / "drivers"
RAY = Path(sys.executable).with_name("ray")
HOSTS = {"a": 2, "b": 10, "c": 9}  # the driver's, and two whose order as text is not their order as numbers
PORT = 6399

CONFIG = """
cluster:
  num_nodes: 3
  component_placement:
    actor: 1-4
"""


pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not can_make_namespaces(), reason="needs root and iproute2 to make network namespaces"),
]


class Hosts:
    """Network namespaces on one bridge, and the Ray nodes in them."""

    def __init__(self, folder):
        self.folder = folder
        self.environ = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("ROOST_", "RAY_"))},
            "ROOST_FAKE_ACCELERATORS": "2",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": uuid.uuid4().hex + uuid.uuid4().hex,
        }
        self.raylets = []
        self.starts = 0
        self.network = Network(HOSTS)

    def run(self, host, *words, limit=HANG_S, **options):
        command = self.network.command(host, *words)
        return subprocess.run(command, env=self.environ, capture_output=True, text=True, timeout=limit, **options)

    def start(self, order, hidden=None):
        """Ray's head on the first host, then the others in order. What is hidden, the last host does not see."""
        for host in order:
            address = f"{NETWORK}.{HOSTS[host]}"
            words = ["start", f"--node-ip-address={address}", "--num-cpus=2", "--num-gpus=2", "--block"]
            if host == order[0]:
                words += ["--head", f"--port={PORT}", "--include-dashboard=false", f"--temp-dir={self.folder}/{order}"]
            else:
                words += [f"--address={NETWORK}.{HOSTS[order[0]]}:{PORT}"]
            command = self.network.command(host)
            if hidden is not None and host == order[-1]:
                command += ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs none {hidden} && exec "$@"', "sh"]
            log = (self.folder / f"{host}.out").open("a")
            self.raylets.append(
                subprocess.Popen([*command, str(RAY), *words], env=self.environ, stdout=log, stderr=log)
            )
            # One after the other: nodes that share a disk and start at once may choose the same socket.
            self._wait_for(host, self.starts)
        self.starts += 1

    def _wait_for(self, host, starts):
        deadline = time.monotonic() + HANG_S
        while (self.folder / f"{host}.out").read_text().count("Ray runtime started") <= starts:
            assert time.monotonic() < deadline, self.reported()
            time.sleep(0.1)

    def reported(self):
        """Output of Ray's command line on each host."""
        return "\n".join(f"{host}: {(self.folder / f'{host}.out').read_text()[-2000:]}" for host in HOSTS)

    def stop(self):
        """End every process of the hosts; what Ray leaves behind would take part in the next cluster."""
        for process in reversed(self.raylets):
            process.terminate()
        for process in self.raylets:
            process.wait(HANG_S)
        self.raylets = []
        self.network.kill_all()

    def close(self):
        self.stop()
        self.network.close()


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """The driver's view, with Ray's nodes started in two orders."""
    # Ray's sockets lie below this folder, and the path of a Unix socket has little room.
    folder = Path("/tmp") / f"rt{os.getpid()}"
    folder.mkdir()
    config = tmp_path_factory.mktemp("config") / "job.yaml"
    config.write_text(CONFIG)
    hosts = Hosts(folder)
    try:
        found = []
        for order in ("abc", "acb"):
            logs = tmp_path_factory.mktemp("logs")
            hosts.start(order, hidden=logs)
            address = f"{NETWORK}.2:{PORT}"
            done = hosts.run("a", sys.executable, DRIVERS / "three_nodes.py", address, logs, config)
            assert done.returncode == 0, done.stderr[-4000:] + hosts.reported()
            found.append(json.loads(done.stdout.strip().splitlines()[-1]))
            hosts.stop()
        yield found
    finally:
        hosts.close()
        shutil.rmtree(folder, ignore_errors=True)


def test_nodes_are_in_numeric_order_with_the_driver_first(answers):
    assert answers[0]["addresses"] == [f"{NETWORK}.2", f"{NETWORK}.9", f"{NETWORK}.10"]


def test_groups_over_several_nodes_meet_at_an_address_of_the_network(answers):
    assert answers[0]["places"] == [[0, "", f"{NETWORK}.2"], [1, "", f"{NETWORK}.2"], [2, "", f"{NETWORK}.2"]]
    assert [place[2] for place in answers[0]["single"]] == ["127.0.0.1"]


def test_tensors_travel_between_machines(answers):
    assert answers[0]["ring"] == 2
    assert answers[0]["broadcast"] == [1_999_999] * 3


def test_a_channel_on_another_machine(answers):
    assert answers[0]["channel"] == [0, 1, 2]


def test_torch_distributed_finds_its_peers(answers):
    assert answers[0]["reduce"] == [6, 6, 6]


def test_logs_come_from_machines_that_do_not_see_the_folder(answers):
    for answer in answers:
        for rank in range(3):
            assert f"this is {rank}\n" in answer["logs"][f"traveller/rank_{rank}.log"]


def test_the_same_plan_after_the_nodes_joined_in_another_order(answers):
    first, second = answers
    assert second["addresses"] == first["addresses"]
    assert [place[:2] for place in first["planned"]] == [[0, "1"], [1, "0"], [1, "1"], [2, "0"]]
    assert second["planned"] == first["planned"]
