"""Daemons at work for their workers: messages, memory, locks and ports, on one node and between nodes."""

import asyncio

import pytest

from roost.transport.context import PeerLost, WaitedTooLong
from roost.transport.directory import ChannelEntry
from roost.transport.mailboxes import MAILBOX_SIZE
from roost.transport.shared_memory import BIG, INLINE_LIMIT, NoRoom, Packet, SegmentPool, SegmentRef
from tests.transport.wired_nodes import MIB, SIZES, data_of, payload, start, tick, two_nodes

PAIRS = {
    "one node": (("all", 0), ("all", 2)),
    "two nodes": (("a", 0), ("b", 0)),
    "back": (("b", 0), ("a", 0)),
    "to itself": (("a", 0), ("a", 0)),
}

# Messages -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_waiting", [True, False], ids=["waited for", "sent before"])
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("sender, receiver", PAIRS.values(), ids=PAIRS)
def test_a_message_arrives(sender, receiver, size, is_waiting):
    @two_nodes
    async def case(nodes):
        one, two = nodes.workers[sender], nodes.workers[receiver]
        if is_waiting:
            receiving = start(two.receive(one))
            await tick()
            await one.send(data_of(size), two)
            assert await receiving == data_of(size)
        else:
            await one.send(data_of(size), two)
            assert await two.receive(one) == data_of(size)

    case()


@pytest.mark.parametrize("sender, receiver", PAIRS.values(), ids=PAIRS)
def test_messages_of_a_pair_arrive_in_order(sender, receiver):
    @two_nodes
    async def case(nodes):
        one, two = nodes.workers[sender], nodes.workers[receiver]
        sending = [start(one.send(bytes([mark]), two)) for mark in range(20)]
        assert [await two.receive(one) for _ in range(20)] == [bytes([mark]) for mark in range(20)]
        await asyncio.gather(*sending)

    case()


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_a_broadcast_is_one_copy_on_each_node(size):
    @two_nodes
    async def case(nodes):
        source = nodes.workers["a", 0]
        others = [nodes.workers["all", rank] for rank in range(4)]
        await source.send(data_of(size), *others, kind="broadcast")
        used = nodes.used
        assert used[0] == used[1] == (0 if size <= INLINE_LIMIT else used[0])
        assert used[0] < 2 * max(size, 2 * MIB)
        for count, worker in enumerate(others):
            _, (packet,) = await worker.ask("receive", "broadcast", tuple(source.who), None)
            assert packet.is_shared, "who receives it must not write into it"
            assert worker.opened([packet]) == [data_of(size)]
            if count < 2:
                assert nodes.used == used, "the others have not got it yet"

    case()


def test_a_message_for_one_is_its_own():
    @two_nodes
    async def case(nodes):
        one, two = nodes.workers["all", 0], nodes.workers["all", 2]
        await one.send(payload(1), two)
        _, (packet,) = await two.ask("receive", "message", tuple(one.who), None)
        assert not packet.is_shared
        two.opened([packet])

    case()


@two_nodes
async def test_who_sends_large_messages_is_given_memory_for_the_next(nodes):
    one, two = nodes.workers["all", 0], nodes.workers["all", 2]
    spare, _ = await one.ask("send", "message", [tuple(two.who)], None, packets=[await one.pack(payload(1))])
    assert isinstance(spare, SegmentRef)
    places = one.maps.write(spare, [memoryview(payload(2))])
    again, _ = await one.ask("send", "message", [tuple(two.who)], None, packets=[Packet(b"h", (), spare, places)])
    assert [await two.receive(one), await two.receive(one)] == [payload(1), payload(2)]
    assert nodes.used[0] == again.size, "only the spare is left"
    nodes.lose(one)


WRONG = {
    "no such group": ([("nobody", 0)], "no group is called nobody"),
    "no such rank": ([("all", 4)], "group all has ranks 0 to 3, not 4"),
    "a wrong one among right ones": ([("all", 0), ("b", 0), ("a", -1)], "group a has ranks 0 to 0, not -1"),
}


@pytest.mark.parametrize("to, text", WRONG.values(), ids=WRONG)
def test_a_message_to_nobody_is_an_error_and_leaves_nothing(to, text):
    @two_nodes
    async def case(nodes):
        one = nodes.workers["a", 0]
        with pytest.raises(LookupError, match=text):
            await one.give("send", "message", to, None, data=payload(1))
        with pytest.raises(LookupError, match=text):
            await one.ask("receive", "message", to[-1], None)

    case()


