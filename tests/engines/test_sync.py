"""The version that an engine's client puts tokens down to, however the weights came: servers of vLLM 0.22 tell none."""

import asyncio
from pathlib import Path

import pytest

from roost.engines.command import EngineKind, ServerSpec
from roost.engines.connect import connect
from roost.engines.fleet import Fleet, check_base
from roost.engines.members import EngineState, Member
from roost.engines.protocol import Capabilities, InFlight, NotOffered, Sampling, VersionSpan
from roost.engines.weights.payload import Manifest
from roost.engines.weights.probe import Probe
from roost.engines.weights.sync import WeightSync
from roost.engines.weights.update import Sent, WeightRoute, WeightUpdate
from tests.engines.vllm_standin import NEW, OLD, running_standin
from tests.limits import HANG_S

PROBE = Probe((5, 6), (-0.5,), tolerance=0.1)


class Owner:
    """A server that runs already, wherever it is started."""

    def __init__(self, url):
        self.spec = ServerSpec(EngineKind.VLLM, "tiny", name="one", weight_transfer="ipc", lora_rank=8)
        self._url = url

    async def start(self, model=None):
        return self._url


class SentByAnother:
    """Sends with a client of its own, as a learner does from its own process."""

    def __init__(self, route):
        self._route = route

    def route_to(self, server):
        return self._route

    async def send(self, engines, version):
        for engine in engines:
            own = connect(EngineKind.VLLM, engine.url)
            await own.start_update(Manifest(version, (), False))
            await own.finish_update(version)
            await own.close()
        return Sent(0, 0, {}, {})

    async def write(self, model, folder):
        pass


def release_by(route):
    if route is WeightRoute.ADAPTER:
        return WeightUpdate(7, PROBE, adapter="adapter")
    if route in (WeightRoute.RELOAD, WeightRoute.RESTART):
        return WeightUpdate(7, PROBE, checkpoint="checkpoint")
    return WeightUpdate(7, PROBE, SentByAnother(route))


@pytest.mark.parametrize("routes", [OLD | {"/v1/load_lora_adapter"}, NEW], ids=["0.22", "0.32"])
@pytest.mark.parametrize("route", [WeightRoute.DEVICE, WeightRoute.RELOAD, WeightRoute.RESTART, WeightRoute.ADAPTER])
def test_tokens_are_put_down_to_the_release_by_every_route(route, routes, tmp_path):
    # Without the route for tokens no server tells spans, so the client's own count is what tokens are put down to.
    with running_standin(routes, opens_token_route=False) as (url, server):
        described = [None, {"6": {"logprob": -0.5}}]
        scored = {"choices": [{"token_ids": [7], "finish_reason": "length", "prompt_logprobs": described}]}
        plain = type(server).on_v1_completions
        server.on_v1_completions = lambda asked: (
            (200, scored) if "prompt_logprobs" in asked.body else plain(server, asked)
        )

        async def scenario():
            member = Member(Owner(url))
            await member.connect(connect(EngineKind.VLLM, url))
            member.state = EngineState.UPDATING
            if route is WeightRoute.RESTART:
                member.useless_routes = {WeightRoute.RELOAD}
            sync = WeightSync(release_by(route), tmp_path, lambda spec, at: connect(spec.kind, at), InFlight.DRAIN)
            errors = await sync.load_on([member])
            made = await member.engine.generate([1], Sampling(max_tokens=2))
            version = await member.engine.version()
            await member.disconnect()
            return errors, made.versions, version, member.version

        async def bounded():
            async with asyncio.timeout(HANG_S):
                return await scenario()

        assert asyncio.run(bounded()) == ({}, (VersionSpan(7, 0, 2),), 7, 7)


def test_an_update_that_did_not_take_is_reported_with_what_is_done_instead(tmp_path):
    found = brought_by_probe(tmp_path, baseline=0.0)
    assert [text for text in found if "http" not in text] == []
    off = "the probe (log-probabilities of fixed tokens) is off by 1.5, and 0.1 is allowed"
    described = [text.replace(text[text.index("http") : text.index(" does not")], "URL") for text in found]
    assert described == [
        f"one failed to load version 7 by {route}: URL does not answer with the new weights: {off}; {instead}"
        for route, instead in [
            ("shared device", "next: reload from disk"),
            ("reload from disk", "next: restart"),
            ("restart", "no route is left"),
        ]
    ]


def test_an_update_is_judged_relative_to_the_mismatch_with_equal_weights(tmp_path):
    assert brought_by_probe(tmp_path, baseline=1.4) == []


