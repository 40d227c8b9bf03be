"""Queues of weighted items: nothing is lost, doubled or reordered, whoever waits, gives up or dies."""

import asyncio
from collections import deque

import pytest
from hypothesis import given, settings, strategies as st

from roost.transport.mailboxes import ChannelClosed, Item, ItemQueue

CLOSED = ChannelClosed("channel c is closed")


async def tick():
    for _ in range(3):
        await asyncio.sleep(0)


def inside(queue):
    return [item.value for item in queue._items]


def queue_of(*weights, maxsize=0):
    queue = ItemQueue(maxsize)
    for number, weight in enumerate(weights):
        queue.put(Item(number, weight))
    return queue


BATCHES = {
    "exact": ([1, 1, 1], 2, [0, 1]),
    "as near as whole items allow": ([2, 2, 2], 5, [0, 1]),
    "a heavy item alone": ([9, 1], 5, [0]),
    "a heavy item does not join": ([1, 9], 5, [0]),
    "a target of zero is one item": ([1, 1], 0, [0]),
    "a negative target is one item": ([1, 1], -3, [0]),
    "items without weight come along": ([0, 0, 2], 2, [0, 1, 2]),
    "items without weight stay for the next": ([2, 0], 2, [0]),
    "fractions that do not add up in binary": ([0.1] * 10, 1, list(range(10))),
    "fractions that exceed the target in binary": ([0.1, 0.2], 0.3, [0, 1]),
    "an endless weight": ([float("inf"), 1], 4, [0]),
}


@pytest.mark.parametrize("weights, target, batch", BATCHES.values(), ids=BATCHES)
def test_a_batch_comes_as_near_to_its_target_as_it_can(weights, target, batch):
    async def case():
        queue = queue_of(*weights)
        assert queue.get(target).result() == batch
        assert queue.count() == len(weights) - len(batch)

    asyncio.run(case())


@pytest.mark.parametrize("weight", [-1, float("-inf"), float("nan")], ids=str)
def test_weights_that_would_make_a_batch_endless_are_refused(weight):
    async def case():
        queue = ItemQueue()
        with pytest.raises(ValueError, match="weight is"):
            queue.put(Item("x", weight))
        assert queue.count() == 0

    asyncio.run(case())


def test_who_waits_for_a_batch_comes_before_who_asks_later():
    async def case():
        queue = queue_of(1)
        batch, one = queue.get(2), queue.get()
        queue.put(Item("a"))
        assert batch.result() == [0, "a"]
        assert not one.done()
        queue.put(Item("b"))
        assert one.result() == ["b"]

    asyncio.run(case())


def test_a_batch_may_be_larger_than_the_queue():
    async def case():
        queue = queue_of(1, 1, maxsize=2)
        waiting = queue.put(Item(2))
        assert queue.get(3).result() == [0, 1, 2]
        assert waiting.done()

    asyncio.run(case())


def test_what_a_batch_had_taken_goes_at_once_to_the_next_when_it_gives_up():
    async def case():
        queue = queue_of(1, 1)
        batch, first, second, third = queue.get(5), queue.get(), queue.get(), queue.get()
        batch.cancel()
        await tick()
        assert (first.result(), second.result()) == ([0], [1])
        assert not third.done()

    asyncio.run(case())


def test_what_a_batch_had_taken_is_there_again_when_it_gives_up():
    async def case():
        queue = queue_of(1, 1)
        queue.get(5).cancel()
        await tick()
        assert inside(queue) == [0, 1]
        assert queue.count() == 2

    asyncio.run(case())


def test_waiters_cancelled_in_the_middle_are_passed_over():
    async def case():
        queue = ItemQueue()
        first, second, third = queue.get(), queue.get(), queue.get()
        second.cancel()
        queue.put(Item("a"))
        queue.put(Item("b"))
        assert (first.result(), third.result()) == (["a"], ["b"])
        full = queue_of(1, maxsize=1)
        one, two = full.put(Item(1)), full.put(Item(2))
        one.cancel()
        assert full.get().result() == [0]
        assert two.done()
        assert inside(full) == [2]

    asyncio.run(case())


