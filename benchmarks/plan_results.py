"""Medians, factors and ratios of the measurements, and the verdicts. Values in, values out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from statistics import median
from typing import Any

from verdicts import Verdict

MILLION = 1_048_576
TARGET_SECONDS = 2.0
TARGET_MB = 1000.0
TARGET_FACTOR = 2.3
TARGET_RATIO = 500.0
TARGET_RATIO_NODES = 1024
UNWANTED = ("ray", "torch")

Sample = Mapping[str, Any]
"""The JSON object that one process printed."""


@dataclass(frozen=True, slots=True)
class Growth:
    """One size of cluster: medians over the runs, and the time as a multiple of that of half the size."""

    nodes: int
    processes: int
    seconds: float
    peak_mb: float
    factor: float | None
    runs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """One size of cluster on both sides; the ratio is the median of those of the pairs that ran one after the other."""

    nodes: int
    processes: int
    roost_seconds: float
    peer_seconds: float
    ratio: float
    roost_import_seconds: float
    peer_import_seconds: float
    roost_runs: tuple[float, ...]
    peer_runs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class CommandLine:
    """`roost plan` on a small file, compared with an interpreter that does nothing.

    `unwanted` are the modules that planning must not import and did; `installed` are those that it could have.
    """

    seconds: float
    interpreter_seconds: float
    runs: tuple[float, ...]
    modules: int
    unwanted: tuple[str, ...]
    installed: tuple[str, ...]


def doublings(first: int, last: int) -> tuple[int, ...]:
    """Sizes from the first, doubling, up to the last."""
    sizes = []
    while first <= last:
        sizes.append(first)
        first *= 2
    return tuple(sizes)


def growth_rows(samples: Mapping[int, Sequence[Sample]]) -> tuple[Growth, ...]:
    """Rows from the samples of each number of nodes, in the order given."""
    medians = {nodes: median(run["seconds"] for run in runs) for nodes, runs in samples.items()}
    factors = {after: medians[after] / medians[before] for before, after in pairwise(medians)}
    return tuple(
        Growth(
            nodes,
            runs[0]["processes"],
            medians[nodes],
            median(run["peak_mb"] for run in runs),
            factors.get(nodes),
            tuple(run["seconds"] for run in runs),
        )
        for nodes, runs in samples.items()
    )


def steepest(rows: Sequence[Growth]) -> Growth | None:
    """The row whose doubling cost most."""
    doubled = [row for row in rows if row.factor is not None]
    return max(doubled, key=lambda row: row.factor or 0.0, default=None)


def constant_cost_until(rows: Sequence[Growth]) -> int:
    """The most processes whose plan takes less than twice the time of the smallest: half of it is constant cost."""
    return max(row.processes for row in rows if row.seconds < 2 * rows[0].seconds)


def compare(nodes: int, pairs: Sequence[tuple[Sample, Sample]]) -> Comparison:
    """One row from pairs of samples, Roost's first."""
    ours, theirs = zip(*pairs, strict=True)
    return Comparison(
        nodes,
        len(ours[0]["rows"]),
        median(run["seconds"] for run in ours),
        median(run["seconds"] for run in theirs),
        median(their["seconds"] / our["seconds"] for our, their in pairs),
        median(run["import_seconds"] for run in ours),
        median(run["import_seconds"] for run in theirs),
        tuple(run["seconds"] for run in ours),
        tuple(run["seconds"] for run in theirs),
    )


def first_difference(ours: Sequence[Any], theirs: Sequence[Any]) -> str | None:
    """The first process that the two sides place differently; None where they agree."""
    for our, their in zip_longest(ours, theirs):
        if our != their:
            return f"rank, node, local hardware ranks: Roost {our}, peer {their}"
    return None


def imported_modules(importtime: str) -> tuple[str, ...]:
    """The modules named in what `-X importtime` wrote; its first line is a heading."""
    lines = [line.split("|") for line in importtime.splitlines() if line.startswith("import time:")]
    return tuple(parts[2].strip() for parts in lines[1:])


def unwanted_modules(modules: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in UNWANTED if any(module.split(".")[0] == name for module in modules))


def verdicts(
    growth: Sequence[Growth], comparisons: Sequence[Comparison], command_line: CommandLine
) -> tuple[Verdict, ...]:
    """Every target for which there is a measurement."""
    return (
        *(verdict for row in growth if row.processes == MILLION for verdict in _of_a_million(row)),
        *_of_doubling(steepest(growth)),
        *(_of_ratio(row) for row in comparisons if row.nodes == TARGET_RATIO_NODES),
        _of_imports(command_line),
    )


def _of_a_million(row: Growth) -> tuple[Verdict, Verdict]:
    target = f"{row.processes:,} processes within"
    return (
        Verdict(f"{target} {TARGET_SECONDS:.0f} s", f"{row.seconds:.2f} s", row.seconds <= TARGET_SECONDS),
        Verdict(f"{target} {TARGET_MB / 1000:.0f} GB", f"{row.peak_mb:.0f} MB", row.peak_mb <= TARGET_MB),
    )


def _of_doubling(worst: Growth | None) -> tuple[Verdict, ...]:
    if worst is None or worst.factor is None:
        return ()
    measured = f"at most {worst.factor:.2f} times (to {worst.processes:,} processes)"
    return (Verdict(f"a doubling costs at most {TARGET_FACTOR} times", measured, worst.factor <= TARGET_FACTOR),)


def _of_ratio(row: Comparison) -> Verdict:
    target = f"at least {TARGET_RATIO:.0f} times faster than the peer at {row.nodes:,} nodes"
    return Verdict(target, f"{row.ratio:,.0f} times", row.ratio >= TARGET_RATIO)


def _of_imports(result: CommandLine) -> Verdict:
    """A module that is not installed cannot have been imported, so the measurement says which are."""
    seen = " and ".join(result.unwanted) or "neither"
    could = " and ".join(result.installed) or "none"
    return Verdict("`roost plan` imports neither Ray nor torch", f"{seen} (installed: {could})", not result.unwanted)
