"""The client of vLLM and of our own engine: what it sends to which release, and what it makes of the answers."""

import asyncio
import base64
import pickle
from collections import deque
from dataclasses import replace

import numpy as np
import pytest

from roost.engines.http_calls import TimeLimits
from roost.engines.protocol import (
    Completion,
    Continuation,
    EngineError,
    EngineLoad,
    Finish,
    InFlight,
    NotOffered,
    Part,
    Sampling,
    SamplingMasks,
    UpdateFailed,
    VersionSpan,
)
from roost.engines.vllm import VllmEngine, vllm_load
from roost.engines.weights.payload import (
    Broadcast,
    DeviceHandles,
    GroupInvitation,
    Manifest,
    SharedMemory,
    TensorInfo,
    WeightPayload,
)
from roost.net.routing import encode_routing
from tests.engines.vllm_standin import BUILT_IN, NEW, OLD, PLAIN, running_standin
from tests.limits import HANG_S

HEAD = TensorInfo("lm_head.weight", "bfloat16", (3, 2))
MANIFEST = Manifest(7, (HEAD,))
NAMED = {"names": ["lm_head.weight"], "dtype_names": ["bfloat16"], "shapes": [[3, 2]]}
HANDLES = ({"GPU-one": (1, 2, 3)},)
INVITATION = GroupInvitation("10.0.0.1", 29500, 1, 3, "nccl", "weights")
RELEASES = [pytest.param(OLD, id="0.22"), pytest.param(NEW, id="0.32")]


def on_standin(scenario, routes=NEW, *, sleeps=False, limits=None, **settings):
    """Run a scenario with a client and the stand-in it talks to."""

    async def no_wait(_):
        await asyncio.sleep(0)

    async def body(url, state):
        engine = VllmEngine(url, sleeps=sleeps, limits=limits, sleep=no_wait)
        try:
            async with asyncio.timeout(HANG_S):
                await scenario(engine, state)
        finally:
            await engine.close()

    with running_standin(routes, **settings) as (url, state):
        asyncio.run(body(url, state))


async def send(engine, payload=None, version=7):
    await engine.start_update(MANIFEST)
    await engine.take(payload or WeightPayload((HEAD,), DeviceHandles(HANDLES)))
    await engine.finish_update(version)


COMPLETED = Completion((5, 6), (-0.5, -0.25), Finish.LENGTH, (VersionSpan(0, 0, 2),))


def test_tokens_go_to_the_route_for_tokens_with_every_choice_spelled_out():
    async def scenario(engine, state):
        cut = {"temperature": 0.5, "top_p": 0.9, "top_k": 4, "min_p": 0.1, "repetition_penalty": 1.2}
        sampling = Sampling(max_tokens=9, min_tokens=2, seed=3, stop_token_ids=(2,), **cut)
        assert await engine.generate([1, 2], sampling, request_id="a", adapter="policy-adapter") == COMPLETED
        body = state.bodies_of("/inference/v1/generate")[-1]
        assert (body["model"], body["token_ids"], body["request_id"]) == ("policy-adapter", [1, 2], "a")
        assert body["sampling_params"] == {
            "max_tokens": 9,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 4,
            "min_p": 0.1,
            "seed": 3,
            "stop_token_ids": [2],
            "ignore_eos": False,
            "logprobs": 0,
            "detokenize": False,
            "min_tokens": 2,
            "repetition_penalty": 1.2,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
        }
        await engine.generate([1, 2], Sampling())
        body = state.bodies_of("/inference/v1/generate")[-1]
        assert body["model"] == "tiny" and "seed" not in body["sampling_params"] and "request_id" not in body

    on_standin(scenario)


MASKED = Sampling(max_tokens=2, top_k=4, return_sampling_mask=True)


def test_sampling_masks_are_asked_for_and_read():
    async def scenario(engine, state):
        await engine.generate([1], Sampling())
        choice = {"index": 0, "token_ids": [5, 6], "finish_reason": "length", "sampling_mask": [[5, 9], []]}
        content = [{"token_id": 5, "logprob": -0.5}, {"token_id": 6, "logprob": -0.25}]
        span = {"version": "0", "start": 0, "end": 2}
        given = {**choice, "logprobs": {"content": content}, "weight_versions": [span]}
        state.answers["/inference/v1/generate"] = deque([{"choices": [given]}])
        assert (await engine.generate([1, 2], MASKED)).sampling_mask == SamplingMasks.of([(5, 9), ()])
        assert state.bodies_of("/inference/v1/generate")[-1]["return_sampling_mask"] is True

    on_standin(scenario, BUILT_IN)


