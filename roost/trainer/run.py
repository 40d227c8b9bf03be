"""A run from a job to a better policy. What dies under it is started again, from the newest checkpoint."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from roost.engines.errors import EngineError
from roost.placement.plan import Plan
from roost.placement.planner import try_plan
from roost.rollout.scenario import Scenario
from roost.runtime.cluster import Cluster
from roost.runtime.control_watch import ControlLost
from roost.runtime.failure import FailureKind, WorkerFailed
from roost.spec.errors import Findings
from roost.spec.job import Job
from roost.spec.training import Estimator, TrainSettings
from roost.spec.training_read import setting_place
from roost.trainer.checkpoints import Checkpoints, TrainerState
from roost.trainer.live_view import LiveView
from roost.trainer.machines import open_cluster
from roost.trainer.metrics.fan_out import MetricSettings, open_metrics
from roost.trainer.named import check_named
from roost.trainer.preflight import check_models
from roost.trainer.run_folder import RunFolder
from roost.trainer.running import Running
from roost.trainer.surroundings import made_rewards
from roost.trainer.targets import make_scenario
from roost.trainer.tokenizers import class_name_of, decoder, load_tokenizer
from roost.trainer.watching import Watching

RESTARTS = 3  # without a step in between
LOOK_EVERY = 0.5  # seconds
CANCEL_LIMIT = 60.0  # seconds for a run to end after it was cancelled

Say = Callable[[str], None]
OpenView = Callable[[int, int], LiveView]  # for so many steps, after so many


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What is said on the command line, beside the config."""

    folder: Path
    resumes: bool = False
    address: str | None = None
    metrics: MetricSettings = field(default_factory=MetricSettings)


class Broken(Exception):
    """An attempt that ended before its time; `error` says why, and `steps` how many it had done."""

    def __init__(self, error: WorkerFailed | EngineError | ControlLost, steps: int, was_stopped: bool) -> None:
        super().__init__(str(error))
        self.error, self.steps, self.was_stopped = error, steps, was_stopped

    @property
    def may_be_tried_again(self) -> bool:
        """Whether it would not end in the same way at once: something was lost, or it had worked until then."""
        failures = self.error.failures if isinstance(self.error, WorkerFailed) else ()
        was_lost = any(failure.kind is not FailureKind.RAISED for failure in failures)
        was_lost = was_lost or isinstance(self.error, ControlLost)
        return (was_lost or self.steps > 0) and not self.was_stopped


class EndedEarly(RuntimeError):
    """The run ended before its last step, and neither a signal nor an error says why."""

    def __init__(self, done: int, wanted: int, reason: str) -> None:
        super().__init__(
            f"the run ended after step {done} of {wanted}: {reason}. To continue, add --resume to the command"
        )


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    run: RunFolder
    state: TrainerState
    was_stopped: bool


def train(job: Job, options: RunOptions, say: Say, open_view: OpenView, show: Callable[[Plan], None]) -> Outcome:
    """Train as the job says; every mistake that can be known before is raised at once as a ConfigError.

    When a worker or Ray dies, or no engine is left, the run goes on from its newest checkpoint, with everything
    launched anew. Steps that were done since are undone with it, so that no sample counts twice.
    """
    settings = job.training
    if settings is None:
        raise ValueError("the job says nothing about training")
    options = replace(options, folder=options.folder.absolute())  # workers may be in other folders
    if options.resumes:
        _check_resumed(options.folder, job, say)
    else:
        RunFolder(options.folder).check_free()
    check_models(job, settings, say)
    say("loading the tokenizer and the task")
    scenario, tokenizer = _scenario(job, settings)
    failures, furthest = 0, -1
    while True:
        try:
            return _attempt(job, settings, scenario, tokenizer, options, say, open_view, show)
        except (Broken, ControlLost) as error:
            broken = error if isinstance(error, Broken) else Broken(error, 0, was_stopped=False)
            done = _newest_state(options.folder, job).step
            failures = 1 if done > furthest else failures + 1
            furthest = max(done, furthest)
            if failures > RESTARTS or not broken.may_be_tried_again:
                raise broken.error from None
            say(f"{broken}\ngoing on from step {done}")
            options = replace(options, resumes=options.resumes or RunFolder(options.folder).has_run)