@pytest.mark.parametrize("target", [None, 1, 7], ids=["one", "batch of 1", "batch of 7"])
def test_a_closed_queue_gives_what_is_left_and_then_the_reason(target):
    async def case():
        queue = queue_of(1, 1, 1, maxsize=3)
        refused = queue.put(Item("late"))
        queue.close(CLOSED)
        with pytest.raises(ChannelClosed, match="is closed"):
            refused.result()
        with pytest.raises(ChannelClosed, match="is closed"):
            queue.put(Item("later"))
        left = []
        while queue.count():
            left += queue.get(target).result()
        assert left == [0, 1, 2]
        with pytest.raises(ChannelClosed, match="is closed"):
            queue.get(target).result()

    asyncio.run(case())


def test_closing_gives_a_waiting_batch_what_it_has_and_the_others_the_reason():
    async def case():
        queue = queue_of(1)
        batch, one = queue.get(9), queue.get()
        queue.close(CLOSED)
        assert batch.result() == [0]
        with pytest.raises(ChannelClosed):
            one.result()

    asyncio.run(case())


def test_ending_every_wait_keeps_the_items():
    async def case():
        queue = queue_of(1, 1)
        batch, one = queue.get(9), queue.get()
        queue.fail_getters(CLOSED)
        for wait in (batch, one):
            with pytest.raises(ChannelClosed):
                wait.result()
        assert inside(queue) == [0, 1]
        assert queue.get(2).result() == [0, 1]

    asyncio.run(case())


def test_an_error_told_often_does_not_pile_up_what_it_passed():
    async def case():
        queue = ItemQueue()
        queue.close(CLOSED)
        for _ in range(5):
            with pytest.raises(ChannelClosed):
                queue.put(Item("x"))
            with pytest.raises(ChannelClosed):
                await queue.get()
        assert CLOSED.__traceback__ is None

    asyncio.run(case())


steps = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 3)),
        st.tuples(st.just("get"), st.none() | st.integers(0, 6)),
        st.tuples(st.sampled_from(["give up", "take back", "tick"]), st.integers(0, 50)),
    ),
    max_size=60,
)


@settings(max_examples=200)
@given(steps, st.integers(0, 4), st.booleans())
def test_every_accepted_item_comes_out_once_and_in_order_of_its_wait(steps, maxsize, fails):
    """Whoever gives up when, what was put and not taken back is received once or still there."""

    async def case():
        queue = ItemQueue(maxsize)
        accepted, putting, getting, asked = set(), {}, deque(), []
        for number, (step, amount) in enumerate(steps):
            match step:
                case "put":
                    wait = queue.put(Item(number, amount))
                    if wait is None:
                        accepted.add(number)
                    else:
                        putting[number] = wait
                case "get":
                    getting.append(queue.get(amount))
                    asked.append(getting[-1])
                case "give up" if getting:
                    getting[amount % len(getting)].cancel()
                case "take back" if putting:
                    list(putting.values())[amount % len(putting)].cancel()
                case _:
                    await tick()
        if fails:
            queue.fail_getters(CLOSED)
            queue.fail_putters(CLOSED)
        await tick()
        accepted |= {number for number, wait in putting.items() if has_result(wait)}
        received = [number for future in asked if has_result(future) for number in future.result()]
        held = [] if fails else [item.value for getter in queue._getters for item in getter.taken]
        everything = [*received, *held, *inside(queue)]
        assert sorted(everything) == sorted(accepted)
        assert inside(queue) == sorted(inside(queue))
        if not fails and any(not future.done() for future in asked):
            assert queue.count() == 0, "an item waits although somebody waits for it"
        if maxsize and any(not wait.done() for wait in putting.values()):
            assert queue.is_full, "somebody waits although there is room"

    asyncio.run(case())


def has_result(future):
    return future.done() and not future.cancelled() and future.exception() is None


def test_who_gives_up_leaves_the_queue():
    async def case():
        queue = queue_of(1, maxsize=1)
        for number in range(100):
            queue.put(Item(number)).cancel()
        await tick()
        assert not queue._putters
        empty = ItemQueue()
        first = empty.get()
        for _ in range(100):
            empty.get().cancel()
        await tick()
        assert len(empty._getters) == 1
        assert not empty.is_idle
        first.cancel()
        assert empty.is_idle

    asyncio.run(case())