def test_a_server_without_sampling_masks_is_told_from_one_that_truncates_nothing():
    async def scenario(engine, state):
        assert (await engine.generate([1, 2], replace(MASKED, top_k=0))).sampling_mask is None
        with pytest.raises(EngineError, match="returned no sampling mask"):
            await engine.generate([1, 2], MASKED)

    on_standin(scenario)


@pytest.mark.parametrize(
    ("masks", "message"),
    [(((5,),), "2 tokens came with sampling masks of 1"), (((5,), (7, 8)), "token 6 is not among the 2 ids")],
)
def test_masks_that_do_not_fit_their_tokens_are_refused(masks, message):
    with pytest.raises(ValueError, match=message):
        replace(COMPLETED, sampling_mask=SamplingMasks.of(masks))


def test_a_continued_completion_keeps_its_masks():
    continuation = Continuation([1], replace(MASKED, max_tokens=3))
    continuation.add(Completion((5,), (-0.5,), Finish.ABORT, (VersionSpan(0, 0, 1),), SamplingMasks.of([(5, 6)])))
    continuation.add(Completion((7,), (-0.5,), Finish.STOP, (VersionSpan(1, 0, 1),), SamplingMasks.of([()])))
    assert continuation.completion.sampling_mask == SamplingMasks.of([(5, 6), ()])


ROUTED = Sampling(max_tokens=2, return_routed_experts=True)
EXPERTS = np.array([[[0, 3]], [[2, 1]], [[7, 5]]], np.uint8)  # of two prompt tokens and all but the last generated


@pytest.mark.parametrize("profile", [BUILT_IN, NEW], ids=["built-in", "vLLM"])
def test_routed_experts_are_asked_for_where_requests_can_and_read(profile):
    async def scenario(engine, state):
        choice = {"index": 0, "token_ids": [5, 6], "finish_reason": "length", "routed_experts": encode_routing(EXPERTS)}
        content = [{"token_id": 5, "logprob": -0.5}, {"token_id": 6, "logprob": -0.25}]
        span = {"version": "0", "start": 0, "end": 2}
        given = {**choice, "logprobs": {"content": content}, "weight_versions": [span]}
        await engine.generate([1], Sampling())
        state.answers["/inference/v1/generate"] = deque([{"choices": [given]}])
        np.testing.assert_array_equal((await engine.generate([1, 2], ROUTED)).routed_experts, EXPERTS)
        assert ("return_routed_experts" in state.bodies_of("/inference/v1/generate")[-1]) is (profile is BUILT_IN)
        with pytest.raises(EngineError, match="no routed experts, which router_replay needs"):
            await engine.generate([1, 2], ROUTED)

    on_standin(scenario, profile)


def test_a_continued_completion_keeps_the_experts_that_tokens_were_computed_with():
    continuation = Continuation([1, 2], replace(ROUTED, max_tokens=3))
    continuation.add(Completion((5,), (-0.5,), Finish.ABORT, (VersionSpan(0, 0, 1),), None, EXPERTS[:2]))
    continuation.add(Completion((), (), Finish.ABORT, ()))
    later = np.concatenate([EXPERTS[:2] + 1, EXPERTS[2:]])
    continuation.add(Completion((7,), (-0.5,), Finish.STOP, (VersionSpan(1, 0, 1),), None, later))
    np.testing.assert_array_equal(continuation.completion.routed_experts, EXPERTS)


METRICS = """# HELP vllm:num_requests_running Number of requests in model execution batches.
vllm:num_requests_running{engine="0",model_name="toy"} 3.0
vllm:num_requests_running{engine="1",model_name="toy"} 4.0
vllm:num_requests_waiting{engine="0",model_name="toy"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="toy"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="toy"} 0.5
"""


