"""A server that is well is not lost for what happens to its connections: a real socket, and a process that is there."""

import asyncio

import pytest

from roost.engines.command import EngineKind, ServerSpec
from roost.engines.connect import connect
from roost.engines.fleet import Fleet
from roost.engines.members import EngineState, FleetMembers
from roost.engines.protocol import EngineError, EngineLost
from roost.engines.supervision import Supervisor, Watchfulness
from roost.engines.weights.probe import Probe
from roost.engines.weights.sync import WeightCheck
from tests.engines.scripted_server import DROP, OK, ScriptedServer, bounded
from tests.limits import HANG_S


class OwnerOfWhatRuns:
    """Its process is there all the time."""

    def __init__(self, name="one"):
        self.spec = ServerSpec(EngineKind.TORCH, "model", name=name)

    async def is_running(self):
        return True


EXAMINED = [
    pytest.param([OK, OK], True, id="connections-stay-open"),
    pytest.param([OK, DROP, OK], True, id="an-idle-connection-is-closed-when-it-is-used-again"),
    pytest.param([OK, DROP], False, id="every-connection-is-closed"),
]


@pytest.mark.parametrize(("script", "is_well"), EXAMINED)
def test_a_healthy_server_is_not_lost_with_a_connection(script, is_well):
    reported = []

    async def scenario():
        pool = FleetMembers([OwnerOfWhatRuns()])
        (member,) = pool.members.values()
        supervisor = Supervisor(pool, Watchfulness(), recover=lambda _: asyncio.sleep(0), report=reported.append)
        async with ScriptedServer(*script) as server:
            engine = connect(EngineKind.TORCH, f"http://127.0.0.1:{server.port}")
            member._engine, member.state = engine, EngineState.READY
            await engine._calls.get("/version", limit_s=HANG_S)
            assert await supervisor.examine(member) is is_well
            await supervisor.stop()
            await member.disconnect()

    bounded(scenario())
    assert reported[:1] == ([] if is_well else ["one is lost: it does not answer"])


def test_a_member_that_is_lost_is_not_lost_again():
    """A check of its weights and the watch may both find it wrong: it is started once."""
    recovered, reported = [], []

    async def recover(member):
        recovered.append(member.name)

    async def scenario():
        pool = FleetMembers([OwnerOfWhatRuns()])
        (member,) = pool.members.values()
        member.state = EngineState.READY
        supervisor = Supervisor(pool, Watchfulness(), recover, reported.append)
        for why in ("its process is gone", "its weights are not those of its version"):
            await supervisor.lose(member, why)
        await asyncio.sleep(0)
        await supervisor.stop()
        return member.last_error, len(member.restarts)

    assert bounded(scenario()) == ("its process is gone", 1)
    assert (recovered, reported[:1]) == (["one"], ["one is lost: its process is gone"])


def test_a_check_of_weights_passes_over_a_member_that_was_disconnected():
    async def scenario():
        pool = FleetMembers([OwnerOfWhatRuns()])
        (member,) = pool.members.values()
        member.state, member.probe = EngineState.READY, Probe((1, 2), (-1.0,), 0.1)
        return await WeightCheck(pool, print).wrong()

    assert bounded(scenario()) == []


READY, LOST, BEHIND, FAILED = EngineState.READY, EngineState.LOST, EngineState.BEHIND, EngineState.FAILED
SERVED = [
    pytest.param([READY, FAILED], None, id="one is ready"),
    pytest.param([LOST, BEHIND], None, id="one may come back"),
    pytest.param([BEHIND, FAILED], "no engine has the current weights, .*: one is behind; two is failed", id="behind"),
    pytest.param([FAILED, FAILED], "every engine has failed: one is failed; two is failed", id="failed"),
]


