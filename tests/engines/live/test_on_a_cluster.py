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
from roost.engines.members import EngineState, RestartLimit
from roost.engines.planned import plan_engines
from roost.engines.residency import EngineSwitch
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


async def until(member, *states):
    while member.state not in states:
        await asyncio.sleep(0.05)


def test_a_worker_is_not_killed_because_the_drivers_event_loop_was_blocked(owners):
    owner, limit_s = owners[0], 0.05

    async def run():
        result = owner._methods.server_is_running()
        asking = asyncio.create_task(owner._ask(result, limit_s))
        await asyncio.sleep(0)
        ray.wait(result._refs, timeout=HANG_S)
        time.sleep(2 * limit_s)
        return await asking

    before = worker_pid(owner)
    assert asyncio.run(run()) is False, "its server has not been started"
    assert worker_pid(owner) == before


async def lose_worker(fleet, owner, how):
    """Answers while the worker of an engine is lost and when it is back; and its processes before and after."""
    member, before = fleet.pool.members["rollout-1"], await asyncio.to_thread(worker_pid, owner)
    os.kill(before, how)
    await until(member, EngineState.LOST)
    meanwhile = await fleet.generate(PROMPT, GREEDY)
    await until(member, EngineState.READY)
    made = await member.engine.generate(PROMPT, GREEDY)
    return meanwhile.token_ids, made.token_ids, (before, await asyncio.to_thread(worker_pid, owner))


async def fleet_scenario(owners, policy, reported):
    """Two steps of a synchronous job whose engines and learner take turns; then engines are lost in three ways."""
    engine_switch = EngineSwitch(Decision.SLEEP)
    watchful = FleetSettings(watchfulness=Watchfulness(every_s=0.3, restarts=RestartLimit(most=10)))
    found = {"answers": []}
    async with Fleet(owners, watchful, report=reported.append) as fleet:
        for version in (1, 2):
            await engine_switch.to_learner(fleet)
            found["asleep"] = [member.state for member in fleet.pool.members.values()]
            await engine_switch.to_engines(fleet, policy.weight_update(version))
            answers = await asyncio.gather(*(fleet.generate(PROMPT, GREEDY) for _ in range(4)))
            found["answers"] += [(answer.token_ids, answer.versions[0].version) for answer in answers]
        servers = {name: psutil.Process(_listener(member.engine.url)) for name, member in fleet.pool.members.items()}
        found["ranks"] = [server.environ().get("RANK") for server in servers.values()]
        servers["rollout-1"].send_signal(signal.SIGKILL)
        while fleet.pool.members["rollout-1"].state is EngineState.READY:
            await asyncio.sleep(0.05)
        await until(fleet.pool.members["rollout-1"], EngineState.READY)
        found["after"] = (await fleet.pool.members["rollout-1"].engine.generate(PROMPT, GREEDY)).token_ids
        found["spans"] = [(span.name, (span.args or {}).get("version")) for span in fleet.recorder.drain()]
        found["killed"] = await lose_worker(fleet, owners[1], signal.SIGKILL)
        found["hung"] = await lose_worker(fleet, owners[1], signal.SIGSTOP)
        servers["rollout-1 again"] = psutil.Process(_listener(fleet.pool.members["rollout-1"].engine.url))
        os.kill(found["hung"][-1][-1], signal.SIGKILL)  # the end raises nothing for a worker that is gone
    deadline = time.monotonic() + HANG_S
    while any(server.is_running() for server in servers.values()) and time.monotonic() < deadline:
        await asyncio.sleep(0.1)  # the keeper of the killed worker's server ends it
    found["left"] = [name for name, server in servers.items() if server.is_running()]
    return found


def _listener(url):
    port = int(url.rpartition(":")[2])
    return next(
        connection.pid
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
    )


@pytest.fixture(scope="module")
def reported():
    return []


@pytest.fixture(scope="module")
def found(owners, policy, reported):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("roost.engines.worker.ANSWER_LIMIT_S", 20.0)
        return asyncio.run(asyncio.wait_for(fleet_scenario(owners, policy, reported), 3 * HANG_S))


def test_two_steps_and_a_kill(found, policy, engines):
    assert engines.decision is Decision.SLEEP
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
    assert found["left"] == []


@pytest.mark.parametrize("how", ["killed", "hung"])
def test_a_worker_that_is_lost_comes_back_and_its_engine_with_it(found, policy, reported, how):
    meanwhile, made, (before, after) = found[how]
    assert meanwhile == made == policy.greedy(2)
    assert before != after
    assert reported.count("rollout-1 is back, on version 2") == 3, "after the kill of its server, too"
