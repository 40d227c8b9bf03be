"""A node that registers late is waited for, and one whose process exited is not."""

import subprocess
import sys

import pytest

pytest.importorskip("ray")

from ray._private import services

from roost.runtime.ray_connection import patient_start


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
        with pytest.raises(RuntimeError, match="not yet"):
            services.get_node("address", "id")
    assert len(registered_late) == 2
