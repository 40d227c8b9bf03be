"""A run from a job to a better policy: machines, workers and engines, the loop, and what is kept of it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from roost.engines.fleet import Fleet
from roost.engines.worker import EngineGroup
from roost.placement.plan import Plan
from roost.placement.planner import try_plan
from roost.rollout.draw import FleetDraws
from roost.rollout.episode import Group
from roost.rollout.scenario import Scenario
from roost.runtime import current
from roost.runtime.cluster import Cluster
from roost.runtime.group import LaunchOptions, WorkerGroup
from roost.spec.errors import Findings
from roost.spec.job import Job
from roost.spec.training import TrainSettings
from roost.trainer.checkpoints import Checkpoints, TrainerState
from roost.trainer.components import ACTOR, CRITIC, REFERENCE, ROLLOUT, layout_of, learner_groups
from roost.trainer.evaluation import Evaluation, evaluate
from roost.trainer.feed import Feed
from roost.trainer.learners import Learners
from roost.trainer.live_view import LiveView
from roost.trainer.loop import Loop, Models
from roost.trainer.machines import has_gpus, open_cluster
from roost.trainer.metrics.fan_out import FanOut, MetricSettings, open_metrics
from roost.trainer.receivers import plan_sending, receiver_at
from roost.trainer.run_folder import RunFolder
from roost.trainer.targets import make_scenario

SHOWN_SAMPLES = 4  # of each step, kept to be looked at


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What is said on the command line, beside the config."""

    folder: Path
    resumes: bool = False
    address: str | None = None
    metrics: MetricSettings = field(default_factory=MetricSettings)


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    run: RunFolder
    state: TrainerState
    was_stopped: bool


def train(job: Job, options: RunOptions, say: Callable[[str], None], view: Callable[[int, int], LiveView]) -> Outcome:
    """Train as the job says; every mistake that can be known before is raised at once as a ConfigError."""
    settings = job.training
    if settings is None:
        raise ValueError("the job says nothing about training")
    findings = Findings()
    scenario = _scenario(job, settings, findings)
    findings.raise_errors()
    with open_cluster(job, options.address, str(options.folder / "logs"), say) as cluster:
        plan = try_plan(job, findings, cluster)
        findings.raise_errors()
        if plan is None or scenario is None:
            raise RuntimeError("a job without findings must have a plan; please report it")
        run, state = _open_run(job, plan, settings, options)
        with view(settings.steps, state.step) as live:
            return asyncio.run(_Run(cluster, plan, settings, scenario, run, state, options, live).run())


def _scenario(job: Job, settings: TrainSettings, findings: Findings) -> Scenario | None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(settings.learner.model)
    return make_scenario(settings.task, tokenizer, job.source.where(("train", "task")), findings)


def _open_run(job: Job, plan: Plan, settings: TrainSettings, options: RunOptions) -> tuple[RunFolder, TrainerState]:
    """A new folder, or the one of a run that goes on from its newest whole checkpoint."""
    if options.resumes:
        newest = Checkpoints(RunFolder(options.folder).checkpoints, settings.checkpoint.keep).newest()
        state = newest.read_state() if newest is not None else TrainerState()
        return RunFolder.resume(options.folder, state.step), state
    config = yaml.safe_dump(_plain(job.source.values), sort_keys=False)
    return RunFolder.create(options.folder, config, plan.to_json()), TrainerState()


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value if isinstance(value, bool | int | float | str) or value is None else str(value)


