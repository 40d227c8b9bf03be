"""What is planned is reserved: jobs side by side, plans that do not fit, and nodes of every size."""

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


def open_cluster(said=None, **options):
    say = said.append if said is not None else (lambda text: None)
    return Cluster(num_nodes=4, say=say, **options)


def held(cluster, strategy, name="holder"):
    return Holder.create_group().launch(cluster, name=name, placement_strategy=strategy)


def test_inventory(ragged):
    with open_cluster() as cluster:
        assert [node.accelerators for node in cluster.inventory.nodes] == [16, 8, 4, 2]
        assert {node.accelerator_type for node in cluster.inventory.nodes} == {"SIMULATED"}
        assert [cluster.nodes[rank].report.cpus for rank in range(4)] == [4] * 4


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
def test_each_process_gets_the_devices_it_was_planned_on(ragged, ranks, expected):
    with open_cluster() as cluster:
        assert held(cluster, FlexiblePlacementStrategy(ranks)).node().wait() == expected


def test_later_groups_get_the_planned_devices_too(ragged):
    said = []
    with open_cluster(said) as cluster:
        first = held(cluster, FlexiblePlacementStrategy([[17]]), "first")
        second = held(cluster, FlexiblePlacementStrategy([[19], [22]]), "second")
        assert [*first.sees().wait(), *second.sees().wait()] == ["1", "3", "6"]
    assert said == []


def test_groups_of_one_job_may_overlap(ragged):
    with open_cluster() as cluster:
        first = held(cluster, PackedPlacementStrategy(16, 19), "first")
        second = held(cluster, PackedPlacementStrategy(18, 21), "second")
        assert [*first.sees().wait(), *second.sees().wait()] == ["0", "1", "2", "3", "2", "3", "4", "5"]


def test_two_jobs_never_share_a_device(ragged):
    said = []
    with open_cluster(said) as one, open_cluster(said) as two:
        first = held(one, PackedPlacementStrategy(16, 19)).sees().wait()
        second = held(two, PackedPlacementStrategy(16, 19)).sees().wait()
        assert first == ["0", "1", "2", "3"]
        assert second == ["4", "5", "6", "7"]
    assert any("accelerators 4-7 stand for 0-3, of which another job holds some" in text for text in said)


def test_what_another_cluster_of_this_process_holds_is_not_waited_for(ragged):
    said = []
    with open_cluster() as one, open_cluster(said) as two:
        held(one, PackedPlacementStrategy(24, 26)).wait_ready()
        text = refusal(lambda: held(two, PackedPlacementStrategy(24, 25)))
        assert "2 accelerators needed, 3 of 4 held by another Cluster of this process" in text
        assert "it holds them for holder" in text
        assert not any("waiting" in text for text in said)
        one.shutdown()
        assert len(held(two, PackedPlacementStrategy(24, 25), "after").sees().wait()) == 2


def refusal(action):
    with pytest.raises(ConfigError) as caught:
        action()
    return str(caught.value)


def test_a_plan_too_large_is_refused_at_once(ragged):
    machines = {"nodes": [{"accelerators": 16}, {"accelerators": 12}]}
    plan = roost.plan({"cluster": {"num_nodes": 2, "component_placement": {"actor": "0-27"}}}, machines)
    said = []
    with open_cluster(said) as cluster:
        text = refusal(lambda: cluster.launch(plan, {"actor": Holder.create_group()}))
    assert "has 8 accelerators, the plan uses 0-11 there" in text
    assert not any("waiting" in text for text in said)


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
def test_other_shortages_are_reported_like_those_of_accelerators(ragged, options, expected):
    placement = {"env": {"node_group": "node", "placement": "1:0-1"}}
    said = []
    with open_cluster(said) as cluster:
        plan = roost.plan({"cluster": {"num_nodes": 4, "component_placement": placement}}, cluster)
        text = refusal(lambda: cluster.launch(plan, {"env": Holder.create_group()}, {"env": options}))
    assert expected in text
    assert not any("waiting" in text for text in said)


def test_nothing_is_left_reserved_after_a_job(ragged):
    with open_cluster() as cluster:
        held(cluster, EVERYTHING).wait_ready()
    deadline = time.monotonic() + HANG_S
    while ray.available_resources().get("GPU", 0) < 30 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert ray.available_resources()["GPU"] == 30
    states = {group["state"] for group in ray.util.placement_group_table().values()}
    assert states <= {"REMOVED"}


def test_a_saved_plan_is_verified_and_launched(ragged, tmp_path):
    with open_cluster() as cluster:
        plan = roost.plan({"cluster": {"num_nodes": 4, "component_placement": {"actor": "16-17,24"}}}, cluster)
        (tmp_path / "plan.json").write_text(plan.to_json())
        assert Plan.from_json(plan.to_json()) == plan
    with open_cluster() as cluster:
        group = cluster.launch(tmp_path / "plan.json", {"actor": Holder.create_group()})["actor"]
        assert group.node().wait() == [(1, "0"), (1, "1"), (2, "0")]


def test_fewer_nodes_than_wanted(ragged):
    said = []
    text = refusal(lambda: Cluster(num_nodes=6, node_timeout=3.0, say=said.append))
    assert "expected 6 nodes, 4 joined" in text
    assert any("waiting up to 3 s for 6 nodes; 4 joined" in text for text in said)


def test_workers_without_devices_need_no_room(ragged):
    with open_cluster() as one, open_cluster(reservation_timeout=HANG_S) as two:
        held(one, EVERYTHING).wait_ready()
        assert held(two, NodePlacementStrategy([1, 2])).node().wait() == [(1, ""), (2, "")]
