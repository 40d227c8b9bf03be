"""Engines that join and leave a run: as `roost scale` asks, and when a node with engines is lost."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from roost.config.findings import counted
from roost.config.train import TrainSettings
from roost.engines.command import ServerSpec
from roost.engines.fleet import Fleet
from roost.engines.members import EngineState
from roost.engines.protocol import InFlight
from roost.engines.worker import EngineGroup
from roost.placement.plan import Plan
from roost.placement.rescale import Rescale, scaled, without_nodes
from roost.placement.routes import ServerRoute
from roost.runtime.cluster import Cluster
from roost.runtime.worker import WorkerGroup
from roost.trainer.records.run_folder import RunFolder
from roost.trainer.records.scale_requests import Change, ScaleAnswer, ScaleRequests, ScaleState
from roost.trainer.setup import ROLLOUT, RunSetup, run_setup
from roost.transport.context import FailureKind, WorkerFailed

LOOK_EVERY_S = 0.5
DEVICE_LIMIT_S = 20.0  # to wait for accelerators that other jobs of the Ray cluster hold
SHARED = (
    "the engines of this run take turns with learners on the same accelerators; only engines with accelerators of "
    "their own join and leave"
)


class ScaleRefused(Exception):
    """A change that cannot be made; the run goes on as it was."""


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """Worker of an engine: a rank of the group that was launched with the run, or a group of its own."""

    group: WorkerGroup
    rank: int


def names_after(change: Rescale, before: Sequence[str]) -> list[str]:
    """Engine names by rank in the new plan: engines that stay keep theirs, new ones get the lowest free numbers."""
    kept = {new: before[old] for (part, old), new in change.kept.items() if part == ROLLOUT}
    free = (name for number in range(10**9) if (name := f"{ROLLOUT}-{number}") not in kept.values())
    return [kept[rank] if rank in kept else next(free) for rank in range(change.plan[ROLLOUT].world_size)]


def leaving_ranks(count: int, failed: Collection[int], world_size: int) -> list[int]:
    """Ranks that leave: engines that have failed first, then the highest.

    >>> leaving_ranks(2, failed=[0], world_size=4)
    [0, 3]
    """
    others = [rank for rank in reversed(range(world_size)) if rank not in failed]
    return sorted([*failed, *others][:count])


class ElasticEngines:
    """Adds and removes engines of a running run, and keeps its plan file up to date."""

    def __init__(
        self,
        cluster: Cluster,
        fleet: Fleet,
        plan: Plan,
        engines: EngineGroup,
        group: WorkerGroup,
        routes: dict[str, ServerRoute],
        setup: RunSetup,
        settings: TrainSettings,
        run: RunFolder,
        note: Callable[[str], None],
    ) -> None:
        self._cluster, self._fleet, self._engines, self._routes = cluster, fleet, engines, routes
        self._setup, self._settings, self._run, self._note = setup, settings, run, note
        self._plan = plan
        self._names = [spec.name for spec in engines.servers]  # by rank in the plan
        self._processes = {name: EngineProcess(group, rank) for rank, name in enumerate(self._names)}
        self._requests = ScaleRequests(run.path)
        self._lost: frozenset[int] = frozenset()

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Context in which requests and losses of nodes are handled."""
        self._run.write_plan(self._plan.to_json())  # an earlier attempt may have written another
        self._requests.clear()
        if not self._setup.switch.is_shared:
            # Nodes without a process of the run are reported by their own name.
            for group in (ROLLOUT, *(f"node {rank}" for rank in range(self._cluster.num_nodes))):
                self._cluster.set_expendable(group, [FailureKind.NODE_LOST])
        task = asyncio.create_task(self._serve())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _serve(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            try:
                await self._go_on_without(self._cluster.lost_nodes - self._lost)
                taken = self._requests.take()
                if taken is not None:
                    await self._answer(*taken)
            except Exception as error:  # such as one of the folder's file system; the run itself goes on
                self._note(f"a change of engines failed: {error}")

    # Requests -----------------------------------------------------------------------------------------------------

    async def _answer(self, name: str, changes: Sequence[Change]) -> None:
        lines: list[str] = []

        def say(text: str) -> None:
            lines.append(text)
            self._requests.answer(name, ScaleAnswer(ScaleState.WORKING, tuple(lines)))

        state, why = ScaleState.REFUSED, "the run ended meanwhile"
        try:
            await self._scale(changes, say)
            state, why = ScaleState.APPLIED, ""
        except Exception as error:  # whatever goes wrong, the run goes on with the engines it has
            why = str(error) or type(error).__name__
            self._note(f"roost scale was refused: {why}")
        finally:
            self._requests.answer(name, ScaleAnswer(state, (*lines, why) if why else tuple(lines)))

    async def _scale(self, changes: Sequence[Change], say: Callable[[str], None]) -> None:
        if self._setup.switch.is_shared:
            raise ScaleRefused(SHARED)
        others = [change.component for change in changes if change.component != ROLLOUT]
        if others or len(changes) != 1:
            raise ScaleRefused(f"only {ROLLOUT} changes while a run goes on, by one change at a time")
        count = self._plan[ROLLOUT].world_size
        amount = changes[0].amount(count)
        if not amount:
            say(f"{ROLLOUT} has {counted(count, 'engine')} already")
            return
        members = self._fleet.pool.members
        failed = [rank for rank, name in enumerate(self._names) if members[name].state is EngineState.FAILED]
        leaving = {ROLLOUT: leaving_ranks(-amount, failed, count)} if 0 < -amount < count else None
        change = scaled(self._plan, {ROLLOUT: amount}, leaving)
        for line in change.lines():
            say(line)
        names = names_after(change, self._names)
        if amount > 0:
            self._use_routes(change.plan, names)
            for line in await self._start(change, names):
                say(line)
        else:
            await self._end([self._names[rank] for part, rank in change.removed], InFlight.DROP)
        self._adopt(change.plan, names)
        self._note("; ".join(["roost scale", *change.lines()]))

    # Lost nodes ---------------------------------------------------------------------------------------------------

    async def _go_on_without(self, lost: frozenset[int]) -> None:
        """Remove the engines of lost nodes, and place them again where accelerators are free."""
        self._lost |= lost
        if not lost or self._setup.switch.is_shared:
            return
        # Read now: removing a group drops its failures.
        loss = WorkerFailed(found for found in self._cluster.failures if found.kind is FailureKind.NODE_LOST)
        try:
            change = without_nodes(self._plan, self._lost)
            if any(part != ROLLOUT for part, _ in (*change.removed, *change.added)):
                self._cluster.give_up(loss)  # learners and other workers change only in a new attempt
                return
            gone = [self._names[rank] for _, rank in change.removed]
            are_all_gone = len(gone) == len(self._names)
            if not are_all_gone:
                await self._end(gone, None)
            plan, names, lines = await self._replaced(change)
            if are_all_gone:
                await self._end(gone, None)
        except Exception as error:
            self._note(f"the run cannot go on without {counted(len(lost), 'lost node')}: {error}")
            self._cluster.give_up(loss)
            return
        self._adopt(plan, names)
        self._note("; ".join(["the run goes on", *lines]))

    async def _replaced(self, change: Rescale) -> tuple[Plan, list[str], list[str]]:
        """Start the engines that a change adds, or go on without them; return plan, engine names and the change."""
        names = names_after(change, self._names)
        self._use_routes(change.plan, names)
        try:
            await self._start(change, names)
        except Exception as error:
            self._note(f"engines of a lost node cannot be placed again: {error}")
            added = [rank for part, rank in change.added]
            fewer = scaled(change.plan, {ROLLOUT: -len(added)}, {ROLLOUT: added})
            return fewer.plan, names_after(fewer, names), [*change.lines(), *fewer.lines()]
        return change.plan, names, change.lines()

    # Effects ------------------------------------------------------------------------------------------------------

    def _use_routes(self, plan: Plan, names: Sequence[str]) -> None:
        """Tell the learners the weight route to each engine, before one of them takes weights."""
        setup = run_setup(plan, self._settings, self._setup.on_gpu)
        self._routes.update(zip(names, setup.engines.routes, strict=True))

    async def _start(self, change: Rescale, names: Sequence[str]) -> list[str]:
        """Start all engines that a change adds, or none; return a line about each."""
        ranks = [rank for part, rank in change.added if part == ROLLOUT]
        servers = run_setup(change.plan, self._settings, self._setup.on_gpu).engines.servers
        groups: dict[str, tuple[EngineGroup, WorkerGroup]] = {}
        try:
            for rank in ranks:
                spec = replace(servers[rank], name=names[rank])
                groups[spec.name] = await self._launch(change.plan, rank, spec)
            adding = [self._fleet.add(engines.owners(group)[0]) for engines, group in groups.values()]
            outcomes = await asyncio.gather(*adding, return_exceptions=True)
            for outcome in outcomes:
                if isinstance(outcome, BaseException):
                    raise outcome
        except BaseException:  # also when the run ends meanwhile
            await self._undo({name: group for name, (_, group) in groups.items()})
            raise
        self._processes |= {name: EngineProcess(group, 0) for name, (_, group) in groups.items()}
        return [_joined_line(name, outcome) for name, outcome in zip(groups, outcomes, strict=True)]

    async def _undo(self, groups: Mapping[str, WorkerGroup]) -> None:
        """Remove engines that have joined, and close all groups. Errors are only noted, as one is being raised."""
        for in_flight in (InFlight.DROP, None):  # None: also if no other engine has the weights
            joined = [name for name in groups if name in self._fleet.pool.members]
            if joined:
                await self._noting_errors(self._fleet.remove(joined, in_flight))
        for group in groups.values():
            await self._noting_errors(asyncio.to_thread(group.close))

    async def _noting_errors(self, action: Awaitable[object]) -> None:
        try:
            await action
        except Exception as error:
            self._note(str(error) or type(error).__name__)

    async def _launch(self, plan: Plan, rank: int, spec: ServerSpec) -> tuple[EngineGroup, WorkerGroup]:
        engines = self._engines.another(spec)
        options = engines.options(spec.name)[spec.name]
        workers = engines.workers()
        part = plan[ROLLOUT]
        launch = self._cluster.launch_one
        return engines, await asyncio.to_thread(launch, workers, part, rank, spec.name, options, DEVICE_LIMIT_S)

    async def _end(self, names: Sequence[str], in_flight: InFlight | None) -> None:
        """Remove engines and end their workers; raises only if the fleet keeps them."""
        try:
            await self._fleet.remove(names, in_flight)
        except Exception as error:
            if any(name in self._fleet.pool.members for name in names):
                raise
            self._note(str(error))  # they are out of the fleet, and their servers end with their workers
        for name in names:
            process = self._processes.pop(name)
            end = partial(self._cluster.end_worker, process.group, process.rank)
            await self._noting_errors(asyncio.to_thread(end if process.group.name == ROLLOUT else process.group.close))

    def _adopt(self, plan: Plan, names: Sequence[str]) -> None:
        self._plan, self._names = plan, list(names)
        self._run.write_plan(plan.to_json())


def _joined_line(name: str, outcome: EngineState | BaseException) -> str:
    later = "; it gets requests after the next weight sync" if outcome is EngineState.BEHIND else ""
    return f"{name} has joined{later}"
