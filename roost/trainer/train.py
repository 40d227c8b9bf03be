"""Train a job: launch it, run the loop, checkpoint, evaluate, and relaunch after a failure."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import psutil

from roost.config.findings import ConfigError, counted
from roost.config.job import Job, resolve_model
from roost.config.train import Objective, TrainSettings
from roost.config.train_read import setting_location
from roost.engines.fleet import Fleet
from roost.engines.protocol import EngineError
from roost.engines.weights.probe import Probe
from roost.engines.worker import EngineGroup
from roost.learner.checksums import Damaged
from roost.placement.plan import Plan
from roost.procs.files import full_shared_memory, is_disk_full, private_files
from roost.procs.loop_watch import LoopWatch
from roost.procs.signals import PREEMPTING, Preempted, Stoppable, first_signal
from roost.procs.user_code import contain_tasks
from roost.rollout.concurrency import ConcurrencyControl
from roost.rollout.episode import Scenario
from roost.rollout.rewards.config import ConfiguredRewards
from roost.runtime.cluster import Cluster
from roost.runtime.control_watch import ControlLost
from roost.runtime.worker import WorkerGroup
from roost.trace.spans import Span
from roost.trainer.elastic import ElasticEngines
from roost.trainer.evaluation import evaluate
from roost.trainer.feed import Feed
from roost.trainer.guards import Broken, EndedAtStart, EndedEarly, SkippedSteps, check_ended
from roost.trainer.loop import Loop, Models
from roost.trainer.metrics import memory_metrics
from roost.trainer.preflight import check_models
from roost.trainer.records.checkpoints import Saver, TrainerState, saved_beside
from roost.trainer.records.fan_out import MetricSettings, open_metrics
from roost.trainer.records.resuming import (
    Say,
    check_fits,
    check_free,
    clearing_preempted_mark,
    is_finished,
    locked,
    newest_state,
    out_of_room,
    recorded_end,
    resumed_state,
    resumes_by_itself,
)
from roost.trainer.records.run_folder import RunFolder, RunState
from roost.trainer.report.live_view import LiveView
from roost.trainer.rollout_workers import Stages, open_stages, restarting, rollout_worker_groups
from roost.trainer.setup import (
    ROLLOUT,
    check_shared_disk,
    data_end,
    has_gpus,
    joined_address,
    launch_options,
    learner_groups,
    load_rewards,
    load_scenario,
    models_of,
    open_cluster,
    open_run,
    planned,
    run_setup,
    with_step_count,
)
from roost.trainer.sft import Conversations, SftTrainer
from roost.trainer.targets import check_vocabularies, class_name_of, decoder
from roost.trainer.watching import FailureFiles, Watching
from roost.transport.context import Address, WorkerFailed, current_context

RESTARTS = 3  # without a step in between
HOW_TO_GO_ON = "when the nodes are there again, or the config places less, add --resume to the command"
LOOK_EVERY = 0.5  # seconds
CANCEL_LIMIT = 60.0  # seconds for a run to end after it was cancelled

OpenView = Callable[[int, int], LiveView]  # total steps, steps already done


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Command-line options of a run, besides its config."""

    folder: Path
    resumes: bool = False
    address: str | None = None
    metrics: MetricSettings = field(default_factory=MetricSettings)
    from_step: int | None = None  # checkpoint step to resume from; None: the newest
    auto_resumes: bool = False  # resume a run that exists, start one that does not


@dataclass(frozen=True, slots=True)
class Launch:
    """Inputs shared by all attempts at a run."""

    job: Job
    settings: TrainSettings
    scenario: Scenario
    tokenizer: Any
    rewards: ConfiguredRewards
    options: RunOptions
    say: Say
    open_view: OpenView
    show: Callable[[Plan], None]


