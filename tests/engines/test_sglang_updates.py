"""New weights for SGLang: the order of calls in each way to share devices, and what is said when a step fails."""

import asyncio
import contextlib
import json

import pytest

from roost.engines.command import EngineKind
from roost.engines.connect import connect
from roost.engines.protocol import EngineError, Finish, InFlight, NotOffered, Part, Sampling, UpdateFailed, VersionSpan
from roost.engines.sglang import payloads
from roost.engines.weights.payload import (
    Broadcast,
    DeviceHandles,
    GroupInvitation,
    Manifest,
    PackedHandle,
    SharedMemory,
    TensorInfo,
    WeightPayload,
)
from tests.engines.sglang_scenarios import OLD, PROMPT, completion_versions, on_standin, started, until
from tests.engines.sglang_standin import read_payload

NEW = 30  # the sum of the weights after an update
EMBED, HEAD = TensorInfo("embed", "bfloat16", (2, 2)), TensorInfo("head", "bfloat16", (2,))
MANIFEST = Manifest(1, (EMBED, HEAD))
INVITATION = GroupInvitation("127.0.0.1", 29500, 1, 2, "nccl", "learner-to-engine")


def handle(value, device=3):
    """Result of torch's reduction of a device tensor: 14 values, of which the seventh is the device."""
    return {"GPU-one": (value, None, None, None, None, None, device, *[None] * 7)}


def by_handles(tensor, value, is_last=False):
    return WeightPayload((tensor,), DeviceHandles((handle(value),)), is_last)


async def send(engine, embed=10, head=20, version=1):
    await engine.start_update(MANIFEST)
    await engine.take(by_handles(EMBED, embed))
    await engine.take(by_handles(HEAD, head, is_last=True))
    await engine.finish_update(version)


def test_time_shared_with_the_learner():
    async def scenario(engine, state):
        task = await started(engine, state)
        await engine.sleep(2)
        assert (await task).finish is Finish.ABORT
        assert state.released == {"kv_cache", "weights", "cuda_graph"}
        queued = asyncio.create_task(engine.generate(PROMPT, Sampling(max_tokens=2)))
        await until(lambda: state.waiting == 1)
        await engine.wake([Part.WEIGHTS])
        assert state.released == {"kv_cache", "cuda_graph"}
        await send(engine)
        assert state.waiting == 1 and not state.running  # nothing is worked on before all is there
        await engine.wake([Part.KV_CACHE])
        done = await queued
        assert done.token_ids == completion_versions(NEW, NEW)
        assert done.versions == (VersionSpan(1, 0, 2),)
        assert await engine.version() == 1
        await engine.wake()  # awake already: nothing is asked of the server, which would die of it
        assert state.death is None

    on_standin(scenario)


def test_disjoint_from_the_learner_with_requests_finished_first():
    async def scenario(engine, state):
        await engine.join_group(INVITATION)
        running = asyncio.create_task(engine.generate(PROMPT, Sampling(max_tokens=40), "running"))
        await until(lambda: state.running)
        drained = asyncio.create_task(engine.pause(InFlight.DRAIN))
        await until(lambda: not engine._is_open.is_set())
        late = asyncio.create_task(engine.generate(PROMPT, Sampling(max_tokens=2), "late"))
        await drained
        assert running.done() or not state.running
        await engine.start_update(MANIFEST)
        for tensor, value, is_last in ((EMBED, 10, False), (HEAD, 20, True)):
            taking = asyncio.create_task(engine.take(WeightPayload((tensor,), Broadcast(), is_last)))
            await asyncio.sleep(0)
            state.broadcast.append(value)
            await taking
        await engine.finish_update(1)
        assert state.cache_of is None  # what the old weights left there is gone
        await engine.resume()
        assert (await running).versions == (VersionSpan(0, 0, 40),)
        assert (await late).versions == (VersionSpan(1, 0, 2),)
        assert (await late).token_ids == completion_versions(NEW, NEW)
        await engine.leave_group()
        assert state.group is None

    on_standin(scenario)


def test_held_requests_go_on_with_the_new_weights_and_tell_which_tokens_they_made():
    async def scenario(engine, state):
        task = await started(engine, state)
        await engine.pause(InFlight.HOLD)
        assert state.paused == "in_place"  # with what it has in its cache
        generated = len(state.running[0].generated)
        await send(engine)
        assert len(state.running[0].generated) <= generated + 1
        at_change = len(state.running[0].generated)
        await engine.resume()
        await until(lambda: len(state.running[0].generated) > at_change + 2)
        await engine.abort()
        done = await task
        assert done.versions == (VersionSpan(0, 0, at_change), VersionSpan(1, at_change, len(done.token_ids)))
        after = len(done.token_ids) - at_change
        assert done.token_ids == completion_versions(*[OLD] * at_change, *[NEW] * after)

    on_standin(scenario)


def test_where_spans_are_not_told_a_held_request_cannot_be_told_apart():
    async def scenario(engine, state):
        state.reports_versions = False
        assert (await engine.generate(PROMPT, Sampling(max_tokens=2))).versions == (VersionSpan(0, 0, 2),)
        held = await started(engine, state)
        await engine.pause(InFlight.HOLD)
        queued = asyncio.create_task(engine.generate(PROMPT, Sampling(max_tokens=2)))
        await until(lambda: state.waiting == 1)
        await send(engine)
        await engine.resume()
        assert (await queued).versions == (VersionSpan(1, 0, 2),)  # it had not begun
        await engine.abort()
        with pytest.raises(NotOffered, match="changed to version 1 during this request"):
            await held

    on_standin(scenario)


