"""Reservation of plans: jobs side by side, plans that do not fit, and nodes of every size."""

import contextlib
import os
import time

import pytest
import ray

import roost
from roost import (
    Cluster,
    ConfigError,
    FlexiblePlacementStrategy,
    LaunchOptions,
    NodePlacementStrategy,
    PackedPlacementStrategy,
    Plan,
    Worker,
)
from tests.limits import HANG_S

pytestmark = pytest.mark.long

EVERYTHING = FlexiblePlacementStrategy([range(16), range(16, 24), range(24, 28), range(28, 30)])  # one process a node


class Holder(Worker):
    def sees(self):
        return os.environ["ROOST_VISIBLE_DEVICES"]

    def node(self):
        return int(os.environ["CLUSTER_NODE_RANK"]), os.environ["ROOST_VISIBLE_DEVICES"]


@pytest.fixture(scope="module")
def ragged(ray_nodes, module_patch):
    """16, 8 and 4 accelerators, and a node whose batch system leaves two of its eight."""
    ray_nodes.add(16, rank=0, cpus=4)
    ray_nodes.add(8, rank=1, cpus=4)
    ray_nodes.add(4, rank=2, cpus=4)
    ray_nodes.add(2, rank=3, cpus=4, ROOST_FAKE_ACCELERATORS="8", ROOST_VISIBLE_DEVICES="4,5")
    ray.init(address=ray_nodes.address, namespace="roost", log_to_driver=False)
    return ray_nodes


def open_cluster(reported=None, **options):
    say = reported.append if reported is not None else (lambda text: None)
    return Cluster(num_nodes=4, say=say, **options)


@pytest.fixture(scope="module")
def reported():
    """Output of the shared clusters."""
    return []


@pytest.fixture(scope="module")
def one(ragged, reported):
    """A cluster for tests that close their groups: opening one starts a process on every node."""
    with open_cluster(reported) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def two(ragged, reported):
    """Another one beside it."""
    with open_cluster(reported) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def all_free_in_the_end(ragged):
    """Nothing is left reserved, neither by a closed group nor by a closed cluster."""
    yield
    deadline = time.monotonic() + HANG_S
    while ray.available_resources().get("GPU", 0) < 30 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert ray.available_resources()["GPU"] == 30


def launched(cluster, strategy, name="holder"):
    return Holder.create_group().launch(cluster, name=name, placement_strategy=strategy)


@contextlib.contextmanager
def held(cluster, strategy, name="holder"):
    group = launched(cluster, strategy, name)
    try:
        yield group
    finally:
        group.close()


def test_inventory(one):
    assert [node.accelerators for node in one.inventory.nodes] == [16, 8, 4, 2]
    assert {node.accelerator_type for node in one.inventory.nodes} == {"SIMULATED"}
    assert [one.nodes[rank].report.cpus for rank in range(4)] == [4] * 4


PLACES = [
    pytest.param([[0], [9], [15]], [(0, "0"), (0, "9"), (0, "15")], id="16 on a host, in numeric order"),
    pytest.param([[16], [17]], [(1, "0"), (1, "1")], id="second host"),
    pytest.param([[14, 15], [16, 17]], [(0, "14,15"), (1, "0,1")], id="8 + 16: across hosts"),
    pytest.param([[17], [19], [22]], [(1, "1"), (1, "3"), (1, "6")], id="gaps"),
    pytest.param([[20, 21], [22], [24]], [(1, "4,5"), (1, "6"), (2, "0")], id="from the middle of a node to the next"),
    pytest.param([[24, 25, 26, 27]], [(2, "0,1,2,3")], id="all 4 of a host"),
    pytest.param([[28], [29]], [(3, "4"), (3, "5")], id="behind an outer mask"),
]


@pytest.mark.parametrize(("ranks", "expected"), PLACES)
def test_each_process_gets_the_devices_it_was_planned_on(one, ranks, expected):
    with held(one, FlexiblePlacementStrategy(ranks)) as group:
        assert group.node().wait() == expected


def test_later_groups_get_the_planned_devices_too(one, reported):
    reported.clear()
    first, second = FlexiblePlacementStrategy([[17]]), FlexiblePlacementStrategy([[19], [22]])
    with held(one, first, "first") as first, held(one, second, "second") as second:
        assert [*first.sees().wait(), *second.sees().wait()] == ["1", "3", "6"]
    assert reported == []


