"""Ratios, their medians and spread, and verdicts. Values in, values out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from runtime_process import NODES, ON_NODES
from verdicts import Verdict

MB = 1 << 20
LAUNCH_TARGET = 1.2
CALL_TARGET = 1.3
QUEUE_TARGET = 5.0
COPY_TARGET = 0.5
ONES = {
    "launch": "launch on the node",
    "accelerators": "launch on 16 accelerators",
    **{what: f"launch of {count} on {NODES} nodes" for what, count in ON_NODES.items()},
    "call": "call",
}
WAYS = {"channel": "channel", "send": "send/recv"}

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio of the two sides of each round: the median, the middle half of the rounds, and how many there were."""

    middle: float
    low: float
    high: float
    rounds: int


@dataclass(frozen=True, slots=True)
class Overhead:
    """Time of a runtime and of bare Ray: medians, and the ratio of those that ran one after the other."""

    side: str
    what: str
    seconds: float
    bare_seconds: float
    ratio: Ratio


@dataclass(frozen=True, slots=True)
class Throughput:
    """Seconds per item in one way, through Ray's queue and of a copy, and the ratios to both."""

    side: str
    way: str
    kind: str
    nbytes: int
    seconds: float
    queue_seconds: float
    copy_seconds: float
    to_queue: Ratio
    to_copy: Ratio

    @property
    def megabytes_a_second(self) -> float:
        return self.nbytes / self.seconds / 1e6


@dataclass(frozen=True, slots=True)
class Missing:
    """A measurement without a result, and the reason."""

    side: str
    what: str
    why: str


def ratio(values: Sequence[float]) -> Ratio:
    """The median of some ratios and the quarter points around it.

    >>> ratio([1, 2, 3, 4, 5])
    Ratio(middle=3, low=2, high=4, rounds=5)
    """
    ordered = sorted(values)
    quarter = len(ordered) // 4
    return Ratio(median(ordered), ordered[quarter], ordered[-1 - quarter], len(ordered))


def overhead(side: str, what: str, rows: Sequence[Row]) -> Overhead:
    return Overhead(
        side,
        what,
        median(row["seconds"] for row in rows),
        median(row["bare"] for row in rows),
        ratio([row["seconds"] / row["bare"] for row in rows]),
    )


def throughputs(side: str, way: str, rows: Sequence[Row]) -> tuple[Throughput, ...]:
    """One for each load, in the order of the first round."""
    loads = list(dict.fromkeys((row["kind"], row["nbytes"]) for row in rows))
    return tuple(throughput(side, way, [row for row in rows if (row["kind"], row["nbytes"]) == load]) for load in loads)


def throughput(side: str, way: str, rows: Sequence[Row]) -> Throughput:
    first = rows[0]
    return Throughput(
        side,
        way,
        first["kind"],
        first["nbytes"],
        median(row["seconds"] for row in rows),
        median(row["bare"] for row in rows),
        median(row["copy"] for row in rows),
        ratio([row["bare"] / row["seconds"] for row in rows]),
        ratio([row["copy"] / row["seconds"] for row in rows]),
    )


def verdicts(overheads: Sequence[Overhead], streams: Sequence[Throughput]) -> tuple[Verdict, ...]:
    """Every target of Roost for which there is a measurement."""
    return (
        *(_of_overhead(row) for row in overheads if row.side == "roost"),
        *(_of_queue(row) for row in _large(streams, lambda row: row.nbytes == MB)),
        *(_of_copy(row) for row in _large(streams, lambda row: row.nbytes == 64 * MB)),
    )


def _large(streams: Sequence[Throughput], wanted: Callable[[Throughput], bool]) -> list[Throughput]:
    return [row for row in streams if row.side == "roost" and wanted(row)]


def _of_overhead(row: Overhead) -> Verdict:
    limit = CALL_TARGET if row.what == "call" else LAUNCH_TARGET
    target = f"{ONES[row.what]}: at most {limit} times bare Ray"
    return Verdict(target, f"{row.ratio.middle:.2f}", row.ratio.middle <= limit)


def _of_queue(row: Throughput) -> Verdict:
    target = f"{WAYS[row.way]}, {row.kind}, 1 MB: at least {QUEUE_TARGET:.0f} times Ray's queue"
    return Verdict(target, f"{row.to_queue.middle:.1f}", row.to_queue.middle >= QUEUE_TARGET)


def _of_copy(row: Throughput) -> Verdict:
    target = f"{WAYS[row.way]}, {row.kind}, 64 MB: at least {COPY_TARGET} of a copy"
    return Verdict(target, f"{row.to_copy.middle:.2f}", row.to_copy.middle >= COPY_TARGET)
