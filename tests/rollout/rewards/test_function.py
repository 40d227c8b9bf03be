import asyncio
import threading
import time

import numpy as np
import pytest

from roost.rollout.episode import Task
from roost.rollout.rewards.config import Function
from roost.rollout.rewards.reward import Answer, RewardFailed
from tests.limits import HANG_S
from tests.rollout.script import ran

ANSWER = Answer(Task("say five", {"most": 5}, "chat"), "five!", reward=0.25)


async def twice(reward):
    await asyncio.sleep(0)
    return reward * 2


class Callable:
    def __call__(self, text, *, factor=1):
        return len(text) * factor


class AsyncCallable:
    async def __call__(self, text):
        return len(text)


async def outcome(reward):
    try:
        return await reward.score(ANSWER)
    finally:
        await reward.close()


@pytest.mark.parametrize(
    ("function", "keys", "expected"),
    [
        pytest.param(lambda text: len(text), {}, 5.0, id="text"),
        pytest.param(lambda data, text: data["most"] >= len(text), {}, 1.0, id="data and a bool"),
        pytest.param(lambda task: task.tag == "code", {}, 0.0, id="task"),
        pytest.param(lambda answer: answer.reward, {}, 0.25, id="answer"),
        pytest.param(lambda **all: len(all), {}, 6.0, id="all that is offered"),
        pytest.param(lambda: 7, {}, 7.0, id="nothing"),
        pytest.param(lambda text, most: len(text) - most, {"most": 3}, 2.0, id="a key of the config"),
        pytest.param(lambda text: len(text), {"text": "mine"}, 4.0, id="a key instead of what is offered"),
        pytest.param(twice, {}, 0.5, id="asynchronous"),
        pytest.param(Callable(), {"factor": 2}, 10.0, id="an object"),
        pytest.param(AsyncCallable(), {}, 5.0, id="an asynchronous object"),
        pytest.param(lambda: np.float32(0.5), {}, 0.5, id="a number of numpy"),
        pytest.param(lambda: np.array([[0.5]]), {}, 0.5, id="an array of one"),
        pytest.param(lambda: np.bool_(True), {}, 1.0, id="a bool of numpy"),
        pytest.param("tests.rollout.rewards.own_rewards.short", {}, 1.0, id="by its path"),
    ],
)
def test_scores(function, keys, expected):
    score = asyncio.run(outcome(Function(function, keys)))
    assert score == expected
    assert type(score) is float


@pytest.mark.parametrize(
    "value",
    [None, "1", float("nan"), float("inf"), 1j, {1.0}, np.array([1.0, 2.0]), np.nan, 10**400],
    ids=lambda value: str(value)[:12],
)
def test_what_is_no_finite_number(value):
    with pytest.raises(RewardFailed, match="it must be a finite number"):
        asyncio.run(outcome(Function(lambda: value)))


def test_what_a_function_raises_is_not_hidden():
    with pytest.raises(ZeroDivisionError):
        asyncio.run(outcome(Function(lambda text: 1 / 0)))


@pytest.mark.parametrize(
    ("function", "keys", "message"),
    [
        pytest.param(lambda rubric: 0, {}, "it needs rubric", id="needs what is not offered"),
        pytest.param(lambda text, /: 0, {}, "it needs text", id="by position only"),
        pytest.param(lambda text: 0, {"most": 1}, "does not take most", id="given what it does not take"),
    ],
)
def test_functions_that_cannot_be_called(function, keys, message):
    with pytest.raises(TypeError, match=message):
        Function(function, keys)


def test_a_slow_function_does_not_hold_up_the_loop():
    """Two calls wait for each other in threads, which the loop must let happen."""
    both = threading.Barrier(2, timeout=HANG_S)

    def meet():
        both.wait()
        return 1.0

    async def run():
        reward = Function(meet, threads=2)
        return await asyncio.gather(reward.score(ANSWER), reward.score(ANSWER))

    assert asyncio.run(run()) == [1.0, 1.0]


def test_a_call_that_hangs_takes_no_thread_from_the_answers_after_it():
    hangs, may_end = threading.Event(), threading.Event()

    def length(text):
        if text == "hang":
            hangs.set()
            may_end.wait(HANG_S)
        return len(text)

    async def run():
        reward = Function(length, threads=1)
        hung = asyncio.create_task(reward.score(Answer(Task(""), "hang")))
        while not hangs.is_set():
            await asyncio.sleep(0.01)
        hung.cancel()  # nobody waits for it any more, as after its limit
        return await reward.score(ANSWER)

    try:
        assert ran(run()) == 5.0
    finally:
        may_end.set()


def test_what_takes_too_long_is_a_failure():
    with pytest.raises(RewardFailed, match=r"was not over after 0\.1 s"):
        asyncio.run(outcome(Function(lambda: time.sleep(1), limit_s=0.1)))


def test_waiting_for_a_thread_is_not_taking_too_long(monkeypatch):
    """The time of so many runs as there are threads."""
    running, most = 0, 0

    async def noted(limit_s, work):
        nonlocal running, most
        running += 1
        most = max(most, running)
        try:
            return await work
        finally:
            running -= 1

    monkeypatch.setattr("roost.rollout.rewards.config.within", noted)

    async def run():
        reward = Function(lambda: time.sleep(0.01) or 1.0, threads=2)
        return await asyncio.gather(*(reward.score(ANSWER) for _ in range(9)))

    assert asyncio.run(run()) == [1.0] * 9
    assert most == 2


@pytest.mark.parametrize("keys", [{"threads": 0}, {"limit_s": 0}], ids=str)
def test_wrong_keys(keys):
    with pytest.raises(ValueError, match=next(iter(keys))):
        Function(twice, **keys)
