"""What agents do for their workers: two exchanges wired to each other stand for two nodes.

Every test ends with all shared memory given back on both nodes.
"""

import asyncio
import pickle

import pytest

from roost.runtime.address import Address
from roost.runtime.directory import ChannelEntry, Directory, GroupEntry
from roost.runtime.exchange import Empty, Exchange, Full
from roost.runtime.failure import PeerLost, WaitedTooLong
from roost.runtime.freight import BIG, Freight
from roost.runtime.parcel import INLINE_LIMIT, Parcel
from roost.runtime.post_office import MAILBOX_SIZE, ChannelClosed
from roost.runtime.segments import NoRoom, SegmentMaps, SegmentPool, SegmentRef, needed

SIZES = {"inline": 100, "shared memory": INLINE_LIMIT + 1, "written by a thread": BIG + 1}
SIZE = INLINE_LIMIT + 1
MIB = 1 << 20
HANGS = 60  # seconds after which a test that hangs is ended


class Nodes:
    """Two nodes of a job: group `a` has a worker on node 0, `b` one on node 1, `all` one on each and one more on 0."""

    def __init__(self):
        self.directory = Directory()
        self.failures = {}
        self.exchanges = [Exchange(node, self.ask_node, self.look_up, self.last_failure) for node in range(2)]
        self.workers = {}

    async def ask_node(self, node, who, op, args, freight):
        there = pickle.loads(pickle.dumps([tuple(piece) for piece in freight]))
        value, back = await self.exchanges[node].serve_node(who, op, args, [Freight(*piece) for piece in there])
        return value, [Freight(*piece) for piece in pickle.loads(pickle.dumps([tuple(piece) for piece in back]))]

    async def look_up(self, method, *args):
        if method in ("group", "channel"):
            args = (args[0], 0)  # what is not there now will not come in a test
        return await getattr(self.directory, method)(*args)

    async def last_failure(self, who):
        return self.failures.get(who, "")

    async def open(self):
        for entry in (GroupEntry("a", (0,)), GroupEntry("b", (1,)), GroupEntry("all", (0, 1, 0, 1))):
            await self.directory.add_group(entry)
            for rank, node in enumerate(entry.nodes):
                self.workers[entry.name, rank] = Worker(Address(entry.name, rank), self.exchanges[node])

    def lose(self, worker, returns=False):
        for exchange in self.exchanges:
            exchange.lose(worker.who, "killed by signal 9", returns)
        worker.is_dead = True

    def find_again(self, worker):
        for exchange in self.exchanges:
            exchange.post.find_again(worker.who)
        worker.is_dead = False

    @property
    def used(self):
        return [exchange.pool.used for exchange in self.exchanges]

    def close(self):
        for exchange in self.exchanges:
            exchange.pool.close()
            exchange.ports.close()


class Worker:
    """What a worker's process does, without the socket between it and the exchange."""

    def __init__(self, who, exchange):
        self.who, self.exchange = who, exchange
        self.maps = SegmentMaps()
        self.is_dead = False

    async def ask(self, op, *args, parcels=()):
        return await self.exchange.serve(self.who, op, args, list(parcels))

    async def pack(self, data):
        if len(data) <= INLINE_LIMIT:
            return Parcel(b"h", (data,))
        segment, _ = await self.ask("allocate", needed([len(data)]))
        return Parcel(b"h", (), segment, self.maps.write(segment, [memoryview(data)]))

    async def give(self, op, *args, data):
        """Send or put, and give the spare memory of the answer back."""
        spare, _ = await self.ask(op, *args, parcels=[await self.pack(data)])
        if spare is not None:
            self.exchange.release(self.who, [spare.number])

    def opened(self, parcels):
        data = []
        for parcel in parcels:
            if parcel.segment is None:
                data.append(bytes(parcel.inline[0]))
            else:
                data.append(bytes(self.maps.read(parcel.segment, parcel.places)[0]))
        self.exchange.release(self.who, self.maps.take_released())
        return data

    async def send(self, data, *to, timeout=None, kind="message"):
        await self.give("send", kind, [tuple(worker.who) for worker in to], timeout, data=data)

    async def receive(self, source, timeout=None, kind="message"):
        _, parcels = await self.ask("receive", kind, tuple(source.who), timeout)
        (data,) = self.opened(parcels)
        return data

    async def put(self, data, name="c", key="k", weight=1, timeout=None):
        await self.give("put", name, key, weight, timeout, data=data)

    async def get(self, name="c", key="k", target=None, timeout=None):
        _, parcels = await self.ask("get", name, key, target, timeout)
        return self.opened(parcels)

    async def channel(self, what, *args):
        return (await self.ask("channel", what, *args))[0]


async def tick(times=20):
    for _ in range(times):
        await asyncio.sleep(0)


def start(coroutine):
    return asyncio.ensure_future(coroutine)


def two_nodes(case):
    """Run a test among two nodes; at its end all memory is free."""

    async def run(args):
        nodes = Nodes()
        await nodes.open()
        try:
            await asyncio.wait_for(case(nodes, **args), HANGS)
            await tick()
            assert nodes.used == [0, 0], "shared memory is still in use"
        finally:
            nodes.close()

    def test(**args):
        asyncio.run(run(args))

    return test


def data_of(size, mark=1):
    return bytes([mark]) * size


def payload(mark):
    return data_of(SIZE, mark)


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
            _, (parcel,) = await worker.ask("receive", "broadcast", tuple(source.who), None)
            assert parcel.is_shared, "who receives it must not write into it"
            assert worker.opened([parcel]) == [data_of(size)]
            if count < 2:
                assert nodes.used == used, "the others have not got it yet"

    case()