def brought_by_probe(tmp_path, baseline):
    """The report on an engine whose answers are 1.5 from the learner's, whatever it is sent."""
    reported = []
    with running_standin(NEW, opens_token_route=False) as (url, server):
        described = [None, {"6": {"logprob": -0.5}}]
        scored = {"choices": [{"token_ids": [7], "finish_reason": "length", "prompt_logprobs": described}]}
        server.on_v1_completions = lambda asked: (200, scored)

        async def scenario():
            member = Member(Owner(url))
            await member.connect(connect(EngineKind.VLLM, url))
            member.state, member.baseline = EngineState.UPDATING, baseline
            member.probe = probe = Probe((5, 6), (-2.0,), tolerance=0.1)  # the learner has hardly moved
            update = WeightUpdate(7, probe, SentByAnother(WeightRoute.DEVICE), "checkpoint")
            sync = WeightSync(
                update, tmp_path, lambda spec, at: connect(spec.kind, at), InFlight.DRAIN, reported.append
            )
            async with asyncio.timeout(HANG_S):
                await sync.load_on([member])
            await member.disconnect()

        asyncio.run(scenario())
    return reported


@pytest.mark.parametrize("route", [WeightRoute.DEVICE, WeightRoute.RELOAD, WeightRoute.ADAPTER])
def test_the_learner_leaves_the_device_before_the_kv_caches_are_restored(route, tmp_path):
    with running_standin(NEW, opens_token_route=False, sleeps=True) as (url, server):
        described = [None, {"6": {"logprob": -0.5}}]
        scored = {"choices": [{"token_ids": [7], "finish_reason": "length", "prompt_logprobs": described}]}
        server.on_v1_completions = lambda asked: (200, scored)

        def woken():
            return [asked.query["tags"] for asked in server.asked if asked.path == "/wake_up"]

        async def scenario():
            members = [Member(Owner(url)) for _ in range(2)]
            for member in members:
                await member.connect(connect(EngineKind.VLLM, url, sleeps=True))
                member.state = EngineState.ASLEEP
            when_left = []

            async def offload():
                await asyncio.sleep(0.05)  # another engine must wait for it
                when_left.append(woken())

            connecting = lambda spec, at: connect(spec.kind, at)  # noqa: E731
            sync = WeightSync(release_by(route), tmp_path, connecting, InFlight.DRAIN, offload=offload)
            async with asyncio.timeout(HANG_S):
                errors = await sync.load_on(members)
            for member in members:
                await member.disconnect()
            return errors, when_left

        assert asyncio.run(scenario()) == ({}, [[["weights"]] * 2])
        assert woken() == [["weights"]] * 2 + [["kv_cache"]] * 2


@pytest.mark.parametrize(
    ("route", "why"),
    [
        (WeightRoute.SHARED_MEMORY, "vllm cannot map files of the learner"),
        (WeightRoute.BROADCAST, "the server was started with weight_transfer ipc, not nccl"),
        (WeightRoute.DEVICE, None),
    ],
)
def test_a_planned_route_that_a_server_refuses_is_reported_once(route, why, tmp_path):
    with running_standin(NEW, opens_token_route=False) as (url, server):
        described = [None, {"6": {"logprob": -0.5}}]
        scored = {"choices": [{"token_ids": [7], "finish_reason": "length", "prompt_logprobs": described}]}
        server.on_v1_completions = lambda asked: (200, scored)
        reported = []

        async def scenario():
            member = Member(Owner(url))
            await member.connect(connect(EngineKind.VLLM, url))
            member.state = EngineState.UPDATING
            connecting = lambda spec, at: connect(spec.kind, at)  # noqa: E731
            for version in (6, 7, 8):
                if version == 6:
                    member.capabilities = Capabilities(frozenset())  # as while a server is started again
                update = WeightUpdate(version, PROBE, SentByAnother(route))
                folder = tmp_path / str(version)
                sync = WeightSync(update, folder, connecting, InFlight.DRAIN, report=reported.append)
                assert await sync.load_on([member]) == {}
                if version == 6:
                    assert not member.useless_routes
            await member.disconnect()

        asyncio.run(scenario())
    line = f"one does not take weights by {route}, the planned route: {why}; it reads them from disk"
    assert reported == ([line] if why else [])


def test_what_an_engine_loads_from_disk_is_written_before_the_learner_leaves(tmp_path):
    """One engine is sent the weights, and the other, to which that never worked, reads them from disk."""
    with running_standin(NEW, opens_token_route=False, sleeps=True) as (url, server):
        described = [None, {"6": {"logprob": -0.5}}]
        scored = {"choices": [{"token_ids": [7], "finish_reason": "length", "prompt_logprobs": described}]}
        server.on_v1_completions = lambda asked: (200, scored)
        done = []

        class Writing(SentByAnother):
            async def write(self, model, folder):
                done.append("written")
                Path(folder).mkdir()

        async def offload():
            done.append("left")

        async def scenario():
            members = [Member(Owner(url)) for _ in range(2)]
            for member in members:
                await member.connect(connect(EngineKind.VLLM, url, sleeps=True))
                member.state = EngineState.ASLEEP
            members[1].useless_routes = {WeightRoute.DEVICE}
            update = WeightUpdate(7, PROBE, Writing(WeightRoute.DEVICE))
            connecting = lambda spec, at: connect(spec.kind, at)  # noqa: E731
            sync = WeightSync(update, tmp_path / "version", connecting, InFlight.DRAIN, offload=offload)
            async with asyncio.timeout(HANG_S):
                errors = await sync.load_on(members)
            for member in members:
                await member.disconnect()
            return errors

        assert asyncio.run(scenario()) == {}
        assert done == ["written", "left"]