class Attempt(Protocol):
    """One attempt at a run, on a cluster: its processes and its progress."""

    state: TrainerState
    stopped_by: signal.Signals | None
    ended_start: signal.Signals | None  # the signal that ended the run while it was starting

    @property
    def was_stopped(self) -> bool: ...

    def launch(self) -> None:
        """Start the processes. Not in an event loop, so that Ctrl-C interrupts a wait for devices."""
        ...

    async def train(self) -> None:
        """Train with the processes of `launch` until the run ends or is stopped."""
        ...


@dataclass(frozen=True)
class Outcome:
    """Final state of a run."""

    run: RunFolder
    state: TrainerState
    stopped_by: signal.Signals | None = None

    @property
    def was_stopped(self) -> bool:
        return self.stopped_by is not None

    @property
    def was_preempted(self) -> bool:
        """True if the run is to be started again: a preempting signal stopped it before its end."""
        return self.stopped_by in PREEMPTING and self.run.finished_at() != self.state.step


def train(job: Job, options: RunOptions, say: Say, open_view: OpenView, show: Callable[[Plan], None]) -> Outcome:
    """Train a job to its end, or until it is stopped.

    When a worker or Ray dies, or no engine is left, relaunch everything and continue from the newest checkpoint. Steps
    after that checkpoint are undone, so that no sample is used twice.
    """
    with private_files():
        return _train(job, options, say, open_view, show)


def _train(job: Job, options: RunOptions, say: Say, open_view: OpenView, show: Callable[[Plan], None]) -> Outcome:
    settings = job.training
    if settings is None:
        raise ValueError("the job has no training settings")
    options = replace(options, folder=options.folder.absolute())  # workers may be in other folders
    run = RunFolder(options.folder)
    is_automatic = not options.resumes and resumes_by_itself(run, options.auto_resumes, os.environ, say)
    options = replace(options, resumes=options.resumes or is_automatic)
    try:
        with contextlib.ExitStack() as held:
            state = None
            if options.resumes:
                RunFolder.open(run.path)
                held.enter_context(locked(run.path, say))
                held.enter_context(recorded_end(run, EndedAtStart))
                state = resumed_state(run, job, settings, options.from_step, say, may_start_over=is_automatic)
                if is_finished(run, settings, state):
                    return _finished(run, state, job, settings, say)
            else:
                check_free(run)
            check_models(job, settings, say)
            if state is not None:
                check_fits(run, job, settings, state)
            say("loading the tokenizer and the task")
            scenario, tokenizer = load_scenario(job, settings)
            check_vocabularies(settings, job, tokenizer)
            rewards = load_rewards(job, settings)
            settings = with_step_count(settings, scenario, say)
            if state is not None:
                if is_finished(run, settings, state):
                    return _finished(run, state, job, settings, say)
                say(f"continuing from step {state.step}")
            else:
                run.make_folder()
                held.enter_context(locked(run.path, say))
                held.enter_context(recorded_end(run, EndedAtStart))
                run.check_free()  # again, under the lock: another run may have just ended here
            launch = Launch(job, settings, scenario, tokenizer, rewards, options, say, open_view, show)
            with clearing_preempted_mark(run, EndedAtStart, ConfigError):
                outcome = attempts(launch, state)
            run.mark_preempted(outcome.state.step if outcome.was_preempted else None)
            if outcome.was_stopped:
                run.mark_ended(RunState.STOPPED)
            elif ended := data_end(job, settings, scenario):
                say(ended)
            return outcome
    except Exception as error:
        if is_disk_full(error, run.path):
            raise out_of_room(error, run, settings) from error
        hint = full_shared_memory(error)
        if hint is not None:
            say(hint)
        raise


def _finished(run: RunFolder, state: TrainerState, job: Job, settings: TrainSettings, say: Say) -> Outcome:
    has_changed = job.training is not None and job.training.max_steps != settings.max_steps  # by `with_step_count`
    key = setting_location("max_epochs" if has_changed else "max_steps", job).key_path
    say(f"{run.path} is finished: {counted(state.step, 'step')} done; raise {key} to train on")
    return Outcome(run, state)


