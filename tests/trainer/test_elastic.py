"""Changes of engines that break off or fail halfway: fleet, workers and plan agree, or the attempt ends."""

import asyncio
from types import SimpleNamespace

import pytest

pytest.importorskip("ray")
pytest.importorskip("torch")

import roost
from roost.engines.fleet import Fleet
from roost.engines.members import EngineState
from roost.engines.worker import Answer, EngineGroup
from roost.placement.plan import Plan
from roost.runtime.cluster import Cluster
from roost.trainer.elastic import ElasticEngines
from roost.trainer.records.run_folder import RunFolder
from roost.trainer.records.scale_requests import Change
from roost.trainer.setup import run_setup
from roost.transport.context import Address, Failure, FailureKind, WorkerFailed
from tests.engines.scripted_server import bounded
from tests.trainer.live.jobs import config, job_of


class Group:
    """Engine workers without processes; a closed group refuses calls as a real one does."""

    def __init__(self, name, size=1):
        self.name, self.hosts, self.is_closed = name, [None] * size, False

    def execute_on(self, rank):
        return self

    async def stop_server(self):
        if self.is_closed:
            raise RuntimeError(f"{self.name} is closed; launch it again to call stop_server")
        return [Answer()]

    def close(self):
        self.is_closed = True


class Nodes:
    """The cluster of a run, as far as changes of engines use it."""

    def __init__(self, lost=()):
        self.failures = tuple(
            Failure(Address("rollout", 0), FailureKind.NODE_LOST, f"node {node} is lost", node, node) for node in lost
        )
        self.launched, self.ended, self.given_up = [], [], None

    def launch_one(self, workers, component, rank, name, options, wait_s):
        self.launched.append(Group(name))
        return self.launched[-1]

    def end_worker(self, group, rank):
        self.ended.append(rank)
        raise ConnectionError(f"no answer about rank {rank}")

    def give_up(self, error):
        self.given_up = error


class QuietFleet(Fleet):
    """Its servers are ready at once, except one that never is."""

    async def _start_plain(self, member):
        if member.name == "rollout-3":
            await asyncio.Event().wait()


class Elastic:
    def __init__(self, folder, placement, nodes=1, lost=()):
        values = config("model", placement)
        values["cluster"] |= {"num_nodes": nodes, "num_gpus_per_node": 8 if nodes == 1 else 1}
        settings, plan = job_of(values).training, roost.plan(values)
        setup = run_setup(plan, settings, on_gpu=False)
        engines = EngineGroup(setup.engines.servers, is_multi_node=False)
        group = Group("rollout", len(engines.servers))
        self.notes, self.cluster = [], Nodes(lost)
        self.fleet = QuietFleet(engines.owners(group), folder=folder, report=self.notes.append)
        for member in self.fleet.pool.members.values():
            member.state = EngineState.READY
        self.run = RunFolder(folder)
        routes = setup.engines.routes_by_name
        self.engines = ElasticEngines(
            self.cluster, self.fleet, plan, engines, group, routes, setup, settings, self.run, self.notes.append
        )

    def scale(self, number):
        return self.engines._scale([Change("rollout", number, is_total=False)], lambda text: None)

    @property
    def names(self):
        return list(self.fleet.pool.members)


def test_the_end_of_a_run_while_engines_join_takes_them_out_again(tmp_path):
    elastic = Elastic(tmp_path, {"actor": "0", "rollout": "1-2"})

    async def scenario():
        scaling = asyncio.create_task(elastic.scale(2))
        members = elastic.fleet.pool.members
        while "rollout-2" not in members or members["rollout-2"].state is not EngineState.READY:
            await asyncio.sleep(0)
        scaling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await scaling
        names = elastic.names
        await elastic.fleet.close()
        return names

    assert bounded(scenario()) == ["rollout-0", "rollout-1"]
    assert [(group.name, group.is_closed) for group in elastic.cluster.launched] == [
        ("rollout-2", True),
        ("rollout-3", True),
    ]
    assert elastic.notes == []


