"""Daemons without sockets: exchanges wired to each other stand for nodes.

Every test that runs among them ends with all shared memory given back on all nodes.
"""

import asyncio
import pickle

from roost.transport.context import Address
from roost.transport.directory import Directory, GroupEntry
from roost.transport.exchange import Exchange
from roost.transport.shared_memory import BIG, INLINE_LIMIT, Packet, SegmentMaps, WirePacket, needed
from tests.limits import HANG_S

SIZES = {"inline": 100, "shared memory": INLINE_LIMIT + 1, "written by a thread": BIG + 1}
SIZE = INLINE_LIMIT + 1
MIB = 1 << 20


class Nodes:
    """Nodes of a job: `a`, `b` and `c` have a worker on nodes 0, 1 and 2, `all` two on node 0 and two on node 1."""

    def __init__(self):
        self.directory = Directory()
        self.failures = {}
        self.packed, self.forwarded, self.limits = 0, [], []
        self.exchanges = [Exchange(node, self.ask_node, self.look_up, self.last_failure, 3) for node in range(3)]
        self.workers = {}

    async def ask_node(self, node, who, op, args, load):
        there = pickle.loads(await load.packed(self.pack))
        self.forwarded.append((node, op))
        await self.on_the_way(node, op, there)
        value, back = await self.exchanges[node].serve_node(who, op, args, [WirePacket(*piece) for piece in there])
        return value, [WirePacket(*piece) for piece in pickle.loads(pickle.dumps([tuple(piece) for piece in back]))]

    async def pack(self, wire, num_nodes):
        self.packed += 1
        return pickle.dumps([tuple(piece) for piece in wire])

    async def on_the_way(self, node, op, wire):
        """Transfer between nodes; tests put something in its place."""

    async def look_up(self, method, *args):
        if method in ("group", "channel"):
            self.limits.append(args[1])
            args = (args[0], 0)  # what is not there now will not come in a test
        return await getattr(self.directory, method)(*args)

    async def last_failure(self, who):
        return self.failures.get(who, "")

    async def open(self):
        groups = {"a": (0,), "b": (1,), "c": (2,), "all": (0, 1, 0, 1)}
        for entry in (GroupEntry(name, nodes) for name, nodes in groups.items()):
            await self.directory.add_group(entry)
            for rank, node in enumerate(entry.nodes):
                self.workers[entry.name, rank] = Worker(Address(entry.name, rank), self.exchanges[node])

    def lose(self, worker, will_restart=False):
        for exchange in self.exchanges:
            exchange.lose(worker.who, "killed by signal 9", will_restart)
        worker.is_dead = True

    def restarted(self, worker):
        for exchange in self.exchanges:
            exchange.queues.restarted(worker.who)
        worker.is_dead = False

    @property
    def used(self):
        return [exchange.pool.used for exchange in self.exchanges]

    def close(self):
        for exchange in self.exchanges:
            exchange.pool.close()
            exchange.ports.close()


class Worker:
    """A worker's process, without the socket between it and the exchange."""

    def __init__(self, who, exchange):
        self.who, self.exchange = who, exchange
        self.maps = SegmentMaps()
        self.is_dead = False

    async def ask(self, op, *args, packets=()):
        return await self.exchange.serve(self.who, op, args, list(packets))

    async def pack(self, data):
        if len(data) <= INLINE_LIMIT:
            return Packet(b"h", (data,))
        segment, _ = await self.ask("allocate", needed([len(data)]))
        return Packet(b"h", (), segment, self.maps.write(segment, [memoryview(data)]))

    async def give(self, op, *args, data):
        """Send or put, and give the spare memory of the answer back."""
        spare, _ = await self.ask(op, *args, packets=[await self.pack(data)])
        if spare is not None:
            self.exchange.release(self.who, [spare.number])

    def opened(self, packets):
        data = []
        for packet in packets:
            if packet.segment is None:
                data.append(bytes(packet.inline[0]))
            else:
                data.append(bytes(self.maps.read(packet.segment, packet.places)[0]))
        self.exchange.release(self.who, self.maps.take_released())
        return data

    async def send(self, data, *to, timeout=None, kind="message"):
        await self.give("send", kind, [tuple(worker.who) for worker in to], timeout, data=data)

    async def receive(self, source, timeout=None, kind="message"):
        _, packets = await self.ask("receive", kind, tuple(source.who), timeout)
        (data,) = self.opened(packets)
        return data

    async def put(self, data, name="c", key="k", weight=1, timeout=None):
        await self.give("put", name, key, weight, timeout, data=data)

    async def get(self, name="c", key="k", target=None, timeout=None):
        _, packets = await self.ask("get", name, key, target, timeout)
        return self.opened(packets)

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
            await asyncio.wait_for(case(nodes, **args), HANG_S)
            await tick()
            assert nodes.used == [0, 0, 0], "shared memory is still in use"
            for exchange in nodes.exchanges:
                assert not exchange._tasks
                assert not exchange.memory._held
                for service in (exchange._router, exchange._channels):
                    assert not service._arrivals
                    assert not service._forwards
        finally:
            nodes.close()

    def test(**args):
        asyncio.run(run(args))

    return test


def data_of(size, mark=1):
    return bytes([mark]) * size


def payload(mark):
    return data_of(SIZE, mark)
