"""Bare Ray, the baseline of both runtimes, and the loops that every side runs.

Loaded by every worker of every side, so it imports nothing that the measurement does not need.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import ray

IN_FLIGHT = 4  # items that a queue or channel holds at most: the same for every side
LIMIT = 120.0  # seconds for any one wait


class Load(NamedTuple):
    """A stream: number and bytes of its items, which are NumPy arrays or torch tensors."""

    kind: str
    nbytes: int
    count: int


def start_ray(accelerators: int = 0, nodes: int = 1) -> Any:
    """A private Ray of this process; close it with `shutdown()`.

    Further nodes are processes on this machine, as in Ray's own tests.
    """
    from ray.cluster_utils import Cluster as RayCluster

    os.environ["ROOST_NODE_RANK"] = "0"
    head = {"num_cpus": os.cpu_count(), "num_gpus": accelerators, "object_store_memory": 2 << 30}
    started = RayCluster(initialize_head=True, head_node_args={**head, "include_dashboard": False})
    for rank in range(1, nodes):
        os.environ["ROOST_NODE_RANK"] = str(rank)  # inherited by the processes of the node
        started.add_node(num_cpus=1, object_store_memory=100 << 20)
    os.environ["ROOST_NODE_RANK"] = "0"
    os.environ["RAY_ADDRESS"] = started.address
    return started


def make_item(load: Load) -> Any:
    import numpy as np

    array = np.arange(load.nbytes, dtype=np.uint8)
    if load.kind == "numpy":
        return array
    import torch

    return torch.from_numpy(array)


def check_item(item: Any, load: Load) -> None:
    """Check that an item arrived whole, without reading all of it: reading is not measured."""
    last = load.nbytes - 1
    if len(item) != load.nbytes or int(item[0]) != 0 or int(item[last]) != last % 256:
        raise RuntimeError(f"sent {load.nbytes:,} bytes and got something else: {item!r:.100}")


def produce(put: Callable[[Any], object], load: Load) -> float:
    """Put all items; return when the first put began, by the monotonic clock that all processes share."""
    item = make_item(load)
    start = time.monotonic()
    for _ in range(load.count):
        put(item)
    return start


def consume(get: Callable[[], Any], load: Load) -> float:
    """Get all items; return when the last one arrived."""
    if load.kind == "torch":
        import torch  # noqa: F401  # before the clock starts
    for _ in range(load.count):
        check_item(get(), load)
    return time.monotonic()


def copy_seconds(nbytes: int) -> float:
    """Seconds of a copy between two arrays that were written before: the best of a few."""
    import numpy as np

    source, target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
    repeats = max(1, min(1000, (64 << 20) // nbytes))
    runs = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(repeats):
            np.copyto(target, source)
        runs.append((time.perf_counter() - start) / repeats)
    return min(runs)


class Trivial:
    """A minimal worker."""

    def answer(self) -> int:
        return os.getpid()


class Producer:
    """Puts into a queue or a channel; as a runtime's worker it can also send."""

    def through_channel(self, channel: Any, load: Load) -> float:
        return produce(channel.put, load)

    def by_send(self, load: Load) -> float:
        return produce(lambda item: self.send(item, "consumer", 0), load)

    def copy_seconds(self, nbytes: int) -> float:
        return copy_seconds(nbytes)


class Consumer:
    """Gets from a queue or a channel; as a runtime's worker it can also receive."""

    def through_channel(self, channel: Any, load: Load) -> float:
        return consume(channel.get, load)

    def by_send(self, load: Load) -> float:
        return consume(lambda: self.recv("producer", 0), load)


def _look() -> None: ...


def _nodes() -> list[Any]:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in ray.nodes()]


class Bare:
    """Ray's own actors and queue."""

    def begin(self) -> None:
        """On several nodes, run a task on each: runtimes that probe nodes also leave an idle process of Ray there."""
        if len(ray.nodes()) > 1:
            look = ray.remote(_look)
            ray.get([look.options(num_cpus=0, scheduling_strategy=where).remote() for where in _nodes()])

    def launch(self, count: int) -> Sequence[Any]:
        actors = [ray.remote(Trivial).options(num_cpus=0, scheduling_strategy=where) for where in _nodes()]
        return [actors[rank * len(actors) // count].remote() for rank in range(count)]

    def answer(self, group: Sequence[Any]) -> list[int]:
        return ray.get([actor.answer.remote() for actor in group])

    def end(self, group: Sequence[Any]) -> None:
        for actor in group:
            ray.kill(actor)


class BarePair:
    """Two bare actors and a queue between them."""

    def __init__(self) -> None:
        from ray.util.queue import Queue

        self._producer = ray.remote(Producer).options(num_cpus=0).remote()
        self._consumer = ray.remote(Consumer).options(num_cpus=0).remote()
        self._queue = Queue(IN_FLIGHT, actor_options={"num_cpus": 0})

    def seconds(self, load: Load) -> float:
        """Seconds from the start of the first put to the end of the last get."""
        end = self._consumer.through_channel.remote(self._queue, load)
        start = self._producer.through_channel.remote(self._queue, load)
        began, ended = ray.get([start, end], timeout=LIMIT)
        return ended - began