def attempts(launch: Launch, state: TrainerState | None) -> Outcome:
    """Launch the run, and relaunch it from its newest checkpoint after a retryable failure.

    If nodes were lost, it continues on the remaining ones, if its plan fits on them.
    """
    run, settings, say = RunFolder(launch.options.folder), launch.settings, launch.say
    address = joined_address(launch.job, launch.options.address)
    failures, furthest = 0, -1
    former: tuple[str, ...] = ()  # nodes of the attempt before
    while True:
        try:
            return _attempt(launch, address, state, former)
        except ConfigError:
            if former:
                say(f"the run cannot go on; {counted((state or TrainerState()).step, 'step')} done: {HOW_TO_GO_ON}")
            raise
        except Broken as broken:
            former = broken.nodes or former
            if is_disk_full(broken.error, run.path):
                raise broken.error from None
            if broken.had_folder:  # else the checkpoint to resume from may not be the newest
                state = _newest_after(broken, run, settings, say)
            start = state or TrainerState()
            if broken.had_folder and is_finished(run, settings, start):
                say(f"{broken}\nall steps were done before that")
                return Outcome(run, start)
            failures = 1 if start.step > furthest else failures + 1
            furthest = max(start.step, furthest)
            if failures > RESTARTS or not broken.is_retryable:
                raise broken.error from None
            say(f"{broken}\ncontinuing from step {start.step}")
            launch = replace(launch, rewards=load_rewards(launch.job, settings))  # the failed attempt closed its own


def _newest_after(broken: Broken, run: RunFolder, settings: TrainSettings, say: Say) -> TrainerState:
    """Return the state to continue from. Raise if checkpoints cannot be read: the run must not start over."""
    try:
        return newest_state(run, settings, say)
    except (Damaged, OSError):
        say(str(broken))  # the error raised here does not mention it
        raise


def _attempt(launch: Launch, address: str | None, state: TrainerState | None, former: tuple[str, ...]) -> Outcome:
    settings, options = launch.settings, launch.options
    has_folder, nodes = False, former
    try:
        with open_cluster(launch.job, address, str(options.folder / "logs"), launch.say, former) as cluster:
            nodes = cluster.node_ids
            check_shared_disk(cluster, options.folder)
            plan = planned(launch.job, cluster, RunFolder(options.folder), launch.say)
            launch.show(plan)
            run = open_run(launch.job, plan, settings, options.folder, state, launch.say)
            has_folder = True
            start = state or TrainerState()
            with (
                launch.open_view(settings.step_count, start.step) as live,
                contextlib.closing(open_metrics(run, options.metrics, live.note, start.step)) as sinks,
            ):
                watching = Watching(run, sinks, live, decoder(launch.tokenizer))
                running: Attempt
                if settings.objective is Objective.SFT:
                    distilled = settings.learner.loss.distillation
                    rows = Conversations(
                        launch.scenario,
                        launch.tokenizer,
                        settings.completion,
                        settings.max_sequence_tokens,
                        distilled is not None and distilled.on_prompt,
                    )
                    running = SftTrainer(cluster, plan, settings, run, start, watching, rows)
                else:
                    running = Trainer(cluster, plan, launch, run, start, watching)
                _run_to_end(running, cluster, start.step, settings.step_count)
    except Broken as broken:
        broken.nodes = nodes
        raise
    except ControlLost as error:
        raise Broken(error, 0, was_stopped=False, had_folder=has_folder) from error
    check_ended(running.state.step, settings.step_count, running.was_stopped)
    return Outcome(run, running.state, running.stopped_by)


