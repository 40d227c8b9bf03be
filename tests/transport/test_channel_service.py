"""Channels on one node and between nodes: their order, their limits, and what becomes of them when someone goes."""

import asyncio

import pytest

from roost.transport.context import PeerLost, WaitedTooLong
from roost.transport.directory import ChannelEntry
from roost.transport.exchange import Empty, Full
from roost.transport.mailboxes import ChannelClosed
from roost.transport.shared_memory import BIG
from tests.transport.wired_nodes import SIZES, data_of, payload, start, tick, two_nodes

CHANNEL_PAIRS = {
    "both here": (("all", 0), ("all", 2)),
    "put from away": (("b", 0), ("a", 0)),
    "got from away": (("a", 0), ("b", 0)),
    "both away": (("all", 1), ("all", 3)),
}
everywhere = pytest.mark.parametrize("producer, consumer", CHANNEL_PAIRS.values(), ids=CHANNEL_PAIRS)


def with_channel(maxsize=0):
    """A test with a producer and a consumer of a channel on node 0."""

    def decorate(case):
        def test(producer, consumer, **args):
            @two_nodes
            async def run(nodes, **args):
                one, two = nodes.workers[producer], nodes.workers[consumer]
                await one.channel("create", "c", 0, maxsize)
                await case(nodes, one, two, **args)

            run(**args)

        return test

    return decorate


@everywhere
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_items_come_out_in_order(producer, consumer, size):
    @with_channel()
    async def case(nodes, one, two):
        waiting = start(two.get())
        await tick()
        for mark in range(3):
            await one.put(data_of(size, mark))
        assert await waiting == [data_of(size, 0)]
        assert await two.get() == [data_of(size, 1)]
        assert await two.get() == [data_of(size, 2)]

    case(producer, consumer)


@everywhere
def test_a_full_channel_holds_up_who_puts(producer, consumer):
    @with_channel(maxsize=1)
    async def case(nodes, one, two):
        await one.put(payload(1))
        assert await one.channel("full", "c", "k")
        waiting = start(one.put(payload(2)))
        await tick()
        assert not waiting.done()
        with pytest.raises(Full, match="channel c is full"):
            await one.put(payload(3), timeout=0)
        with pytest.raises(WaitedTooLong, match=r"channel c stayed full for 0\.01 s"):
            await one.put(payload(4), timeout=0.01)
        assert [await two.get(), await two.get()] == [[payload(1)], [payload(2)]]
        await waiting
        with pytest.raises(Empty, match="channel c is empty"):
            await two.get(timeout=0)
        with pytest.raises(WaitedTooLong, match=r"channel c stayed empty for 0\.01 s"):
            await two.get(timeout=0.01)
        assert await one.channel("sizes", "c") == {"k": 0}
        await one.put(payload(5), timeout=0)
        assert await two.get(timeout=0) == [payload(5)]

    case(producer, consumer)


@everywhere
def test_batches_and_keys(producer, consumer):
    @with_channel()
    async def case(nodes, one, two):
        for mark, weight in enumerate([1, 2, 0, 4]):
            await one.put(payload(mark), weight=weight)
        await one.put(payload(9), key=("other", 1))
        assert await one.channel("size", "c", "k") == 4
        assert await two.get(target=3) == [payload(0), payload(1)]
        assert await two.get(target=0) == [payload(2)]
        assert await two.get(target=-1) == [payload(3)]
        assert await two.get(key=("other", 1)) == [payload(9)]
        with pytest.raises(ValueError, match="weight is -1"):
            await one.put(payload(1), weight=-1)

    case(producer, consumer)


@everywhere
def test_a_batch_that_comes_too_late_leaves_its_items_to_who_asks_next(producer, consumer):
    @with_channel()
    async def case(nodes, one, two):
        await one.put(payload(1))
        late = start(two.get(target=5, timeout=0.02))
        await tick()
        behind = start(nodes.workers["all", 3].get())
        with pytest.raises(WaitedTooLong):
            await late
        assert await behind == [payload(1)]
        await one.put(payload(2))
        with pytest.raises(WaitedTooLong):
            await two.get(target=5, timeout=0.01)
        assert await one.channel("size", "c", "k") == 1
        assert await two.get(timeout=0) == [payload(2)]

    case(producer, consumer)


