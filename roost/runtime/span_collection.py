"""Collect the spans of workers from all nodes of a job, with times on the driver's clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import ray

from roost.runtime.node_daemons import NodeDaemons
from roost.runtime.nodes import LiveNode
from roost.runtime.worker import WorkerGroup
from roost.trace.spans import Span, WorkerSpans
from roost.transport.failure import Address

FLUSH_LIMIT = 3.0  # seconds for workers to flush their spans
BRIEFLY = 0.5  # the same, for workers about to be stopped


def flush(groups: Iterable[WorkerGroup], limit: float = FLUSH_LIMIT) -> None:
    """Ask workers to flush their spans, without waiting for one that is in a long call."""
    flushed = [host._roost_flush.remote() for group in groups for host in group.hosts]
    if flushed:
        ray.wait(flushed, num_returns=len(flushed), timeout=limit)


def collected(daemons: NodeDaemons, nodes: Sequence[LiveNode]) -> list[WorkerSpans]:
    """Spans of all workers, from every node daemon."""
    workers = []
    for node, found in daemons.ask_all("spans"):
        # The driver's own daemon may follow those of the job's nodes.
        offset = nodes[node].report.clock_offset_ns if node < len(nodes) else 0
        for who, devices, spans, dropped in found:
            held = tuple((node, device) for device in devices)
            workers.append(WorkerSpans(who.group, who.rank, node, held, _earlier(spans, offset), dropped))
    return workers


def _earlier(spans: Iterable[Span], offset: int) -> tuple[Span, ...]:
    return tuple(span._replace(start_ns=span.start_ns - offset, end_ns=span.end_ns - offset) for span in spans)


def with_spans(workers: Sequence[WorkerSpans], more: Mapping[Address, Sequence[Span]], node: int) -> list[WorkerSpans]:
    """Add spans to workers; spans of any other address become a new entry on this node."""
    known = {Address(worker.component, worker.rank) for worker in workers}
    found = [
        worker._replace(spans=(*worker.spans, *more.get(Address(worker.component, worker.rank), ())))
        for worker in workers
    ]
    others = [
        WorkerSpans(who.group, who.rank, node, (), tuple(spans)) for who, spans in more.items() if who not in known
    ]
    return [*others, *found]