def _run_to_end(running: Attempt, cluster: Cluster, first: int, last: int) -> None:
    """Run the steps after `first`; convert what ends them early into Broken, EndedAtStart or EndedEarly."""
    try:
        running.launch()
        asyncio.run(_while_ray_lives(running.train(), cluster))
    except asyncio.CancelledError:
        if running.ended_start is None:
            raise
        raise EndedAtStart(running.ended_start, running.state.step) from None
    except (WorkerFailed, EngineError, ControlLost) as error:
        raise Broken(error, running.state.step - first, running.was_stopped) from error
    except SystemExit as error:
        if error.code:  # raised by a signal handler with the exit status of the process
            raise
        raise EndedEarly(running.state.step, last, "sys.exit() was called in the driver") from error


async def _while_ray_lives(training: Coroutine[Any, Any, None], cluster: Cluster) -> None:
    """Train to the end. Poll for a lost Ray or node daemon, which short calls would not notice."""
    task = asyncio.ensure_future(training)
    try:
        while not task.done():
            await asyncio.wait([task], timeout=LOOK_EVERY)
            if not task.done():
                cluster.raise_if_lost()
    except BaseException:
        task.cancel()
        ended, _ = await asyncio.wait([task], timeout=CANCEL_LIMIT)
        if ended and not task.cancelled():
            task.exception()  # mark as retrieved: it is a consequence of the error raised here
        raise
    task.result()


TRAINER = Address("trainer", 0)  # the driver's lane in the trace


