"""Utilization of an engine by concurrent episodes: asyncio, a thread for each episode, and agent workers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rollout_results import ALONE, HERE, SAME_ROUTE, THREADS, WORKERS, Measured, Row, ratios, rows, spread, verdicts
from rollout_watch import Cores, looks_between, means, watching
from rollout_ways import Completions, Episodes, TokenRoute, engine, forget, in_workers, run_alone, run_in_threads
from rollout_workload import Workload, check, write_model
from runtime import wait_for_quiet
from verdicts import JsonFile, print_verdicts, write_results

from roost.engines import Fleet

PARTS = ("scale", "threads", "workers")
CONCURRENCY = (1, 4, 16, 64, 256)
COMPARED = (64, 256)  # concurrencies at which the other ways are compared with asyncio, if they are measured
WORKERS_AT = 64
EQUAL = {"RAY_worker_niceness": "0"}  # by default Ray's workers have a lower priority than the compared processes

Way = Callable[[int, int], Awaitable[list[int]]]  # runs this many episodes at this concurrency


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; each runs all ways once.")] = 3,
    concurrency: Annotated[list[int] | None, typer.Option(help="Episodes at a time; several may be given.")] = None,
    episodes: Annotated[int, typer.Option(min=1, help="Episodes of a round, for each at a time.")] = 4,
    turns: Annotated[int, typer.Option(min=1, help="Turns of an episode.")] = 4,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a turn.")] = 16,
    wait: Annotated[float, typer.Option(min=0, help="Seconds of an environment's step.")] = 0.05,
    hidden: Annotated[int, typer.Option(min=64, help="The model's width, a multiple of 64.")] = 128,
    layers: Annotated[int, typer.Option(min=1, help="The model's layers.")] = 2,
    threads: Annotated[int, typer.Option(min=1, help="Threads of the engine.")] = 1,
    batch: Annotated[int | None, typer.Option(min=1, help="Largest batch of the engine; default: no limit.")] = None,
    patience: Annotated[int, typer.Option(min=0, help="Seconds to wait for an idle machine before each.")] = 0,
    only: Annotated[list[str] | None, typer.Option(help="scale, threads or workers; all if left out.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Measure on the CPU; print results and targets."""
    unknown = set(only or ()) - set(PARTS)
    if unknown:
        raise SystemExit(f"there is no part {unknown.pop()}; there are {', '.join(PARTS)}")
    console, progress = Console(highlight=False), Console(stderr=True, highlight=False, style="dim")
    workload = Workload(turns=turns, tokens=tokens, wait=wait)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as made:
        folder = Path(made)
        model = write_model(folder / "model", hidden, layers)
        bench = Bench(workload, model, folder, episodes, patience, progress)
        measured = asyncio.run(bench.run(rounds, concurrency or CONCURRENCY, only or PARTS, threads, batch))
    judged = verdicts(measured, batch)
    found = rows(measured, workload)
    report(found, measured, console)
    print_verdicts(judged, console)
    if json_file is not None:
        results = {"rows": [asdict(row) for row in found], "measured": [asdict(each) for each in measured]}
        write_results(json_file, {"workload": asdict(workload), **results}, judged)