@pytest.mark.parametrize(
    ("metrics", "load"),
    [
        pytest.param(METRICS, EngineLoad(7, 2, 0.5), id="several engines"),
        pytest.param(METRICS.replace("kv_cache", "gpu_cache"), EngineLoad(7, 2, 0.5), id="before 0.10"),
        pytest.param("python_info 1.0\n", None, id="no statistics"),
    ],
)
def test_the_load_is_read_from_metrics(metrics, load):
    assert vllm_load(metrics) == load


def test_where_the_route_for_tokens_is_closed_completions_do():
    async def scenario(engine, state):
        assert await engine.generate([1] * 60, Sampling(max_tokens=9)) == COMPLETED
        body = state.bodies_of("/v1/completions")[-1]
        assert (body["model"], body["prompt"], body["max_tokens"]) == ("tiny", [1] * 60, 4)  # 64 is the context
        assert body["return_token_ids"] and body["return_tokens_as_token_ids"] and body["logprobs"] == 1
        await engine.generate([1] * 80, Sampling(max_tokens=9))
        assert state.bodies_of("/v1/completions")[-1]["max_tokens"] == 1  # for the server to refuse
        known = await engine.capabilities()
        assert not known.takes_tokens and not known.reports_versions

    on_standin(scenario, opens_token_route=False)


def salts(state, route):
    return [body.get("cache_salt") for body in state.bodies_of(route) if body]


SALTED = [
    pytest.param(NEW, True, "/inference/v1/generate", ["version-0", "version-7"], id="0.32-token-route"),
    pytest.param(NEW, False, "/v1/completions", ["version-0", "version-7"], id="0.32-completions"),
    pytest.param(OLD, True, "/inference/v1/generate", [None, None], id="0.22"),
    pytest.param(BUILT_IN, True, "/inference/v1/generate", [None, None], id="built-in"),
]


@pytest.mark.parametrize(("routes", "opens_token_route", "route", "expected"), SALTED)
def test_no_request_reads_what_another_version_left_in_the_cache(routes, opens_token_route, route, expected):
    async def scenario(engine, state):
        await engine.generate([1], Sampling())
        await send(engine, version=7)
        await engine.generate([1], Sampling())
        assert salts(state, route) == expected
        state.answers[route] = deque([{"prompt_logprobs": [None]}])
        await engine.score([1])
        assert salts(state, route)[-1] == expected[-1]

    on_standin(scenario, routes, opens_token_route=opens_token_route)


SCORES = [None, {"2": {"logprob": -1.5}, "9": {"logprob": -0.1}}, {"3": {"logprob": -2.5}}]
SCORED = [
    pytest.param(True, "/inference/v1/generate", {"prompt_logprobs": SCORES}, id="token-route"),
    pytest.param(False, "/v1/completions", {"choices": [{"prompt_logprobs": SCORES}]}, id="completions"),
]


@pytest.mark.parametrize(("opens_token_route", "route", "answer"), SCORED)
def test_scores_are_of_the_prompts_own_tokens(opens_token_route, route, answer):
    async def scenario(engine, state):
        await engine.capabilities()
        state.answers[route] = deque([answer, answer])
        assert await engine.score([1, 2, 3]) == (-1.5, -2.5)
        body = state.bodies_of(route)[-1]
        fields = body.get("sampling_params", body)
        assert (fields["prompt_logprobs"], fields["max_tokens"], fields["temperature"]) == (0, 1, 1.0)
        with pytest.raises(EngineError, match="4 tokens were scored, and 3 log-probabilities came back"):
            await engine.score([1, 2, 3, 4])

    on_standin(scenario, opens_token_route=opens_token_route)


@pytest.mark.parametrize("reason", ["error", "repetition", None])
def test_an_end_that_is_not_known_is_an_error(reason):
    choice = {"index": 0, "token_ids": [5], "logprobs": {"content": [{"logprob": -1.0}]}, "finish_reason": reason}

    async def scenario(engine, state):
        await engine.capabilities()
        state.answers["/inference/v1/generate"] = deque([{"choices": [choice]}])
        with pytest.raises(EngineError, match=repr(reason)):
            await engine.generate([1], Sampling())

    on_standin(scenario)


