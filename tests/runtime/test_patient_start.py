"""A node that registers late is waited for; one whose process exited is not, and Ray is started again.

The services that Roost does without are not started.
"""

import subprocess
import sys

import pytest

pytest.importorskip("ray")

import ray
from ray._private import services
from ray._private.node import Node

from roost.runtime.ray_connection import RayExited, connect, patient_start, without_services


@pytest.fixture
def registered_late(monkeypatch):
    """Ray's look-up of a node, which fails twice."""
    answers = [RuntimeError("not yet"), RuntimeError("not yet"), {"node": 1}]

    def get_node(*_):
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(services, "get_node", get_node)
    return answers


def test_a_node_that_registers_late_is_waited_for(registered_late):
    with patient_start(), services.ConsolePopen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE):
        assert services.get_node("address", "id") == {"node": 1}
    with pytest.raises(IndexError):
        services.get_node("address", "id")


def test_a_process_that_exited_is_not_waited_for(registered_late):
    with patient_start():
        services.ConsolePopen([sys.executable, "-c", ""]).wait()
        with pytest.raises(RayExited, match=r"its process python\S* exited with code 0"):
            services.get_node("address", "id")
    assert len(registered_late) == 2


def test_services_that_this_ray_does_not_have_are_passed_over(monkeypatch):
    monkeypatch.delattr(Node, "start_monitor")
    before = Node.start_log_monitor
    with without_services():
        assert Node.start_log_monitor is not before
        assert not hasattr(Node, "start_monitor")
    assert Node.start_log_monitor is before
    assert not hasattr(Node, "start_monitor")


@pytest.mark.long
def test_ray_is_started_again_when_its_daemon_exits(monkeypatch):
    """As it does on a busy machine, where its agents are not up in time."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    killed, start = [], services.start_raylet

    def start_raylet(*args, **options):
        info = start(*args, **options)
        if not killed:
            killed.append(info.process.pid)
            info.process.kill()
        return info

    monkeypatch.setattr(services, "start_raylet", start_raylet)
    connection = connect("local")
    try:
        assert killed and ray.is_initialized()
    finally:
        connection.close()