def test_the_learner_leaves_once_where_no_engine_slept(tmp_path):
    with running_standin(NEW, opens_token_route=False) as (url, _):

        async def scenario():
            member = Member(Owner(url))
            await member.connect(connect(EngineKind.VLLM, url))
            member.state, member.useless_routes = EngineState.UPDATING, set(WeightRoute)
            left = []

            async def offload():
                left.append(True)

            update = release_by(WeightRoute.RELOAD)
            sync = WeightSync(
                update, tmp_path, lambda spec, at: connect(spec.kind, at), InFlight.DRAIN, offload=offload
            )
            async with asyncio.timeout(HANG_S):
                errors = await sync.load_on([member])
            await member.disconnect()
            return list(errors), left

        assert asyncio.run(scenario()) == (["one"], [True])


class Learning:
    """A learner that begins its next step at some moment of sending the weights of this one."""

    def __init__(self, moment):
        self.moment, self.fleet, self.writes = moment, None, 0

    def at(self, moment):
        if moment == self.moment:
            self.fleet.learning_begins()

    def route_to(self, server):
        return WeightRoute.DEVICE if "send" in self.moment else WeightRoute.RESTART

    async def send(self, engines, version):
        self.at("before-the-send-ends")
        return Sent(0, 0, {}, {})

    async def write(self, model, folder):
        self.writes += 1
        Path(folder).mkdir()
        self.at("before-the-write-ends")


class StartsBeside(Owner):
    """A server whose start takes long enough for the learner to go on."""

    def __init__(self, url, learner):
        super().__init__(url)
        self._learner = learner

    async def start(self, model=None):
        self._learner.at("while-the-server-starts")
        return await super().start(model)


RECOVERED = [
    pytest.param("after-all", (EngineState.READY, 7, True), id="the-learner-waits"),
    pytest.param("while-the-server-starts", (EngineState.READY, 7, True), id="written-before"),
    pytest.param("before-the-write-ends", (EngineState.BEHIND, 0, False), id="during-the-write"),
]


@pytest.mark.parametrize(("moment", "found"), RECOVERED)
def test_a_recovered_engine_never_gets_weights_of_the_learners_next_step(moment, found, tmp_path):
    """It waits for the next weight sync, and what was written is not kept as this version."""
    assert changed_beside(moment, tmp_path, lambda fleet, member: fleet._recover(member), EngineState.LOST) == found


JOINED = [
    pytest.param("before-the-write-ends", (EngineState.BEHIND, -1, False), id="written"),
    pytest.param("before-the-send-ends", (EngineState.BEHIND, -1, False), id="sent"),
]


@pytest.mark.parametrize(("moment", "found"), JOINED)
def test_an_engine_that_joins_never_gets_weights_of_the_learners_next_step(moment, found, tmp_path):
    assert changed_beside(moment, tmp_path, lambda fleet, member: fleet._catch_up(member), EngineState.BEHIND) == found


def changed_beside(moment, tmp_path, change, state):
    """State and version of an engine after a change beside a learner, and whether the version is on disk."""
    with running_standin(NEW - {"/collective_rpc"}, opens_token_route=False) as (url, server):
        described = [None, {"6": {"logprob": -0.5}}]
        scored = {"choices": [{"token_ids": [7], "finish_reason": "length", "prompt_logprobs": described}]}
        server.on_v1_completions = lambda asked: (200, scored)

        async def scenario():
            learner = Learning(moment)
            fleet = Fleet([StartsBeside(url, learner)], folder=tmp_path, report=lambda text: None)
            learner.fleet = fleet
            (member,) = fleet.pool.members.values()
            if state is EngineState.BEHIND:
                await member.connect(connect(EngineKind.VLLM, url))
            member.state, member.probe = state, PROBE
            folder = tmp_path / "version-7"
            fleet._current.set(WeightUpdate(7, PROBE, learner), folder)
            async with asyncio.timeout(HANG_S):
                await change(fleet, member)
            await member.disconnect()
            return member.state, member.version, folder.exists()

        return asyncio.run(scenario())


ASLEEP = [
    pytest.param(EngineState.ASLEEP, 2, "adapter", True, id="dropped"),
    pytest.param(EngineState.ASLEEP, 1, "adapter", False, id="kept"),
    pytest.param(EngineState.READY, 2, "adapter", False, id="awake"),
    pytest.param(EngineState.ASLEEP, 2, None, False, id="all-weights-come"),
]


@pytest.mark.parametrize(("state", "level", "adapter", "is_refused"), ASLEEP)
def test_an_adapter_does_not_bring_back_weights_that_were_dropped(state, level, adapter, is_refused):
    member = Member(Owner("http://127.0.0.1:1"))
    member.state = state
    update = WeightUpdate(1, PROBE, adapter=adapter, checkpoint=None if adapter else "checkpoint")
    if not is_refused:
        check_base([member], update, level)
        return
    with pytest.raises(NotOffered, match=r"one: the base weights were dropped.*level 1"):
        check_base([member], update, level)
