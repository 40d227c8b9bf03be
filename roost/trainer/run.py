"""A run from a job to a better policy. What dies under it is started again, from the newest checkpoint."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from roost.config.findings import Findings, counted
from roost.config.job import Job
from roost.config.train import TrainSettings
from roost.config.train_read import setting_place
from roost.engines.protocol import EngineError, EnginesBehind
from roost.learner.checksums import Damaged
from roost.placement.plan import Plan
from roost.placement.planner import try_plan
from roost.procs.files import DiskFull, chain_of, disk_full, full_shared_memory, is_disk_full, private_files
from roost.rollout.episode import Scenario, Split
from roost.runtime.cluster import Cluster
from roost.runtime.control_watch import ControlLost
from roost.trainer.checkpoints import TrainerState
from roost.trainer.live_view import LiveView
from roost.trainer.machines import joined_address, open_cluster
from roost.trainer.metrics.fan_out import MetricSettings, open_metrics
from roost.trainer.preflight import check_models
from roost.trainer.resuming import (
    Say,
    check_free,
    checkpoints_of,
    is_finished,
    locked,
    newest_state,
    plain,
    reopened,
    resumed_state,
)
from roost.trainer.rollout_workers import build_rewards
from roost.trainer.run_folder import RunFolder
from roost.trainer.running import Running
from roost.trainer.targets import check_named, class_name_of, decoder, load_tokenizer, make_scenario
from roost.trainer.watching import Watching
from roost.transport.failure import FailureKind, WorkerFailed

RESTARTS = 3  # without a step in between
LOOK_EVERY = 0.5  # seconds
CANCEL_LIMIT = 60.0  # seconds for a run to end after it was cancelled

OpenView = Callable[[int, int], LiveView]  # for so many steps, after so many


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What is said on the command line, beside the config."""

    folder: Path
    resumes: bool = False
    address: str | None = None
    metrics: MetricSettings = field(default_factory=MetricSettings)
    from_step: int | None = None  # of the checkpoint that a resumed run continues from; None: the newest


@dataclass(frozen=True, slots=True)
class Launch:
    """What every attempt at a run is made of."""

    job: Job
    settings: TrainSettings
    scenario: Scenario
    tokenizer: Any
    options: RunOptions
    say: Say
    open_view: OpenView
    show: Callable[[Plan], None]


class Broken(Exception):
    """An attempt that ended before its time; `error` says why, and `steps` how many it had done.

    `had_folder`: the run's folder was created, or cut back to the attempt's first step.
    """

    def __init__(
        self, error: WorkerFailed | EngineError | ControlLost, steps: int, was_stopped: bool, had_folder: bool = True
    ) -> None:
        super().__init__(str(error))
        self.error, self.steps, self.was_stopped, self.had_folder = error, steps, was_stopped, had_folder

    @property
    def is_retryable(self) -> bool:
        """Whether it would not end in the same way at once: something was lost, or it had worked until then."""
        failures = self.error.failures if isinstance(self.error, WorkerFailed) else ()
        was_lost = any(failure.kind is not FailureKind.RAISED for failure in failures)
        was_lost = was_lost or isinstance(self.error, ControlLost | EnginesBehind)
        return (was_lost or self.steps > 0) and not self.was_stopped


class EndedEarly(RuntimeError):
    """The run ended before its last step, and neither a signal nor an error says why."""

    def __init__(self, done: int, wanted: int, reason: str) -> None:
        super().__init__(
            f"the run ended after step {done} of {wanted}: {reason}. To continue, add --resume to the command"
        )


class EndedAtStart(Exception):
    """A signal ended the run while it was starting, after so many steps that were done before."""

    def __init__(self, number: signal.Signals, done: int) -> None:
        how = "while it was starting" if done else "before its first step"
        back = f"; {counted(done, 'step')} done: to continue, add --resume to the command" if done else ""
        super().__init__(f"{number.name} ended the run {how}; everything that it started is ended{back}")
        self.exit_code = 128 + number


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    run: RunFolder
    state: TrainerState
    was_stopped: bool


def train(job: Job, options: RunOptions, say: Say, open_view: OpenView, show: Callable[[Plan], None]) -> Outcome:
    """Train as the job says; every mistake that can be known before is raised at once as a ConfigError.

    When a worker or Ray dies, or no engine is left, the run continues from its newest checkpoint, with everything
    launched anew. Steps that were done since are undone with it, so that no sample counts twice.
    """
    with private_files():
        return _train(job, options, say, open_view, show)


