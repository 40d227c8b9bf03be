"""The example with many agents, small: 16 of its 512 processes on four simulated nodes, as a person runs it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.limits import HANG_S

EXAMPLE = Path(__file__).parents[3] / "examples" / "many_agents" / "launch.py"


@pytest.mark.long
def test_every_agent_answers_from_the_node_of_the_plan(tmp_path):
    found = tmp_path / "found.json"
    # A process of its own: it tells Ray, before that is imported, to listen on loopback.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    command = [sys.executable, str(EXAMPLE), "--processes", "16", "--json", str(found)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, env=environ)
    assert done.returncode == 0, done.stderr

    outcome = json.loads(found.read_text())
    answers = outcome["answers"]
    assert outcome["planned_nodes"] == [0] * 3 + [1] * 3 + [2] * 5 + [3] * 5
    assert [answer["node"] for answer in answers] == outcome["planned_nodes"]
    assert [answer["reward"] for answer in answers] == [1.0] * 16
    pids = {answer["pid"] for answer in answers}
    assert len(pids) == 16
    assert not any(psutil.pid_exists(pid) for pid in pids), "they end with the example"
    assert "launched    16 in" in done.stdout
