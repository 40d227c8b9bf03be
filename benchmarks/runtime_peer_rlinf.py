"""RLinf's side of the runtime measurements, run by the interpreter that has `rlinf`."""

from __future__ import annotations

import itertools
from typing import Any

import runtime_bare
from rlinf.scheduler import Channel, Cluster, NodePlacementStrategy, Worker
from runtime_bare import IN_FLIGHT, Load


class Trivial(runtime_bare.Trivial, Worker): ...


class Producer(runtime_bare.Producer, Worker): ...


class Consumer(runtime_bare.Consumer, Worker): ...


class Side:
    """Groups of workers on the node. The peer has one cluster for the process, which connects to Ray itself."""

    def __init__(self, on_accelerators: bool = False) -> None:
        if on_accelerators:
            raise NotImplementedError(
                "rlinf 0.3.0 finds accelerators by their drivers; it cannot be told of simulated ones"
            )
        self._cluster = Cluster(num_nodes=1)
        self._numbers = itertools.count()

    def begin(self) -> None: ...

    def launch(self, count: int) -> Any:
        name = f"trivial-{next(self._numbers)}"
        return Trivial.create_group().launch(self._cluster, NodePlacementStrategy([0] * count), name=name)

    def answer(self, group: Any) -> list[int]:
        return group.answer().wait()

    def end(self, group: Any) -> None:
        group._close()


class Pair:
    """Two workers and a connection between them."""

    def __init__(self, side: Side, way: str) -> None:
        cluster, where = side._cluster, NodePlacementStrategy([0])
        self._producer = Producer.create_group().launch(cluster, where, name="producer")
        self._consumer = Consumer.create_group().launch(cluster, where, name="consumer")
        self._channel = Channel.create("items", maxsize=IN_FLIGHT) if way == "channel" else None

    def seconds(self, load: Load) -> float:
        if self._channel is not None:
            end = self._consumer.through_channel(self._channel, load)
            start = self._producer.through_channel(self._channel, load)
        else:
            end, start = self._consumer.by_send(load), self._producer.by_send(load)
        return end.wait()[0] - start.wait()[0]

    def copy_seconds(self, nbytes: int) -> float:
        return self._producer.copy_seconds(nbytes).wait()[0]