def _attempt(
    job: Job,
    settings: TrainSettings,
    scenario: Scenario,
    tokenizer: Any,
    options: RunOptions,
    say: Say,
    open_view: OpenView,
    show: Callable[[Plan], None],
) -> Outcome:
    findings = Findings()
    with open_cluster(job, options.address, str(options.folder / "logs"), say) as cluster:
        _check_disk(cluster, options.folder)
        plan = try_plan(job, findings, cluster)
        findings.raise_errors()
        if plan is None:
            raise RuntimeError("a job without findings must have a plan; please report it")
        show(plan)
        run, state = _open_run(job, plan, options)
        with (
            open_view(settings.steps, state.step) as live,
            contextlib.closing(open_metrics(run, options.metrics, live.note, state.step)) as sinks,
        ):
            watching = Watching(run, sinks, live, decoder(tokenizer))
            running = Running(cluster, plan, settings, scenario, class_name_of(tokenizer), run, state, watching)
            try:
                asyncio.run(_while_ray_lives(running.train(), cluster))
            except (WorkerFailed, EngineError, ControlLost) as error:
                raise Broken(error, running.state.step - state.step, running.was_stopped) from error
            except SystemExit as error:
                if error.code:  # of a signal handler, with the status that the process is to have
                    raise
                raise EndedEarly(running.state.step, settings.steps, "sys.exit() was called in the driver") from error
    check_ended(running.state.step, settings.steps, running.was_stopped)
    return Outcome(run, running.state, running.was_stopped)


def check_ended(done: int, wanted: int, was_stopped: bool) -> None:
    """Raise EndedEarly where steps are missing although nobody stopped the run."""
    if done < wanted and not was_stopped:
        raise EndedEarly(done, wanted, "nothing stopped it; please report this")


async def _while_ray_lives(training: Coroutine[Any, Any, None], cluster: Cluster) -> None:
    """Train to the end, or until Ray's control service is lost: episodes would go on without noticing."""
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
    made_rewards(settings, {part.name for part in job.components}, setting_place("rewards", job))
    return scenario, tokenizer


def _check_disk(cluster: Cluster, folder: Path) -> None:
    """Checkpoints, and what engines are started on, are written and read on several machines."""
    if cluster.blind_nodes:
        names = ", ".join(cluster.nodes[rank].report.name for rank in cluster.blind_nodes)
        raise ValueError(f"{names} cannot see {folder}; keep runs on a disk that all machines share (--runs)")


def _check_resumed(folder: Path, job: Job, say: Say) -> None:
    """A run goes on from a checkpoint; that the config is another one is told, as it may be meant."""
    run, done = RunFolder.open(folder), _newest_state(folder, job).step
    if run.steps() and not done:
        raise FileNotFoundError(f"{folder} has no whole checkpoint to go on from; begin a run of another name")
    say(f"going on from step {done}")
    before = yaml.safe_load(run.config_file.read_text()) if run.config_file.exists() else {}
    changed = changed_keys(before, _plain(job.source.values))
    if changed:
        say(f"the config is not the one that the run began with; changed: {', '.join(changed)}")


def changed_keys(before: Any, after: Any, path: str = "") -> list[str]:
    """The keys under which two configs differ.

    >>> changed_keys({"train": {"seed": 1, "steps": 2}}, {"train": {"seed": 1, "steps": 3}, "actor": {}})
    ['actor', 'train.steps']
    """
    if not (isinstance(before, Mapping) and isinstance(after, Mapping)):
        return [] if before == after else [path]
    names = sorted({*before, *after})
    inner = (changed_keys(before.get(name), after.get(name), f"{path}.{name}" if path else name) for name in names)
    return [key for keys in inner for key in keys]


def _open_run(job: Job, plan: Plan, options: RunOptions) -> tuple[RunFolder, TrainerState]:
    """A new folder, or the one of a run that goes on from its newest whole checkpoint."""
    if options.resumes:
        state = _newest_state(options.folder, job)
        return RunFolder.resume(options.folder, state.step), state
    config = yaml.safe_dump(_plain(job.source.values), sort_keys=False)
    return RunFolder.create(options.folder, config, plan.to_json()), TrainerState()


def _newest_state(folder: Path, job: Job) -> TrainerState:
    has_critic = job.training is not None and job.training.advantage.estimator is Estimator.GAE
    newest = Checkpoints(RunFolder(folder).checkpoints, 1, has_critic).newest()
    return newest.read_state() if newest is not None else TrainerState()


def _plain(value: Any) -> Any:
    """A config as YAML can write it."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value if isinstance(value, bool | int | float | str) or value is None else str(value)
