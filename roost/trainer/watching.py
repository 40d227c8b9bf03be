"""Report a run: metrics, live view, samples, and a file with a traceback for each reason an episode failed."""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from roost.config.findings import counted
from roost.config.train import AdvantageEstimator, AdvantageSettings
from roost.engines.fleet import Fleet
from roost.engines.members import WorkTimes
from roost.rollout.episode import Decode, Episode, Group, token_numbers
from roost.rollout.episode_runner import EpisodeFailed, EpisodeRequest, EpisodeRunner, check_episode
from roost.rollout.rewards.config import Routing
from roost.trainer.diagnosis import Diagnoser
from roost.trainer.evaluation import Evaluation
from roost.trainer.metrics import TokenRatio
from roost.trainer.records.checkpoints import HELD_OUT, TrainerState
from roost.trainer.records.fan_out import FanOut
from roost.trainer.records.run_folder import RunFolder
from roost.trainer.records.samples import samples_of, token_record
from roost.trainer.report.live_view import LiveView

MOST_REASONS = 50  # files in the folder
_TASK = re.compile(r"\btask (?:'[^']*'|\"[^\"]*\")")  # a task's name, which differs in every group
LONGEST = 4_000  # characters of a reason or of a task's name; tracebacks arrive already cut


class FailureFiles:
    """Folder with one file per reason of failure, rewritten each time the count of its reason doubles."""

    def __init__(self, folder: Path, note: Callable[[str], None]) -> None:
        self._folder, self._note = folder, note
        self._counts: Counter[str] = Counter()

    def add(self, reason: str, traceback: str, request: EpisodeRequest) -> None:
        """Record a failed attempt at an episode."""
        name = file_name(reason)
        self._counts[name] += 1
        count, file = self._counts[name], self._folder / name
        if count & (count - 1):
            return
        try:
            is_new = not file.exists()
            if is_new and len(list(self._folder.glob("*.txt"))) >= MOST_REASONS:
                return
            self._folder.mkdir(exist_ok=True)
            file.write_text(_description(reason, traceback, request, count), encoding="utf-8", errors="replace")
        except OSError as error:  # a full disk must not end the run here
            self._note(f"an episode failed, and {file} cannot be written: {error}")
            return
        if is_new:
            self._note(f"an episode failed: {reason.partition(chr(10))[0][:400]}; more is in {file}")


class RecordingEpisodeRunner:
    """Runs episodes with another runner, and records failed attempts."""

    def __init__(self, runner: EpisodeRunner, failures: FailureFiles) -> None:
        self._runner, self._failures = runner, failures

    async def run_episode(self, request: EpisodeRequest) -> Episode:
        try:
            check_episode(request.task)
            return await self._runner.run_episode(request)
        except EpisodeFailed as error:
            self._failures.add(str(error), error.traceback, request)
            raise


def file_name(reason: str) -> str:
    """Name of the file of a reason.

    Reasons that differ only in the task, or in numbers other than line numbers, share a file.

    >>> file_name("ValueError: 3 is odd (a.py:7)"), file_name("ValueError: 5 is odd (a.py:7)")
    ('ValueError-da29793b.txt', 'ValueError-da29793b.txt')
    """
    kind = re.sub(r"\W.*", "", reason.strip(), flags=re.DOTALL)[:40] or "failure"
    alike = re.sub(r"(?<![:\d])\d+", "0", _TASK.sub("task", reason[:LONGEST]))
    return f"{kind}-{zlib.crc32(alike.encode(errors='replace')):08x}.txt"


def _description(reason: str, traceback: str, request: EpisodeRequest, count: int) -> str:
    attempt = f"group {request.number}, episode {request.episode}, attempt {request.attempt + 1}"
    head = f"{reason[:LONGEST]}\n\n{counted(count, 'time')} so far; this is {attempt} of the task\n"
    return f"{head}{request.task.name[:LONGEST]}\n\n{traceback.rstrip()}\n"


def idle_rewards(routing: Routing, tags: Sequence[str]) -> dict[str, str]:
    """Note for each reward that scores no task of a step, given the tasks' tags.

    >>> from roost.rollout.rewards.config import Route
    >>> idle_rewards(Routing((Route("exact", frozenset({"maths"})),)), ["math", "math", ""])["exact"]
    'reward exact scores nothing in this step: its tags are maths, and the tasks have math (2), no tag (1)'
    """
    had = ", ".join(f"{tag or 'no tag'} ({count})" for tag, count in sorted(Counter(tags).items(), reverse=True))
    return {
        route.name: f"reward {route.name} scores nothing in this step: its tags are {', '.join(sorted(route.tags))}, "
        f"and the tasks have {had}"
        for route in routing.routes
        if tags and not route.domain and not any(map(route.takes, tags))
    }