def test_dropped_requests_come_back_and_the_cache_is_emptied_once():
    async def scenario(engine, state):
        task = await started(engine, state)
        await engine.pause(InFlight.DROP)
        assert (await task).finish is Finish.ABORT
        assert state.cache_of == OLD
        await engine.start_update(MANIFEST)
        await engine.take(by_handles(EMBED, 10))
        assert state.cache_of == OLD  # not before the last payload
        await engine.take(by_handles(HEAD, 20, is_last=True))
        assert state.cache_of is None
        await engine.finish_update(1)
        await engine.resume()

    on_standin(scenario)


STEPS = {
    "begin": ("/begin_weight_update", "still on version 0"),
    "first-payload": ("/update_weights_from_tensor", "was on version 0 and may have parts of both versions"),
    "end": ("/end_weight_update", "was on version 0 and may have parts of both versions"),
}


@pytest.mark.parametrize(("route", "state_told"), STEPS.values(), ids=STEPS)
def test_a_step_that_fails_says_how_the_engine_stands(route, state_told):
    async def scenario(engine, state):
        state.fail_next[route] = "out of luck"
        with pytest.raises(UpdateFailed, match=f"{route}: 400, out of luck; the engine .*{state_told}"):
            await send(engine)
        with contextlib.suppress(EngineError):
            await engine.abandon_update()
        await send(engine)  # the bracket was closed, so another update can follow
        assert state.weight == NEW and await engine.version() == 1

    on_standin(scenario)


def test_an_update_that_took_but_left_the_old_cache_is_a_failure_that_says_so():
    async def scenario(engine, state):
        other = connect(EngineKind.SGLANG, engine.url)
        theirs = await started(other, state)  # this client has not paused, so it does not know of them
        await engine.start_update(MANIFEST)
        await engine.take(by_handles(EMBED, 10))
        with pytest.raises(UpdateFailed, match="may have the new weights and a cache of the old ones"):
            await engine.take(by_handles(HEAD, 20, is_last=True))
        assert state.weight == NEW
        await other.abort()
        await theirs
        await other.close()

    on_standin(scenario)


def test_an_update_cannot_be_undone_but_the_next_one_can_begin():
    async def scenario(engine, state):
        await engine.start_update(MANIFEST)
        await engine.take(by_handles(EMBED, 10))
        with pytest.raises(NotOffered, match="may have parts of both versions"):
            await engine.abandon_update()
        assert state.session is None

    on_standin(scenario)


def test_a_parcel_outside_an_update_is_refused():
    async def scenario(engine, state):
        with pytest.raises(UpdateFailed, match="must run between begin_weight_update"):
            await engine.take(by_handles(EMBED, 10))
        assert state.weight == OLD

    on_standin(scenario)


NOT_TAKEN = [
    pytest.param(PackedHandle({}, ()), "live ones .LiveDeviceCarrier", id="packed-handle"),
    pytest.param(SharedMemory("/dev/shm/weights"), "send them as a checkpoint", id="shared-memory"),
    pytest.param(Broadcast(), "not joined a broadcast group", id="broadcast-without-a-group"),
]


@pytest.mark.parametrize(("way", "message"), NOT_TAKEN)
def test_ways_that_sglang_does_not_have(way, message):
    async def scenario(engine, state):
        await engine.start_update(MANIFEST)
        with pytest.raises(NotOffered, match=message):
            await engine.take(WeightPayload((EMBED,), way))

    on_standin(scenario)


def test_a_checkpoint_from_disk(tmp_path):
    (tmp_path / "weights.json").write_text(json.dumps({"embed": 11, "head": 19}))

    async def scenario(engine, state):
        await engine.load_checkpoint(str(tmp_path), version=4)
        done = await engine.generate(PROMPT, Sampling(max_tokens=2))
        assert (done.token_ids, done.versions) == (completion_versions(NEW, NEW), (VersionSpan(4, 0, 2),))
        with pytest.raises(UpdateFailed, match="holds no weights"):
            await engine.load_checkpoint(str(tmp_path / "none"), version=5)
        assert await engine.version() == 4

    on_standin(scenario)


def test_setting_the_version_ends_no_request():
    async def scenario(engine, state):
        task = await started(engine, state)
        await engine.set_version(8)
        at_change = state.running[0].marks[0][1]
        await until(lambda: len(state.running[0].generated) > at_change)
        await engine.abort()
        assert [span.version for span in (await task).versions] == [0, 8]

    on_standin(scenario)


def test_fingerprints_change_with_the_weights():
    async def scenario(engine, state):
        before = await engine.fingerprints()
        await send(engine, embed=1, head=20)
        after = await engine.fingerprints()
        assert {name for name in before if before[name] != after[name]} == {"head"}

    on_standin(scenario)


def test_a_handle_travels_as_torch_would_write_it_with_the_device_by_its_uuid():
    two_devices = {"GPU-one": handle(5)["GPU-one"], "GPU-two": handle(6, device=4)["GPU-one"]}
    messages = payloads(["embed"], [two_devices])
    read = [read_payload(message)["embed"] for message in messages]
    assert [(arguments[0], arguments[6], len(arguments)) for arguments in read] == [
        (5, "GPU-one", 14),
        (6, "GPU-two", 14),
    ]
