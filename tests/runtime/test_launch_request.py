"""Launch requests before anything is launched: mistakes, and defaults."""

from dataclasses import replace

import pytest

import roost
from roost import Inventory, LaunchOptions, NodePlacementStrategy, PackedPlacementStrategy, Worker

pytest.importorskip("ray")

from roost.cluster.hardware.accelerators.nvidia import NVIDIA
from roost.cluster.hardware.registry import BUILT_IN
from roost.config.node_groups import PROTECTED_VARIABLES
from roost.runtime.launch import Request, component_of, plan_launch, process_env
from roost.transport.context import Address

CLUSTER = {"num_nodes": 1, "num_gpus_per_node": 4, "component_placement": {"actor": "0-1", "rollout": "2-3"}}
PLAN = roost.plan({"cluster": CLUSTER})


class Actor(Worker):
    def work(self):
        return self._rank


class Hiding(Worker):
    def close(self):
        pass


MISTAKES = [
    pytest.param({"actr": Actor}, {}, (), KeyError, "no component actr; did you mean actor?", id="component"),
    pytest.param(
        {"actor": Actor},
        {"actr": LaunchOptions()},
        (),
        KeyError,
        "given for actr, which is not",
        id="options",
    ),
    pytest.param({"actor": Actor}, {}, ["actor"], ValueError, "there is a group actor already", id="name"),
    pytest.param({"actor": Hiding}, {}, (), ValueError, "Hiding.close would hide", id="method"),
]


@pytest.mark.parametrize(("groups", "options", "taken", "error", "match"), MISTAKES)
def test_mistakes(groups, options, taken, error, match):
    with pytest.raises(error, match=match.replace("?", r"\?")):
        plan_launch(PLAN, groups, options, taken)


def test_a_part_of_a_saved_plan(tmp_path):
    (tmp_path / "plan.json").write_text(PLAN.to_json())
    asked = plan_launch(tmp_path / "plan.json", {"actor": Actor}, None, ())
    assert asked.plan == PLAN
    assert asked.specs["actor"].cls is Actor
    assert asked.options == {"actor": LaunchOptions()}
    assert asked.left_out == ["rollout"]


@pytest.mark.parametrize(
    ("where", "accelerators", "expected"),
    [
        pytest.param(None, 2, [[0], [1]], id="every accelerator"),
        pytest.param(None, 0, [[]], id="no accelerators: node 0"),
        pytest.param(PackedPlacementStrategy(0, 1, num_hardware_per_process=2), 2, [[0, 1]], id="strategy"),
        pytest.param(NodePlacementStrategy([0, 0]), 2, [[], []], id="nodes"),
        pytest.param(PLAN["rollout"], 2, [[2], [3]], id="component of a plan"),
    ],
)
def test_where_a_group_goes(where, accelerators, expected):
    inventory = Inventory.from_dict({"nodes": [{"accelerators": accelerators}]})
    component = component_of(where, "it", LaunchOptions(), inventory, BUILT_IN)
    held = [[device for _, device in place.devices] for place in component.table]
    assert held == expected


def test_what_is_no_strategy():
    with pytest.raises(TypeError, match=r"placement_strategy is \[0\]; give a strategy"):
        component_of([0], "it", LaunchOptions(), Inventory.from_dict({"nodes": [{}]}), BUILT_IN)


@pytest.mark.parametrize("variable", ["RANK", "CUDA_VISIBLE_DEVICES", "NEW_VISIBLE_DEVICES"])
def test_launch_options_change_neither_ranks_nor_masks(variable):
    vendor = replace(NVIDIA, type="NEW_GPU", visible_devices_variable="NEW_VISIBLE_DEVICES")
    component = replace(PLAN["actor"], registry=BUILT_IN.with_accelerator(vendor))
    with pytest.raises(ValueError, match=f"actor: the plan sets {variable} for every process; remove it from env"):
        Request("actor", Actor.create_group(), component, LaunchOptions(env={"SEED": "1", variable: "0"}), b"")


def test_all_variables_of_the_plan_are_protected():
    process = next(iter(PLAN["actor"].processes()))
    found = set(process_env(Address("actor", 0), 2, process, None, (), ("127.0.0.1", 1))) - set(process.start_env)
    masks = {name for vendor in BUILT_IN.accelerators for name in vendor.masks([])}
    assert found | masks <= set(PROTECTED_VARIABLES)
