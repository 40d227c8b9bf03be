"""New weights reach engines that run, whichever engine it is: what they answer then is what the learner answers."""

import asyncio
import os
import signal
import threading

import httpx
import pytest
import torch

from roost.engines.command import EngineKind
from roost.engines.fleet import Fleet, FleetSettings
from roost.engines.members import EngineState, RestartLimit
from roost.engines.protocol import EngineLost, Finish, InFlight, NotOffered, Sampling, UpdateFailed
from roost.engines.residency import EngineSwitch
from roost.engines.server_process import LocalOwner
from roost.engines.supervision import Watchfulness
from roost.engines.weights.carriers import SharedMemoryCarrier
from roost.engines.weights.source import ModuleSource
from roost.engines.weights.update import BroadcastSender, WeightRoute, WeightUpdate
from roost.net.addresses import PortLeases
from roost.placement.memory.residency import Decision
from tests.engines.live.conftest import spec_of
from tests.engines.live.policies import GREEDY, PROMPT, SMALL_BUCKETS, Policy
from tests.limits import HANG_S

LONG = Sampling(max_tokens=400, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def policy(model_folder):
    return Policy(model_folder)


class Loop:
    """Runs one scenario after the other; one that hangs fails with where it was."""

    def __init__(self, runner):
        self._runner = runner

    def run(self, scenario):
        return self._runner.run(asyncio.wait_for(scenario, HANG_S))


@pytest.fixture(scope="module")
def loop():
    with asyncio.Runner() as runner:
        yield Loop(runner)


@pytest.fixture(scope="module")
def fleet(loop, server_spec, tmp_path_factory):
    """One engine of the kind that is tested; each test brings it to a version of its own."""
    often = FleetSettings(watchfulness=Watchfulness(restarts=RestartLimit(most=20)))
    fleet = Fleet([LocalOwner(server_spec, tmp_path_factory.mktemp("logs"))], often)
    loop.run(fleet.start())
    yield fleet
    loop.run(fleet.close())


@pytest.fixture
def number(fleet):
    """The next version."""
    return (fleet.current_update.version if fleet.current_update else 0) + 1


@pytest.fixture
def built_in(engine_kind):
    if engine_kind is not EngineKind.TORCH:
        pytest.skip("of the built-in engine")


def only(fleet):
    return next(iter(fleet.pool.members.values()))


async def answer(fleet, sampling=GREEDY, prompt=PROMPT):
    return await fleet.generate(prompt, sampling)


async def are_under_way(requests, count):
    """Wait until `count()` says that all requests are with the engine; one that is over by then says why."""
    while await count() < len(requests):
        for request in requests:
            if request.done():
                pytest.fail(f"a request was over before all were under way: {request.result()}")
        await asyncio.sleep(0.01)


def test_new_weights_answer(loop, fleet, policy, number, engine_kind):
    assert loop.run(answer(fleet)).token_ids == policy.greedy(number - 1)
    loop.run(fleet.update(policy.weight_update(number)))
    made = loop.run(answer(fleet))
    assert made.token_ids == policy.greedy(number)
    assert [span.version for span in made.versions] == [number]
    assert loop.run(only(fleet).engine.version()) == number
    # vLLM maps no files of the learner. On some CPUs it answers 200 to a reload in place, then computes with a mix of
    # both: there, a restart did it.
    of_vllm = {WeightRoute.SHARED_MEMORY, WeightRoute.RELOAD}
    assert only(fleet).useless_routes <= (of_vllm if engine_kind is EngineKind.VLLM else set())


def test_a_checkpoint_on_disk_does_too(loop, fleet, policy, number, tmp_path):
    loop.run(fleet.update(policy.written(number, tmp_path)))
    assert loop.run(answer(fleet)).token_ids == policy.greedy(number)
    assert fleet.recorder.pop_time("update") > 0


@pytest.mark.long
def test_weights_that_a_probe_does_not_know_are_noticed(loop, fleet, policy, number, built_in):
    """The learner's answer and its weights must belong together, or nothing is taken for verified."""
    other = policy.version(number + 1)
    update = policy.weight_update(number, source=ModuleSource(other, torch.float16))
    with pytest.raises(UpdateFailed, match="does not answer with the new weights"):
        loop.run(fleet.update(update))
    assert only(fleet).state is not EngineState.READY
    loop.run(fleet.update(policy.weight_update(number + 1)))
    assert loop.run(answer(fleet)).token_ids == policy.greedy(number + 1)


class Missing(ModuleSource):
    @property
    def tensors(self):
        return super().tensors[1:]

    def stream(self):
        return iter(list(super().stream())[1:])


class Misshapen(ModuleSource):
    def __init__(self, module):
        super().__init__(module)
        self._weights["model.norm.weight"] = torch.zeros(7)


class BreaksOff(ModuleSource):
    def stream(self):
        for count, tensor in enumerate(super().stream()):
            if count == 9:
                raise RuntimeError("the learner lost a shard")
            yield tensor


class Forgets(ModuleSource):
    """It announces what it then does not send."""

    def stream(self):
        _, *others = super().stream()
        yield torch.zeros(3)
        yield from others


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        pytest.param(Missing, "model.embed_tokens.weight is missing", id="missing"),
        pytest.param(Misshapen, r"model.norm.weight is \[7\] and should be \[128\]", id="misshapen"),
        pytest.param(BreaksOff, "the learner lost a shard", id="broken off"),
        pytest.param(Forgets, r"model.embed_tokens.weight is \[3\]", id="not as announced"),
    ],
)
def test_a_bad_update_leaves_the_old_version(loop, fleet, policy, number, built_in, source, reason):
    with pytest.raises(UpdateFailed, match=reason) as raised:
        loop.run(fleet.update(policy.weight_update(number, source=source(policy.version(number)))))
    assert f"stay on version {number - 1}" in str(raised.value)
    made = loop.run(answer(fleet))
    assert made.token_ids == policy.greedy(number - 1)
    assert made.versions[0].version == number - 1
    assert only(fleet).state is EngineState.READY