def test_a_message_for_one_is_its_own():
    @two_nodes
    async def case(nodes):
        one, two = nodes.workers["all", 0], nodes.workers["all", 2]
        await one.send(payload(1), two)
        _, (parcel,) = await two.ask("receive", "message", tuple(one.who), None)
        assert not parcel.is_shared
        two.opened([parcel])

    case()


@two_nodes
async def test_who_sends_large_messages_is_given_memory_for_the_next(nodes):
    one, two = nodes.workers["all", 0], nodes.workers["all", 2]
    spare, _ = await one.ask("send", "message", [tuple(two.who)], None, parcels=[await one.pack(payload(1))])
    assert isinstance(spare, SegmentRef)
    places = one.maps.write(spare, [memoryview(payload(2))])
    again, _ = await one.ask("send", "message", [tuple(two.who)], None, parcels=[Parcel(b"h", (), spare, places)])
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
        with pytest.raises(WaitedTooLong, match=f"{two.who} took nothing of {one.who} for 0.01 s"):
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
    with pytest.raises(WaitedTooLong, match="all:0 took nothing of a:0"):
        await one.send(payload(1), full, other, nodes.workers["b", 0], timeout=0.01)
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
        parcel = await one.pack(payload(1))
        await tick()
        sending = start(one.ask("send", "message", [tuple(two.who)], None, parcels=[parcel]))
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
        nodes.lose(two, returns=True)
        nodes.find_again(two)
        assert nodes.used == [0, 0]
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
    await one.ask("send", "message", [tuple(two.who)], None, parcels=[await one.pack(payload(2))])  # with a spare
    _, (parcel,) = await two.ask("receive", "message", tuple(one.who), None)
    views = two.maps.read(parcel.segment, parcel.places)
    nodes.lose(one)
    assert nodes.used[0] == parcel.segment.size
    assert bytes(views[0]) == payload(2)
    nodes.lose(two)


@two_nodes
async def test_what_a_dead_worker_says_last_does_not_free_what_another_uses(nodes):
    source, one, two = nodes.workers["a", 0], nodes.workers["all", 0], nodes.workers["all", 2]
    await source.send(payload(1), one, two)
    _, (parcel,) = await one.ask("receive", "message", tuple(source.who), None)
    _, (other,) = await two.ask("receive", "message", tuple(source.who), None)
    nodes.lose(one)
    one.exchange.release(one.who, [parcel.segment.number])
    two.exchange.release(one.who, [parcel.segment.number, 12345])
    assert nodes.used[0] == parcel.segment.size
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
        parcel = await one.pack(payload(1))
        nodes.lose(one)
        await two.pack(payload(2))  # has the dead one's memory now
        with pytest.raises(PeerLost, match="all:0 is gone"):
            match request_:
                case "send":
                    await one.ask("send", "message", [tuple(two.who)], None, parcels=[parcel])
                case "put":
                    await one.ask("put", "c", "k", 1, None, parcels=[parcel])
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
    nodes.exchanges[0].pool = SegmentPool(4 * MIB)
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
    nodes.exchanges[0].pool = SegmentPool(4 * MIB)
    with pytest.raises(NoRoom, match="bytes asked for"):
        await nodes.workers["a", 0].ask("allocate", 5 * MIB)


@two_nodes
async def test_spare_memory_leaves_room_for_others(nodes):
    one, two = nodes.workers["all", 0], nodes.workers["all", 2]
    nodes.exchanges[0].pool = SegmentPool(4 * MIB)
    spare, _ = await one.ask("send", "m", [tuple(two.who)], None, parcels=[await one.pack(data_of(2 * MIB))])
    assert spare is None
    await two.receive(one, kind="m")
    spare, _ = await one.ask("send", "m", [tuple(two.who)], None, parcels=[await one.pack(data_of(MIB))])
    assert spare is not None
    await two.receive(one, kind="m")
    nodes.lose(one)


# Channels -------------------------------------------------------------------------------------------------------------

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
        with pytest.raises(WaitedTooLong, match=r"channel c gave nothing for 0\.01 s"):
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
@pytest.mark.parametrize("returns", [True, False], ids=["comes back", "is gone"])
def test_a_consumer_that_dies_with_half_a_batch_leaves_it_to_the_next(producer, consumer, returns):
    @with_channel()
    async def case(nodes, one, two):
        await one.put(payload(1))
        dying = start(two.get(target=2))
        await tick()
        nodes.lose(two, returns)
        await one.put(payload(2))  # would have made the batch whole
        with pytest.raises(asyncio.CancelledError):
            await dying
        if returns:
            nodes.find_again(two)
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
        nodes.lose(one, returns=True)
        after = start(two.get())
        await tick()
        nodes.find_again(one)
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


# Locks ----------------------------------------------------------------------------------------------------------------


@two_nodes
async def test_a_lock_waits_for_its_holder_and_names_it(nodes):
    one, two = nodes.workers["all", 0], nodes.workers["all", 2]
    await one.ask("lock", (0, 1), None)
    await one.ask("lock", (0, 1), 0.01)
    with pytest.raises(WaitedTooLong, match=r"all:2 waited 0\.01 s for the lock of devices held: 1 by all:0"):
        await two.ask("lock", (1, 2), 0.01)
    waiting = start(two.ask("lock", (1,), None))
    await one.ask("unlock", (0, 1))
    await tick()
    assert not waiting.done()
    await one.ask("unlock", (0, 1))
    await waiting
    with pytest.raises(ValueError, match="which all:2 holds"):
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