@pytest.mark.parametrize("sender, receiver", list(PAIRS.values())[:2], ids=list(PAIRS)[:2])
def test_a_wait_for_a_message_is_bounded_and_names_who_did_not_send(sender, receiver):
    @two_nodes
    async def case(nodes):
        one, two = nodes.workers[sender], nodes.workers[receiver]
        with pytest.raises(WaitedTooLong, match=f"^nothing came from {one.who} to {two.who} within 0.01 s$"):
            await two.receive(one, timeout=0.01)
        nodes.failures[one.who] = "it raised"
        with pytest.raises(WaitedTooLong, match=r"within 0\.01 s; its last failure: it raised$"):
            await two.receive(one, timeout=0.01)
        await one.send(payload(1), two)  # who gave up waiting has taken nothing
        assert await two.receive(one) == payload(1)

    case()


async def fill(one, two):
    for _ in range(MAILBOX_SIZE):
        await one.send(b"x", two)


async def empty(one, two, count=MAILBOX_SIZE):
    return [await two.receive(one) for _ in range(count)]


@pytest.mark.parametrize("sender, receiver", list(PAIRS.values())[:2], ids=list(PAIRS)[:2])
def test_a_sender_that_is_far_ahead_waits_and_gives_up(sender, receiver):
    @two_nodes
    async def case(nodes):
        one, two = nodes.workers[sender], nodes.workers[receiver]
        await fill(one, two)
        with pytest.raises(WaitedTooLong, match=f"{two.who} received nothing from {one.who} for 0.01 s"):
            await one.send(payload(1), two, timeout=0.01)
        sending = start(one.send(payload(2), two))
        await tick()
        assert not sending.done()
        assert await empty(one, two, MAILBOX_SIZE + 1) == [b"x"] * MAILBOX_SIZE + [payload(2)]
        await sending

    case()


@two_nodes
async def test_a_broadcast_that_one_receiver_does_not_take_reaches_the_others(nodes):
    one, full, other = nodes.workers["a", 0], nodes.workers["all", 0], nodes.workers["all", 2]
    for _ in range(MAILBOX_SIZE):
        await one.send(b"x", full)
    with pytest.raises(WaitedTooLong, match="all:0 received nothing from a:0"):
        await one.send(payload(1), full, other, nodes.workers["b", 0], timeout=0.5)
    assert await other.receive(one) == await nodes.workers["b", 0].receive(one) == payload(1)
    await empty(one, full)


@pytest.mark.parametrize("sender, receiver", list(PAIRS.values())[:2], ids=list(PAIRS)[:2])
@pytest.mark.parametrize("dies", ["the receiver", "the sender"])
def test_a_death_at_a_full_mailbox_leaves_nothing(sender, receiver, dies):
    @two_nodes
    async def case(nodes):
        one, two = nodes.workers[sender], nodes.workers[receiver]
        for _ in range(MAILBOX_SIZE):
            await one.send(payload(3), two)
        sending = start(one.send(payload(1), two))
        await tick()
        assert not sending.done()
        nodes.lose(two if dies == "the receiver" else one)
        if dies == "the receiver":
            with pytest.raises(PeerLost, match=f"{two.who} is gone: killed by signal 9"):
                await sending
        else:
            with pytest.raises((asyncio.CancelledError, PeerLost)):
                await sending
            assert await empty(one, two) == [payload(3)] * MAILBOX_SIZE, "what was sent can be received"

    case()


@pytest.mark.parametrize("sender, receiver", list(PAIRS.values())[:2], ids=list(PAIRS)[:2])
def test_who_waits_for_a_lost_sender_or_sends_to_a_lost_receiver_knows(sender, receiver):
    @two_nodes
    async def case(nodes):
        one, two = nodes.workers[sender], nodes.workers[receiver]
        receiving = start(two.receive(one))
        await tick()
        nodes.lose(one)
        with pytest.raises(PeerLost, match=f"{one.who} is gone: killed by signal 9"):
            await receiving
        with pytest.raises(PeerLost, match=f"{one.who} is gone: killed by signal 9"):
            await two.send(payload(1), one)
        with pytest.raises(PeerLost, match=f"{one.who} is gone: killed by signal 9"):
            await two.send(payload(1), nodes.workers["all", 1], nodes.workers["all", 2], one)
        for rank in (1, 2):  # whether the others got it depends on where they are
            nodes.lose(nodes.workers["all", rank])

    case()


def test_a_message_that_arrives_in_the_moment_its_receiver_dies_leaves_nothing():
    @two_nodes
    async def case(nodes):
        one, two = nodes.workers["all", 0], nodes.workers["all", 2]
        receiving = start(two.receive(one))
        packet = await one.pack(payload(1))
        await tick()
        sending = start(one.ask("send", "message", [tuple(two.who)], None, packets=[packet]))
        sending.add_done_callback(lambda _: nodes.lose(two))
        await asyncio.wait([sending, receiving])
        nodes.lose(one)

    case()