@everywhere
def test_a_closed_channel_gives_what_is_left(producer, consumer):
    @with_channel(maxsize=2)
    async def case(nodes, one, two):
        await one.put(payload(1))
        await one.put(payload(2))
        putting = start(one.put(payload(3)))
        await tick()
        await two.channel("close", "c")
        for timeout in (None, 0):
            with pytest.raises(ChannelClosed, match="channel c is closed"):
                await one.put(payload(4), timeout=timeout)
        with pytest.raises(ChannelClosed):
            await putting
        assert await two.get(target=9) == [payload(1), payload(2)]
        for timeout in (None, 0):
            with pytest.raises(ChannelClosed, match="channel c is closed"):
                await two.get(timeout=timeout)

    case(producer, consumer)


@everywhere
def test_who_waits_for_a_lost_producer_knows(producer, consumer):
    @with_channel()
    async def case(nodes, one, two):
        await one.put(payload(1))
        batch = start(two.get(target=3))
        await tick()
        nodes.lose(one)
        with pytest.raises(PeerLost, match=f"{one.who} is gone: killed by signal 9"):
            await batch
        assert await two.get() == [payload(1)], "what the batch had is not lost"
        with pytest.raises(PeerLost, match=f"{one.who} is gone: killed by signal 9"):
            await two.get()

    case(producer, consumer)


@everywhere
def test_who_waits_at_a_full_channel_for_a_lost_consumer_knows(producer, consumer):
    @with_channel(maxsize=1)
    async def case(nodes, one, two):
        await one.put(payload(1))
        assert await two.get() == [payload(1)]
        await one.put(payload(2))
        waiting = start(one.put(payload(3)))
        await tick()
        nodes.lose(two)
        with pytest.raises(PeerLost, match=f"{two.who} is gone: killed by signal 9"):
            await waiting
        with pytest.raises(PeerLost, match=f"{two.who} is gone: killed by signal 9"):
            await one.put(payload(4))
        assert await one.get() == [payload(2)]

    case(producer, consumer)


@everywhere
def test_a_producer_that_dies_at_a_full_channel_leaves_nothing(producer, consumer):
    @with_channel(maxsize=1)
    async def case(nodes, one, two):
        await one.put(payload(1))
        waiting = start(one.put(payload(2)))
        await tick()
        nodes.lose(one)
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert await two.get() == [payload(1)]
        with pytest.raises(PeerLost):
            await two.get()

    case(producer, consumer)


@everywhere
@pytest.mark.parametrize("will_restart", [True, False], ids=["comes back", "is gone"])
def test_a_consumer_that_dies_with_half_a_batch_leaves_it_to_the_next(producer, consumer, will_restart):
    @with_channel()
    async def case(nodes, one, two):
        await one.put(payload(1))
        dying = start(two.get(target=2))
        await tick()
        nodes.lose(two, will_restart)
        await one.put(payload(2))  # would have made the batch whole
        with pytest.raises(asyncio.CancelledError):
            await dying
        if will_restart:
            nodes.restarted(two)
            assert await two.get(target=2) == [payload(1), payload(2)]
        else:
            assert await one.get(target=2) == [payload(1), payload(2)]

    case(producer, consumer)


@everywhere
def test_a_channel_goes_on_while_its_producer_starts_again(producer, consumer):
    @with_channel()
    async def case(nodes, one, two):
        await one.put(payload(1))
        await two.get()
        before = start(two.get())
        await tick()
        nodes.lose(one, will_restart=True)
        after = start(two.get())
        await tick()
        nodes.restarted(one)
        await one.put(payload(2))
        await one.put(payload(3))
        assert [await before, await after] == [[payload(2)], [payload(3)]]

    case(producer, consumer)


@two_nodes
async def test_a_channel_that_nobody_made_is_an_error_and_leaves_nothing(nodes):
    one = nodes.workers["a", 0]
    with pytest.raises(LookupError, match="no channel is called c"):
        await one.put(payload(1))
    with pytest.raises(LookupError, match="no channel is called c"):
        await one.get()
    assert await one.channel("create", "c", 1, 3) == ChannelEntry("c", 1, 3)
    assert await nodes.workers["b", 0].channel("connect", "c") == ChannelEntry("c", 1, 3)


