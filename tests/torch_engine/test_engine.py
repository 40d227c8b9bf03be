"""Requests, and what can be done to them while they run."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
import torch

from roost.engines.protocol import Finish, InFlight, Part, Sampling
from roost.torch_engine.engine import Progress, Request
from roost.torch_engine.model import compile_layers

PROMPT = list(range(40))
GREEDY = Sampling(max_tokens=8, temperature=0.0, ignore_eos=True)
LONG = Sampling(max_tokens=150, temperature=0.0, ignore_eos=True)


def test_a_prompt_that_came_before_is_not_computed_again(start: Any) -> None:
    driver = start()
    first = driver.ask(PROMPT, GREEDY).all()
    again = driver.ask(PROMPT, GREEDY).all()
    assert (first.taken[0].cached_tokens, again.taken[0].cached_tokens) == (0, 32)
    assert again.token_ids == first.token_ids
    assert again.logprobs == pytest.approx(first.logprobs, abs=1e-5)
    assert driver.engine.reset_prefix_cache()
    assert driver.ask(PROMPT, GREEDY).all().taken[0].cached_tokens == 0


def test_samples_of_one_prompt_share_it(start: Any) -> None:
    driver = start()
    driver.engine.pause(InFlight.HOLD)
    answers = [driver.ask(PROMPT, Sampling(max_tokens=8, seed=seed, ignore_eos=True)) for seed in range(6)]
    driver.engine.resume()
    assert [answer.all().taken[0].cached_tokens for answer in answers] == [0, 32, 32, 32, 32, 32]
    assert len({tuple(answer.token_ids) for answer in answers}) > 1


@pytest.mark.parametrize("length", [31, 32, 33, 34])
def test_what_is_shared_in_the_step_that_computes_it_is_right(start: Any, length: int) -> None:
    """With 33 tokens, the others compute one token over blocks that the first fills in the same step."""
    driver = start()
    expected = driver.ask(PROMPT[:length], GREEDY).all().token_ids
    driver.engine.reset_prefix_cache()
    driver.engine.pause(InFlight.HOLD)
    answers = [driver.ask(PROMPT[:length], GREEDY) for _ in range(3)]
    driver.engine.resume()
    assert [answer.all().token_ids for answer in answers] == [expected] * 3


def test_a_seed_gives_the_same_tokens_alone_among_others_and_continued(start: Any) -> None:
    driver = start()
    seeded = Sampling(max_tokens=12, temperature=1.3, top_p=0.95, seed=7, ignore_eos=True)
    alone = driver.ask(PROMPT, seeded).all()
    others = [driver.ask(PROMPT[place:], Sampling(max_tokens=20, ignore_eos=True)) for place in range(6)]
    among = driver.ask(PROMPT, seeded).all()
    assert among.token_ids == alone.token_ids
    assert among.logprobs == pytest.approx(alone.logprobs, abs=1e-5)
    for other in others:
        other.all()


def test_without_a_seed_no_two_are_alike_unless_the_engine_has_one(start: Any) -> None:
    free = Sampling(max_tokens=16, temperature=2.0, ignore_eos=True)
    sampled = [driver.ask(PROMPT, free).all().token_ids for driver in (start(), start(), start(seed=1), start(seed=1))]
    assert sampled[0] != sampled[1]
    assert sampled[2] == sampled[3]


BAD = {
    "empty": ({"token_ids": ()}, "at least 1 token"),
    "too long": ({"token_ids": tuple([1] * 64)}, "64 tokens; a context of 64 has room for 63"),
    "beyond the vocabulary": ({"token_ids": (1, 272)}, "272 is not in the vocabulary of 272"),
    "negative": ({"token_ids": (-1,)}, "-1 is not in the vocabulary"),
    "unknown adapter": ({"adapter": "none"}, "no adapter 'none'"),
    "twice": ({"request_id": "running"}, "'running' is already being worked on"),
}


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD)
def test_bad_requests_are_refused_with_numbers(start: Any, change: dict[str, Any], message: str) -> None:
    driver = start(max_context=64)
    driver.engine.pause(InFlight.HOLD)
    driver.ask([1], GREEDY, request_id="running")
    request = {"request_id": "bad", "token_ids": (1,), "sampling": GREEDY, **change}
    with pytest.raises(ValueError, match=message):
        driver.engine.submit(Request(**request), lambda progress: None)


def test_an_id_can_be_used_again_after_the_end(start: Any) -> None:
    driver = start()
    for _ in range(2):
        assert driver.ask([1], GREEDY, request_id="same").all().finish is Finish.LENGTH


def test_abort_ends_some_or_all_as_far_as_they_got(start: Any) -> None:
    driver = start()
    one, two, three = (driver.ask(PROMPT, LONG, request_id=name) for name in ("one", "two", "three"))
    for answer in (one, two, three):
        answer.next()
    assert driver.engine.abort(["two", "unknown"]) == 1
    assert two.all().finish is Finish.ABORT
    assert two.taken[-1].token_ids == ()
    assert driver.engine.abort() == 2
    assert (one.all().finish, three.all().finish) == (Finish.ABORT, Finish.ABORT)
    load = driver.engine.load
    assert (load.running, load.waiting, load.free_blocks) == (0, 0, load.num_blocks)


def test_pause_and_drop(start: Any) -> None:
    driver = start()
    running = driver.ask(PROMPT, LONG)
    running.next()
    driver.engine.pause(InFlight.DROP)
    assert driver.engine.is_paused
    assert running.all().finish is Finish.ABORT
    later = driver.ask(PROMPT, GREEDY)
    assert driver.engine.load.waiting == 1
    driver.engine.resume()
    assert later.all().finish is Finish.LENGTH


def test_pause_and_drain(start: Any) -> None:
    driver = start()
    running = driver.ask(PROMPT, LONG)
    running.next()
    pausing = threading.Thread(target=driver.engine.pause, args=(InFlight.DRAIN,))
    pausing.start()
    assert running.all().finish is Finish.LENGTH
    assert len(running.token_ids) == 150
    pausing.join()
    assert driver.engine.is_paused
    later = driver.ask(PROMPT, GREEDY)
    driver.engine.pause(InFlight.HOLD)  # already paused; what waits goes on waiting
    assert driver.engine.load.waiting == 1
    driver.engine.resume()
    assert later.all().finish is Finish.LENGTH


@pytest.mark.parametrize(
    ("interrupt", "reason"),
    [(lambda engine: engine.resume(), "resumed"), (lambda engine: engine.sleep(1), "put to sleep")],
    ids=["resume", "sleep"],
)
def test_a_drain_that_is_interrupted_is_no_pause(start: Any, interrupt: Any, reason: str) -> None:
    driver = start()
    running = driver.ask(PROMPT, LONG)
    running.next()

    def drain_and_interrupt() -> Any:
        drained = driver.engine._pause(InFlight.DRAIN)
        assert not drained.done()
        interrupt(driver.engine)
        return drained

    with pytest.raises(ValueError, match=reason):
        driver.engine.between_steps(drain_and_interrupt).result()
    assert not driver.engine.is_paused
    driver.engine.wake()
    assert running.all().finish is Finish.LENGTH


@pytest.mark.parametrize("level", [0, 1, 2])
def test_who_sleeps_cannot_finish_requests(start: Any, level: int) -> None:
    driver = start()
    driver.engine.sleep(level)
    driver.ask(PROMPT, GREEDY)
    with pytest.raises(ValueError, match="1 requests cannot be finished while the engine sleeps"):
        driver.engine.pause(InFlight.DRAIN)


def test_pause_and_hold_continues_where_it_was(start: Any) -> None:
    driver = start()
    expected = driver.ask(PROMPT, LONG).all().token_ids
    held = driver.ask(PROMPT, LONG)
    held.next()
    driver.engine.pause(InFlight.HOLD)
    so_far = driver.engine.load
    assert so_far.running == 1
    driver.engine.resume()
    assert held.all().token_ids == expected


def test_each_token_has_the_version_that_made_it(start: Any) -> None:
    driver = start()
    answer = driver.ask(PROMPT, LONG)
    answer.next()
    driver.engine.pause(InFlight.HOLD)
    driver.engine.set_version(3)
    driver.engine.resume()
    versions = answer.all().versions
    assert set(versions) == {0, 3}
    assert versions == sorted(versions)


def test_what_is_held_over_new_weights_keeps_its_own_and_gives_nothing_to_new_prompts(start: Any) -> None:
    driver = start()
    held = driver.ask(PROMPT, LONG)
    held.next()
    driver.engine.pause(InFlight.HOLD)

    def double() -> None:
        for weight in driver.engine.named_weights().values():
            weight.mul_(1.5)
        driver.engine.weights_replaced(1)

    driver.engine.between_steps(double)
    driver.engine.resume()
    new = driver.ask(PROMPT, GREEDY).all()
    assert new.taken[0].cached_tokens == 0
    assert set(new.versions) == {1}
    held.all()
    assert driver.ask(PROMPT, GREEDY).all().token_ids == new.token_ids


@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize("parts", [None, (Part.WEIGHTS, Part.KV_CACHE), (Part.KV_CACHE, Part.WEIGHTS)])
def test_sleep_keeps_what_runs(start: Any, level: int, parts: tuple[Part, ...] | None) -> None:
    driver = start()
    expected = driver.ask(PROMPT, LONG).all().token_ids
    answer = driver.ask(PROMPT, LONG)
    answer.next()
    driver.engine.pause(InFlight.HOLD)
    driver.engine.sleep(level)
    assert driver.engine.sleeping == (frozenset(Part) if level else frozenset())
    for part in parts or (None,):
        driver.engine.wake(None if part is None else [part])
    assert driver.engine.sleeping == frozenset()
    assert not driver.engine.is_paused
    assert answer.all().token_ids == expected


def test_dropped_weights_are_waited_for(start: Any) -> None:
    driver = start()
    expected = driver.ask(PROMPT, GREEDY).all().token_ids
    kept = {name: weight.clone() for name, weight in driver.engine.named_weights().items()}
    driver.engine.sleep(2)
    with pytest.raises(RuntimeError, match="asleep"):
        driver.engine.named_weights()
    answer = driver.ask(PROMPT, GREEDY)
    driver.engine.wake([Part.WEIGHTS])
    assert driver.engine.sleeping == {Part.KV_CACHE}

    def write() -> None:
        for name, weight in driver.engine.named_weights().items():
            weight.copy_(kept[name])
        driver.engine.weights_replaced(5)

    driver.engine.wake([Part.KV_CACHE])
    assert driver.engine.load.waiting == 1
    driver.engine.between_steps(write)
    assert answer.all().token_ids == expected
    assert set(answer.versions) == {5}


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_weights_are_named_as_in_the_checkpoint(start: Any, models: Any, family: str) -> None:
    from safetensors.torch import load_file

    stored = load_file(models(family) / "model.safetensors")
    named = start(family).engine.named_weights()
    assert named.keys() == stored.keys()
    assert all(torch.equal(named[name], stored[name]) for name in stored)


def test_an_action_raises_where_it_was_asked_for(start: Any) -> None:
    driver = start()
    with pytest.raises(KeyError, match="mine"):
        driver.engine.between_steps(lambda: {}["mine"])
    assert driver.ask([1], GREEDY).all().finish is Finish.LENGTH


def test_a_listener_that_fails_ends_its_own_request_only(start: Any) -> None:
    driver = start()

    def fail(progress: Progress) -> None:
        raise OSError("gone")

    driver.engine.submit(Request("broken", (1, 2), LONG), fail)
    assert driver.ask(PROMPT, GREEDY).all().finish is Finish.LENGTH
    assert driver.engine.abort() == 0


def test_when_the_thread_dies_every_request_ends_and_no_more_are_taken(start: Any) -> None:
    driver = start()
    answer = driver.ask(PROMPT, LONG)
    answer.next()
    driver.engine.between_steps(lambda: driver.engine._cache.clear())
    assert answer.all().finish is Finish.ABORT
    with pytest.raises(RuntimeError, match="IndexError"):
        while True:
            driver.engine.abort()
    assert isinstance(driver.engine.failure, IndexError)
    with pytest.raises(RuntimeError, match="IndexError"):
        driver.ask(PROMPT, GREEDY)


def test_a_request_that_the_dying_thread_never_saw_ends_too(start: Any) -> None:
    driver = start()

    def die() -> None:
        raise MemoryError("full")

    def ask_a_dying_engine() -> Any:
        driver.engine._thread.post(die)
        return driver.ask(PROMPT, LONG)

    assert driver.engine.between_steps(ask_a_dying_engine).all().finish is Finish.ABORT


def test_closing_ends_what_runs(start: Any) -> None:
    driver = start()
    answer = driver.ask(PROMPT, LONG)
    answer.next()
    driver.engine.close()
    assert answer.all().finish is Finish.ABORT
    with pytest.raises(RuntimeError, match="closed"):
        driver.ask(PROMPT, GREEDY)


@pytest.mark.long
def test_a_prompt_as_long_as_a_dimension_of_the_model_compiles_for_all_lengths(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    driver = start("llama")
    module = driver.engine.model.module
    compile_layers(module)
    two = Sampling(max_tokens=2, temperature=0.0, ignore_eos=True)
    driver.ask([1] * module.config.hidden_size, two).all()
    compiled = counter.frame_count
    assert compiled > 0
    for length in (5, 30, 90):
        driver.ask([2] * length, two).all()
    assert counter.frame_count == compiled