def test_memory_that_arrives_while_its_receiver_dies_is_free_when_it_is_written():
    @two_nodes
    async def case(nodes):
        one, two = nodes.workers["a", 0], nodes.workers["b", 0]
        await nodes.directory.add_channel(ChannelEntry("c", 0, 0))
        await one.put(data_of(BIG + 1))
        getting = start(two.get())
        while not nodes.used[1]:  # until a thread of node 1 writes it
            await asyncio.sleep(0)
        nodes.lose(two)
        with pytest.raises(asyncio.CancelledError):
            await getting
        while nodes.used[1]:
            await asyncio.sleep(0)

    case()


@pytest.mark.parametrize("sender, receiver", list(PAIRS.values())[:2], ids=list(PAIRS)[:2])
def test_a_worker_that_starts_again_meets_no_old_messages(sender, receiver):
    @two_nodes
    async def case(nodes):
        one, two = nodes.workers[sender], nodes.workers[receiver]
        await one.send(payload(1), two)
        await two.send(payload(2), one)
        nodes.lose(two, will_restart=True)
        nodes.restarted(two)
        assert nodes.used == [0, 0, 0]
        await one.send(payload(3), two)
        assert await two.receive(one) == payload(3)
        await two.send(payload(4), one)
        assert await one.receive(two) == payload(4)

    case()


# What a dead worker held ----------------------------------------------------------------------------------------------


@two_nodes
async def test_memory_that_a_dead_worker_held_is_free(nodes):
    one, two = nodes.workers["all", 0], nodes.workers["all", 2]
    await one.pack(payload(1))  # written and never sent
    await one.ask("send", "message", [tuple(two.who)], None, packets=[await one.pack(payload(2))])  # with a spare
    _, (packet,) = await two.ask("receive", "message", tuple(one.who), None)
    views = two.maps.read(packet.segment, packet.places)
    nodes.lose(one)
    assert nodes.used[0] == packet.segment.size
    assert bytes(views[0]) == payload(2)
    nodes.lose(two)


@two_nodes
async def test_what_a_dead_worker_says_last_does_not_free_what_another_uses(nodes):
    source, one, two = nodes.workers["a", 0], nodes.workers["all", 0], nodes.workers["all", 2]
    await source.send(payload(1), one, two)
    _, (packet,) = await one.ask("receive", "message", tuple(source.who), None)
    _, (other,) = await two.ask("receive", "message", tuple(source.who), None)
    nodes.lose(one)
    one.exchange.release(one.who, [packet.segment.number])
    two.exchange.release(one.who, [packet.segment.number, 12345])
    assert nodes.used[0] == packet.segment.size
    assert two.opened([other]) == [payload(1)]
    two.exchange.release(two.who, [other.segment.number])  # twice
    assert nodes.used[0] == 0
    await source.send(payload(2), two)
    two.exchange.release(two.who, [other.segment.number])  # of the message before, which had the same memory
    assert await two.receive(source) == payload(2)


@pytest.mark.parametrize("request_", ["send", "put", "lock", "port", "allocate", "get"])
def test_a_dead_workers_late_request_is_refused(request_):
    @two_nodes
    async def case(nodes):
        one, two = nodes.workers["all", 0], nodes.workers["all", 2]
        await nodes.directory.add_channel(ChannelEntry("c", 0, 0))
        await two.put(b"kept")
        packet = await one.pack(payload(1))
        nodes.lose(one)
        await two.pack(payload(2))  # has the dead one's memory now
        with pytest.raises(PeerLost, match="all:0 is gone"):
            match request_:
                case "send":
                    await one.ask("send", "message", [tuple(two.who)], None, packets=[packet])
                case "put":
                    await one.ask("put", "c", "k", 1, None, packets=[packet])
                case "lock":
                    await one.ask("lock", (0,), None)
                case "port":
                    await one.ask("port")
                case "allocate":
                    await one.ask("allocate", 1)
                case "get":
                    await one.get()
        await two.ask("lock", (0,), 0.01)
        assert await two.get() == [b"kept"]
        nodes.lose(two)

    case()


@two_nodes
async def test_ports_of_a_dead_worker_are_free(nodes):
    one = nodes.workers["a", 0]
    ports = {(await one.ask("port"))[0] for _ in range(3)}
    assert len(ports) == 3
    nodes.lose(one)
    assert not nodes.exchanges[0].ports._locks