@pytest.mark.parametrize(
    ("routes", "n", "requests"),
    [
        pytest.param(NEW, 3, [(3, 7)], id="0.32"),
        pytest.param(BUILT_IN, 3, [(3, 7)], id="built-in"),
        pytest.param(OLD, 3, [(1, 7), (1, 8), (1, 9)], id="0.22 may lose some"),
        pytest.param(NEW, 9, [(9, 7), *((1, seed) for seed in range(7, 16))], id="more than the server takes"),
    ],
)
def test_several_completions_are_one_request_where_the_server_takes_it(routes, n, requests):
    async def scenario(engine, state):
        assert len(await engine.generate_n([1], Sampling(seed=7), n)) == n
        sent = [body["sampling_params"] for body in state.bodies_of("/inference/v1/generate") if body]
        assert sorted((each.get("n", 1), each["seed"]) for each in sent) == sorted(requests)

    on_standin(scenario, routes)


@pytest.mark.parametrize("routes", RELEASES)
def test_an_update_by_handles_of_device_memory(routes):
    async def scenario(engine, state):
        assert await engine.version() == 0
        await send(engine, version=7)
        await send(engine, version=8)
        assert state.bodies_of("/init_weight_transfer_engine") == [{"init_info": {}}]  # once
        assert state.bodies_of("/start_weight_update") == [{"is_checkpoint_format": True}] * 2
        sent = state.bodies_of("/update_weights")[0]["update_info"]
        handles = sent.pop("ipc_handles_pickled")
        assert sent == NAMED and pickle.loads(base64.b64decode(handles)) == list(HANDLES)
        finished = [{}, {}] if routes is OLD else [{"weight_version": "7"}, {"weight_version": "8"}]
        assert state.bodies_of("/finish_weight_update") == finished
        assert await engine.version() == 8
        assert (await engine.generate([1], Sampling())).versions == (VersionSpan(8, 0, 2),)

    on_standin(scenario, routes)


def test_an_update_by_broadcast_uses_the_group_that_was_joined():
    async def scenario(engine, state):
        await engine.join_group(INVITATION)
        await send(engine, WeightPayload((HEAD,), Broadcast()))
        place = {"master_address": "10.0.0.1", "master_port": 29500, "rank_offset": 1, "world_size": 3}
        assert state.bodies_of("/init_weight_transfer_engine") == [{"init_info": {**place, "packed": False}}]
        assert state.bodies_of("/update_weights") == [{"update_info": NAMED}]
        await engine.leave_group()

    on_standin(scenario)


def test_our_own_engine_is_told_what_comes_and_reads_shared_memory():
    async def scenario(engine, state):
        await send(engine, WeightPayload((HEAD,), SharedMemory("/dev/shm/w")))
        manifest = {"version": 7, "tensors": [["lm_head.weight", "bfloat16", [3, 2]]]}
        assert state.bodies_of("/start_weight_update") == [{"manifest": manifest}]
        assert state.bodies_of("/update_weights") == [{"update_info": {**NAMED, "path": "/dev/shm/w"}}]
        assert not state.bodies_of("/init_weight_transfer_engine")
        await engine.join_group(GroupInvitation("10.0.0.1", 29500, 1, 3, "gloo", "weights"))
        joined = state.bodies_of("/init_weight_transfer_engine")[0]["init_info"]
        assert (joined["backend"], joined["group_name"]) == ("gloo", "weights")
        known = await engine.capabilities()
        assert known.can_sleep and known.undoes_updates and known.takes_shared_memory and not known.takes_adapters

    on_standin(scenario, BUILT_IN)


STEPS = [
    pytest.param("/start_weight_update", NEW, "still on version 0", id="start"),
    pytest.param("/update_weights", NEW, "may have parts of both versions", id="take"),
    pytest.param("/finish_weight_update", NEW, "may have parts of both versions", id="finish"),
    pytest.param("/update_weights", BUILT_IN, "out of luck$", id="built-in-says-itself"),
]


@pytest.mark.parametrize("status", [400, 500])
@pytest.mark.parametrize(("route", "routes", "state_told"), STEPS)
def test_a_step_that_fails_says_how_the_engine_stands(route, routes, state_told, status):
    async def scenario(engine, state):
        state.answers[route] = deque([(status, {"error": {"message": "out of luck"}})])
        with pytest.raises(UpdateFailed, match=f"{route}: {status}, .*{state_told}"):
            await send(engine)
        assert len(state.bodies_of(route)) == 1  # it is not tried again

    on_standin(scenario, routes)