def test_a_small_item_does_not_overtake_a_big_one_between_nodes():
    @two_nodes
    async def case(nodes):
        one, two = nodes.workers["b", 0], nodes.workers["a", 0]
        await one.channel("create", "c", 0, 0)
        held_up = asyncio.Event()

        async def on_the_way(node, op, wire):
            if wire and len(wire[0][1][0]) > BIG:
                await held_up.wait()

        nodes.on_the_way = on_the_way
        putting = [start(one.put(data_of(BIG + 1))), start(one.put(b"small"))]
        await one.put(b"under another key", key="other")
        assert await two.get(key="other") == [b"under another key"]
        with pytest.raises(Full, match="an earlier item of b:0"):
            await one.put(b"at once", timeout=0)
        held_up.set()
        assert [await two.get(), await two.get()] == [[data_of(BIG + 1)], [b"small"]]
        await asyncio.gather(*putting)

    case()


@pytest.mark.parametrize("node", [-1, 3, 9])
def test_a_channel_on_a_node_that_is_not_there_is_refused(node):
    @two_nodes
    async def case(nodes):
        with pytest.raises(ValueError, match=f"channel c cannot be on node {node}: this job has 0 to 2"):
            await nodes.workers["a", 0].channel("create", "c", node, 0)
        await nodes.workers["a", 0].channel("create", "c", 2, 0)

    case()


@pytest.mark.parametrize("creator", [("a", 0), ("b", 0), ("c", 0)], ids=["here", "there", "elsewhere"])
@pytest.mark.parametrize("home", [0, 1, 2], ids="again on {}".format)
@everywhere
def test_a_closed_and_empty_channel_makes_way_for_a_new_one(producer, consumer, home, creator):
    @with_channel(maxsize=1)
    async def case(nodes, one, two):
        maker = nodes.workers[creator]
        await one.put(payload(1))
        assert await maker.channel("create", "c", home, 3) == ChannelEntry("c", 0, 1), "it is open"
        await two.channel("close", "c")
        assert await maker.channel("create", "c", home, 3) == ChannelEntry("c", 0, 1), "it is not empty"
        assert await two.get() == [payload(1)]
        with pytest.raises(ChannelClosed):
            await two.get()
        made = await asyncio.gather(maker.channel("create", "c", home, 3), one.channel("create", "c", home, 3))
        assert made == [ChannelEntry("c", home, 3, 1)] * 2
        for mark in range(3):
            await one.put(payload(mark), timeout=0)
        assert await maker.channel("full", "c", "k")
        assert [await two.get() for _ in range(3)] == [[payload(mark)] for mark in range(3)]
        await one.channel("close", "c")
        assert await one.channel("create", "c", 0, 0) == ChannelEntry("c", 0, 0, 2)

    case(producer, consumer)


@everywhere
@pytest.mark.parametrize("will_restart", [True, False], ids=["will be back", "is gone"])
def test_a_channel_goes_on_while_another_producer_lives(producer, consumer, will_restart):
    @with_channel()
    async def case(nodes, one, two):
        other = nodes.workers["c", 0]
        await one.put(b"1")
        await other.put(b"2")
        assert await two.get(target=2) == [b"1", b"2"]
        waiting = start(two.get())
        await tick()
        nodes.lose(one, will_restart)
        later = start(two.get(key="k"))
        await tick()
        assert not waiting.done()
        assert not later.done()
        await other.put(b"3")
        await other.put(b"4")
        assert [await waiting, await later] == [[b"3"], [b"4"]]
        if not will_restart:
            last = start(two.get())
            await tick()
            nodes.lose(other)
            with pytest.raises(PeerLost, match="c:0 is gone"):
                await last

    case(producer, consumer)


@everywhere
def test_nobodys_wait_at_a_channel_ends_when_a_group_is_closed(producer, consumer):
    @with_channel(maxsize=1)
    async def case(nodes, one, two):
        gone = nodes.workers["c", 0]
        await gone.put(b"1")
        assert await two.get() == [b"1"]
        assert await start(gone.put(b"2")) is None
        assert await gone.get() == [b"2"]
        getting, dying = start(two.get()), start(gone.get(target=5))
        await tick()
        for exchange in nodes.exchanges:
            exchange.forget([gone.who])
        await tick()
        assert not getting.done()
        assert dying.cancelled()
        await one.put(b"3")
        assert await getting == [b"3"]
        await one.put(b"4")
        putting = start(one.put(b"5"))
        await tick()
        assert not putting.done()
        assert [await two.get(), await two.get()] == [[b"4"], [b"5"]]
        await putting

    case(producer, consumer)
