"""The grid of a plan: rows of equal nodes, cells, declared devices and processes without devices; marks and numbers."""

import numpy as np
import pytest

import roost
from roost.view.grid_model import COLOURS, grid, marks, progressions


def rlinf(nodes, per_node=8, groups=(), **placement):
    cluster = {"num_nodes": nodes, "num_gpus_per_node": per_node, "component_placement": placement}
    return {"cluster": {**cluster, "node_groups": list(groups)} if groups else cluster}


def roll(per_node=8, **roles):
    return {"num_gpus_per_node": per_node, **roles}


def devices(first, stop, per_worker=1):
    return {"device_mapping": f"list(range({first},{stop}))", "num_gpus_per_worker": per_worker}


def described(run):
    """A row as text: each accelerator's holders with their ranks, `|` between accelerators."""
    cells = ["+".join(f"{part.component}{run.spell(part)}" for part in cell) for cell in run.layout.accelerators]
    others = [f"{part.component}{run.spell(part)}" for part in run.layout.without_device]
    robots = [
        f"{robot.kind}{robot.index}:{'+'.join(f'{part.component}{run.spell(part)}' for part in robot.holders)}"
        for robot in run.layout.declared
    ]
    return f"{run.label}: " + " / ".join(part for part in ("|".join(cells), ",".join(robots), ",".join(others)) if part)


@pytest.mark.parametrize(
    ("config", "machines", "expected"),
    [
        pytest.param(rlinf(1, 2, actor="all"), None, ["node 0: actor0|actor1"], id="one-node"),
        pytest.param(rlinf(1, 3, actor="0"), None, ["node 0: actor0||"], id="free-accelerators"),
        pytest.param(
            rlinf(1, 2, **{"actor,rollout": "all"}), None, ["node 0: actor0+rollout0|actor1+rollout1"], id="shared"
        ),
        pytest.param(rlinf(1, 2, env="0-1:0-5"), None, ["node 0: env0-2|env3-5"], id="several-processes-on-a-device"),
        pytest.param(
            roll(2, actor_train=devices(0, 4), actor_infer=devices(0, 4, 2)),
            None,
            ["nodes 0-1: actor0...2+rollout0-1|actor1...3+rollout0-1"],
            id="engines-of-two",
        ),
        pytest.param(
            rlinf(4, 1, actor="0-1", rollout="2-3"),
            None,
            ["nodes 0-1: actor0-1", "nodes 2-3: rollout0-1"],
            id="two-runs",
        ),
        pytest.param(
            roll(2, actor_infer=devices(0, 16, 4)),
            None,
            ["nodes 0-6, every 2nd: rollout0-3|rollout0-3", "nodes 1-7, every 2nd: rollout0-3|rollout0-3"],
            id="engines-across-two-nodes",
        ),
        pytest.param(
            roll(1, actor_train=devices(0, 2), rewards={"a": {"world_size": 5}}),
            None,
            ["node 0: actor0 / reward.a0,2,4", "node 1: actor1 / reward.a1,3"],
            id="workers-dealt-out-in-turn",
        ),
        pytest.param(
            rlinf(3, 2, actor="0-5", agent={"node_group": "node", "placement": "0-2:0-299"}),
            None,
            ["nodes 0-2: actor0...4|actor1...5 / agent0-299"],
            id="processes-without-devices",
        ),
        pytest.param(
            rlinf(2, 2, actor="0-3"),
            {"nodes": [{"accelerators": 2, "host": "a"}, {"accelerators": 2, "host": "b"}]},
            ["nodes 0-1: actor0...2|actor1...3"],
            id="host-names-do-not-part-nodes",
        ),
        pytest.param(
            rlinf(2, 2, actor="0-3"),
            {"nodes": [{"accelerators": 2, "memory_gb": 80}, {"accelerators": 2, "memory_gb": 24}]},
            ["node 0: actor0|actor1", "node 1: actor2|actor3"],
            id="other-machines-do",
        ),
        pytest.param(
            rlinf(2, 1, [{"label": "a", "node_ranks": 0}, {"label": "b", "node_ranks": 1}], actor="all"),
            None,
            ["node 0: actor0", "node 1: actor1"],
            id="node-groups-do",
        ),
    ],
)
def test_rows(config, machines, expected):
    assert [described(run) for run in grid(roost.plan(config, machines)).runs] == expected