class Trainer(Stoppable):
    """All processes and state of one attempt on a cluster."""

    def __init__(
        self, cluster: Cluster, plan: Plan, launch: Launch, run: RunFolder, state: TrainerState, watching: Watching
    ) -> None:
        super().__init__(watching.note)
        self.state = state
        settings = launch.settings
        self._cluster, self._plan, self._settings, self._scenario = cluster, plan, settings, launch.scenario
        self._rewards, self._tokenizer_class = launch.rewards, class_name_of(launch.tokenizer)
        self._run, self._watching = run, watching
        self._setup = run_setup(plan, settings, has_gpus(plan))
        self._recorder = current_context().recorder
        self._saver = Saver(run, settings, saved_beside(settings), state.step, self._recorder)
        self._models: Models | None = None
        self._loop: Loop | None = None
        self._control: ConcurrencyControl | None = None
        self._first_probe: Probe | None = None  # of the weights before the first step
        self._stages: Stages

    def launch(self) -> None:
        """Start the processes. Not in an event loop, so that Ctrl-C interrupts a wait for devices."""
        self._watching.phase("launch")
        self._began = time.perf_counter()
        self._engines = EngineGroup.of(self._setup.engines, self._cluster)
        learners = learner_groups(self._plan, self._settings, self._setup)
        model = resolve_model(self._settings.learner.model)
        paths = tuple(filter(None, sys.path))
        workers = rollout_worker_groups(self._plan, self._settings, model, self._tokenizer_class, paths)
        self._watching.note(" and ".join(["starting learners", *workers, "engines"]))
        specs = {**learners, **workers, ROLLOUT: self._engines.workers()}
        options = {**launch_options(self._setup, learners), **restarting(workers), **self._engines.options(ROLLOUT)}
        self._groups = self._cluster.launch(self._plan, specs, options)
        self._learner_names, self._rollout_worker_names = tuple(learners), tuple(workers)

    async def train(self) -> None:
        """Train with the processes of `launch` until the run ends or is stopped."""
        groups = self._groups
        owners = self._engines.owners(groups[ROLLOUT])
        # The run folder is on shared storage: the learner writes checkpoints there that servers start from.
        fleet = Fleet(owners, folder=self._run.path, recorder=self._recorder, report=self._watching.note)
        routes = self._setup.engines.routes_by_name
        learners = {name: groups[name] for name in self._learner_names}
        adapters = self._run.path / "adapters"
        models = models_of(self._plan, learners, fleet, routes, self._setup, self._settings, adapters)
        self._models, watching = models, self._watching
        if self._setup.engines.reload_note and self._settings.learner.adapter is None:
            self._watching.note(self._setup.engines.reload_note)
        elastic = ElasticEngines(
            self._cluster, fleet, self._plan, self._engines, groups[ROLLOUT], routes, self._setup, self._settings,
            self._run, watching.note,
        )  # fmt: skip
        self._watching.phase("load")
        with first_signal(partial(self.stop, asyncio.current_task())):
            await self._prepare_learner(models)
            async with fleet:
                # Load models while engines start: without shared devices neither waits for the other.
                await asyncio.gather(*(learners.ready() for learners in models.learners))
                await self._prepare_engines(models)
                self._watching.note(f"learners and engines are ready after {time.perf_counter() - self._began:.0f} s")
                self._watching.watch(fleet)
                self.is_starting = False
                async with elastic.serving():
                    await self._run_watched(models, {name: groups[name] for name in self._rollout_worker_names})

    async def _run_watched(self, models: Models, workers: Mapping[str, WorkerGroup]) -> None:
        contain_tasks(asyncio.get_running_loop())
        async with self._watched_loops():
            await self._run_stages(models, workers)

    async def _run_stages(self, models: Models, workers: Mapping[str, WorkerGroup]) -> None:
        is_one_node = self._cluster.num_nodes == 1
        failures = FailureFiles(self._run.failures, self._watching.note)
        decode = self._watching.decode
        async with open_stages(
            workers, self._scenario, models.fleet, self._settings, is_one_node, failures, self._rewards, decode
        ) as stages:
            self._stages = stages
            self._watching.watch_rewards(stages.rewards.routing if stages.rewards is not None else None)
            self._watching.watch_steps(self._settings.advantage)
            try:
                await self._steps(models)
            finally:
                self._write_trace(models.fleet)
            await self._finish(models)

    @contextlib.asynccontextmanager
    async def _watched_loops(self) -> AsyncIterator[None]:
        """Report user code that blocks an event loop, in the driver or in a worker."""
        watch, notes = LoopWatch(self._watching.note), self._cluster.follow_notes(self._watching.note)
        watch.start()
        following = asyncio.create_task(notes)
        try:
            yield
        finally:
            watch.stop()
            following.cancel()

    # Beginning ----------------------------------------------------------------------------------------------------

    async def _prepare_learner(self, models: Models) -> None:
        """Restore the checkpoint, if any, and offload shared devices before engines start there."""
        if self.state.step or self._setup.switch.is_shared:  # else `_prepare_engines` takes it
            self._first_probe = await models.policy.probe()
        if self.state.step:
            checkpoint = self._saver.at(self.state.step)
            await models.policy.all("restore", str(checkpoint.learner))
            if models.critic is not None:
                await models.critic.all("restore", str(checkpoint.critic))
            has_moved = self._settings.moves_reference and checkpoint.reference.is_dir()
            if models.reference is not None and has_moved:
                await models.reference.all("restore", str(checkpoint.reference))
            await models.follow_policy()
        if self._setup.switch.is_shared:
            await self._setup.switch.offload(models.sharing)

    async def _prepare_engines(self, models: Models) -> None:
        """Calibrate the engines, which started from the initial model; after a resume sync the restored weights."""
        await models.fleet.weights.calibrate(self._first_probe or await models.policy.probe())
        if self.state.step:
            switch = self._setup.switch
            await switch.to_learner(models.fleet, models.sharing)
            await switch.to_engines(models.fleet, models.sharing, await models.policy.weight_update(self.state.version))

    # The steps ----------------------------------------------------------------------------------------------------

    async def _steps(self, models: Models) -> None:
        settings = self._settings
        await self._evaluate_if_due()
        feed = Feed(
            self._scenario,
            self._stages.training.runner,
            settings.rollout,
            settings.max_staleness,
            settings.seed,
            position=self.state.position,
            version=self.state.version,
            on_progress=lambda done, total: self._watching.advance(done),
            on_end=self._stages.training.on_end,
            steps=settings.step_count - self.state.step,
        )
        loop = Loop(
            settings,
            models,
            feed,
            self._setup.switch,
            recorder=self._recorder,
            watcher=self._watching,
            state=self.state,
            after_learning=self._after_learning,
            after_step=self._after_step,
            is_stopped=lambda: self.was_stopped,
            unless_preempted=self.unless_preempted,
            more_metrics=self._more_metrics,
        )
        self._loop = loop
        if settings.rollout.adaptive_concurrency:
            most = settings.rollout.largest_concurrency
            self._control = ConcurrencyControl(feed.slots, models.fleet.loads, most, self._watching.note)
        try:
            async with self._control.running() if self._control is not None else contextlib.nullcontext():
                await loop.run()
        finally:
            await feed.close()

    async def _more_metrics(self) -> Mapping[str, float]:
        """Return reward counters since the last step, and memory of the learners and the driver."""
        rewards, learners = self._stages.rewards, self._models.learners if self._models is not None else []
        found: dict[str, float] = dict(await rewards.new_counts()) if rewards is not None else {}
        for each in learners:
            found |= memory_metrics(each.name, await each.all("memory"))
        found |= {} if self._control is None else self._control.pop_metrics()
        return found | memory_metrics("driver", [{"rss": float(psutil.Process().memory_info().rss)}])

    async def _after_learning(self, state: TrainerState) -> None:
        if self._models is not None:
            await self._saver.after_learning(
                self._models.saved(self._settings), state, self._skipped, self._watching.note
            )

    async def _after_step(self, state: TrainerState) -> None:
        self.state = state
        if self._models is not None:
            await self._saver.after_step(self._models.saved(self._settings), state, self._skipped)
        await self._evaluate_if_due()

    async def _evaluate_if_due(self) -> None:
        """Evaluate if this step is due, unless it was evaluated before the run was resumed."""
        every, step = self._settings.evaluation.eval_every, self.state.step
        is_due = every and step % every == 0 and step < self._settings.step_count
        if self._models is not None and is_due and not self._run.has_evaluation(step):
            await self._evaluate(self._models)

    async def _evaluate(self, models: Models) -> None:
        """Evaluate the current policy. With staleness, rollouts for training continue meanwhile; updates do not."""
        self._watching.phase("evaluate")
        with self._recorder.timer("evaluate", "work", True, step=self.state.step):
            stage = self._stages.evaluation
            trying = evaluate(self._scenario, stage.runner, self._settings, self.state.version, stage.on_end)
            try:
                with contextlib.nullcontext() if self._control is None else self._control.held():
                    found = await self.unless_preempted(models.fleet.serve(trying))
            except Preempted:
                return  # evaluated after the resume
        if found.groups:
            self._watching.evaluated(self.state.step, found)
        elif self.state.step == self._settings.evaluation.eval_every:  # once
            self._watching.note("nothing to evaluate: the task has no prompts for evaluations")

    # Ending -------------------------------------------------------------------------------------------------------

    async def _finish(self, models: Models) -> None:
        if not self.was_stopped and not self._run.has_evaluation(self.state.step):
            await self._evaluate(models)
        self._watching.phase("save")
        if self._setup.switch.is_shared:
            await models.fleet.stop_servers()
            await self._setup.switch.load(models.sharing)
        await self._saver.finish(models.saved(self._settings), self.state, self._skipped, self._watching.note)
        if not self.was_stopped:
            self._run.finish(self.state.step)

    @property
    def _skipped(self) -> SkippedSteps:
        return self._loop.skipped if self._loop is not None else SkippedSteps()

    def _write_trace(self, fleet: Fleet) -> None:
        spans: dict[Address, list[Span]] = {TRAINER: self._recorder.drain()}
        for name, member in fleet.pool.members.items():
            spans[Address(ROLLOUT, int(name.rpartition("-")[2]))] = member.work.drain()
        self._cluster.write_trace(self._run.trace_file, spans)
