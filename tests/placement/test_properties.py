"""Properties of every plan, on random machines and placements."""

from itertools import groupby

from hypothesis import assume, given, settings, strategies as st

import roost

MANY = settings(max_examples=60)

nodes = st.lists(st.integers(0, 6), min_size=1, max_size=6).map(
    lambda counts: [{"accelerators": count, "hardware": {"Franka": count % 3}} for count in counts]
)


@st.composite
def machines(draw):
    described = draw(nodes)
    ranks = st.sets(st.integers(0, len(described) - 1), min_size=1).map(sorted)
    groups = [{"label": "some", "node_ranks": draw(ranks)}]
    robots = draw(ranks)
    if any(described[rank]["hardware"]["Franka"] for rank in robots):
        groups.append({"label": "robot", "node_ranks": robots, "hardware": "Franka"})
    return roost.Inventory.from_dict({"nodes": described, "node_groups": groups})


@st.composite
def rank_maps(draw, total):
    """A placement string with random segments, each splitting evenly, over `total` resources."""
    segments, resource, process = [], 0, 0
    while resource < total and len(segments) < 3:
        first = draw(st.integers(resource, total - 1))
        last = draw(st.integers(first, total - 1))
        count = last - first + 1
        divisors = [number for number in range(1, count + 1) if count % number == 0]
        size = draw(st.sampled_from([*divisors, count * 2, count * 3]))
        segments.append(f"{first}-{last}:{process}-{process + size - 1}")
        resource, process = last + 1, process + size
    return ",".join(segments)


@st.composite
def planned(draw):
    """A plan on random machines; placements that cannot be had (a process across nodes) are skipped."""
    inventory = draw(machines())
    placement = {}
    for name in ("actor", "rollout", "agent"):
        label = draw(st.sampled_from(inventory.labels))
        total = inventory.resources((label,)).total
        placement[name] = {"node_group": label, "placement": draw(rank_maps(total))}
    config = {"cluster": {"num_nodes": inventory.num_nodes, "component_placement": placement}}
    try:
        return config, inventory, roost.plan(config, inventory)
    except roost.ConfigError:
        assume(False)


def every_process_is_there_once(config, inventory, plan):
    for component in plan.components:
        assert [placement.rank for placement in component.table] == list(range(component.world_size))
        by_node: dict[int, list] = {}
        for placement in component.table:
            by_node.setdefault(placement.cluster_node_rank, []).append(placement)
        for same_node in by_node.values():
            assert [placement.local_rank for placement in same_node] == list(range(len(same_node)))
            assert {placement.local_world_size for placement in same_node} == {len(same_node)}
        assert sorted({placement.placement_node_rank for placement in component.table}) == list(range(len(by_node)))


def no_process_is_outside_its_group_or_across_nodes(config, inventory, plan):
    for component in plan.components:
        for placement in component.table:
            group = inventory.group(placement.node_group_label)
            assert placement.cluster_node_rank in group.node_ranks
            assert {node for node, _ in placement.devices} <= {placement.cluster_node_rank}
            kind = inventory.kind(group)
            node = inventory.nodes[placement.cluster_node_rank]
            there = {"accelerator": node.accelerators, "node": 0}.get(kind, len(node.hardware.get(kind, ())))
            assert all(0 <= rank < there for rank in placement.local_hardware_ranks)
            assert len(set(placement.local_hardware_ranks)) == len(placement.local_hardware_ranks)


def json_and_back_is_the_identity(config, inventory, plan):
    again = roost.Plan.from_json(plan.to_json())
    assert again == plan
    assert again.to_json() == plan.to_json()


def planning_is_deterministic(config, inventory, plan):
    assert roost.plan(config, inventory) == plan


def folded_rows_hold_every_process(config, inventory, plan):
    from roost.view.grid_model import fold

    for component in plan.components:
        rows = fold(component.table)
        assert [row.first for row in rows] == [0, *(row.last + 1 for row in rows[:-1])]
        assert rows[-1].last == component.world_size - 1
        for row in rows:
            nodes = [component.table[rank].cluster_node_rank for rank in range(row.first, row.last + 1)]
            assert list(dict.fromkeys(nodes)) == list(row.nodes)


@MANY
@given(planned())
def test_every_plan(case):
    """All properties of one plan, as drawing plans is what takes the time."""
    every_process_is_there_once(*case)
    no_process_is_outside_its_group_or_across_nodes(*case)
    json_and_back_is_the_identity(*case)
    planning_is_deterministic(*case)
    folded_rows_hold_every_process(*case)


@MANY
@given(
    st.integers(1, 8),
    st.integers(1, 3).flatmap(
        lambda size: st.tuples(st.just(size), st.lists(st.integers(0, 31), min_size=size, unique=True))
    ),
)
def test_roll_workers_are_slices_of_the_list(per_node, mapping):
    size, devices = mapping
    devices = devices[: len(devices) // size * size]
    plan = roost.plan(
        {"num_gpus_per_node": per_node, "actor": {"device_mapping": devices, "num_gpus_per_worker": size}}
    )
    placed = [device for placement in plan["actor"].table for device in placement.devices]
    assert placed == [divmod(device, per_node) for device in devices]
    assert all(placement.cluster_node_rank == placement.devices[0][0] for placement in plan["actor"].table)
    assert plan["actor"].world_size == len(devices) // size


@MANY
@given(st.integers(1, 200), st.integers(1, 9))
def test_cpu_workers_are_dealt_out_in_turn(workers, node_count):
    plan = roost.plan(
        {"num_gpus_per_node": 1, "num_nodes": node_count, "rewards": {"sandbox": {"world_size": workers}}}
    )
    assert [p.cluster_node_rank for p in plan["reward.sandbox"].table] == [rank % node_count for rank in range(workers)]


@MANY
@given(st.integers(1, 40), st.integers(1, 6))
def test_uneven_splits_over_nodes_differ_by_one_at_most(processes, node_count):
    assume(processes >= node_count)
    ranks = f"0-{node_count - 1}:0-{processes - 1}"
    placement = {"agent": {"node_group": "node", "placement": ranks}}
    plan = roost.plan({"cluster": {"num_nodes": node_count, "num_gpus_per_node": 1, "component_placement": placement}})
    sizes = [len(list(same)) for _, same in groupby(p.cluster_node_rank for p in plan["agent"].table)]
    assert len(sizes) == node_count
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
