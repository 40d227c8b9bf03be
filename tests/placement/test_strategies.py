"""Strategies: what they refuse, and the fields of what they give."""

import pytest

import roost

TWO_BY_FOUR = roost.Inventory.from_dict({"nodes": [{"accelerators": 4}, {"accelerators": 4}]})
MIXED = roost.Inventory.from_dict(
    {
        "nodes": [{"accelerators": 2, "accelerator_type": "AMD_GPU"}, {"hardware": {"Franka": 2}}, {"accelerators": 4}],
        "node_groups": [
            {"label": "gpu", "node_ranks": [0, 2]},
            {"label": "robot", "node_ranks": [1], "hardware": "Franka"},
            {"label": "cpu", "node_ranks": [1]},
            {"label": "quiet", "node_ranks": [2], "ignore_hardware": True},
        ],
    }
)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        pytest.param(lambda: roost.FlexiblePlacementStrategy([]), "must not be empty", id="flexible-empty"),
        pytest.param(lambda: roost.FlexiblePlacementStrategy([[]]), "has no ranks", id="flexible-empty-process"),
        pytest.param(lambda: roost.FlexiblePlacementStrategy([[0, 0]]), "must be unique", id="flexible-repeated"),
        pytest.param(lambda: roost.FlexiblePlacementStrategy([[-1]]), "not negative", id="flexible-negative"),
        pytest.param(lambda: roost.FlexiblePlacementStrategy([["0"]]), "whole numbers", id="flexible-text"),
        pytest.param(lambda: roost.FlexiblePlacementStrategy([[True]]), "whole numbers", id="flexible-flag"),
        pytest.param(lambda: roost.PackedPlacementStrategy(3, 1), "is before", id="packed-backwards"),
        pytest.param(lambda: roost.PackedPlacementStrategy(-1, 1), "not negative", id="packed-negative"),
        pytest.param(lambda: roost.PackedPlacementStrategy(0, 3, 0), "at least 1", id="packed-none-per-process"),
        pytest.param(lambda: roost.PackedPlacementStrategy(0, 3, -2), "at least 1", id="packed-negative-per-process"),
        pytest.param(lambda: roost.PackedPlacementStrategy(0, 3, 1, 0), "at least 1", id="packed-stride-0"),
        pytest.param(lambda: roost.PackedPlacementStrategy(0, 4, 2), "blocks of 2", id="packed-left-over"),
        pytest.param(lambda: roost.NodePlacementStrategy([]), "must not be empty", id="node-empty"),
        pytest.param(lambda: roost.NodePlacementStrategy([-1]), "not negative", id="node-negative"),
    ],
)
def test_refused_when_made(make, message):
    with pytest.raises(roost.ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    ("strategy", "inventory", "message"),
    [
        pytest.param(roost.FlexiblePlacementStrategy([[8]]), TWO_BY_FOUR, "rank 8 is out of range", id="out-of-range"),
        pytest.param(roost.FlexiblePlacementStrategy([[3, 4]]), TWO_BY_FOUR, "on the same node", id="two-nodes"),
        pytest.param(
            roost.PackedPlacementStrategy(3, 4, 2), TWO_BY_FOUR, "on the same node", id="packed-past-its-node"
        ),
        pytest.param(
            roost.PackedPlacementStrategy(0, 8), TWO_BY_FOUR, "rank 8 is out of range", id="packed-out-of-range"
        ),
        pytest.param(roost.NodePlacementStrategy([2]), TWO_BY_FOUR, "rank 2 is out of range", id="node-out-of-range"),
        pytest.param(roost.FlexiblePlacementStrategy([[0]], "nowhere"), TWO_BY_FOUR, "nowhere", id="unknown-group"),
        pytest.param(roost.FlexiblePlacementStrategy([[0]], "cpu"), MIXED, "neither accelerators nor", id="no-devices"),
        pytest.param(roost.PackedPlacementStrategy(0, 0, node_group="node"), MIXED, "neither", id="packed-on-nodes"),
        pytest.param(roost.NodePlacementStrategy([0], "gpu,quiet"), MIXED, "nodes in common", id="overlapping-groups"),
        pytest.param(
            roost.FlexiblePlacementStrategy([[2, 8]], "gpu,gpu"), MIXED, "same device twice", id="device-twice"
        ),
    ],
)
def test_refused_when_placed(strategy, inventory, message):
    with pytest.raises(roost.ConfigError, match=message):
        strategy.get_placement(inventory)


def test_errors_are_both_kinds_that_ported_code_catches():
    for kind in (ValueError, AssertionError):
        with pytest.raises(kind):
            roost.FlexiblePlacementStrategy([])


