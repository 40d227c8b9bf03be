"""Data between workers: messages, broadcasts, channels, batches; and device locks."""

import asyncio
import time

import numpy as np
import pytest
import torch

from roost import Channel, ChannelClosed, PackedPlacementStrategy, PeerLost, WaitedTooLong, Worker, WorkerFailed
from tests.limits import HANG_S

EVERYONE = [("left", None), ("right", None)]


class Peer(Worker):
    """Does whatever a test asks of it."""

    def give(self, value, group, rank):
        self.send(value, group, rank)

    def give_many(self, values, group, rank):
        for pending in [self.send(value, group, rank, async_op=True) for value in values]:
            pending.wait()

    def take(self, group, rank, timeout=None):
        return self.recv(group, rank, timeout=timeout)

    def take_many(self, count, group, rank):
        return [pending.wait() for pending in [self.recv(group, rank, async_op=True) for _ in range(count)]]

    def give_tensors(self, group, rank):
        tensors = {"big": torch.arange(1_000_000), "list": [torch.ones(3, dtype=torch.bfloat16), "text", None]}
        self.send(tensors, group, rank)
        tensors["big"].fill_(-1)  # the sender's own memory is free again

    def take_tensors(self, group, rank):
        first = self.recv(group, rank)
        total = int(first["big"].sum())
        first["big"] += 1  # what was received is the receiver's
        return total, int(first["big"].sum()), str(first["list"][0].dtype), first["list"][1:]

    def share(self, value=None, src=None):
        if value is not None:
            value = {"array": value["array"].copy()}  # arguments of calls are read-only
        got = self.broadcast(value, groups=EVERYONE, src=src)
        got["array"] += self._rank  # nobody else sees this
        return float(got["array"][0])

    def spread(self, rows):
        self.send_to("right", {"row": np.arange(rows) + rows * self._rank, "tag": "batch"})

    def gather(self, total):
        batch = self.recv_from("left", total)
        return batch["row"].tolist(), batch["tag"]

    def put(self, channel, values, **options):
        for value in values:
            channel.put(value, **options)

    def get(self, channel, count, **options):
        return [channel.get(**options) for _ in range(count)]

    def get_by_name(self, name):
        return self.connect_channel(name).get(timeout=HANG_S)

    def get_batch(self, channel, weight):
        return channel.get_batch(weight)

    def timed_put(self, channel, timeout):
        channel.put("more", timeout=timeout)

    def keep_lock(self, channel, seconds):
        with self.device_lock():
            channel.put((self._group_name, "in"))
            time.sleep(seconds)
            channel.put((self._group_name, "out"))

    def keep_lock_until_told(self, channel):
        with self.device_lock():
            channel.put("held")
            channel.get(key="let go")

    def try_lock(self, timeout):
        with self.device_lock(timeout=timeout):
            return True

    def lock_twice(self):
        with self.device_lock(), self.device_lock():
            return True

    def fail(self, text):
        raise ValueError(text)

    def ports(self, count):
        return [self.acquire_free_port() for _ in range(count)]


class Mixer(Worker):
    async def relay(self, source, target, count):
        for _ in range(count):
            await target.put(2 * await source.get(async_op=True), async_op=True)


@pytest.fixture(scope="module")
def pair(shared_cluster):
    """Two groups on the same devices."""
    groups = [
        Peer.create_group().launch(shared_cluster, name=name, placement_strategy=PackedPlacementStrategy(0, 1))
        for name in ("left", "right")
    ]
    yield groups
    for group in groups:
        group.close()


@pytest.fixture
def channel(shared_cluster, request):
    return shared_cluster.create_channel(request.node.name, getattr(request, "param", 0))


OBJECTS = [
    pytest.param(None, id="none"),
    pytest.param({"a": [1, "two", 3.0], "b": (4,)}, id="containers"),
    pytest.param(b"x" * 3_000_000, id="bytes"),
    pytest.param("y" * 200_000, id="text"),
    pytest.param({"empty": [], "zero": 0}, id="empty"),
]


@pytest.mark.parametrize("value", OBJECTS)
def test_objects_arrive_as_they_were(pair, value):
    left, right = pair
    sent = left.execute_on(0).give(value, "right", 1)
    assert right.execute_on(1).take("left", 0).wait() == [value]
    sent.wait()


def test_tensors_arrive_and_belong_to_the_receiver(pair):
    left, right = pair
    left.execute_on(0).give_tensors("right", 0)
    (answer,) = right.execute_on(0).take_tensors("left", 0).wait()
    total = sum(range(1_000_000))
    assert answer == (total, total + 1_000_000, "torch.bfloat16", ["text", None])


def test_messages_of_a_pair_keep_their_order(pair):
    left, right = pair
    values = [np.full(size, size) for size in (10, 300_000, 20, 200_000, 30)]
    left.execute_on(0).give_many(values, "right", 0)
    (got,) = right.execute_on(0).take_many(5, "left", 0).wait()
    assert [len(array) for array in got] == [10, 300_000, 20, 200_000, 30]


