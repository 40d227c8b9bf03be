"""The planner against recorded facts (tests/golden)."""

import json
from pathlib import Path

import pytest

import roost
from tests.grid import grid

GOLDEN = Path(__file__).parent / "golden"
BROKEN_CLUSTERS = {
    # The devices are declared on node 0, the group has nodes 1 and 2.
    "examples/embodiment/config/realworld_dual_franka_dagger_openpi.yaml",
}


def rows(name):
    return [json.loads(line) for line in (GOLDEN / name).read_text().splitlines()]


def placement_row(placement):
    return [
        placement.rank,
        placement.cluster_node_rank,
        placement.placement_node_rank,
        placement.local_hardware_ranks,
        placement.visible_accelerators,
        placement.local_accelerator_rank,
        placement.local_rank,
        placement.local_world_size,
        placement.node_group_label,
    ]


def placement_rows(strategy, inventory, isolate=True):
    return [placement_row(placement) for placement in strategy.get_placement(inventory, isolate_accelerator=isolate)]


def plan_strategy(case, inventory):
    strategies = {
        "flexible": roost.FlexiblePlacementStrategy,
        "packed": roost.PackedPlacementStrategy,
        "node": roost.NodePlacementStrategy,
    }
    return placement_rows(strategies[case["kind"]](**case["args"]), inventory, case.get("isolate_accelerator", True))


def plan_components(case, inventory):
    config = {
        "cluster": {"num_nodes": inventory.num_nodes, "component_placement": case["component_placement"]},
        **case.get("config", {}),
    }
    if case["kind"] == "hybrid":
        placement = roost.HybridComponentPlacement(config, inventory)
        return {
            name: {
                "strategy": type(placement.get_strategy(name)).__name__,
                "world_size": placement.get_world_size(name),
                "hardware_ranks": placement.get_hardware_ranks(name),
                "placements": placement_rows(placement.get_strategy(name), inventory),
            }
            for name in placement.components
        }
    placement = roost.ModelParallelComponentPlacement(config, inventory)
    return {
        "mode": placement.placement_mode.name,
        "components": {
            name: {
                "hardware_ranks": placement.get_hardware_ranks(name),
                "placements": placement_rows(placement.get_strategy(name), inventory),
            }
            for name in placement.components
        },
    }


@grid("case", rows("rlinf_placements.jsonl"), ids=lambda case: f"{case['kind']}-{case['id']}")
def test_placements(case):
    inventory = roost.Inventory.from_dict(case["cluster"])
    planned = plan_strategy if "args" in case else plan_components
    if "error" in case:
        with pytest.raises(roost.ConfigError):
            planned(case, inventory)
    else:
        assert planned(case, inventory) == case["expect"]


def filled_in(value):
    """The value with placeholders for robots' addresses replaced, as a user must do before planning."""
    if isinstance(value, dict):
        return {key: filled_in(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [filled_in(inner) for inner in value]
    return "10.10.10.1" if isinstance(value, str) and value.endswith("ROBOT_IP") else value


@grid("case", rows("rlinf_clusters.jsonl"), ids=lambda case: case["file"])
def test_real_clusters(case):
    config = {"cluster": filled_in(case["cluster"])}
    if case["file"] in BROKEN_CLUSTERS:
        with pytest.raises(roost.ConfigError, match="outside its group"):
            roost.plan(config, accelerators_per_node=8)
        return
    plan = roost.plan(config, accelerators_per_node=8)
    names = [name.strip() for key in case["cluster"]["component_placement"] for name in key.split(",")]
    assert [component.name for component in plan.components] == names
    assert all(component.world_size > 0 for component in plan.components)


@grid("role", rows("roll_roles.jsonl"), ids=lambda role: f"{role['file']}:{role['role']}")
def test_roll_roles(role):
    sizes = {key: role[key] for key in ("tensor_parallel_size", "pipeline_parallel_size") if role[key] is not None}
    section = {
        "device_mapping": role["device_mapping"],
        "strategy_args": {"strategy_name": role["strategy"], "strategy_config": sizes},
    }
    if role["num_gpus_per_worker_given"] is not None:
        section["num_gpus_per_worker"] = role["num_gpus_per_worker_given"]
    config = {"num_gpus_per_node": role["num_gpus_per_node"]}
    outer, _, inner = role["role"].partition(".")
    config[outer] = {inner: section} if inner else section
    # The number of nodes is the whole config's: another role may reach further than this one.
    config["last"] = {"device_mapping": [role["num_nodes"] * role["num_gpus_per_node"] - 1]}
    plan = roost.plan(config)
    component = plan.components[0]
    assert component.written_name == role["role"]
    assert component.world_size == role["world_size"]
    assert component.hardware_ranks[[0, -1]].tolist() == [role["first"], role["last"]]
    assert len(component.hardware_ranks) == role["devices"]
    assert {len(placement.devices) for placement in component.table} == {role["num_gpus_per_worker"]}
    assert plan.inventory.num_nodes == role["num_nodes"]
