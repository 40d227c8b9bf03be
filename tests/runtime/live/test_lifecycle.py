"""Groups that come and go, launches that fail half way, and several clusters in one process."""

import os
import threading
import time

import pytest
import ray

import roost
from roost import (
    Cluster,
    ConfigError,
    NodePlacementStrategy,
    PackedPlacementStrategy,
    Worker as RoostWorker,
    WorkerFailed,
)
from roost.transport.context import Address
from tests.limits import HANG_S


class Plain(RoostWorker):
    def __init__(self, thing=None):
        super().__init__()

    def rank(self):
        return self._rank

    def fail(self):
        raise ValueError("broken")

    def vanish(self):
        os._exit(1)

    def sleep(self, seconds):
        time.sleep(seconds)
        return "rested"

    def receive(self):
        return self.recv("late", 0)

    def fill(self, channel):
        raise ValueError("nothing to fill it with")


NODE = NodePlacementStrategy([0])


def launched(cluster, name, strategy=NODE, *args, **options):
    return Plain.create_group(*args).launch(cluster, name=name, placement_strategy=strategy, **options)


def until(condition, limit=HANG_S):
    deadline = time.monotonic() + limit
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def test_a_launch_that_cannot_be_sent_leaves_nothing_behind(cluster):
    with pytest.raises(TypeError):
        launched(cluster, "it", PackedPlacementStrategy(0, 7), threading.Lock())
    assert cluster.groups == {}
    assert launched(cluster, "it", PackedPlacementStrategy(0, 0)).rank().wait() == [0]


@pytest.mark.long
def test_a_launch_that_fails_half_way_leaves_nothing_behind(cluster, monkeypatch):
    cut = {"num_nodes": 1, "component_placement": {"actor": "0-1", "rollout": "2-3"}}
    plan = roost.plan({"cluster": cut}, cluster)

    def fail(setups):
        raise RuntimeError("no agent answers")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no agent answers"):
        patch.setattr(cluster._links, "assign", fail)
        cluster.launch(plan, {"actor": Plain, "rollout": Plain})
    assert cluster.groups == {}
    assert until(lambda: ray.available_resources().get("GPU") == 8)
    groups = cluster.launch(plan, {"actor": Plain, "rollout": Plain})
    assert [group.rank().wait() for group in groups.values()] == [[0, 1], [0, 1]]


def test_a_closed_group_gives_its_devices_to_other_jobs(cluster):
    group = launched(cluster, "all", PackedPlacementStrategy(0, 7, num_hardware_per_process=8))
    group.wait_ready()
    with Cluster(num_nodes=1, reservation_timeout=HANG_S) as other:
        group.close()
        assert launched(other, "all", PackedPlacementStrategy(0, 7, num_hardware_per_process=8)).rank().wait() == [0]


@pytest.mark.long
def test_what_groups_share_is_kept_until_the_last_is_closed(cluster):
    first = launched(cluster, "first", PackedPlacementStrategy(0, 1))
    second = launched(cluster, "second", PackedPlacementStrategy(1, 2))
    first.close()
    with Cluster(num_nodes=1) as other:
        third = launched(other, "third", PackedPlacementStrategy(3, 3))
        third.wait_ready()
        held = {worker for group in (second, third) for worker in group.rank().wait()}
        assert held == {0, 1}
        assert ray.available_resources()["GPU"] <= 5
    second.close()


def test_a_job_that_would_wait_for_itself_is_refused(shared_cluster):
    half = ray.cluster_resources()["CPU"] * 0.6
    group = launched(shared_cluster, "greedy", cpus_per_process=half)
    with pytest.raises(ConfigError, match="CPU"):
        launched(shared_cluster, "more", cpus_per_process=half)
    group.close()
    group = launched(shared_cluster, "more", cpus_per_process=half)
    group.wait_ready()
    group.close()


@pytest.mark.long
def test_a_failure_of_a_closed_group_disturbs_nobody(cluster):
    broken, healthy = launched(cluster, "broken"), launched(cluster, "healthy")
    healthy.wait_ready()
    broken.fail()
    assert until(lambda: cluster.failures)
    broken.close()
    assert healthy.sleep(4.5).wait() == ["rested"]


def test_a_name_used_again_starts_afresh(cluster):
    for _ in range(2):
        group = launched(cluster, "again", restarts=1)
        with pytest.raises(WorkerFailed) as caught:
            group.vanish().wait()
        assert caught.value.first.will_restart
        group.close()


def test_a_worker_that_never_comes_to_life_is_lost_to_all(cluster):
    waiting = launched(cluster, "waiting")
    waiting.wait_ready()
    late = launched(cluster, "late")
    ray.kill(late.hosts[0])
    call = waiting.receive()
    with pytest.raises(WorkerFailed) as caught:
        call.wait(timeout=HANG_S)
    assert str(caught.value.first.address) == "late:0"


def test_a_worker_that_never_came_to_life_in_a_group_closed_meanwhile_is_not_told_of(shared_cluster):
    shared_cluster._never_started(Address("closed", 0), "it never started")
    assert shared_cluster.failures == ()


def test_the_driver_does_not_wait_for_items_of_a_failed_producer(cluster):
    channel = cluster.create_channel("never")
    launched(cluster, "producer").fill(channel)
    with pytest.raises(WorkerFailed, match="nothing to fill it with"):
        channel.get()


def test_clusters_of_one_process_end_independently(local_ray):
    one, two = Cluster(num_nodes=1), Cluster(num_nodes=1)
    group = launched(two, "two")
    one.shutdown()
    one.shutdown()
    assert group.rank().wait() == [0]
    two.shutdown()
    with Cluster(num_nodes=1) as three:
        assert launched(three, "three").rank().wait() == [0]


@pytest.mark.parametrize(("nodes", "answering"), [(None, [0]), ([0], [0]), ([], [])], ids=["all", "one", "none"])
def test_whom_agents_ask(shared_cluster, nodes, answering):
    assert [node for node, _ in shared_cluster._links.ask_all("clock", nodes=nodes)] == answering


def test_a_config_may_describe_machines_only(local_ray):
    section = {"num_nodes": 1, "node_groups": [{"label": "bench", "node_ranks": 0}]}
    with Cluster(cluster_cfg=section) as cluster:
        on_bench = PackedPlacementStrategy(2, 2, node_group="bench")
        assert launched(cluster, "it", on_bench).rank().wait() == [0]


def test_another_address_than_the_one_in_use_is_refused(local_ray):
    with pytest.raises(ValueError, match=r"is connected to Ray at .* and cannot also connect to 192.0.2.1:6379"):
        Cluster(num_nodes=1, address="192.0.2.1:6379")