@pytest.mark.parametrize("moment", ["while it waits", "as it fails", "as it succeeds"])
@pytest.mark.parametrize(("states", "message"), SERVED)
def test_work_ends_when_no_engine_is_left_for_it(states, message, moment, tmp_path):
    """Whatever the work makes of requests that fail; groups that are complete wait for the next update."""
    is_kept = message is None or (moment == "as it succeeds" and BEHIND in states)

    async def scenario():
        fleet = Fleet([OwnerOfWhatRuns("one"), OwnerOfWhatRuns("two")], folder=tmp_path)
        members = list(fleet.pool.members.values())
        await fleet.pool.set_state(members, READY)
        ended = asyncio.Event()

        async def work():
            try:
                await asyncio.sleep(0)
                for member, state in zip(members, states, strict=True):
                    await fleet.pool.set_state([member], state)
                if moment == "while it waits":
                    await (asyncio.Event().wait() if message else asyncio.sleep(0))
                if moment == "as it fails":
                    raise ValueError("no episode finished")
                return "groups"
            finally:
                ended.set()

        try:
            return await fleet.serve(work())
        finally:
            assert ended.is_set(), "nothing is left of it"

    if not is_kept:
        with pytest.raises(EngineLost, match=message):
            bounded(scenario())
    elif moment == "as it fails":
        with pytest.raises(ValueError, match="no episode finished"):
            bounded(scenario())
    else:
        assert bounded(scenario()) == "groups"


class FailsToStart(OwnerOfWhatRuns):
    """Its server fails once `may_fail` is set."""

    def __init__(self, name):
        super().__init__(name)
        self.is_starting, self.may_fail = asyncio.Event(), asyncio.Event()

    async def start(self, model=None):
        self.is_starting.set()
        await self.may_fail.wait()
        raise EngineError("no server")

    async def stop(self):
        pass


def test_work_ends_when_the_only_engine_left_fails_to_join(tmp_path):
    async def scenario():
        fleet = Fleet([OwnerOfWhatRuns("one")], folder=tmp_path)
        joining = FailsToStart("two")
        adding = asyncio.create_task(fleet.add(joining))
        await joining.is_starting.wait()
        await fleet.pool.set_state([fleet.pool.members["one"]], FAILED)
        working = asyncio.create_task(fleet.serve(asyncio.Event().wait()))
        await asyncio.sleep(0.01)
        assert not working.done(), "the engine that joins may serve it"
        joining.may_fail.set()
        with pytest.raises(EngineError, match="no server"):
            await adding
        await working

    with pytest.raises(EngineLost, match="every engine has failed: one is failed"):
        bounded(scenario())


REMOVED = [
    pytest.param([READY, READY], ["one", "two"], "a run needs at least one engine", id="all"),
    pytest.param(
        [READY, BEHIND], ["one"], r"no other engine has the current weights \(two is behind\)", id="the-only-ready"
    ),
    pytest.param(
        [READY, FAILED], ["one"], r"no other engine has the current weights \(two is failed\)", id="the-only-sound"
    ),
    pytest.param([READY, READY], ["three"], "has no engine three; it has one, two", id="unknown"),
    pytest.param([LOST, BEHIND], ["one"], None, id="a-lost-one"),
    pytest.param([READY, LOST], ["one"], None, id="another-comes-back"),
]


@pytest.mark.parametrize(("states", "names", "message"), REMOVED)
def test_engines_are_removed_unless_none_would_be_left_for_requests(states, names, message):
    async def scenario():
        pool = FleetMembers([OwnerOfWhatRuns("one"), OwnerOfWhatRuns("two")])
        for member, state in zip(pool.members.values(), states, strict=True):
            await pool.set_state([member], state)
        pool.router.choose({"one": 0}, episode="7")
        try:
            await pool.remove(names)
        finally:
            left, home = list(pool.members), pool.router.choose({"one": 1, "two": 0}, episode="7")
        return left, home

    if message is None:
        assert bounded(scenario()) == (["two"], "two")
    else:
        with pytest.raises(ValueError, match=message):
            bounded(scenario())


def test_nobody_is_started_again_once_the_watch_has_ended():
    recovered = []

    async def recover(member):
        recovered.append(member.name)

    async def scenario(is_stopped):
        pool = FleetMembers([OwnerOfWhatRuns()])
        (member,) = pool.members.values()
        member.state = EngineState.LOST
        supervisor = Supervisor(pool, Watchfulness(), recover, report=lambda _: None)
        if is_stopped:
            await supervisor.stop()
        supervisor.start_again_soon(member)
        await asyncio.sleep(0)
        return recovered

    assert bounded(scenario(is_stopped=True)) == []
    assert bounded(scenario(is_stopped=False)) == ["one"]