class _Run:
    """Everything that lives as long as the run."""

    def __init__(
        self,
        cluster: Cluster,
        plan: Plan,
        settings: TrainSettings,
        scenario: Scenario,
        run: RunFolder,
        state: TrainerState,
        options: RunOptions,
        live: LiveView,
    ) -> None:
        self._cluster, self._plan, self._settings, self._scenario = cluster, plan, settings, scenario
        self._folder, self._state, self._live = run, state, live
        self._layout = layout_of(plan, settings, has_gpus(cluster))
        self._checkpoints = Checkpoints(run.checkpoints, settings.checkpoint.keep, self._layout.has_critic)
        self._sinks: FanOut = open_metrics(run, options.metrics, live.note, state.step)
        self._stop = asyncio.Event()
        self._saved_at = state.step if options.resumes else -1

    async def run(self) -> Outcome:
        with self._signals(), contextlib.closing(self._sinks):
            groups, engines = self._launch()
            recorder = current.get().recorder
            self._live.phase("start")
            async with Fleet(engines.owners(groups[ROLLOUT]), recorder=recorder, report=self._live.note) as fleet:
                self._models = self._meet(groups, fleet)
                feed = await self._begin(fleet)
                try:
                    await self._trained(feed)
                finally:
                    await feed.close()
                await self._end(fleet)
        return Outcome(self._folder, self._state, self._stop.is_set())

    # Beginning ----------------------------------------------------------------------------------------------------

    def _launch(self) -> tuple[dict[str, WorkerGroup], EngineGroup]:
        engines = EngineGroup.of(self._layout.engines, self._cluster)
        specs = learner_groups(self._settings, self._layout, None)
        launched = self._cluster.launch(
            self._plan,
            {**specs, ROLLOUT: engines.workers()},
            {ROLLOUT: LaunchOptions(max_concurrency=None)},
        )
        return launched, engines

    def _meet(self, groups: Mapping[str, WorkerGroup], fleet: Fleet) -> Models:
        sending = plan_sending(self._plan, ROLLOUT, ACTOR, self._layout.on_gpu)
        find = partial(receiver_at, fleet=fleet, sending=sending)
        made = {name: Learners(group, sending.way, find) for name, group in groups.items() if name != ROLLOUT}
        return Models(fleet, made[ACTOR], made.get(CRITIC), made.get(REFERENCE))

    async def _begin(self, fleet: Fleet) -> Feed:
        """Bring learner and engines to the state that the run begins with, or goes on from."""
        policy, critic = self._models.policy, self._models.critic
        newest = self._checkpoints.newest() if self._state.step else None
        if newest is not None:
            await policy.all("restore", str(newest.learner))
            if critic is not None:
                await critic.all("restore", str(newest.critic))
            await fleet.update(await policy.release(self._state.version))
        else:
            await policy.all("wait_saved")  # its constructor may still be at work
        if self._layout.turns.are_taken and self._layout.turns.offloads:
            await policy.offload(self._layout.turns.offloads)
        settings = self._settings
        draws = FleetDraws(fleet, settings.draw, settings.seed)
        return Feed(
            self._scenario,
            draws.open,
            settings.collect,
            settings.max_policy_lag,
            settings.seed,
            self._state.position,
            self._state.version,
            lambda done, total: self._live.advance(done),
        )

    # The steps ----------------------------------------------------------------------------------------------------

    async def _trained(self, feed: Feed) -> None:
        if not self._state.step and self._settings.evaluation.every:
            await self._evaluate()
        loop = Loop(
            self._settings,
            self._models,
            feed,
            self._layout.turns,
            current.get().recorder,
            self,
            self._state,
            self._after_step,
            self._stop.is_set,
        )
        self._state = await loop.run()

    def phase(self, name: str, total: int | None = None) -> None:
        self._live.phase(name, total)

    def step_done(self, state: TrainerState, figures: Mapping[str, float], groups: Sequence[Group]) -> None:
        told = {"step": state.step, "version": state.version, **figures}
        self._sinks.write(state.step, told)
        self._live.step(told)
        self._folder.add_samples(_shown(groups, "train", state.step, state.version - 1))

    async def _after_step(self, state: TrainerState) -> None:
        self._state = state
        settings = self._settings
        if settings.evaluation.every and state.step % settings.evaluation.every == 0 and state.step < settings.steps:
            await self._evaluate()
        if settings.checkpoint.every and state.step % settings.checkpoint.every == 0:
            await self._save()

    async def _evaluate(self) -> None:
        self._live.phase("evaluate")
        with current.get().recorder.timer("evaluate", "work", True, step=self._state.step):
            found = await evaluate(self._models.fleet, self._scenario, self._settings, self._state.version)
        self._note(found)

    def _note(self, found: Evaluation) -> None:
        step = self._state.step
        self._folder.add_evaluation({"step": step, "version": found.version, **found.figures})
        self._folder.add_samples(_shown(found.groups, "evaluation", step, found.version, len(found.groups)))
        self._live.note(f"evaluation of version {found.version}: mean reward {found.figures['reward/mean']:.3f}")

    async def _save(self) -> None:
        """Begin a checkpoint; it is written while the next step runs."""
        policy, critic = self._models.policy, self._models.critic
        with current.get().recorder.timer("save", "work", True, step=self._state.step):
            checkpoint = self._checkpoints.at(self._state.step)
            checkpoint.write_state(self._state)
            away = self._layout.turns.offloads if self._layout.turns.are_taken else ()
            if away:
                await policy.load(away)
            await policy.all("save", str(checkpoint.learner))
            if away:
                await policy.offload(away)
            if critic is not None:
                await critic.all("save", str(checkpoint.critic))
        self._saved_at = self._state.step
        self._checkpoints.prune()

    # Ending -------------------------------------------------------------------------------------------------------

    async def _end(self, fleet: Fleet) -> None:
        policy, critic = self._models.policy, self._models.critic
        if self._saved_at != self._state.step:
            await self._save()
        for learners in [policy, *([critic] if critic is not None else [])]:
            await learners.all("wait_saved")
        self._checkpoints.prune()
        if not self._stop.is_set():
            await self._evaluate()
            if self._layout.turns.are_taken and self._layout.turns.offloads:
                await policy.load(self._layout.turns.offloads)
            await policy.all("export", str(self._folder.policy))
        self._live.phase("report")
        self._cluster.write_trace(self._folder.trace_file)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """The first SIGTERM or Ctrl-C lets the step end and saves; the second ends at once."""
        loop = asyncio.get_running_loop()

        def stop(number: int) -> None:
            self._live.note("stopping after this step; once more to end at once")
            self._stop.set()
            loop.remove_signal_handler(number)

        wanted = (signal.SIGTERM, signal.SIGINT)
        for number in wanted:
            loop.add_signal_handler(number, stop, number)
        try:
            yield
        finally:
            for number in wanted:
                loop.remove_signal_handler(number)


def _shown(
    groups: Sequence[Group], kind: str, step: int, version: int, count: int = SHOWN_SAMPLES
) -> list[dict[str, Any]]:
    """Some rollouts as people see them: the first episode of the first groups."""
    return [
        {
            "step": step,
            "version": version,
            "kind": kind,
            "task": group.task.name,
            "completion": episode.score.shown,
            "reward": episode.score.reward,
            "lag": int(version - episode.tokens.made_by.min()) if episode.made else 0,
            "tokens": episode.made,
        }
        for group in groups[:count]
        for episode in group.episodes[:1]
    ]