class Bench:
    """Runs episodes in all ways in turn, on one engine that another process watches."""

    def __init__(
        self, workload: Workload, model: Path, folder: Path, per_slot: int, patience: float, progress: Console
    ) -> None:
        self._workload, self._model, self._folder = workload, model, folder
        self._per_slot, self._patience, self._progress = per_slot, patience, progress

    async def run(
        self, rounds: int, sizes: Sequence[int], parts: Sequence[str], threads: int, batch: int | None
    ) -> list[Measured]:
        async with engine(self._model, self._folder, threads, batch or max(sizes)) as fleet:
            (member,) = fleet.pool.members.values()
            url, cores = member.engine.url, Cores(member.owner.pid)
            with watching(url, self._looks):
                async with self._ways(fleet, url, parts) as ways:
                    await self._warm_up(ways, max(sizes))
                    return [
                        await self._measured(turn, way, ways[way], size, url, cores)
                        for turn in range(rounds)
                        for size in sizes
                        for way in in_turn(ways, turn)
                        if is_measured(way, size, sizes)
                    ]

    @property
    def _looks(self) -> Path:
        return self._folder / "looks"

    @contextlib.asynccontextmanager
    async def _ways(self, fleet: Fleet, url: str, parts: Sequence[str]) -> AsyncIterator[dict[str, Way]]:
        async with contextlib.AsyncExitStack() as stack:
            workload, episodes = self._workload, Episodes(fleet, self._workload)
            ways: dict[str, Way] = {HERE: partial(episodes.run_episode, episodes.here)}
            if "scale" in parts:
                ways[ALONE] = in_thread(partial(run_alone, url, workload))
            if "threads" in parts:
                ways[THREADS] = in_thread(partial(run_in_threads, url, Completions(), workload))
                ways[SAME_ROUTE] = in_thread(partial(run_in_threads, url, TokenRoute(), workload))
            if "workers" in parts:
                runner = await stack.enter_async_context(in_workers(episodes, workload, self._model))
                ways[WORKERS] = partial(episodes.run_episode, runner)
            yield ways

    async def _warm_up(self, ways: Mapping[str, Way], size: int) -> None:
        self._progress.print("warming up")
        for way, run_episodes in ways.items():
            at_a_time = min(size, WORKERS_AT) if way == WORKERS else size
            await run_episodes(at_a_time, at_a_time)

    async def _measured(self, turn: int, way: str, run_episodes: Way, size: int, url: str, cores: Cores) -> Measured:
        await asyncio.to_thread(forget, url)
        if self._patience:
            await asyncio.to_thread(wait_for_quiet, self._patience)
        count = self._per_slot * max(size, 2)
        before, begin = cores.used(), time.monotonic()
        made = await run_episodes(count, size)
        end, after = time.monotonic(), cores.used()
        check(self._workload, made)
        batch, queued, busy = means(looks_between(self._looks, begin, end))
        seconds = end - begin
        share = [(used - used_before) / seconds for used, used_before in zip(after, before, strict=True)]
        measured = Measured(turn, way, size, count, seconds, batch, queued, busy, *share)
        self._progress.print(f"round {turn + 1}, {size} at a time, {way}: {measured.speed:.2f} episodes/s")
        return measured


def in_thread(run_episodes: Callable[[int, int], list[int]]) -> Way:
    """A way of a blocking function, which runs in a thread."""

    async def way(count: int, concurrency: int) -> list[int]:
        return await asyncio.to_thread(run_episodes, count, concurrency)

    return way


def in_turn(ways: Mapping[str, Way], turn: int) -> list[str]:
    """The order of the ways changes each round."""
    return list(ways) if turn % 2 == 0 else list(ways)[::-1]


def is_measured(way: str, size: int, sizes: Sequence[int]) -> bool:
    """Asyncio and threads everywhere; the rest where it says something."""
    if way == ALONE:
        return size == max(sizes)
    if way == WORKERS:
        return size == WORKERS_AT
    return way != SAME_ROUTE or size in COMPARED


def report(found: Sequence[Row], measured: Sequence[Measured], console: Console) -> None:
    table = Table("at a time", "", "episodes/s", "turns/s", "tokens/s", "rounds", title="Speed", title_justify="left")
    costs = Table("at a time", "", "batch", "busy", "engine", "runner", "others", title="Engine and cores")
    costs.title_justify = "left"
    costs.caption = "batch: requests in it; engine, others: cores; runner: its own ms of a core for a turn"
    for row in found:
        who = str(row.concurrency), row.way
        speeds = f"{row.episodes_per_second:.2f}", f"{row.turns_per_second:.1f}", f"{row.tokens_per_second:,.0f}"
        table.add_row(*who, *speeds, str(row.rounds))
        batch, cores = (f"{row.batch:.1f}", f"{row.busy:.0%}"), f"{row.engine_cores:.2f}"
        costs.add_row(*who, *batch, cores, f"{row.agent_ms_per_turn:.2f}", f"{row.other_cores:.2f}")
    console.print(table)
    console.print(costs)
    beside = Table("", "times as fast, in each round", title="Asyncio against others", title_justify="left")
    for way, sizes in ((THREADS, CONCURRENCY), (SAME_ROUTE, COMPARED), (WORKERS, (WORKERS_AT,))):
        for size in sizes:
            if compared := ratios(measured, (HERE, size), (way, size)):
                beside.add_row(f"{size}, {way}", spread(compared))
    for size in COMPARED:
        if compared := ratios(measured, (HERE, size), (ALONE, max(each.concurrency for each in measured))):
            beside.add_row(f"{size}, {ALONE} with a full batch", spread(compared))
    console.print(beside)


if __name__ == "__main__":
    os.environ.update(EQUAL)
    typer.run(main)
