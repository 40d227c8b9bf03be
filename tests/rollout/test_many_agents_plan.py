"""The example with 512 agents: its plan is whole, and smaller ones keep its proportions. Nothing is launched."""

import runpy
from pathlib import Path

import pytest

import roost
from tests.cli.terminal import lines_of, run

EXAMPLE = Path(__file__).parents[2] / "examples" / "many_agents"
JOB, MACHINES = EXAMPLE / "job.yaml", EXAMPLE / "machines.yaml"
PROPORTIONS = runpy.run_path(str(EXAMPLE / "proportions.py"))


def test_all_512_processes_are_placed():
    plan = roost.plan(JOB, MACHINES)
    nodes = [placement.cluster_node_rank for placement in plan["agent"].table]
    assert nodes == [0] * 101 + [1] * 100 + [2] * 156 + [3] * 155
    assert [placement.rank for placement in plan["agent"].table] == list(range(512))


def test_the_command_shows_where_they_are_and_warns_of_uneven_nodes():
    result = run("plan", JOB, "--inventory", MACHINES)
    assert result.exit_code == 0, result.output
    lines = lines_of(result.stdout)
    start = lines.index("agent 0-100    0           101  -")
    assert [line.split() for line in lines[start : start + 4]] == [
        ["agent", "0-100", "0", "101", "-"],
        ["agent", "101-200", "1", "100", "-"],
        ["agent", "201-356", "2", "156", "-"],
        ["agent", "357-511", "3", "155", "-"],
    ]
    assert result.stderr.count("do not divide evenly over 2 nodes") == 2


@pytest.mark.parametrize(
    ("processes", "placement"),
    [
        pytest.param(512, "0-1:0-200,2-3:201-511", id="all"),
        pytest.param(256, "0-1:0-99,2-3:100-255", id="half"),
        pytest.param(16, "0-1:0-5,2-3:6-15", id="a few"),
        pytest.param(4, "0-1:0-1,2-3:2-3", id="one on each node"),
    ],
)
def test_fewer_processes_keep_the_proportions(processes, placement):
    assert PROPORTIONS["scaled"]("0-1:0-200,2-3:201-511", processes) == placement


@pytest.mark.parametrize(
    ("free", "count"),
    [
        pytest.param(60_000, 512, id="never more than the most"),
        pytest.param(4_139, 1, id="whole ones"),
        pytest.param(3_000, 0, id="less than is spared"),
    ],
)
def test_as_many_as_there_is_memory_for(free, count):
    assert PROPORTIONS["fitting"](free, spared=4_000, each=70, most=512) == count
