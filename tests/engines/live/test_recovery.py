"""Engines that die or hang: noticed, started again on the current version, and no request is lost with them."""

import asyncio
import os
import signal
from dataclasses import replace

import pytest

from roost.engines.errors import EngineLost
from roost.engines.fleet import Fleet, FleetSettings
from roost.engines.generation import Sampling
from roost.engines.member import Standing
from roost.engines.owner import LocalOwner
from roost.engines.restarts import RestartLimit
from roost.engines.spec import EngineKind
from roost.engines.supervision import Watchfulness
from roost.engines.weights.source import ModuleSource
from tests.engines.live.policies import GREEDY, PROMPT, Policy

LONG = Sampling(max_tokens=120, temperature=0.0, ignore_eos=True)
EAGER = Watchfulness(every_s=0.2, missed=2, restarts=RestartLimit(most=2, within_s=3600))


@pytest.fixture(scope="module")
def policy(model_folder):
    return Policy(model_folder)


def fleet_of(count, server_spec, logs, **settings):
    owners = [LocalOwner(replace(server_spec, name=f"engine-{index}"), logs) for index in range(count)]
    return Fleet(owners, FleetSettings(watchfulness=EAGER, **settings))


def finished(run, limit_s=300.0):
    """What a scenario gives; one that hangs fails with where it was."""
    return asyncio.run(asyncio.wait_for(run, limit_s))


async def until(fleet, name, standing):
    while fleet.crew.members[name].standing is not standing:
        await asyncio.sleep(0.05)


def kill(fleet, name, how=signal.SIGKILL):
    os.kill(fleet.crew.members[name].owner.pid, how)


def test_kill_and_recovery(server_spec, policy, tmp_path):
    """The one engine is killed while it works: it comes back on the version it had, and the requests are finished."""

    async def run():
        async with fleet_of(1, server_spec, tmp_path) as fleet:
            await fleet.update(policy.release(1))
            requests = [asyncio.create_task(fleet.generate((*PROMPT, index), LONG)) for index in range(3)]
            await asyncio.sleep(0.3)
            kill(fleet, "engine-0")
            made = await asyncio.gather(*requests)
            member = fleet.crew.members["engine-0"]
            return made, member.version, await member.engine.version(), fleet.recorder.pop_time("recover")

    made, version, told, seconds = finished(run())
    assert (version, told) == (1, 1)
    assert seconds > 0
    for index, completion in enumerate(made):
        assert completion.token_ids == policy.greedy(1, (*PROMPT, index), LONG.max_tokens)
        assert [span.version for span in completion.versions] == [1]


@pytest.fixture
def built_in(engine_kind):
    if engine_kind is not EngineKind.TORCH:
        pytest.skip("of the built-in engine")


def test_requests_move_to_another_engine(server_spec, policy, tmp_path, built_in):
    async def run():
        async with fleet_of(2, server_spec, tmp_path) as fleet:
            requests = [
                asyncio.create_task(fleet.generate((*PROMPT, index), LONG, episode=str(index))) for index in range(4)
            ]
            while any(member.in_flight < 2 for member in fleet.crew.members.values()):
                await asyncio.sleep(0.01)
            kill(fleet, "engine-1")
            made = await asyncio.gather(*requests)
            await until(fleet, "engine-1", Standing.READY)
            return made

    for index, completion in enumerate(finished(run())):
        assert completion.token_ids == policy.greedy(0, (*PROMPT, index), LONG.max_tokens)


class KillsOnTheWay(ModuleSource):
    """While the weights are sent, one of the engines is killed."""

    def __init__(self, module, kill):
        super().__init__(module)
        self._kills = [kill]

    def stream(self):
        for count, tensor in enumerate(super().stream()):
            if count == 12 and self._kills:
                self._kills.pop()()
            yield tensor