def test_messages_of_other_pairs_do_not_mix(pair):
    left, right = pair
    left.execute_on(1).give("from 1", "right", 0).wait()
    left.execute_on(0).give("from 0", "right", 0).wait()
    assert right.execute_on(0).take("left", 0).wait() == ["from 0"]
    assert right.execute_on(0).take("left", 1).wait() == ["from 1"]


@pytest.mark.parametrize("size", [10, 500_000], ids=["small", "large"])
def test_broadcast_gives_everyone_their_own(pair, size):
    left, right = pair
    calls = [left.share({"array": np.zeros(size)}), right.share()]
    assert [call.wait() for call in calls] == [[0.0, 1.0], [0.0, 1.0]]


def test_broadcast_from_another_source(pair):
    left, right = pair
    calls = [left.share(src=("right", 1)), right.share({"array": np.full(3, 5.0)}, src=("right", 1))]
    assert [call.wait() for call in calls] == [[5.0, 6.0], [5.0, 6.0]]


def test_batches_are_routed_by_rows(pair):
    left, right = pair
    left.spread(3)
    assert right.gather(6).wait() == [([0, 1, 2], "batch"), ([3, 4, 5], "batch")]


def test_a_group_that_is_not_there_is_named(pair):
    left, _ = pair
    with pytest.raises(WorkerFailed, match=r"left has ranks 0 to 1, not 7"):
        left.execute_on(0).take("left", 7).wait()


def test_a_wait_for_a_message_is_bounded(pair):
    left, _ = pair
    with pytest.raises(WorkerFailed, match=r"nothing came from right:1 to left:0 within 0.3 s"):
        left.execute_on(0).take("right", 1, timeout=0.3).wait()


def test_a_wait_that_ends_tells_what_happened_to_the_peer(pair):
    left, right = pair
    with pytest.raises(WorkerFailed, match="the shard is corrupt"):
        right.execute_on(1).fail("the shard is corrupt").wait()
    with pytest.raises(WorkerFailed) as caught:
        left.execute_on(0).take("right", 1, timeout=0.5).wait()
    described = caught.value.first.summary
    assert "nothing came from right:1 to left:0 within 0.5 s; its last failure: right:1 raised in fail" in described
    assert "ValueError: the shard is corrupt" in described


def test_channel_between_workers_and_driver(pair, channel):
    left, right = pair
    left.execute_on(0).put(channel, ["a", np.arange(100_000)])
    first, second = right.execute_on(0).get(channel, 2).wait()[0]
    assert (first, len(second)) == ("a", 100_000)
    channel.put({"from": "driver"})
    assert right.execute_on(1).get(channel, 1).wait() == [[{"from": "driver"}]]
    left.execute_on(1).put(channel, ["to the driver"])
    assert channel.get(timeout=HANG_S) == "to the driver"


def test_channel_by_name(pair, channel):
    _, right = pair
    channel.put(1)
    assert right.execute_on(0).get_by_name(channel.name).wait() == [1]


def test_keys_are_queues_of_their_own(channel):
    channel.put("x", key="one")
    channel.put("y", key=2)
    assert (channel.qsize(key="one"), channel.qsize(key=2), channel.empty()) == (1, 1, True)
    assert (channel.get(key=2), channel.get(key="one")) == ("y", "x")


def test_batches_by_weight(pair, channel):
    _, right = pair
    for weight in (2, 2, 3, 9, 1):
        channel.put(weight, weight=weight)
    assert channel.get_batch(5) == [2, 2]  # the next would pass the target
    assert channel.get_batch(3) == [3]
    assert channel.get_batch(5) == [9]  # heavier than the target, so alone
    waiting = right.execute_on(0).get_batch(channel, 4)
    assert not waiting.done()
    channel.put(3, weight=3)
    assert waiting.wait() == [[1, 3]]


@pytest.mark.parametrize("channel", [2], indirect=True)
def test_a_full_channel_makes_producers_wait(pair, channel):
    left, _ = pair
    putting = left.execute_on(0).put(channel, range(5))
    while not channel.full():
        time.sleep(0.02)
    assert not putting.done()
    assert channel.qsize() == 2
    with pytest.raises(asyncio.QueueFull):
        channel.put_nowait("more")
    assert [channel.get() for _ in range(5)] == [0, 1, 2, 3, 4]
    putting.wait()
    with pytest.raises(asyncio.QueueEmpty):
        channel.get_nowait()


@pytest.mark.parametrize("channel", [1], indirect=True)
def test_waits_on_a_channel_are_bounded(pair, channel):
    left, _ = pair
    channel.put(0)
    with pytest.raises(WorkerFailed, match=r"stayed full for 0.2 s"):
        left.execute_on(0).timed_put(channel, 0.2).wait()
    channel.get()
    with pytest.raises(WaitedTooLong, match=r"stayed empty for 0.2 s"):
        channel.get(timeout=0.2)