def test_a_worker_that_cannot_be_ended_does_not_stop_the_change(tmp_path):
    elastic = Elastic(tmp_path, {"actor": "0", "rollout": "1-3"})

    async def scenario():
        await elastic.scale(-2)
        await elastic.scale(1)

    bounded(scenario())
    assert elastic.cluster.ended == [1, 2] and elastic.names == ["rollout-0", "rollout-1"]
    assert elastic.notes[:2] == ["no answer about rank 1", "no answer about rank 2"]
    assert Plan.from_json(elastic.run.plan_file.read_text())["rollout"].world_size == 2


LOST = [
    pytest.param([2], "", id="the learner would have to make room"),
    pytest.param([1, 2], "the run cannot go on without 2 lost nodes", id="no plan fits"),
]


@pytest.mark.parametrize(("lost", "note"), LOST)
def test_the_loss_of_all_engines_without_room_for_others_ends_the_attempt(lost, note, tmp_path):
    elastic = Elastic(tmp_path, {"actor": "0-1", "rollout": "2"}, nodes=3, lost=lost)
    bounded(elastic.engines._go_on_without(frozenset(lost)))
    error = elastic.cluster.given_up
    assert [(found.kind, found.node) for found in error.failures] == [(FailureKind.NODE_LOST, node) for node in lost]
    assert "".join(elastic.notes).startswith(note) and elastic.names == ["rollout-0"]


def test_a_cluster_that_is_given_up_says_so_every_time():
    cluster = Cluster.__new__(Cluster)
    cluster._failures, cluster._given_up = SimpleNamespace(raise_if_lost=lambda: None), None
    cluster.raise_if_lost()
    cluster.give_up(WorkerFailed([Failure(Address("rollout", 0), FailureKind.NODE_LOST, "node 1 is lost", 1, 1)]))
    for _ in range(2):
        with pytest.raises(WorkerFailed, match="node 1 is lost"):
            cluster.raise_if_lost()


@pytest.mark.parametrize(("answering", "waits"), [(["a", "b"], 1), (["a"], 2)], ids=["all answer", "one is dead"])
def test_missing_nodes_are_waited_for_again_only_if_a_daemon_did_not_start(answering, waits, monkeypatch):
    """Ray takes a dead node for alive for some seconds; where all answer, it has noticed."""
    waited = []

    def wait_for_nodes(wanted, limit, say):
        waited.append(wanted)
        return dict.fromkeys(("a", "b"))

    monkeypatch.setattr("roost.runtime.cluster.nodes.wait_for_nodes", wait_for_nodes)
    monkeypatch.setattr("roost.runtime.cluster.nodes.start_daemons", lambda new, *_: dict.fromkeys(new))
    monkeypatch.setattr(
        "roost.runtime.cluster.nodes.ask_nodes", lambda daemons, *_: [name for name in daemons if name in answering]
    )
    cluster = Cluster.__new__(Cluster)
    cluster._former, cluster._daemons, cluster._say, cluster.log_dir = ("a", "b", "c"), {}, print, "logs"
    cluster.connection = SimpleNamespace(folder="ray")
    assert cluster._reports(3, 60.0, "mark") == answering and waited == [3] * waits


def test_a_group_that_is_launched_while_the_cluster_ends_disturbs_nothing(tmp_path):
    class Another:
        def __init__(self, groups):
            self._groups = groups

        @property
        def hosts(self):
            self.mark_closed()
            return []

        def mark_closed(self):
            self._groups[f"rollout-{len(self._groups)}"] = SimpleNamespace(hosts=[], mark_closed=lambda: None)

    cluster = Cluster.__new__(Cluster)
    cluster._groups, cluster.nodes, cluster._control = {}, [], SimpleNamespace(is_lost=True)
    cluster._groups["rollout"] = Another(cluster._groups)
    cluster._links = SimpleNamespace(ask_all=lambda *_: [], driver=SimpleNamespace(node=0))
    cluster.write_trace(tmp_path / "trace.json")
    cluster._end_processes()
    assert len(cluster._groups) == 3
