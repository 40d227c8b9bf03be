"""The client of SGLang against a stand-in that insists on the documented order and bodies."""

import asyncio
import math

import pytest

from roost.engines.command import EngineKind
from roost.engines.connect import connect
from roost.engines.http_calls import TimeLimits
from roost.engines.protocol import (
    EngineError,
    EngineLost,
    EngineRefused,
    Finish,
    InFlight,
    NotOffered,
    Sampling,
    VersionSpan,
)
from tests.engines.sglang_scenarios import OLD, PROMPT, completion_versions, on_standin, started, until
from tests.engines.sglang_standin import logprob_of


def test_what_is_generated_comes_back_with_log_probabilities_and_versions():
    async def scenario(engine, state):
        done = await engine.generate(PROMPT, Sampling(max_tokens=4, temperature=0.0))
        assert done.token_ids == completion_versions(OLD, OLD, OLD, OLD)
        assert done.logprobs == pytest.approx([logprob_of(OLD, token) for token in done.token_ids])
        assert done.finish is Finish.LENGTH
        assert done.versions == (VersionSpan(0, 0, 4),)
        silent = await engine.generate(PROMPT, Sampling(max_tokens=4, temperature=0.0, logprobs=False))
        assert silent.token_ids == done.token_ids and all(map(math.isnan, silent.logprobs))
        stopped = await engine.generate(PROMPT, Sampling(max_tokens=9, stop_token_ids=(done.token_ids[1],)))
        assert (stopped.token_ids, stopped.finish) == (done.token_ids[:2], Finish.STOP)
        made = state.tokens_made
        assert await engine.score(PROMPT) == pytest.approx([logprob_of(OLD, token) for token in PROMPT[1:]])
        assert state.tokens_made == made
        assert await engine.alive()

    on_standin(scenario)


def test_a_completion_ends_where_the_context_is_full():
    async def scenario(engine, state):
        done = await engine.generate([1] * 99_998, Sampling(max_tokens=50))
        assert (len(done.token_ids), done.finish) == (2, Finish.LENGTH)

    on_standin(scenario)


REFUSED = [
    pytest.param([9999], None, "not below 997", id="out-of-vocabulary"),
    pytest.param([1] * 100_001, None, "more than 100000", id="too-long"),
    pytest.param([1], "none-such", "none-such is not loaded", id="unknown-adapter"),
]


@pytest.mark.parametrize(("prompt", "adapter", "message"), REFUSED)
def test_a_request_that_is_wrong_everywhere_is_refused(prompt, adapter, message):
    async def scenario(engine, state):
        with pytest.raises(EngineRefused, match=message):
            await engine.generate(prompt, Sampling(), adapter=adapter)

    on_standin(scenario)


def test_an_aborted_request_comes_back_as_far_as_it_got():
    async def scenario(engine, state):
        first = await started(engine, state, request_id="first")
        other = await started(engine, state, request_id="other")
        await engine.abort([])
        await engine.abort(["first"])
        done = await first
        assert done.finish is Finish.ABORT and len(done.token_ids) >= 3
        assert not other.done()
        await engine.abort()
        assert (await other).finish is Finish.ABORT

    on_standin(scenario)


def test_a_cancelled_call_frees_the_server():
    async def scenario(engine, state):
        task = await started(engine, state)
        task.cancel()
        await until(lambda: not state.running)

    on_standin(scenario)


def test_asleep_with_the_weights_kept():
    async def scenario(engine, state):
        await engine.sleep(1)
        await engine.wake()
        assert (await engine.generate(PROMPT, Sampling(max_tokens=1))).token_ids == completion_versions(OLD)

    on_standin(scenario, enable_weights_cpu_backup=True)


CANNOT_SLEEP = [
    pytest.param(1, {"enable_memory_saver": False}, "--enable-memory-saver", id="no-memory-saver"),
    pytest.param(1, {"enable_weights_cpu_backup": False}, "--enable-weights-cpu-backup", id="no-backup"),
]


@pytest.mark.parametrize(("level", "settings", "fix"), CANNOT_SLEEP)
def test_a_server_that_cannot_sleep_as_asked_is_not_asked(level, settings, fix):
    async def scenario(engine, state):
        with pytest.raises(NotOffered, match=fix):
            await engine.sleep(level)
        assert not state.released and state.paused is None

    on_standin(scenario, **settings)


def test_held_requests_are_let_go_on_to_drain_them():
    async def scenario(engine, state):
        running = asyncio.create_task(engine.generate(PROMPT, Sampling(max_tokens=40)))
        await until(lambda: state.running)
        await engine.pause(InFlight.HOLD)
        await engine.pause(InFlight.DRAIN)
        assert not state.running and state.paused == "retract"
        assert (await running).finish is Finish.LENGTH

    on_standin(scenario)


def test_others_are_waited_for_when_draining():
    async def scenario(engine, state):
        other = connect(EngineKind.SGLANG, engine.url)
        theirs = await started(other, state)
        drained = asyncio.create_task(engine.pause(InFlight.DRAIN))
        await until(lambda: state.calls.count("/v1/loads") >= 2)
        assert not drained.done() and state.paused is None
        await other.abort()
        await drained
        assert (await theirs).finish is Finish.ABORT
        await other.close()

    on_standin(scenario)


def test_an_engine_that_never_gets_idle_is_lost_and_goes_on():
    async def scenario(engine, state):
        task = await started(engine, state)
        with pytest.raises(EngineLost, match=r"did not become idle within 1 s; 1 requests still run"):
            await engine.pause(InFlight.DRAIN)
        assert state.paused is None
        assert (await engine.generate(PROMPT, Sampling(max_tokens=1))).finish is Finish.LENGTH
        await engine.abort()
        await task

    on_standin(scenario, limits=TimeLimits(drain=1.0))


def test_adapters_are_replaced_under_their_name():
    async def scenario(engine, state):
        await engine.load_adapter("policy", "/adapters/1")
        await engine.load_adapter("policy", "/adapters/2")
        assert state.adapters == {"policy": "/adapters/2"}
        assert (await engine.generate(PROMPT, Sampling(max_tokens=1), adapter="policy")).token_ids
        await engine.unload_adapter("policy")
        assert not state.adapters

    on_standin(scenario)


def test_the_cache_is_emptied_when_nothing_runs_any_more():
    async def scenario(engine, state):
        task = await started(engine, state)
        emptied = asyncio.create_task(engine.reset_cache())
        await until(lambda: state.calls.count("/flush_cache") >= 2)
        assert not emptied.done()
        await engine.abort()
        await emptied
        assert state.cache_of is None
        await task

    on_standin(scenario)


def test_a_cache_that_is_never_free_is_an_error():
    async def scenario(engine, state):
        task = await started(engine, state)
        with pytest.raises(EngineError, match=r"could not flush its cache within 1 s: .*Flush cache failed"):
            await engine.reset_cache()
        await engine.abort()
        await task

    on_standin(scenario, limits=TimeLimits(cache=1.0))


def test_a_server_whose_scheduler_died_is_lost():
    async def scenario(engine, state):
        state.death = "out of memory"
        with pytest.raises(EngineLost, match="out of memory"):
            await engine.generate(PROMPT, Sampling())
        assert not await engine.alive()

    on_standin(scenario)
