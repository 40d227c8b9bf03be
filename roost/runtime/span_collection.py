"""Collecting what workers have recorded, from all nodes of a job, with the times of the driver's clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import ray

from roost.runtime.node_daemons import NodeDaemons
from roost.runtime.nodes import LiveNode
from roost.runtime.worker import WorkerGroup
from roost.trace.spans import Span, WorkerSpans
from roost.transport.failure import Address

FLUSH_LIMIT = 3.0  # seconds for workers to hand in what they recorded
BRIEFLY = 0.5  # the same, for those that are about to be ended


def flush(groups: Iterable[WorkerGroup], limit: float = FLUSH_LIMIT) -> None:
    """Let workers hand in what they have recorded; one that is in a long call is not waited for."""
    flushed = [host._roost_flush.remote() for group in groups for host in group.hosts]
    if flushed:
        ray.wait(flushed, num_returns=len(flushed), timeout=limit)


def collected(daemons: NodeDaemons, nodes: Sequence[LiveNode]) -> list[WorkerSpans]:
    """The spans that every node's daemon has of its workers."""
    workers = []
    for node, found in daemons.ask_all("spans"):
        # The driver's own daemon may come after those of the job's nodes.
        offset = nodes[node].report.clock_offset_ns if node < len(nodes) else 0
        for who, devices, spans, dropped in found:
            held = tuple((node, device) for device in devices)
            workers.append(WorkerSpans(who.group, who.rank, node, held, _earlier(spans, offset), dropped))
    return workers


def _earlier(spans: Iterable[Span], offset: int) -> tuple[Span, ...]:
    return tuple(span._replace(start_ns=span.start_ns - offset, end_ns=span.end_ns - offset) for span in spans)


def with_spans(workers: Sequence[WorkerSpans], more: Mapping[Address, Sequence[Span]], node: int) -> list[WorkerSpans]:
    """Workers with more spans of theirs; those of somebody who is no worker are of this node."""
    known = {Address(worker.component, worker.rank) for worker in workers}
    found = [
        worker._replace(spans=(*worker.spans, *more.get(Address(worker.component, worker.rank), ())))
        for worker in workers
    ]
    others = [
        WorkerSpans(who.group, who.rank, node, (), tuple(spans)) for who, spans in more.items() if who not in known
    ]
    return [*others, *found]