def test_giving_up_an_update():
    async def scenario(engine, state):
        await engine.start_update(MANIFEST)
        await engine.abandon_update()
        assert not state.is_updating
        state.answers["/abandon_weight_update"] = deque([{"is_whole": False}])
        with pytest.raises(UpdateFailed, match="could not restore its old weights"):
            await engine.abandon_update()

    on_standin(scenario, BUILT_IN)


NOT_OFFERED = {
    "abandon": (NEW, lambda e: e.abandon_update(), "cannot restore its old weights"),
    "shared-memory": (NEW, lambda e: e.take(WeightPayload((HEAD,), SharedMemory("x"))), "send them as a checkpoint"),
    "gloo": (NEW, lambda e: e.join_group(GroupInvitation("h", 1, 1, 2, "gloo")), "nccl only"),
    "sleep": (NEW, lambda e: e.sleep(1), "--enable-sleep-mode"),
    "wake": (NEW, lambda e: e.wake(), "--enable-sleep-mode"),
    "abort-by-name": (OLD, lambda e: e.abort(["a"]), "abort all"),
    "fingerprints": (OLD, lambda e: e.fingerprints(), "log-probabilities"),
    "leave-group": (OLD, lambda e: e.leave_group(), "stop the server"),
    "adapters": (OLD, lambda e: e.load_adapter("a", "b"), "VLLM_ALLOW_RUNTIME_LORA_UPDATING"),
    "pause": (PLAIN, lambda e: e.pause(InFlight.HOLD), "VLLM_SERVER_DEV_MODE=1"),
    "resume": (PLAIN, lambda e: e.resume(), "VLLM_SERVER_DEV_MODE=1"),
    "reset-cache": (PLAIN, lambda e: e.reset_cache(), "VLLM_SERVER_DEV_MODE=1"),
    "checkpoint": (PLAIN, lambda e: e.load_checkpoint("x", 1), "VLLM_SERVER_DEV_MODE=1"),
    "update": (PLAIN, lambda e: e.start_update(MANIFEST), "load a checkpoint"),
    "join-group": (PLAIN, lambda e: e.join_group(INVITATION), "load a checkpoint"),
}


@pytest.mark.parametrize(("routes", "act", "fix"), NOT_OFFERED.values(), ids=NOT_OFFERED)
def test_what_a_server_does_not_offer_is_said_with_a_way_out(routes, act, fix):
    async def scenario(engine, state):
        await engine.capabilities()
        before = len(state.asked)
        with pytest.raises(NotOffered, match=fix):
            await act(engine)
        assert len(state.asked) == before  # and the server is not bothered with it

    on_standin(scenario, routes)


SLEEPS = [
    pytest.param(True, True, True, id="started-for-it"),
    pytest.param(True, False, False, id="asked-for-but-not-started-for-it"),
    pytest.param(False, True, False, id="not-asked-for"),
]


@pytest.mark.parametrize(("asked_for", "described", "can"), SLEEPS)
def test_whether_it_sleeps_is_not_read_from_the_route(asked_for, described, can):
    async def scenario(engine, state):
        state.sleeps = described
        assert (await engine.capabilities()).can_sleep is can

    on_standin(scenario, sleeps=asked_for)


def test_sleep_and_wake():
    async def scenario(engine, state):
        state.sleeps = True
        await engine.sleep(2)
        await engine.wake([Part.WEIGHTS])
        await engine.wake([Part.KV_CACHE])
        await engine.wake()
        asked = [(asked.path, asked.query) for asked in state.asked if asked.path in ("/sleep", "/wake_up")]
        assert asked == [
            ("/sleep", {"level": ["2"], "mode": ["abort"]}),
            ("/wake_up", {"tags": ["weights"]}),
            ("/wake_up", {"tags": ["kv_cache"]}),
            ("/wake_up", {}),
        ]

    on_standin(scenario, sleeps=True)


@pytest.mark.parametrize(
    ("in_flight", "mode"), [(InFlight.DROP, "abort"), (InFlight.DRAIN, "wait"), (InFlight.HOLD, "keep")]
)
def test_pause_modes(in_flight, mode):
    async def scenario(engine, state):
        await engine.pause(in_flight)
        assert state.asked[-1].query == {"mode": [mode]}

    on_standin(scenario)