class FlippedBit(SharedMemoryCarrier):
    """A carrier that damages what it carries."""

    def pack(self, infos, tensors, is_last):
        def damaged():
            for tensor in tensors:
                changed = tensor.clone()
                changed.view(-1).view(torch.int32)[0] ^= 1
                yield changed

        return super().pack(infos, damaged(), is_last)


def test_damage_on_the_way_is_noticed_and_mended(loop, fleet, policy, number, built_in):
    """One bit of each first element: far too little for a probe, but not for fingerprints."""
    loop.run(fleet.update(policy.weight_update(number, carrier=FlippedBit)))
    assert only(fleet).useless_routes == {WeightRoute.SHARED_MEMORY}
    assert loop.run(answer(fleet)).token_ids == policy.greedy(number)
    only(fleet).useless_routes.clear()


def test_weights_by_broadcast(loop, fleet, policy, number, built_in):
    leases = PortLeases()
    sender = BroadcastSender(policy.source(number), "127.0.0.1", leases.lease, torch.device("cpu"), 1, SMALL_BUCKETS)
    loop.run(fleet.update(WeightUpdate(number, policy.probe(number), sender)))
    leases.close()
    assert loop.run(answer(fleet)).token_ids == policy.greedy(number)
    assert not only(fleet).useless_routes


@pytest.mark.parametrize("in_flight", list(InFlight))
def test_requests_in_flight(loop, fleet, policy, number, built_in, in_flight, server_spec):
    update = policy.weight_update(number)  # made before, as requests do not wait for it

    async def update_meanwhile():
        requests = [asyncio.create_task(answer(fleet, LONG, (*PROMPT, index))) for index in range(4)]
        headers = {"Authorization": f"Bearer {server_spec.api_key}"}
        async with httpx.AsyncClient(headers=headers, timeout=HANG_S) as http:

            async def running():
                return (await http.get(f"{only(fleet).engine.url}/load")).json()["running"]

            await are_under_way(requests, running)
        await fleet.update(update, in_flight)
        return await asyncio.gather(*requests)

    for index, made in enumerate(loop.run(update_meanwhile())):
        assert made.finish is Finish.LENGTH
        assert len(made.token_ids) == LONG.max_tokens
        versions = [span.version for span in made.versions]
        if in_flight is InFlight.DRAIN:
            assert versions == [number - 1]
            continue
        assert versions == [number - 1, number]
        change = made.versions[0].end
        # What came before is the old policy's, and goes on from there under the new one.
        before, after = made.token_ids[:change], made.token_ids[change:]
        assert before == policy.choices(number - 1, (*PROMPT, index), before)
        if in_flight is InFlight.DROP:
            assert after == policy.choices(number, (*PROMPT, index, *before), after)


def test_what_cannot_be_told_apart_is_not_held(loop, fleet, policy, number, engine_kind):
    if only(fleet).capabilities.reports_versions:
        pytest.skip("this engine tells which version made which token")
    with pytest.raises(NotOffered, match="use drop or drain"):
        loop.run(fleet.update(policy.weight_update(number), InFlight.HOLD))


def test_kill_and_recovery(loop, fleet, policy, number):
    """Killed while it works: it comes back on the version it had, and the requests are finished."""

    async def run():
        requests = [asyncio.create_task(answer(fleet, LONG, (*PROMPT, index))) for index in range(2)]

        # One is enough: another may be waiting to be sent again, on a connection that the server had closed.
        while not only(fleet).in_flight:
            await asyncio.sleep(0.01)
        os.kill(only(fleet).owner.pid, signal.SIGKILL)
        return await asyncio.gather(*requests)

    for index, made in enumerate(loop.run(run())):
        assert len(made.token_ids) == LONG.max_tokens
        assert made.token_ids == policy.choices(number - 1, (*PROMPT, index), made.token_ids)
        assert [span.version for span in made.versions] == [number - 1]
    assert only(fleet).version == loop.run(only(fleet).engine.version()) == number - 1
    assert fleet.recorder.pop_time("recover") > 0


