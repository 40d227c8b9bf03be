"""Leased ports: no two owners, not even in two processes, and none that somebody listens on."""

import os
import random
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import roost
from roost.net import addresses as ports
from roost.net.addresses import PortLeases

LEASE_AND_WAIT = """
import sys
from roost.net import addresses as ports
ports._candidates = lambda: map(int, sys.argv[2:])
leases = ports.PortLeases()
print(*[leases.lease() for _ in range(int(sys.argv[1]))], flush=True)
sys.stdin.read()
"""


@pytest.fixture
def leases():
    leases = PortLeases()
    yield leases
    leases.close()


@pytest.fixture
def few(monkeypatch):
    """Leave only some ports, all free at this moment."""

    def choose(count):
        probe = PortLeases()
        found = [probe.lease() for _ in range(count)]
        probe.close()
        monkeypatch.setattr(ports, "_candidates", lambda: random.sample(found, len(found)))
        return found

    return choose


def bound(port, host="127.0.0.1", reuse=True, family=socket.AF_INET):
    server = socket.socket(family, socket.SOCK_STREAM)
    if reuse:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind((host, port))
    server.listen()
    return server


def test_no_port_is_leased_twice(leases):
    others = PortLeases()
    found = [owner.lease() for _ in range(100) for owner in (leases, others)]
    others.close()
    assert len(set(found)) == 200
    assert all(ports.FIRST_PORT <= port < ports._first_ephemeral() for port in found)


def test_a_leased_port_can_be_used(leases):
    port = leases.lease()
    with bound(port, reuse=False) as server:
        assert server.getsockname()[1] == port


@pytest.mark.parametrize("end", ["exit", "kill"])
def test_two_processes_get_different_ports_which_are_free_again_with_their_process(leases, few, end):
    found = few(8)
    other = subprocess.Popen(
        [sys.executable, "-c", LEASE_AND_WAIT, "5", *map(str, found)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(roost.__file__).parents[1])},
    )
    try:
        theirs = set(map(int, other.stdout.readline().split()))
        assert len(theirs) == 5
        ours = {leases.lease() for _ in range(3)}
        assert ours | theirs == set(found)
        with pytest.raises(OSError, match="no free port between"):
            leases.lease()
    finally:
        if end == "kill":
            other.send_signal(signal.SIGKILL)
        other.communicate()
    assert {leases.lease() for _ in range(5)} == theirs


HOSTS = {
    "loopback": ("127.0.0.1", socket.AF_INET),
    "every address": ("", socket.AF_INET),
    "every address of both kinds": ("::", socket.AF_INET6),
}


@pytest.mark.parametrize("host, family", HOSTS.values(), ids=HOSTS)
def test_a_port_that_somebody_listens_on_is_not_given(leases, few, host, family):
    taken, free = few(2)
    try:
        server = bound(taken, host, family=family)
    except OSError:
        pytest.skip("this machine has no such address")
    with server:
        assert leases.lease() == free
        with pytest.raises(OSError, match="no free port"):
            leases.lease()
    assert leases.lease() == taken


def test_a_port_that_was_given_back_can_be_leased_again(leases, few):
    few(1)
    port = leases.lease()
    leases.release(port)
    leases.release(port)
    leases.release(1)
    assert leases.lease() == port
    leases.close()
    assert leases.lease() == port