def test_a_closed_channel_gives_what_is_left(channel):
    channel.put(1)
    channel.close()
    assert channel.get() == 1
    with pytest.raises(ChannelClosed, match="is closed"):
        channel.get()


def test_asynchronous_workers_await_channels(shared_cluster, channel):
    out = shared_cluster.create_channel("out")
    mixer = Mixer.create_group().launch(shared_cluster, name="mixer", placement_strategy=PackedPlacementStrategy(0, 0))
    done = mixer.relay(channel, out, 3)
    for number in (1, 2, 3):
        channel.put(number)
    assert [out.get(timeout=HANG_S) for _ in range(3)] == [2, 4, 6]
    done.wait()
    mixer.close()


def test_one_worker_at_a_time_holds_a_device(pair, channel):
    left, right = pair
    calls = [group.execute_on(0).keep_lock(channel, 0.3) for group in (left, right)]
    for call in calls:
        call.wait()
    events = [channel.get() for _ in range(4)]
    assert [what for _, what in events] == ["in", "out", "in", "out"]
    assert events[0][0] == events[1][0] != events[2][0]


def test_locks_are_bounded_and_name_their_holder(pair, channel):
    left, right = pair
    holding = left.execute_on(0).keep_lock_until_told(channel)
    assert channel.get(timeout=HANG_S) == "held"
    with pytest.raises(
        WorkerFailed, match=r"right:0 did not get the lock of devices 0 within 0\.2 s; held: 0 by left:0"
    ):
        right.execute_on(0).try_lock(0.2).wait()
    assert right.execute_on(1).try_lock(HANG_S).wait() == [True]  # another device
    channel.put(None, key="let go")
    holding.wait()
    assert right.execute_on(0).lock_twice().wait() == [True]


def test_ports_are_given_once(pair):
    left, right = pair
    ports = [port for group in (left, right) for rank in group.ports(5).wait() for port in rank]
    assert len(set(ports)) == 20


class Victim(Worker):
    def put_one(self, channel):
        channel.put("last words")

    def hold(self, channel):
        with self.device_lock():
            channel.put("locked")
            time.sleep(3600)

    def hang(self):
        time.sleep(3600)

    def pid(self):
        import os

        return os.getpid()


class Waiter(Worker):
    def receive(self):
        self.recv("victim", 0)

    def get(self, channel):
        return channel.get(), channel.get()

    def broadcast_with_victim(self):
        self.broadcast(groups=[("victim", 0), ("waiter", 0)])

    def send_to_victim(self):
        for _ in range(1000):
            self.send(np.zeros(100_000), "victim", 0)

    def lock(self):
        with self.device_lock(timeout=HANG_S):
            return "mine"


@pytest.fixture
def hunt(cluster):
    victim, waiter = (
        kind.create_group().launch(cluster, name=name, placement_strategy=PackedPlacementStrategy(0, 0))
        for name, kind in (("victim", Victim), ("waiter", Waiter))
    )
    (pid,) = victim.pid().wait()
    waiter.wait_ready()

    def kill():
        import os
        import signal

        time.sleep(0.5)
        os.kill(pid, signal.SIGKILL)

    return victim, waiter, kill


LONG = [pytest.param(method, marks=pytest.mark.long) for method in ("broadcast_with_victim", "send_to_victim")]


@pytest.mark.parametrize("method", ["receive", *LONG])
def test_a_dead_peer_ends_a_wait_and_is_named(hunt, method):
    _, waiter, kill = hunt
    call = getattr(waiter, method)()
    kill()
    with pytest.raises(WorkerFailed) as caught:
        call.wait(timeout=HANG_S)
    first, *others = caught.value.failures
    assert (str(first.address), first.kind) == ("victim:0", "died")
    assert "victim:0 is gone" in others[0].summary
    assert isinstance(others[0], type(first))
    assert others[0].is_consequence


def test_a_dead_producer_ends_a_wait_for_items(hunt, cluster):
    victim, waiter, kill = hunt
    channel = cluster.create_channel("items")
    victim.put_one(channel).wait()
    call = waiter.get(channel)
    kill()
    with pytest.raises(WorkerFailed) as caught:
        call.wait(timeout=HANG_S)
    assert str(caught.value.first.address) == "victim:0"
    with pytest.raises(PeerLost, match="victim:0 is gone"):
        channel.get(timeout=HANG_S)


def test_a_dead_holder_frees_its_lock(hunt, cluster):
    victim, waiter, kill = hunt
    channel = cluster.create_channel("locked")
    victim.hold(channel)
    channel.get(timeout=HANG_S)
    call = waiter.lock()
    kill()
    assert call.wait(timeout=HANG_S) == ["mine"]


def test_channels_are_values():
    import pickle

    assert repr(pickle.loads(pickle.dumps(Channel("x")))) == "Channel('x')"