def test_planning_does_not_change_the_strategy():
    listed = [[3], [1, 0]]
    strategy = roost.FlexiblePlacementStrategy(listed)
    first = strategy.get_placement(TWO_BY_FOUR)
    assert first == strategy.get_placement(TWO_BY_FOUR)
    assert listed == [[3], [1, 0]]


def test_fields_with_and_without_isolation():
    strategy = roost.FlexiblePlacementStrategy([[2, 3]], "gpu")
    isolated, open_ = (strategy.get_placement(MIXED, isolate_accelerator=flag)[0] for flag in (True, False))
    assert isolated == roost.Placement(
        rank=0,
        cluster_node_rank=2,
        placement_node_rank=0,
        local_accelerator_rank=0,
        accelerator_type="NV_GPU",
        local_rank=0,
        local_world_size=1,
        visible_accelerators=["0", "1"],
        isolate_accelerator=True,
        local_hardware_ranks=[0, 1],
        node_group_label="gpu",
        devices=[(2, 0), (2, 1)],
    )
    assert open_.visible_accelerators == ["0", "1", "2", "3"]
    assert open_.isolate_accelerator is False


def test_robots_leave_the_accelerators_of_their_node_visible():
    inventory = roost.Inventory.from_dict(
        {
            "nodes": [{"accelerators": 2, "hardware": {"Franka": 1}}],
            "node_groups": [{"label": "robot", "node_ranks": [0], "hardware": "Franka"}],
        }
    )
    placement = roost.FlexiblePlacementStrategy([[0]], "robot").get_placement(inventory)[0]
    assert (placement.local_hardware_ranks, placement.visible_accelerators) == ([0], ["0", "1"])


def test_ranks_of_several_groups_in_order():
    placements = roost.FlexiblePlacementStrategy([[0], [6]], ["gpu", "robot"]).get_placement(MIXED)
    assert [(p.cluster_node_rank, p.local_hardware_ranks, p.node_group_label) for p in placements] == [
        (0, [0], "gpu"),
        (1, [0], "robot"),
    ]


def test_local_ranks_where_nodes_come_back():
    placements = roost.ListedPlacementStrategy([4, 0, 5, 1], 1).get_placement(TWO_BY_FOUR)
    assert [(p.cluster_node_rank, p.placement_node_rank, p.local_rank, p.local_world_size) for p in placements] == [
        (1, 0, 0, 2),
        (0, 1, 0, 2),
        (1, 0, 1, 2),
        (0, 1, 1, 2),
    ]


def test_a_worker_over_two_nodes_sees_its_own_node_only():
    first, second = roost.ListedPlacementStrategy([2, 3, 4, 5, 6, 7], 3).get_placement(TWO_BY_FOUR)
    assert (first.cluster_node_rank, first.devices) == (0, [(0, 2), (0, 3), (1, 0)])
    assert first.local_hardware_ranks == [2, 3]
    assert first.visible_accelerators == ["2", "3"]
    assert (second.cluster_node_rank, second.local_hardware_ranks) == (1, [1, 2, 3])


@pytest.mark.parametrize("cluster", [None, 3, {"nodes": []}])
def test_what_is_no_cluster_is_a_type_error(cluster):
    with pytest.raises(TypeError, match="describe machines with"):
        roost.NodePlacementStrategy([0]).get_placement(cluster)


def test_anything_with_an_inventory_is_a_cluster():
    class Live:
        inventory = TWO_BY_FOUR

    assert len(roost.PackedPlacementStrategy(0, 7).get_placement(Live())) == 8


def test_devices_of_overlapping_groups_ascend_as_they_are_seen():
    groups = [{"label": "a", "node_ranks": [0, 1]}, {"label": "c", "node_ranks": [1]}]
    machines = {"nodes": [{"accelerators": 4}, {"accelerators": 4}], "node_groups": groups}
    inventory = roost.Inventory.from_dict(machines)
    (placement,) = roost.FlexiblePlacementStrategy([[6, 7, 8, 9]], ["a", "c"]).get_placement(inventory)
    assert placement.local_hardware_ranks == [0, 1, 2, 3]
    assert placement.visible_accelerators == ["0", "1", "2", "3"]
    assert placement.devices == [(1, 0), (1, 1), (1, 2), (1, 3)]


def test_groups_of_which_one_has_devices():
    with pytest.raises(roost.ConfigError, match="are counted in nodes together") as caught:
        roost.FlexiblePlacementStrategy([[0]], ["gpu", "cpu"]).get_placement(MIXED)
    (finding,) = caught.value.findings
    assert finding.why == "gpu counts accelerators, cpu counts nodes"
    assert finding.fix == "name groups with devices only: gpu"