def test_killed_during_an_update(server_spec, policy, tmp_path, built_in):
    async def run():
        async with fleet_of(2, server_spec, tmp_path) as fleet:
            source = KillsOnTheWay(policy.version(1), lambda: kill(fleet, "engine-0"))
            await fleet.update(policy.release(1, source=source))
            standing = fleet.crew.members["engine-1"].standing
            await until(fleet, "engine-0", Standing.READY)
            engines = [member.engine for member in fleet.crew.members.values()]
            made = [await engine.generate(PROMPT, GREEDY) for engine in engines]
            return standing, made

    standing, made = finished(run())
    assert standing is Standing.READY
    assert [completion.token_ids for completion in made] == [policy.greedy(1)] * 2
    assert [completion.versions[0].version for completion in made] == [1, 1]


def test_killed_asleep(server_spec, policy, tmp_path, built_in):
    """Somebody else holds its device while it sleeps, so it is not started before it is woken."""

    async def run():
        async with fleet_of(2, server_spec, tmp_path) as fleet:
            await fleet.sleep(2)
            fleet.learning_begins()
            kill(fleet, "engine-0")
            await until(fleet, "engine-0", Standing.LOST)
            await asyncio.sleep(1.0)
            was_left_alone = fleet.crew.members["engine-0"].standing is Standing.LOST
            await fleet.wake(policy.release(1))
            made = [await member.engine.generate(PROMPT, GREEDY) for member in fleet.crew.members.values()]
            return was_left_alone, made

    was_left_alone, made = finished(run())
    assert was_left_alone
    assert [completion.token_ids for completion in made] == [policy.greedy(1)] * 2


def test_a_hung_engine_is_replaced(server_spec, policy, tmp_path, built_in):
    async def run():
        async with fleet_of(1, server_spec, tmp_path) as fleet:
            fleet.crew.members["engine-0"].engine._limits = replace(
                fleet.crew.members["engine-0"].engine._limits, answer=1.0
            )
            first = fleet.crew.members["engine-0"].owner.pid
            kill(fleet, "engine-0", signal.SIGSTOP)
            made = await fleet.generate(PROMPT, GREEDY)
            return first, fleet.crew.members["engine-0"].owner.pid, made

    first, second, made = finished(run())
    assert first != second
    assert made.token_ids == policy.greedy(0)


def test_an_engine_that_keeps_dying_is_given_up(server_spec, tmp_path, built_in):
    said = []

    async def run():
        async with fleet_of(1, server_spec, tmp_path, wait_s=120.0) as fleet:
            fleet._supervisor._report = said.append
            for _ in range(3):
                await until(fleet, "engine-0", Standing.READY)
                kill(fleet, "engine-0")
                while fleet.crew.members["engine-0"].standing is Standing.READY:
                    await asyncio.sleep(0.05)
            await until(fleet, "engine-0", Standing.FAILED)
            await fleet.generate(PROMPT, GREEDY)

    with pytest.raises(EngineLost, match=r"every engine has failed: engine-0 is failed \(lost 3 times within 3600 s"):
        finished(run())
    assert said[-1].startswith("engine-0 is given up: lost 3 times within 3600 s, the last time because its process")


def test_without_its_weights_it_waits_for_the_next_update(server_spec, policy, tmp_path, built_in):
    """The learner has gone on, and nothing was written: the version is not to be had any more."""

    async def run():
        async with fleet_of(2, server_spec, tmp_path) as fleet:
            await fleet.update(policy.release(1))
            fleet.learning_begins()
            kill(fleet, "engine-0")
            await until(fleet, "engine-0", Standing.BEHIND)
            meanwhile = await fleet.generate(PROMPT, GREEDY)
            await fleet.update(policy.release(2))
            return meanwhile, [await member.engine.generate(PROMPT, GREEDY) for member in fleet.crew.members.values()]

    meanwhile, made = finished(run())
    assert meanwhile.token_ids == policy.greedy(1)
    assert [completion.token_ids for completion in made] == [policy.greedy(2)] * 2
