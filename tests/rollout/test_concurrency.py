"""Slots that can be resized, and the controller on traces of engines."""

import asyncio
import json
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from roost.engines.protocol import EngineLoad
from roost.rollout.concurrency import (
    FULL,
    QUEUED,
    SILENT_POLLS,
    Bounds,
    ConcurrencyControl,
    Slots,
    is_overloaded,
    next_limit,
)

BOUNDS = Bounds(8, 1024)
TRACE = Path(__file__).parent / "recorded_loads.jsonl"


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


def test_slots_are_given_in_order_and_a_lower_limit_holds_once_episodes_end():
    async def main():
        slots, done = Slots(2), []

        async def episode(number):
            await slots.acquire()
            done.append(number)

        tasks = [asyncio.create_task(episode(number)) for number in range(6)]
        await settle()
        assert (done, slots.used, slots.has_waiting) == ([0, 1], 2, True)
        slots.resize(1)
        slots.release()
        await settle()
        assert done == [0, 1], "one too many ran already"
        slots.release()
        await settle()
        assert done == [0, 1, 2]
        slots.resize(4)
        await settle()
        assert (done, slots.used, slots.has_waiting) == ([0, 1, 2, 3, 4, 5], 4, False)
        await asyncio.gather(*tasks)

    asyncio.run(main())


def test_a_cancelled_episode_keeps_no_slot():
    async def main():
        slots = Slots(1)
        await slots.acquire()
        waiting, granted = (asyncio.create_task(slots.acquire()) for _ in range(2))
        await settle()
        waiting.cancel()
        await settle()
        slots.release()  # granted, but not resumed yet
        granted.cancel()
        await asyncio.gather(waiting, granted, return_exceptions=True)
        assert (slots.used, slots.has_waiting) == (0, False)
        await asyncio.wait_for(slots.acquire(), 5)

    asyncio.run(main())


@given(
    st.integers(1, 2000),
    st.integers(0, 2000),
    st.booleans(),
    st.lists(st.builds(EngineLoad, st.integers(0, 500), st.integers(0, 500), st.none() | st.floats(0, 1)), max_size=3),
)
def test_a_limit_changes_by_little_and_only_for_a_reason(limit, used, has_waiting, loads):
    limit = BOUNDS.within(limit)
    found = next_limit(limit, min(used, limit), has_waiting, loads, BOUNDS)
    assert BOUNDS.least <= found <= BOUNDS.most
    if found < limit:
        assert any(is_overloaded(load) for load in loads)
    if found > limit:
        assert has_waiting and not any(is_overloaded(load) for load in loads) and found <= limit + max(1, limit // 4)


def simulated(capacity, limit, looks=60, wanted=2000, engines=2):
    """Limits over time, of engines that run so many sequences each, and queue the others."""
    limits, used = [limit], 0
    for _ in range(looks):
        used = max(min(limits[-1], wanted), round(0.9 * used))  # a tenth of them end between two looks
        each = used // engines
        running = min(each, capacity)
        load = EngineLoad(running, each - running, running / capacity)
        limits.append(next_limit(limits[-1], used, used < wanted, [load] * engines, BOUNDS))
    return limits


@pytest.mark.parametrize("start", [8, 100, 1024])
def test_it_settles_where_engines_are_nearly_full(start):
    last = simulated(capacity=100, limit=start)[-10:]
    assert all(0.75 * 200 <= limit <= (1 + QUEUED) * 200 for limit in last), last


def test_it_follows_engines_whose_sequences_become_longer():
    high = simulated(capacity=100, limit=1024)[-1]
    low = simulated(capacity=25, limit=high)[-1]
    assert low < 0.4 * high
    assert simulated(capacity=100, limit=low)[-1] > 2 * low


def recorded():
    return [json.loads(line) for line in TRACE.read_text().splitlines()]


def test_a_recorded_trace_of_a_small_engine():
    """Loads of a built-in engine that runs 16 sequences, in a run that may start 144 episodes at once."""
    bounds, limit = Bounds(8, 1024), 1024
    limits = []
    for look in recorded():
        loads = [EngineLoad(*load) for load in look["loads"]]
        limit = next_limit(limit, look["used"], look["has_waiting"], loads, bounds)
        limits.append(limit)
    assert any(is_overloaded(EngineLoad(*load)) for look in recorded() for load in look["loads"])
    assert limits[-1] < limits[0] < 144
    assert 16 <= limits[-1] <= 24, "it runs 16, and a short queue is right"


def test_a_queue_that_is_over_at_the_next_look_changes_nothing():
    async def main():
        slots = Slots(50)
        await slots.acquire()
        answers = iter([[EngineLoad(10, waiting, 0.5)] for waiting in (90, 0, 90, 90)])

        async def loads():
            return next(answers)

        control, limits = ConcurrencyControl(slots, loads, 100, print), []
        for _ in range(4):
            await control.poll()
            limits.append(slots.limit)
        assert limits == [50, 50, 50, 8]

    asyncio.run(main())


def test_looks_that_fail_leave_the_limit_and_are_noted_once():
    async def main(monkeypatch):
        monkeypatch.setattr("roost.rollout.concurrency.POLL_S", 0.001)
        slots, notes = Slots(50), []
        await slots.acquire()
        answers = iter([[EngineLoad(10, 90, 0.5)]] * 2)

        async def loads():
            try:
                return next(answers)
            except StopIteration:
                raise ValueError("no number") from None

        control = ConcurrencyControl(slots, loads, 100, notes.append)
        async with control.running():
            while not notes:
                await asyncio.sleep(0.01)
        assert notes == ["the number of concurrent episodes stays at 8, as ValueError: no number"]
        assert control.pop_metrics() == {
            "concurrency/limit": 8.0,
            "concurrency/waiting": 90.0,
            "concurrency/kv_usage": 0.5,
        }

    with pytest.MonkeyPatch.context() as patch:
        asyncio.run(main(patch))


def test_engines_that_report_no_load_are_named_once():
    async def main():
        slots, notes = Slots(50), []
        await slots.acquire()

        async def loads():
            return []

        control = ConcurrencyControl(slots, loads, 100, notes.append)
        for _ in range(3 * SILENT_POLLS):
            await control.poll()
        assert notes == ["no engine reports its load, so the number of concurrent episodes stays at 50"]

    asyncio.run(main())


def test_an_evaluation_holds_the_limit():
    async def main(monkeypatch):
        monkeypatch.setattr("roost.rollout.concurrency.POLL_S", 0.001)
        slots, looked = Slots(50), asyncio.Event()
        await slots.acquire()

        async def loads():
            looked.set()
            return [EngineLoad(10, 90, FULL + 0.01)]

        control = ConcurrencyControl(slots, loads, 100, print)
        with control.held():
            async with control.running():
                await asyncio.sleep(0.05)
                assert not looked.is_set() and slots.limit == 50
        async with control.running():
            await asyncio.wait_for(looked.wait(), 60)

    with pytest.MonkeyPatch.context() as patch:
        asyncio.run(main(patch))
