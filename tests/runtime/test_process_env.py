"""A worker's environment: its place, the accelerators it may see, and nothing of what others see."""

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from roost.cluster.hardware.accelerators.ascend import ASCEND
from roost.cluster.hardware.accelerators.intel import INTEL
from roost.cluster.hardware.accelerators.nvidia import NVIDIA
from roost.placement.component_plan import Process
from roost.placement.placement import Placement
from roost.runtime.launch import process_env, visible_devices
from roost.transport.context import Address

ADDRESS = Address("rollout", 5)
MASTER = ("10.0.0.7", 20_123)


def process(own, visible, isolate=True, env=None, **more):
    place = Placement(
        rank=5,
        cluster_node_rank=3,
        placement_node_rank=1,
        local_accelerator_rank=own[0] if own else -1,
        accelerator_type="NV_GPU" if visible else "NO_ACCEL",
        local_rank=1,
        local_world_size=4,
        visible_accelerators=[str(device) for device in visible],
        isolate_accelerator=isolate,
        local_hardware_ranks=list(own),
        node_group_label="a800",
    )._replace(**more)
    return Process(place, env or {}, None)


def env_of(process, visible=(), vendor=NVIDIA):
    return process_env(ADDRESS, 8, process, vendor, visible, MASTER)


def test_a_worker_knows_its_place():
    env = env_of(process([2], [2]), [(2, "6")])
    assert (
        env.items()
        >= {
            "RANK": "5",
            "WORLD_SIZE": "8",
            "NODE_RANK": "1",
            "CLUSTER_NODE_RANK": "3",
            "NODE_LOCAL_RANK": "1",
            "NODE_LOCAL_WORLD_SIZE": "4",
            "MASTER_ADDR": "10.0.0.7",
            "MASTER_PORT": "20123",
            "GROUP_NAME": "rollout",
            "WORKER_NAME": "rollout:5",
            "NODE_GROUP_LABEL": "a800",
            "LOCAL_HARDWARE_RANKS": "2",
            "ACCELERATOR_TYPE": "NV_GPU",
        }.items()
    )
    assert all(isinstance(value, str) for value in env.values())


LOCAL_RANKS = {
    "isolated: alone with its own": (process([2, 3], [2, 3]), [(2, "6"), (3, "7")], "0", "1"),
    "not isolated: finds its own by its local rank": (
        process([2, 3], [0, 1, 2, 3], isolate=False),
        [(0, "4"), (1, "5"), (2, "6"), (3, "7")],
        "2",
        "4",
    ),
    "not isolated, on what its job holds of the node": (
        process([2], [0, 1, 2, 3], isolate=False),
        [(1, "5"), (2, "6")],
        "1",
        "4",
    ),
    "without accelerators": (process([], [], isolate=False), [], "0", "1"),
}


@pytest.mark.parametrize("what, visible, rank, size", LOCAL_RANKS.values(), ids=LOCAL_RANKS)
def test_the_local_rank_is_an_index_into_what_is_visible(what, visible, rank, size):
    env = env_of(what, visible)
    assert (env["LOCAL_RANK"], env["LOCAL_WORLD_SIZE"]) == (rank, size)


MASKS = {
    "nvidia": (NVIDIA, [(0, "6"), (1, "7")], {"CUDA_VISIBLE_DEVICES": "6,7"}),
    "nvidia, none": (NVIDIA, [], {"CUDA_VISIBLE_DEVICES": ""}),
    "ascend": (ASCEND, [(1, "3")], {"ASCEND_RT_VISIBLE_DEVICES": "3"}),
    "intel": (INTEL, [(1, "3")], {"ONEAPI_DEVICE_SELECTOR": "level_zero:3"}),
    "no vendor": (None, [], {}),
}


@pytest.mark.parametrize("vendor, visible, masks", MASKS.values(), ids=MASKS)
def test_a_worker_sees_what_the_live_node_says_and_not_what_was_planned(vendor, visible, masks):
    planned = {"CUDA_VISIBLE_DEVICES": "99", "ASCEND_RT_VISIBLE_DEVICES": "99", "ONEAPI_DEVICE_SELECTOR": "99"}
    env = env_of(replace(process([0], [0], env={"NCCL_DEBUG": "INFO"}), masks=planned), visible, vendor)
    assert {name: env[name] for name in planned if name in env} == masks
    assert env["NCCL_DEBUG"] == "INFO"


def test_the_users_variables_do_not_change_a_workers_place():
    env = env_of(process([0], [0], env={"RANK": "77", "MASTER_PORT": "1"}), [(0, "0")])
    assert (env["RANK"], env["MASTER_PORT"]) == ("5", "20123")


@given(st.sets(st.integers(0, 7)), st.dictionaries(st.integers(0, 7), st.integers(0, 7)))
def test_a_process_sees_of_its_planned_accelerators_those_that_are_held_in_order(planned, stands_for):
    names = [f"GPU-{index}" for index in range(8)]
    held = {(0, device): index for device, index in stands_for.items()} | {(1, device): 0 for device in range(8)}
    visible = visible_devices(process(sorted(planned), sorted(planned, key=str)), 0, held, names)
    assert [device for device, _ in visible] == sorted(planned & set(stands_for))
    assert all(name == names[stands_for[device]] for device, name in visible)