def test_groups_of_one_job_may_overlap(one):
    first, second = PackedPlacementStrategy(16, 18), PackedPlacementStrategy(18, 20)
    with held(one, first, "first") as first, held(one, second, "second") as second:
        assert [*first.sees().wait(), *second.sees().wait()] == ["0", "1", "2", "2", "3", "4"]


def test_two_jobs_never_share_a_device(one, two, reported):
    reported.clear()
    both = PackedPlacementStrategy(16, 19, num_hardware_per_process=2)
    with held(one, both) as first, held(two, both) as second:
        assert first.sees().wait() == ["0,1", "2,3"]
        assert second.sees().wait() == ["4,5", "6,7"]
    assert any(
        "accelerators 4-7 are used in place of 0-3, some of which another job holds" in text for text in reported
    )


def test_what_another_cluster_of_this_process_holds_is_not_waited_for(two, reported):
    reported.clear()
    three, pair = PackedPlacementStrategy(24, 26, num_hardware_per_process=3), PackedPlacementStrategy(24, 25)
    with open_cluster() as other, held(other, three) as group:
        group.wait_ready()
        text = refusal(lambda: launched(two, pair))
        assert "2 accelerators needed, 3 of 4 held by another Cluster of this process" in text
        assert "it holds them for holder" in text
        assert not any("waiting" in text for text in reported)
        other.shutdown()
        with held(two, pair, "after") as after:
            assert len(after.sees().wait()) == 2


def refusal(action):
    with pytest.raises(ConfigError) as caught:
        action()
    return str(caught.value)


def test_a_plan_too_large_is_refused_at_once(one, reported):
    machines = {"nodes": [{"accelerators": 16}, {"accelerators": 12}]}
    plan = roost.plan({"cluster": {"num_nodes": 2, "component_placement": {"actor": "0-27"}}}, machines)
    reported.clear()
    text = refusal(lambda: one.launch(plan, {"actor": Holder.create_group()}))
    assert "has 8 accelerators, the plan uses 0-11 there" in text
    assert not any("waiting" in text for text in reported)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        pytest.param(
            LaunchOptions(cpus_per_process=3),
            "has 4 CPUs, the plan needs 6 there\n  why: env 2 x 3 = 6 CPUs",
            id="CPUs",
        ),
        pytest.param(
            LaunchOptions(host_memory_gb_per_process=50_000),
            "GB of host memory, the plan needs 100,000 there\n  why: env 2 x 50,000 = 100,000 GB",
            id="host memory",
        ),
    ],
)
def test_other_shortages_are_reported_like_those_of_accelerators(one, reported, options, expected):
    placement = {"env": {"node_group": "node", "placement": "1:0-1"}}
    plan = roost.plan({"cluster": {"num_nodes": 4, "component_placement": placement}}, one)
    reported.clear()
    text = refusal(lambda: one.launch(plan, {"env": Holder.create_group()}, {"env": options}))
    assert expected in text
    assert not any("waiting" in text for text in reported)


def test_a_saved_plan_is_verified_and_launched(one, two, tmp_path):
    plan = roost.plan({"cluster": {"num_nodes": 4, "component_placement": {"actor": "16-17,24"}}}, one)
    (tmp_path / "plan.json").write_text(plan.to_json())
    assert Plan.from_json(plan.to_json()) == plan
    group = two.launch(tmp_path / "plan.json", {"actor": Holder.create_group()})["actor"]
    assert group.node().wait() == [(1, "0"), (1, "1"), (2, "0")]
    group.close()


def test_fewer_nodes_than_wanted(ragged):
    reported = []
    text = refusal(lambda: Cluster(num_nodes=6, node_timeout=3.0, say=reported.append))
    assert "expected 6 nodes, 4 joined" in text
    assert any("waiting up to 3 s for 6 nodes; 4 joined" in text for text in reported)


def test_workers_without_devices_need_no_room(one, two):
    with held(one, EVERYTHING) as everything:
        everything.wait_ready()
        with held(two, NodePlacementStrategy([1, 2])) as group:
            assert group.node().wait() == [(1, ""), (2, "")]


def test_nothing_is_left_reserved_after_a_job(ragged):
    with open_cluster() as cluster:
        launched(cluster, EVERYTHING).wait_ready()
    deadline = time.monotonic() + HANG_S
    while ray.available_resources().get("GPU", 0) < 30 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert ray.available_resources()["GPU"] == 30
    states = {group["state"] for group in ray.util.placement_group_table().values()}
    assert states <= {"REMOVED"}