def _train(job: Job, options: RunOptions, say: Say, open_view: OpenView, show: Callable[[Plan], None]) -> Outcome:
    settings = job.training
    if settings is None:
        raise ValueError("the job has no section train")
    options = replace(options, folder=options.folder.absolute())  # workers may be in other folders
    run = RunFolder(options.folder)
    try:
        with contextlib.ExitStack() as held:
            state = None
            if options.resumes:
                RunFolder.open(run.path)
                held.enter_context(locked(run.path, say))
                state = resumed_state(run, job, settings, options.from_step, say)
                if is_finished(run, settings, state):
                    return _finished(run, state, job, settings, say)
            else:
                check_free(run)
            check_models(job, settings, say)
            say("loading the tokenizer and the task")
            scenario, tokenizer = _scenario(job, settings)
            settings = _with_steps(settings, scenario, say)
            if state is not None:
                if is_finished(run, settings, state):
                    return _finished(run, state, job, settings, say)
                say(f"continuing from step {state.step}")
            else:
                run.make_folder()
                held.enter_context(locked(run.path, say))
                run.check_free()  # again, as another run may have ended there just now
            return attempts(Launch(job, settings, scenario, tokenizer, options, say, open_view, show), state)
    except Exception as error:
        if is_disk_full(error, run.path):
            raise _out_of_room(error, run, settings) from error
        hint = full_shared_memory(error)
        if hint is not None:
            say(hint)
        raise


def _finished(run: RunFolder, state: TrainerState, job: Job, settings: TrainSettings, say: Say) -> Outcome:
    has_changed = job.training is not None and job.training.steps != settings.steps  # by `_with_steps`
    key = setting_place("max_epochs" if has_changed else "max_steps", job).key_path
    say(f"{run.path} is finished: {counted(state.step, 'step')} done; raise {key} to train on")
    return Outcome(run, state, was_stopped=False)


def attempts(launch: Launch, state: TrainerState | None) -> Outcome:
    """Launch the run, and again from its newest checkpoint where that may help."""
    run, settings, say = RunFolder(launch.options.folder), launch.settings, launch.say
    address = joined_address(launch.job, launch.options.address)
    failures, furthest = 0, -1
    while True:
        try:
            return _attempt(launch, address, state)
        except Broken as broken:
            if is_disk_full(broken.error, run.path):
                raise broken.error from None
            if broken.had_folder:  # else the checkpoint to resume from may not be the newest
                state = _newest_after(broken, run, settings, say)
            start = state or TrainerState()
            if broken.had_folder and is_finished(run, settings, start):
                say(f"{broken}\nall steps were done before that")
                return Outcome(run, start, was_stopped=False)
            failures = 1 if start.step > furthest else failures + 1
            furthest = max(start.step, furthest)
            if failures > RESTARTS or not broken.is_retryable:
                raise broken.error from None
            say(f"{broken}\ncontinuing from step {start.step}")


def _newest_after(broken: Broken, run: RunFolder, settings: TrainSettings, say: Say) -> TrainerState:
    """The state to continue from; if checkpoints cannot be read it is not known, and the run must not start over."""
    try:
        return newest_state(run, settings, say)
    except (Damaged, OSError):
        say(str(broken))  # what is raised here does not name it
        raise


def _out_of_room(error: Exception, run: RunFolder, settings: TrainSettings) -> DiskFull:
    """A full disk by its name, with what is left of the run."""
    named = next((one for one in chain_of(error) if isinstance(one, DiskFull)), None)
    if named is None:
        named = disk_full(run.path, "the files of the run")
    newest = checkpoints_of(run, settings).newest()
    kept = f"the newest checkpoint is of step {newest.step}" if newest is not None else "there is no checkpoint yet"
    return DiskFull(f"{named}; {kept}: free some space or lower keep_checkpoints, and continue with --resume")