def test_software_parts_nodes_of_one_group():
    software = [{"node_ranks": 0, "env_vars": [{"A": 1}]}, {"node_ranks": 1, "env_vars": [{"A": 2}]}]
    config = rlinf(2, 1, [{"label": "a", "node_ranks": "0-1", "env_configs": software}], actor="all")
    config["cluster"]["component_placement"] = {"actor": {"node_group": "a", "placement": "all"}}
    assert [run.label for run in grid(roost.plan(config)).runs] == ["node 0", "node 1"]


def test_robots_with_different_configs_are_one_row():
    robots = [{"robot_ip": f"10.0.0.{node}", "node_rank": node} for node in range(3)]
    groups = [{"label": "robot", "node_ranks": "0-2", "hardware": {"type": "Franka", "configs": robots}}]
    config = rlinf(3, 0, groups, env={"node_group": "robot", "placement": "0-2:0-5"})
    del config["cluster"]["num_gpus_per_node"]
    (run,) = grid(roost.plan(config, accelerators_per_node=0)).runs
    assert described(run) == "nodes 0-2: Franka0:env0-5"
    (robot,) = run.layout.declared
    assert run.ranks(robot.holders[0], 2) == (4, 5)
    assert run.layout.groups == ("robot",)


def test_a_process_across_nodes_runs_on_its_first():
    first, second = grid(roost.plan(roll(2, actor_infer=devices(0, 4, 4)))).runs
    assert [(part.component, part.offsets) for part in first.layout.residents] == [("rollout", (0,))]
    assert second.layout.residents == ()
    assert [len(cell) for cell in second.layout.accelerators] == [1, 1]


@pytest.mark.parametrize(("most", "labels"), [(3, ["nodes 0-3"]), (4, ["node 0", "node 1", "node 2", "node 3"])])
def test_a_small_cluster_is_shown_node_by_node(most, labels):
    assert [row.label for row in grid(roost.plan(rlinf(4, 2, actor="all"))).rows(most)] == labels


def test_every_process_is_in_the_grid_once_for_each_device_it_holds():
    """The grid holds what the plan does, whatever was folded."""
    plan = roost.plan(
        roll(
            4,
            actor_train=devices(0, 64),
            actor_infer=devices(8, 56, 8),
            reference={"device_mapping": [63, 1, 30, 17]},
            rewards={"a": {"world_size": 37}},
        )
    )
    found = set()
    for row in grid(plan).rows(most=16):
        node = row.nodes[0]
        for index, holders in enumerate(row.layout.accelerators):
            found |= {(part.component, rank, node, index) for part in holders for rank in row.ranks(part)}
        found |= {(part.component, rank, node, -1) for part in row.layout.without_device for rank in row.ranks(part)}
    expected = {
        (part.name, placed.rank, node, index)
        for part in plan.components
        for placed in part.table
        for node, index in placed.devices or [(placed.cluster_node_rank, -1)]
    }
    assert found == expected


def test_free_accelerators_are_counted():
    assert grid(roost.plan(rlinf(3, 8, actor="0-9"))).num_free == 14


def test_marks_are_distinct_and_the_usual_ones_stay():
    names = ["reward", "rollout", "reference", "actor", *(f"reward.judge_{number}" for number in range(12))]
    made = marks(names)
    assert len({mark.short for mark in made}) == len(names)
    assert marks(["actor"])[0].colour == next(mark.colour for mark in made if mark.component == "actor")
    assert len({mark.colour for mark in made}) == len(COLOURS)


@pytest.mark.parametrize("name", ["", "_", "<script>", "演员", "123", "a" * 1000])
def test_any_name_has_a_short_one(name):
    one, other = marks([name, name + " "])
    assert one.short != other.short
    assert 1 <= len(one.short) <= 2


@pytest.mark.parametrize(
    "numbers", [[], [3], [3, 3, 3], [0, 1, 2, 9], [5, 4, 3], [0, 2, 4, 6, 7, 8, 8, 1], [0, 5, 10, 11, 12, 13]]
)
@pytest.mark.parametrize("fewest", [2, 4])
def test_progressions_give_the_numbers_back(numbers, fewest):
    made = list(progressions(np.array(numbers, np.int64), fewest))
    assert [start + step * index for start, step, length in made for index in range(length)] == numbers
    assert all(step == 1 or length >= fewest for _, step, length in made)