# Memory ---------------------------------------------------------------------------------------------------------------


@two_nodes
async def test_who_wants_memory_waits_until_another_gives_back(nodes):
    one, two, three = (nodes.workers["all", 0], nodes.workers["all", 2], nodes.workers["a", 0])
    nodes.exchanges[0].memory.pool = SegmentPool(4 * MIB)
    held, _ = await one.ask("allocate", 4 * MIB)
    dying, waiting = start(three.ask("allocate", MIB)), start(two.ask("allocate", 2 * MIB))
    await tick()
    nodes.lose(three)
    await tick()
    assert dying.cancelled()
    assert not waiting.done()
    one.exchange.release(one.who, [held.number])
    segment, _ = await waiting
    two.exchange.release(two.who, [segment.number])


@two_nodes
async def test_what_can_never_fit_is_an_error_and_not_a_wait(nodes):
    nodes.exchanges[0].memory.pool = SegmentPool(4 * MIB)
    with pytest.raises(NoRoom, match="bytes requested"):
        await nodes.workers["a", 0].ask("allocate", 5 * MIB)


@two_nodes
async def test_spare_memory_leaves_room_for_others(nodes):
    one, two = nodes.workers["all", 0], nodes.workers["all", 2]
    nodes.exchanges[0].memory.pool = SegmentPool(4 * MIB)
    spare, _ = await one.ask("send", "m", [tuple(two.who)], None, packets=[await one.pack(data_of(2 * MIB))])
    assert spare is None
    await two.receive(one, kind="m")
    spare, _ = await one.ask("send", "m", [tuple(two.who)], None, packets=[await one.pack(data_of(MIB))])
    assert spare is not None
    await two.receive(one, kind="m")
    nodes.lose(one)


# Locks ----------------------------------------------------------------------------------------------------------------


@two_nodes
async def test_a_lock_waits_for_its_holder_and_names_it(nodes):
    one, two = nodes.workers["all", 0], nodes.workers["all", 2]
    await one.ask("lock", (0, 1), None)
    await one.ask("lock", (0, 1), 0.01)
    with pytest.raises(
        WaitedTooLong, match=r"all:2 did not get the lock of devices 1, 2 within 0\.01 s; held: 1 by all:0;"
    ):
        await two.ask("lock", (1, 2), 0.01)
    waiting = start(two.ask("lock", (1,), None))
    await one.ask("unlock", (0, 1))
    await tick()
    assert not waiting.done()
    await one.ask("unlock", (0, 1))
    await waiting
    with pytest.raises(ValueError, match="held by all:2"):
        await one.ask("unlock", (1,))


@two_nodes
async def test_a_lock_is_free_when_its_holder_dies(nodes):
    one, two, three = nodes.workers["all", 0], nodes.workers["all", 2], nodes.workers["a", 0]
    await one.ask("lock", (0,), None)
    dying, waiting = start(two.ask("lock", (0,), None)), start(three.ask("lock", (0,), None))
    await tick()
    nodes.lose(two)
    nodes.lose(one)
    await waiting
    assert dying.cancelled()


@two_nodes
async def test_who_gives_up_a_lock_makes_way(nodes):
    one, two, three = nodes.workers["all", 0], nodes.workers["all", 2], nodes.workers["a", 0]
    await one.ask("lock", (0,), None)
    late = start(two.ask("lock", (0, 1), 0.02))
    await tick()
    behind = start(three.ask("lock", (1,), None))
    with pytest.raises(WaitedTooLong):
        await late
    await behind


@two_nodes
async def test_an_unknown_request_is_an_error(nodes):
    with pytest.raises(ValueError, match="unknown request dance"):
        await nodes.workers["a", 0].ask("dance")


# Order, names, and who is forgotten -----------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [[BIG + 1, 1, 1], [1, BIG + 1, 1]], ids=["big first", "big between"])
def test_a_small_message_does_not_overtake_a_big_one_between_nodes(sizes):
    @two_nodes
    async def case(nodes):
        one, two, other = nodes.workers["a", 0], nodes.workers["b", 0], nodes.workers["all", 1]
        held_up = asyncio.Event()

        async def on_the_way(node, op, wire):
            if len(wire[0][1][0]) > BIG:
                await held_up.wait()

        nodes.on_the_way = on_the_way
        sending = [start(one.send(data_of(size, mark), two)) for mark, size in enumerate(sizes)]
        await one.send(b"of another pair", other)
        assert await other.receive(one) == b"of another pair"
        held_up.set()
        got = [await two.receive(one) for _ in sizes]
        assert got == [data_of(size, mark) for mark, size in enumerate(sizes)]
        await asyncio.gather(*sending)

    case()


