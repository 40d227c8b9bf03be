"""Measurements of the rollout benchmark, their ratios and verdicts. Values in, values out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from rollout_workload import Workload
from verdicts import Verdict

HERE, WORKERS, ALONE = "asyncio", "agent workers", "engine alone"
THREADS, SAME_ROUTE = "threads, OpenAI's route", "threads, Roost's route"
GROWTH_TARGET, GROWTH_FROM, GROWTH_TO = 8.0, 1, 64
THREADS_TARGET, THREADS_AT = 1.0, 256
FULL_TARGET, FULL_FROM = (
    0.9,
    2,
)  # the share of a batch that is filled by so many times as many episodes as it has places


@dataclass(frozen=True, slots=True)
class Measured:
    """Episodes that ran in one way, at one concurrency."""

    turn: int  # the round
    way: str
    concurrency: int
    episodes: int
    seconds: float
    batch: float  # requests in the engine's batch, on average
    queued: float  # requests that the engine has, but not in its batch
    busy: float  # share of the time in which the engine had a batch
    engine_cores: float
    agent_cores: float  # of the process of the driver, and of workers
    other_cores: float  # that other programs used

    @property
    def speed(self) -> float:
        """Episodes a second."""
        return self.episodes / self.seconds


@dataclass(frozen=True, slots=True)
class Row:
    """One way at one concurrency: the median of its rounds."""

    way: str
    concurrency: int
    episodes_per_second: float
    turns_per_second: float
    tokens_per_second: float
    batch: float
    busy: float
    engine_cores: float
    agent_ms_per_turn: float
    other_cores: float
    rounds: int


def rows(measured: Sequence[Measured], workload: Workload) -> list[Row]:
    kinds = sorted({(each.concurrency, each.way) for each in measured})
    return [_row([each for each in measured if (each.concurrency, each.way) == kind], workload) for kind in kinds]


def _row(runs: Sequence[Measured], workload: Workload) -> Row:
    speed = median(run.speed for run in runs)
    turns = workload.turns
    return Row(
        way=runs[0].way,
        concurrency=runs[0].concurrency,
        episodes_per_second=speed,
        turns_per_second=speed * turns,
        tokens_per_second=speed * workload.generated,
        batch=median(run.batch for run in runs),
        busy=median(run.busy for run in runs),
        engine_cores=median(run.engine_cores for run in runs),
        agent_ms_per_turn=median(1000 * run.agent_cores / (run.speed * turns) for run in runs),
        other_cores=median(run.other_cores for run in runs),
        rounds=len(runs),
    )


def ratios(measured: Sequence[Measured], this: tuple[str, int], other: tuple[str, int]) -> list[float]:
    """Speed-ups of one over the other, for each round that has both."""
    speeds = {(each.turn, each.way, each.concurrency): each.speed for each in measured}
    turns = sorted({each.turn for each in measured})
    return [
        speeds[turn, *this] / speeds[turn, *other]
        for turn in turns
        if (turn, *this) in speeds and (turn, *other) in speeds
    ]


def verdicts(measured: Sequence[Measured], places: int | None = None) -> list[Verdict]:
    """Verdicts on the measured runs; `places` is the engine's batch, where it is smaller than the episodes."""
    growth = ratios(measured, (HERE, GROWTH_TO), (HERE, GROWTH_FROM))
    judged = []
    if growth:
        target = f"episodes a second at {GROWTH_TO}: at least {GROWTH_TARGET:g} times those at {GROWTH_FROM}"
        judged.append(Verdict(target, spread(growth), median(growth) >= GROWTH_TARGET))
    for way in (THREADS, SAME_ROUTE):
        if beside := ratios(measured, (HERE, THREADS_AT), (way, THREADS_AT)):
            target = f"at {THREADS_AT}: at least as fast as a thread for each episode ({way})"
            judged.append(Verdict(target, spread(beside), median(beside) >= THREADS_TARGET))
    if places is not None:
        for size in sorted({each.concurrency for each in measured if each.concurrency >= FULL_FROM * places}):
            full = [each.batch / places for each in measured if (each.way, each.concurrency) == (HERE, size)]
            target = f"at {size}: a batch of {places} is at least {FULL_TARGET:.0%} full"
            judged.append(Verdict(target, spread(full), median(full) >= FULL_TARGET))
    return judged


def spread(found: Sequence[float]) -> str:
    """
    >>> spread([1.5, 1.0, 1.25])
    '1.25 (1.50, 1.00, 1.25)'
    """
    return f"{median(found):.2f} ({', '.join(f'{ratio:.2f}' for ratio in found)})"