def test_abort_by_name_covers_the_names_that_vllm_makes_of_it():
    async def scenario(engine, state):
        await engine.abort([])
        assert not state.bodies_of("/abort_requests")
        await engine.abort(["a"])
        await engine.abort()
        named, everything = state.bodies_of("/abort_requests")
        assert {"generate-tokens-a", "cmpl-a-0"} < set(named["request_ids"])
        assert everything == {"request_ids": []}

    on_standin(scenario)


@pytest.mark.parametrize("was_paused", [False, True])
def test_an_old_server_aborts_all_by_pausing_and_is_left_as_it_was(was_paused):
    async def scenario(engine, state):
        state.is_paused = was_paused
        await engine.abort()
        assert [asked.query for asked in state.asked if asked.path == "/pause"] == [{"mode": ["abort"]}]
        assert state.is_paused is was_paused

    on_standin(scenario, OLD)


CACHES = [
    pytest.param([{"success": False}, {"success": False}, {"success": True}], 3, id="tried-until-it-is-free"),
    pytest.param([(200, None)], 1, id="old-servers-answer-nothing"),
]


@pytest.mark.parametrize(("answers", "tries"), CACHES)
def test_the_cache_is_emptied(answers, tries):
    async def scenario(engine, state):
        state.answers["/reset_prefix_cache"] = deque(answers)
        await engine.reset_cache()
        assert len(state.bodies_of("/reset_prefix_cache")) == tries

    on_standin(scenario)


def test_a_cache_that_is_never_free_is_an_error():
    async def scenario(engine, state):
        state.answers["/reset_prefix_cache"] = deque([{"success": False}] * 100)
        with pytest.raises(EngineError, match="still held the prefix cache after 2 s"):
            await engine.reset_cache()
        assert len(state.bodies_of("/reset_prefix_cache")) == 8

    on_standin(scenario, limits=TimeLimits(cache=2.0))


def test_a_checkpoint_is_loaded_in_place_and_its_version_told():
    async def scenario(engine, state):
        await engine.load_checkpoint("/checkpoints/7", 7)
        body = {"method": "reload_weights", "kwargs": {"weights_path": "/checkpoints/7"}}
        assert state.bodies_of("/collective_rpc") == [body]
        assert await engine.version() == 7 and state.version == "7"

    on_standin(scenario)


def test_an_adapter_takes_the_place_of_one_of_its_name():
    async def scenario(engine, state):
        await engine.load_adapter("policy", "/adapters/3")
        body = {"lora_name": "policy", "lora_path": "/adapters/3", "load_inplace": True}
        assert state.bodies_of("/v1/load_lora_adapter") == [body]
        assert await engine.fingerprints() == {"head": "ab12"}

    on_standin(scenario)


def test_a_server_is_asked_what_it_can_do_once():
    async def scenario(engine, state):
        await asyncio.gather(*(engine.generate([1], Sampling()) for _ in range(20)))
        assert len(state.bodies_of("/openapi.json")) == 1

    on_standin(scenario)


@pytest.mark.parametrize(
    ("routes", "step_s", "is_noticed"),
    [
        pytest.param(OLD, 0.1, True, id="0.22"),
        pytest.param(NEW, 0.1, True, id="0.32"),
        pytest.param(NEW, HANG_S, False, id="a step may take that long"),
        pytest.param(BUILT_IN, 0.1, False, id="the built-in engine tells by its health"),
        pytest.param(PLAIN, 0.1, False, id="a server without the route"),
    ],
)
def test_a_core_that_hangs_is_noticed_although_the_server_is_healthy(routes, step_s, is_noticed):
    async def scenario(engine, state):
        state.hangs.add("/is_sleeping")
        await engine.capabilities()
        assert await engine.alive()
        while is_noticed and await engine.alive():
            await asyncio.sleep(0.01)
        assert [await engine.alive() for _ in range(3)] == [not is_noticed] * 3
        assert await engine.alive(is_changing=True), "weights are loaded in one step"
        assert await engine.alive()

    on_standin(scenario, routes, limits=TimeLimits(step=step_s))
