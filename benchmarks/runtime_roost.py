"""Roost's side of the runtime measurements."""

from __future__ import annotations

from typing import Any

import runtime_bare
from runtime_bare import IN_FLIGHT, LIMIT, Load

from roost import Worker


class Trivial(runtime_bare.Trivial, Worker): ...


class Producer(runtime_bare.Producer, Worker): ...


class Consumer(runtime_bare.Consumer, Worker): ...


class Side:
    """Groups of workers, on the nodes or on simulated accelerators."""

    def __init__(self, on_accelerators: bool = False, nodes: int = 1) -> None:
        import ray

        ray.init(namespace="roost", log_to_driver=False, logging_level="ERROR")
        self._on_accelerators, self._nodes = on_accelerators, nodes
        self._cluster: Any = None

    def begin(self) -> None:
        """A new cluster for each launch, so that each one reserves its resources."""
        from roost import Cluster

        self._cluster = Cluster(num_nodes=self._nodes)

    def launch(self, count: int) -> Any:
        from roost import NodePlacementStrategy, PackedPlacementStrategy

        ranks = [rank * self._nodes // count for rank in range(count)]
        where = PackedPlacementStrategy(0, count - 1) if self._on_accelerators else NodePlacementStrategy(ranks)
        return Trivial.create_group().launch(self._cluster, where, name="trivial")

    def answer(self, group: Any) -> list[int]:
        return group.answer().wait()

    def end(self, group: Any) -> None:
        group.close()
        self._cluster.shutdown()


class Pair:
    """Two workers and a connection between them."""

    def __init__(self, side: Side, way: str) -> None:
        from roost import NodePlacementStrategy

        side.begin()
        cluster, where = side._cluster, NodePlacementStrategy([0])
        self._producer = Producer.create_group().launch(cluster, where, name="producer")
        self._consumer = Consumer.create_group().launch(cluster, where, name="consumer")
        self._channel = cluster.create_channel("items", maxsize=IN_FLIGHT) if way == "channel" else None

    def seconds(self, load: Load) -> float:
        if self._channel is not None:
            end = self._consumer.through_channel(self._channel, load)
            start = self._producer.through_channel(self._channel, load)
        else:
            end, start = self._consumer.by_send(load), self._producer.by_send(load)
        return end.wait(LIMIT)[0] - start.wait(LIMIT)[0]

    def copy_seconds(self, nbytes: int) -> float:
        return self._producer.copy_seconds(nbytes).wait(LIMIT)[0]