def _attempt(launch: Launch, address: str | None, state: TrainerState | None) -> Outcome:
    settings, options = launch.settings, launch.options
    has_folder = False
    try:
        with open_cluster(launch.job, address, str(options.folder / "logs"), launch.say) as cluster:
            _check_disk(cluster, options.folder)
            plan = _planned(launch.job, cluster)
            launch.show(plan)
            run = _open_run(launch.job, plan, settings, options.folder, state, launch.say)
            has_folder = True
            start = state or TrainerState()
            with (
                launch.open_view(settings.step_count, start.step) as live,
                contextlib.closing(open_metrics(run, options.metrics, live.note, start.step)) as sinks,
            ):
                watching = Watching(run, sinks, live, decoder(launch.tokenizer))
                tokenizer_class = class_name_of(launch.tokenizer)
                running = Running(cluster, plan, settings, launch.scenario, tokenizer_class, run, start, watching)
                _run_to_end(running, cluster, start.step, settings.step_count)
    except ControlLost as error:
        raise Broken(error, 0, was_stopped=False, had_folder=has_folder) from error
    check_ended(running.state.step, settings.step_count, running.was_stopped)
    return Outcome(run, running.state, running.was_stopped)


def _planned(job: Job, cluster: Cluster) -> Plan:
    findings = Findings()
    plan = try_plan(job, findings, cluster)
    findings.raise_errors()
    if plan is None:
        raise RuntimeError("a job without findings must have a plan; please report it")
    return plan


def _run_to_end(running: Running, cluster: Cluster, first: int, last: int) -> None:
    """Run the steps after `first`; what ends them early is raised by its name."""
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
        if error.code:  # of a signal handler, with the status that the process is to have
            raise
        raise EndedEarly(running.state.step, last, "sys.exit() was called in the driver") from error


def check_ended(done: int, wanted: int, was_stopped: bool) -> None:
    """Raise EndedEarly where steps are missing although nobody stopped the run."""
    if done < wanted and not was_stopped:
        raise EndedEarly(done, wanted, "nothing stopped it; please report this")


async def _while_ray_lives(training: Coroutine[Any, Any, None], cluster: Cluster) -> None:
    """Train to the end, or until Ray or its driver's node daemon is lost: short calls would not notice it."""
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
            task.exception()  # it follows from what is raised here
        raise
    task.result()


def _scenario(job: Job, settings: TrainSettings) -> tuple[Scenario, Any]:
    """The scenario of a job, and the tokenizer that it was made with."""
    findings = Findings()
    check_named(settings, job, findings)
    findings.raise_errors()
    try:
        tokenizer = load_tokenizer(settings.learner.model)
    except (OSError, ValueError) as error:
        raise ValueError(f"{settings.learner.model} has no tokenizer that can be loaded: {error}") from error
    scenario = make_scenario(settings.task, tokenizer, setting_place("task", job), findings)
    findings.raise_errors()
    if scenario is None:
        raise RuntimeError("a scenario without findings must have been made; please report it")
    build_rewards(settings, {part.name for part in job.components}, setting_place("rewards", job))
    return scenario, tokenizer


def _with_steps(settings: TrainSettings, scenario: Scenario, say: Say) -> TrainSettings:
    """The settings with their number of steps, which may follow from passes over the training tasks."""
    if settings.max_epochs is None:
        return settings
    tasks, groups = scenario.size(Split.TRAIN), settings.collect.groups
    found = settings.for_tasks(tasks)
    if not found.step_count:
        why = f"the task has {tasks} training tasks, a step uses {groups}, and an incomplete batch is dropped"
        raise ValueError(f"max_epochs {settings.max_epochs} makes no step: {why}; use fewer groups")
    how = f"max_epochs {settings.max_epochs} over {tasks} tasks, {groups} of them a step"
    if found.steps == settings.steps:
        bound = replace(settings, steps=None).for_tasks(tasks).step_count
        how = f"max_steps {settings.steps} ends the run; {how}, would be {bound}"
    say(f"{counted(found.step_count, 'step')}: {how}")
    return found


def _check_disk(cluster: Cluster, folder: Path) -> None:
    """Checkpoints, and what engines are started on, are written and read on several machines."""
    if cluster.blind_nodes:
        names = ", ".join(cluster.nodes[rank].report.name for rank in cluster.blind_nodes)
        raise ValueError(f"{names} cannot see {folder}; keep runs on a disk that all machines share (--runs)")


def _open_run(
    job: Job, plan: Plan, settings: TrainSettings, folder: Path, state: TrainerState | None, say: Say
) -> RunFolder:
    """A new folder, or the one of a run that continues."""
    if state is not None:
        return reopened(RunFolder(folder), settings, state, say)
    config = yaml.safe_dump(plain(job.source.values), sort_keys=False)
    return RunFolder.create(folder, config, plan.to_json())
