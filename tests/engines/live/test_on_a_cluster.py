"""Engines where a plan puts them: a worker at each place owns a server, and a fleet drives them all."""

import asyncio
import os
import signal
import time

import psutil
import pytest

pytest.importorskip("ray")

import ray

import roost
from roost.engines.command import EngineKind
from roost.engines.fleet import Fleet, FleetSettings
from roost.engines.members import EngineState
from roost.engines.planned import plan_engines
from roost.engines.residency import HandOver
from roost.engines.supervision import Watchfulness
from roost.engines.worker import EngineGroup
from roost.placement.memory.residency import Decision
from tests.engines.live.conftest import spec_of
from tests.engines.live.policies import GREEDY, PROMPT, Policy
from tests.limits import HANG_S
from tests.local_ray import end_ray

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def policy(model_folder):
    return Policy(model_folder)


@pytest.fixture(scope="module")
def cluster():
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.setenv("ROOST_FAKE_ACCELERATORS", "2")
        end_ray()
        with roost.Cluster(num_nodes=1, address="local") as cluster:
            yield cluster


@pytest.fixture(scope="module")
def plan(cluster):
    offloads = {"offload_weight": True, "offload_grad": True, "offload_optimizer": True}
    config = {"cluster": {"num_nodes": 1, "component_placement": {"actor,rollout": "all"}}, "actor": offloads}
    return roost.plan(config, cluster)


@pytest.fixture(scope="module")
def engines(plan, model_folder):
    return plan_engines(plan, "rollout", spec_of(EngineKind.TORCH, model_folder, device="auto"))


@pytest.fixture(scope="module")
def owners(cluster, plan, engines):
    planned = EngineGroup.of(engines, cluster)
    groups = cluster.launch(plan, {"rollout": planned.workers()}, planned.options("rollout"))
    return planned.owners(groups["rollout"])


def worker_pid(owner):
    """The process of the worker that owns a server."""
    return ray.get(owner._host.__ray_call__.remote(lambda worker: os.getpid()), timeout=HANG_S)


async def until(member, *standings):
    while member.standing not in standings:
        await asyncio.sleep(0.05)


def test_a_worker_is_not_killed_because_the_drivers_event_loop_was_blocked(owners):
    owner, limit_s = owners[0], 0.05

    async def run():
        result = owner._worker.server_is_running()
        asking = asyncio.create_task(owner._ask(result, limit_s))
        await asyncio.sleep(0)
        ray.wait(result._refs, timeout=HANG_S)
        time.sleep(2 * limit_s)
        return await asking

    before = worker_pid(owner)
    assert asyncio.run(run()) is False, "its server has not been started"
    assert worker_pid(owner) == before


WAYS_TO_LOSE = [pytest.param(signal.SIGKILL, id="killed"), pytest.param(signal.SIGSTOP, id="hung")]


@pytest.mark.parametrize("how", WAYS_TO_LOSE)
def test_a_worker_that_is_lost_comes_back_and_its_engine_with_it(owners, policy, how, monkeypatch):
    monkeypatch.setattr("roost.engines.worker.ANSWER_LIMIT_S", 20.0)
    said = []

    async def scenario():
        watchful = FleetSettings(watchfulness=Watchfulness(every_s=0.3))
        async with Fleet(owners, watchful, report=said.append) as fleet:
            await fleet.update(policy.release(1))
            member, before = fleet.pool.members["rollout-1"], await asyncio.to_thread(worker_pid, owners[1])
            os.kill(before, how)
            await until(member, EngineState.LOST)
            meanwhile = await fleet.generate(PROMPT, GREEDY)
            await until(member, EngineState.READY)
            made = await member.engine.generate(PROMPT, GREEDY)
            after = await asyncio.to_thread(worker_pid, owners[1])
            os.kill(after, signal.SIGKILL)
        return meanwhile.token_ids, made.token_ids, (before, after)

    meanwhile, made, (before, after) = asyncio.run(asyncio.wait_for(scenario(), HANG_S))
    assert meanwhile == made == policy.greedy(1)
    assert before != after
    assert "rollout-1 is back, on version 1" in said, "and the end raises nothing for a worker that is gone"


async def fleet_scenario(owners, policy):
    """Two steps of a synchronous job whose engines and learner take turns."""
    hand_over = HandOver(Decision.SLEEP)
    watchful = FleetSettings(watchfulness=Watchfulness(every_s=0.3))
    found = {"answers": []}
    async with Fleet(owners, watchful) as fleet:
        for version in (1, 2):
            await hand_over.to_learner(fleet)
            found["asleep"] = [member.standing for member in fleet.pool.members.values()]
            await hand_over.to_engines(fleet, policy.release(version))
            answers = await asyncio.gather(*(fleet.generate(PROMPT, GREEDY) for _ in range(4)))
            found["answers"] += [(answer.token_ids, answer.versions[0].version) for answer in answers]
        servers = {name: psutil.Process(_listener(member.engine.url)) for name, member in fleet.pool.members.items()}
        found["ranks"] = [server.environ().get("RANK") for server in servers.values()]
        servers["rollout-1"].send_signal(signal.SIGKILL)
        while fleet.pool.members["rollout-1"].standing is EngineState.READY:
            await asyncio.sleep(0.05)
        while fleet.pool.members["rollout-1"].standing is not EngineState.READY:
            await asyncio.sleep(0.05)
        found["after"] = (await fleet.pool.members["rollout-1"].engine.generate(PROMPT, GREEDY)).token_ids
        found["spans"] = [(span.name, (span.args or {}).get("version")) for span in fleet.recorder.drain()]
    found["left"] = [server.is_running() for server in servers.values()]
    return found


def _listener(url):
    port = int(url.rpartition(":")[2])
    return next(
        connection.pid
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
    )


def test_two_steps_and_a_kill(owners, policy, engines):
    assert engines.decision is Decision.SLEEP
    found = asyncio.run(asyncio.wait_for(fleet_scenario(owners, policy), HANG_S))
    assert found["asleep"] == [EngineState.ASLEEP] * 2
    assert found["answers"] == [(policy.greedy(1), 1)] * 4 + [(policy.greedy(2), 2)] * 4
    assert found["ranks"] == [None, None], "a server must not take its worker's ranks for its own"
    assert found["after"] == policy.greedy(2)
    assert found["spans"] == [
        ("start", None),
        ("sleep", None),
        ("update", 1),
        ("wake", 1),
        ("sleep", None),
        ("update", 2),
        ("wake", 2),
        ("recover", 2),
    ]
    assert found["left"] == [False, False]
