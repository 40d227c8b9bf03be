"""Speeds after the warm-up, shares of phases, ratios and verdicts. Values in, values out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean, median
from typing import Any

from verdicts import Verdict

PHASES = ("generate", "switch", "score", "learn", "sync")
PEER_TARGETS = {"peer": 1.5, "small": 1.0}
STALENESS_TARGET = 1.3
REWARD_NOISE = 0.05

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Speed:
    """Speed of a run after its first step."""

    samples_per_second: float
    tokens_per_second: float  # that were generated
    tokens_per_sample: float
    reward: float  # of the last step


@dataclass(frozen=True, slots=True)
class StaleRun:
    """A run of the loop with some staleness."""

    seconds_per_step: float
    reward: float  # of the last quarter of its steps
    staleness: float  # the mean


def speed(rows: Sequence[Row], samples: int) -> Speed:
    """Speed of the fastest step after the first: other load on the machine only makes steps slower.

    >>> rows = [{"time": 0.0, "tokens": 9, "reward": 0.0}, {"time": 2.0, "tokens": 8, "reward": 1.0}]
    >>> speed(rows, samples=4)
    Speed(samples_per_second=2.0, tokens_per_second=4.0, tokens_per_sample=2.0, reward=1.0)
    """
    seconds, tokens = min(zip(step_seconds(rows), (row["tokens"] for row in rows[1:]), strict=True))
    return Speed(samples / seconds, tokens / seconds, tokens / samples, rows[-1]["reward"])


def step_seconds(rows: Sequence[Row]) -> list[float]:
    """Seconds from the end of each step to the end of the next; none for the first, which warms up."""
    return [row["time"] - before["time"] for before, row in pairwise(rows)]


def of_metrics(rows: Sequence[Row]) -> list[Row]:
    """Roost's metrics in the form that `speed` takes."""
    return [{"time": row["time"], "tokens": row["tokens/generated"], "reward": row["reward/mean"]} for row in rows]


def phase_shares(metrics: Sequence[Row]) -> dict[str, float]:
    """Share of the step time of each phase, over all steps but the first; the driver takes the rest."""
    whole = sum(row["time/step"] for row in metrics[1:])
    shares = {name: sum(row.get(f"time/{name}", 0.0) for row in metrics[1:]) / whole for name in PHASES}
    return {**shares, "rest": 1 - sum(shares.values())}


def stale_run(metrics: Sequence[Row]) -> StaleRun:
    last = metrics[-max(1, len(metrics) // 4) :]
    reward, staleness = mean(row["reward/mean"] for row in last), mean(row["staleness/mean"] for row in metrics)
    return StaleRun(median(step_seconds(metrics)), reward, staleness)


def of_peer(part: str, ours: Sequence[Speed], theirs: Sequence[Speed]) -> Verdict:
    ratios = [one.samples_per_second / other.samples_per_second for one, other in zip(ours, theirs, strict=True)]
    target = PEER_TARGETS[part]
    return _verdict(f"{part}: samples a second: at least {target} times TRL's", ratios, target)


def of_staleness(synchronous: Sequence[StaleRun], others: Sequence[StaleRun]) -> tuple[Verdict, Verdict]:
    ratios = [one.seconds_per_step / other.seconds_per_step for one, other in zip(synchronous, others, strict=True)]
    before, after = [run.reward for run in synchronous], [run.reward for run in others]
    noise = max(REWARD_NOISE, max(before) - min(before))
    apart = median(after) - median(before)
    reward = f"{median(after):.3f} against {median(before):.3f}"
    return (
        _verdict(
            f"steps a second with staleness: at least {STALENESS_TARGET} times those without", ratios, STALENESS_TARGET
        ),
        Verdict(f"reward at the end: at most {noise:.2f} below that without", reward, apart >= -noise),
    )


def _verdict(target: str, ratios: Sequence[float], least: float) -> Verdict:
    each = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    return Verdict(target, f"{median(ratios):.2f} ({each})", median(ratios) >= least)
