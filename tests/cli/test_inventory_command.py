"""`roost inventory` on a Ray of its own."""

import json
import os
import subprocess
import sys

import pytest

from tests.limits import HANG_S

pytest.importorskip("ray")

CONFIG = """
cluster:
  num_nodes: 1
  component_placement: {env: {node_group: arms, placement: 0}}
  node_groups:
    - label: arms
      node_ranks: 0
      hardware:
        type: Franka
        configs: [{node_rank: 0, disable_validate: true}]
"""


def roost(*words, **environ):
    return subprocess.run(
        [sys.executable, "-c", "from roost.cli.main import run; run()", "inventory", *map(str, words)],
        env={**os.environ, "ROOST_FAKE_ACCELERATORS": "4", "ROOST_FAKE_MEMORY_GB": "80", "COLUMNS": "100", **environ},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )


def test_shows_and_saves_what_there_is(tmp_path):
    (tmp_path / "job.yaml").write_text(CONFIG)
    saved = tmp_path / "machines.json"
    done = roost(tmp_path / "job.yaml", "--address", "local", "--save", saved, ROBOT_IP="10.0.0.9")
    assert done.returncode == 0, done.stderr
    assert "4 simulated" in done.stdout
    assert "1 Franka" in done.stdout
    assert "arms" in done.stdout
    (node,) = json.loads(saved.read_text())["nodes"]
    assert node["accelerators"] == 4
    assert node["hardware"]["Franka"][0]["robot_ip"] == "10.0.0.9"
    planned = subprocess.run(
        [sys.executable, "-c", "from roost.cli.main import run; run()", "plan", str(tmp_path / "job.yaml"),
         "--inventory", str(saved)],
        capture_output=True, text=True, timeout=HANG_S,
    )  # fmt: skip
    assert planned.returncode == 0, planned.stdout + planned.stderr


@pytest.mark.long
def test_too_few_nodes_are_named():
    done = roost("--address", "local", "--nodes", "3", "--timeout", "1")
    assert done.returncode == 1
    assert "expected 3 nodes, 1 joined" in done.stderr and not done.stdout
    assert "Traceback" not in done.stdout + done.stderr
