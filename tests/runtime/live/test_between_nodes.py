"""Messages from node to node: in order, whatever their size, and once for all nodes."""

import numpy as np
import pytest

from roost import Cluster, NodePlacementStrategy, Worker

BIG, SMALL = 3_000_000, 10  # numbers of 8 bytes


class Peer(Worker):
    def give(self, sizes, group, rank):
        for pending in [self.send(np.full(size, size), group, rank, async_op=True) for size in sizes]:
            pending.wait()

    def take(self, count, group, rank):
        return [int(self.recv(group, rank).sum()) for _ in range(count)]

    def share(self, size):
        got = self.broadcast(np.full(size, 1) if self._rank == 0 else None, groups=[("peers", None)])
        return int(got.sum())

    def put(self, channel, sizes):
        for pending in [channel.put(np.full(size, size), async_op=True) for size in sizes]:
            pending.wait()

    def get(self, channel, count):
        return [int(channel.get().sum()) for _ in range(count)]


@pytest.fixture(scope="module")
def peers(ray_nodes):
    for rank in range(3):
        ray_nodes.add(0, rank=rank)
    with Cluster(num_nodes=3, address=ray_nodes.address) as cluster:
        yield (
            cluster,
            Peer.create_group().launch(cluster, name="peers", placement_strategy=NodePlacementStrategy([0, 1, 2])),
        )


SIZES = {"a big one first": [BIG, SMALL, SMALL], "a big one between": [SMALL, BIG, SMALL, BIG]}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_messages_of_a_pair_keep_their_order(peers, sizes):
    _, group = peers
    sent = group.execute_on(0).give(sizes, "peers", 1)
    assert group.execute_on(1).take(len(sizes), "peers", 0).wait() == [[size * size for size in sizes]]
    sent.wait()


@pytest.mark.parametrize("size", [SMALL, 100_000, BIG], ids=["small", "large", "big"])
def test_a_broadcast_reaches_all_nodes(peers, size):
    _, group = peers
    assert group.share(size).wait() == [size] * 3


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_items_of_a_channel_on_another_node_keep_their_order(peers, sizes, request):
    cluster, group = peers
    channel = cluster.create_channel(request.node.name, node_rank=2)
    group.execute_on(0).put(channel, sizes)
    assert group.execute_on(1).get(channel, len(sizes)).wait() == [[size * size for size in sizes]]
    channel.close()
    again = cluster.create_channel(channel.name, maxsize=1, node_rank=1)
    again.put("one")
    assert again.full()


@pytest.mark.parametrize("rank", [-1, 3])
def test_a_channel_on_a_node_that_is_not_there_is_refused(peers, rank):
    cluster, _ = peers
    with pytest.raises(ValueError, match=f"cannot be on node {rank}: this job has 0 to 2"):
        cluster.create_channel("nowhere", node_rank=rank)