@two_nodes
async def test_who_waits_for_its_turn_gives_up_in_time_and_lets_nobody_pass(nodes):
    one, two = nodes.workers["a", 0], nodes.workers["b", 0]
    held_up = asyncio.Event()
    nodes.on_the_way = lambda *_: held_up.wait()
    first = start(one.send(payload(1), two))
    await tick()
    with pytest.raises(WaitedTooLong, match=r"b:0 received nothing from a:0 for 0\.01 s"):
        await one.send(payload(2), two, timeout=0.01)
    third = start(one.send(payload(3), two))
    await tick()
    assert nodes.forwarded == [(1, "send")]
    held_up.set()
    assert [await two.receive(one), await two.receive(one)] == [payload(1), payload(3)]
    await asyncio.gather(first, third)


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_a_broadcast_is_packed_once_for_all_nodes(size):
    @two_nodes
    async def case(nodes):
        one, others = nodes.workers["a", 0], [nodes.workers[who] for who in (("b", 0), ("c", 0), ("all", 0))]
        await one.send(data_of(size), *others)
        assert (nodes.packed, sorted(nodes.forwarded)) == (1, [(1, "send"), (2, "send")])
        assert [await other.receive(one) for other in others] == [data_of(size)] * 3

    case()


@two_nodes
async def test_a_broadcast_that_fails_at_one_node_reaches_the_others(nodes):
    one, dead, other = nodes.workers["a", 0], nodes.workers["b", 0], nodes.workers["c", 0]
    nodes.exchanges[1].lose(dead.who, "killed by signal 9", False)
    with pytest.raises(PeerLost, match="b:0 is gone"):
        await one.send(data_of(BIG + 1), dead, other)
    assert await other.receive(one) == data_of(BIG + 1)


LIMITS = {"not at all": (0, 0), "less than for a name": (30, 30), "longer": (1800, 60), "for ever": (None, 60)}


@pytest.mark.parametrize("timeout, limit", LIMITS.values(), ids=LIMITS)
@pytest.mark.parametrize("request_", ["send", "receive", "put", "get"])
def test_a_name_is_waited_for_no_longer_than_the_caller_waits(request_, timeout, limit):
    @two_nodes
    async def case(nodes):
        one = nodes.workers["a", 0]
        with pytest.raises(LookupError, match="nobody"):
            match request_:
                case "send":
                    await one.give("send", "message", [("nobody", 0)], timeout, data=payload(1))
                case "receive":
                    await one.ask("receive", "message", ("nobody", 0), timeout)
                case "put":
                    await one.put(payload(1), name="nobody", timeout=timeout)
                case "get":
                    await one.get(name="nobody", timeout=timeout)
        (asked,) = nodes.limits
        assert limit - 20 <= asked <= limit

    case()


@two_nodes
async def test_mailboxes_do_not_pile_up(nodes):
    one, two = nodes.workers["all", 0], nodes.workers["all", 2]
    for tag in range(50):
        await one.send(payload(1), two, kind=f"batch {tag}")
        await two.receive(one, kind=f"batch {tag}")
        with pytest.raises(WaitedTooLong):
            await two.receive(one, kind=f"late {tag}", timeout=0)
    await tick()
    assert not one.exchange.queues._mailboxes


@two_nodes
async def test_a_worker_that_is_forgotten_leaves_nothing_and_can_come_anew(nodes):
    one, two, three = nodes.workers["all", 0], nodes.workers["all", 2], nodes.workers["a", 0]
    await one.send(payload(1), two)
    await two.send(payload(2), one)
    await one.pack(payload(3))
    await one.ask("lock", (0,), None)
    port, _ = await one.ask("port")
    waiting, locking = start(three.receive(one)), start(three.ask("lock", (0,), None))
    await tick()
    for exchange in nodes.exchanges:
        exchange.forget([one.who])
    assert nodes.used == [0, 0, 0]
    assert not one.exchange.ports._locks, f"{port} is still leased"
    await locking
    with pytest.raises(PeerLost, match="all:0 is gone: its group was closed"):
        await waiting
    await one.send(payload(4), two)
    assert await two.receive(one) == payload(4)


@two_nodes
async def test_memory_that_a_worker_does_not_hold_cannot_be_sent(nodes):
    one, two, thief = nodes.workers["all", 0], nodes.workers["all", 2], nodes.workers["a", 0]
    packet = await one.pack(payload(1))
    with pytest.raises(ValueError, match="a:0 sends shared memory that it does not hold"):
        await thief.ask("send", "message", [tuple(two.who)], None, packets=[packet])
    nodes.lose(one)