def lost_steps(settings: AdvantageSettings, groups: Sequence[Group]) -> str:
    """Message if the settings give advantages to steps, but each episode is one sample of several turns; else empty."""
    if settings.step_gamma is None:
        return ""
    episodes = [episode for group in groups for episode in group.episodes]
    if any(len(episode.sequences) > 1 for episode in episodes) or all(episode.num_turns == 1 for episode in episodes):
        return ""
    is_gigpo = settings.advantage_estimator is AdvantageEstimator.GIGPO
    setting, other = ("advantage_estimator: gigpo", "write grpo") if is_gigpo else ("step_gamma", "leave it out")
    return (
        f"{setting} gives all turns of an episode one advantage here: a step is a sample, and each episode is one "
        "sample of all its turns. Use an agent with a sample for each turn (history: step of the templated agent), or "
        f"{other}"
    )


LEARNER_PHASES = ("time/score", "time/learn", "time/sync")


class Watching:
    """Reports a run to the metrics, the terminal and the run folder."""

    def __init__(self, run: RunFolder, sinks: FanOut, live: LiveView, decode: Decode = token_numbers) -> None:
        self._run, self._sinks, self._live = run, sinks, live
        self.decode = decode  # token IDs to text
        self._fleet: Fleet | None = None
        self._worked: dict[WorkTimes, int] = {}  # nanoseconds before this step
        self._routing: Routing | None = None
        self._idle: set[str] = set()  # rewards already reported as idle
        self._advantage: AdvantageSettings | None = None  # until lost steps are reported
        self._diagnoser = Diagnoser()
        for row in run.steps():  # of a resumed run
            self._diagnoser.add(row)

    def watch(self, fleet: Fleet) -> None:
        """Count the work of these engines from now on."""
        self._fleet = fleet
        self._worked = {member.work: member.work.total_ns() for member in fleet.pool.members.values()}

    def watch_rewards(self, routing: Routing | None) -> None:
        """Report which of these rewards are idle from now on."""
        self._routing = routing

    def watch_steps(self, settings: AdvantageSettings) -> None:
        """Report once if these settings give advantages to steps, but episodes are single samples."""
        self._advantage = settings

    def phase(self, name: str, total: int | None = None) -> None:
        self._live.phase(name, total)

    def advance(self, done: int) -> None:
        self._live.advance(done)

    def note(self, text: str) -> None:
        self._live.note(text)

    def step_done(
        self,
        state: TrainerState,
        metrics: Mapping[str, float],
        groups: Sequence[Group],
        tokens: Sequence[TokenRatio] = (),
    ) -> None:
        stats = {"step": state.step, "version": state.version, **metrics, **self._busy(metrics)}
        self._sinks.write(state.step, stats)
        self._live.step(stats)
        for found in self._diagnoser.add(stats):
            self.note(f"diagnosis: {found}")
        self._run.add_learnt(state.step, [group.number for group in groups])
        self._run.add_samples(samples_of(groups, "train", state.step, state.version - 1, self.decode))
        self._run.add_tokens({"step": state.step, **token_record(token, self.decode)} for token in tokens)
        if self._advantage is not None and (note := lost_steps(self._advantage, groups)):
            self._advantage = None
            self.note(note)
        if self._routing is not None and not any(group.failed for group in groups):  # failures go unscored
            for name, note in idle_rewards(self._routing, [group.task.tag for group in groups]).items():
                if name not in self._idle:
                    self._idle.add(name)
                    self.note(note)

    def evaluated(self, step: int, found: Evaluation) -> None:
        self._run.add_evaluation({"step": step, "version": found.version, **found.metrics})
        self._sinks.evaluated(step, {"version": found.version, **found.metrics})
        tried = samples_of(found.groups, "evaluation", step, found.version, self.decode, len(found.groups))
        self._run.add_samples(tried)
        failed = found.metrics["samples/failed"]
        stats = f", {failed:,.0f} failed" if failed else ""
        self.note(f"evaluation of version {found.version}: mean reward {found.metrics['reward/mean']:.3f}{stats}")

    def held_out(self, state: TrainerState, metrics: Mapping[str, float]) -> None:
        """Report the loss of supervised training on held-out rows."""
        self._run.add_evaluation({"step": state.step, "version": state.version, **metrics})
        self._sinks.evaluated(state.step, {"version": state.version, **metrics})
        self.note(f"held-out loss after step {state.step}: {metrics[HELD_OUT]:.3f}")

    def _busy(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Share of the step in which learner and engines were busy."""
        if self._fleet is None:
            return {}
        seconds = metrics["time/step"] or 1.0
        worked = {member.work: member.work.total_ns() for member in self._fleet.pool.members.values()}
        shares = [(total - self._worked.get(work, 0)) / 1e9 / seconds for work, total in worked.items()]
        self._worked = worked
        learner = sum(metrics.get(phase, 0.0) for phase in LEARNER_PHASES)
        return {"busy/actor": min(1.0, learner / seconds), "busy/rollout": min(1.0, sum(shares) / len(shares))}