class Waits(ModuleSource):
    """It never gets past its first tensor, until it is let go."""

    def __init__(self, module):
        super().__init__(module)
        self.let_go = threading.Event()

    def stream(self):
        tensors = super().stream()
        yield next(tensors)
        self.let_go.wait(HANG_S)
        yield from tensors


def test_a_cancelled_update_leaves_a_working_engine(loop, fleet, policy, number, built_in):
    source = Waits(policy.version(number))

    async def run():
        updating = asyncio.create_task(fleet.update(policy.weight_update(number, source=source)))
        while only(fleet).state is not EngineState.UPDATING:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        updating.cancel()
        source.let_go.set()
        with pytest.raises(asyncio.CancelledError):
            await updating
        while only(fleet).state not in (EngineState.READY, EngineState.BEHIND):
            await asyncio.sleep(0.05)
        await fleet.update(policy.weight_update(number))
        return await answer(fleet)

    assert loop.run(run()).token_ids == policy.greedy(number)


def test_a_checkpoint_that_is_not_there(loop, fleet, policy, number, built_in, tmp_path):
    nowhere = WeightUpdate(number, policy.probe(number), checkpoint=str(tmp_path / "nowhere"))
    with pytest.raises(UpdateFailed, match=r"no safetensors files in .*nowhere"):
        loop.run(fleet.update(nowhere))
    assert loop.run(answer(fleet)).token_ids == policy.greedy(number - 1)


def test_refused_weights_after_they_were_dropped(loop, fleet, policy, number, built_in):
    """An engine that dropped its weights has nothing to go back to: it gets no work before it has some."""

    async def run():
        await fleet.sleep(2)
        with pytest.raises(UpdateFailed):
            await fleet.wake(policy.weight_update(number, source=Missing(policy.version(number))))
        state = only(fleet).state
        while only(fleet).state not in (EngineState.READY, EngineState.BEHIND):
            await asyncio.sleep(0.05)
        await fleet.update(policy.weight_update(number))
        return state, await answer(fleet)

    state, made = loop.run(run())
    assert state is EngineState.LOST
    assert made.token_ids == policy.greedy(number)


def test_an_update_without_engines_says_so(loop, policy, tmp_path, built_in):
    fleet = Fleet([LocalOwner(spec_of(EngineKind.TORCH, policy.folder), tmp_path)])
    with pytest.raises(UpdateFailed, match="no engine runs that could load version 1: live-torch is stopped"):
        loop.run(fleet.update(policy.weight_update(1)))
    loop.run(fleet.close())


SWITCHES = [
    pytest.param(EngineSwitch(Decision.KEEP), [EngineState.READY], ["update"], id="keep"),
    pytest.param(EngineSwitch(Decision.SLEEP, 1), [EngineState.ASLEEP], ["sleep", "update", "wake"], id="sleep 1"),
    pytest.param(EngineSwitch(Decision.SLEEP, 2), [EngineState.ASLEEP], ["sleep", "update", "wake"], id="sleep 2"),
    pytest.param(EngineSwitch(Decision.RESTART), [EngineState.STOPPED], ["stop", "start"], id="restart"),
]


@pytest.mark.parametrize(("engine_switch", "state", "spans"), SWITCHES)
def test_devices_are_handed_over_and_back(loop, fleet, policy, number, built_in, engine_switch, state, spans):
    """A residency decision, carried out: who has the device meanwhile, the answers after, the time of each part."""

    async def run():
        fleet.recorder.drain()
        await engine_switch.to_learner(fleet)
        meanwhile = [member.state for member in fleet.pool.members.values()], await only(fleet).owner.is_running()
        await engine_switch.to_engines(fleet, policy.weight_update(number))
        return meanwhile, await answer(fleet)

    (states, is_running), made = loop.run(run())
    assert (states, is_running) == (state, engine_switch.decision is not Decision.RESTART)
    assert (made.token_ids, made.versions[0].version) == (policy.greedy(number), number)
    assert [(span.name, span.end_ns > span.start_ns) for span in fleet.recorder.drain()] == [
        (name, True) for name in spans
    ]


def test_versions_grow(loop, fleet, policy, number, built_in):
    with pytest.raises(
        ValueError, match=rf"are on version {number - 1}; a new policy needs a higher one than {number - 1}"
    ):
        loop.run(fleet.update(policy.weight_update(number - 1)))


def test_a_closed_fleet_says_so(loop, fleet, built_in):
    """The last of these tests: those who wait for an engine are told, and so is who comes later."""

    async def run():
        await fleet.sleep(1)
        waiting = [asyncio.create_task(answer(fleet)) for _ in range(2)]
        await asyncio.sleep(0.1)
        await fleet.close()
        return await asyncio.gather(*waiting, answer(fleet), return_exceptions=True)

    for error in loop.run(run()):
        assert isinstance(error, EngineLost), error
        assert str(error) == "the fleet is closed"
