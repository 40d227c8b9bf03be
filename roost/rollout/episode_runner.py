"""Run one episode: concurrency slots, attempts, and how failures are reported."""

from __future__ import annotations

import asyncio
import math
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar, Token
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from types import TracebackType
from typing import Protocol

from roost.config.train import RolloutSettings
from roost.procs.user_code import call, call_async, within
from roost.rollout.concurrency import Slots
from roost.rollout.episode import Episode, EpisodeReward, Group, Ints, Sampler, Scenario, Split, Task, Transcript
from roost.transport.context import WorkerFailed


class EpisodeSlot:
    """Concurrency slot of an episode, held until its end or until `release_slot()` is called inside it."""

    def __init__(self, slots: Slots | asyncio.Semaphore) -> None:
        self._slots = slots
        self._is_held = False
        self._token: Token[EpisodeSlot | None]

    async def __aenter__(self) -> None:
        await self._slots.acquire()
        self._is_held = True
        self._token = _CURRENT.set(self)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _CURRENT.reset(self._token)
        self.release()

    def release(self) -> None:
        if self._is_held:
            self._is_held = False
            self._slots.release()


_CURRENT: ContextVar[EpisodeSlot | None] = ContextVar("slot", default=None)


def release_slot() -> None:
    """Release this episode's concurrency slot; the rest of the episode needs no engine."""
    slot = _CURRENT.get()
    if slot is not None:
        slot.release()


PACKAGE = Path(__file__).parents[1]
LONGEST_TRACEBACK = 30_000  # characters; it may be sent between nodes
OpenPolicy = Callable[[int, int, int], Sampler]  # number of the group, episode, attempt


@dataclass(frozen=True, slots=True)
class EpisodeRequest:
    """One attempt at an episode."""

    task: Task
    number: int  # of the group
    episode: int  # in the group
    attempt: int = 0


class EpisodeFailed(Exception):
    """A failed attempt; the message is the reason, `traceback` the traceback as text."""

    def __init__(self, reason: str, traceback: str = "") -> None:
        super().__init__(reason)
        self.traceback = traceback

    def __reduce__(self) -> tuple[type[EpisodeFailed], tuple[str, str]]:
        return type(self), (str(self), self.traceback)


@dataclass(frozen=True, slots=True)
class UnmadeTask(Task):
    """Placeholder for a task that the scenario failed to return; every attempt fails with the same reason."""

    reason: str = ""
    traceback: str = ""


def task_of(scenario: Scenario, split: Split, index: int) -> Task:
    """Return a task of the scenario, or an UnmadeTask with the error it raised."""
    try:
        task = call(scenario.task, split, index)
        if not isinstance(task, Task):
            raise TypeError(f"task() must return a Task, not {type(task).__name__}")
    except Exception as error:  # anything a scenario raises fails this group alone
        return UnmadeTask(f"task {index} of {split}", reason=describe_error(error), traceback=whole_traceback(error))
    return task


def check_episode(task: Task) -> None:
    """Raise EpisodeFailed for a task that the scenario failed to return."""
    if isinstance(task, UnmadeTask):
        raise EpisodeFailed(task.reason, task.traceback)


class EpisodeRunner(Protocol):
    """Runs episodes concurrently."""

    async def run_episode(self, request: EpisodeRequest) -> Episode:
        """Run an episode. Raise EpisodeFailed for any error. Cancelling the call ends the episode."""
        ...


class LocalEpisodeRunner:
    """Runs episodes in this process."""

    def __init__(self, scenario: Scenario, open_policy: OpenPolicy, limit_s: float) -> None:
        self._scenario, self._open_policy, self._limit_s = scenario, open_policy, limit_s

    async def run_episode(self, request: EpisodeRequest) -> Episode:
        transcript = Transcript(self._open_policy(request.number, request.episode, request.attempt))
        began = time.perf_counter()
        try:
            returned = await within(self._limit_s, call_async(self._scenario.run_episode, request.task, transcript))
            reward = checked_reward(returned, transcript.turns)
            stopped_in = last_state(transcript) if reward.is_truncated else None
        except Exception as error:  # anything a scenario raises fails this episode alone
            raise EpisodeFailed(describe_error(error), whole_traceback(error)) from error
        finally:
            transcript.close()
        return Episode(transcript.sequences(), reward, time.perf_counter() - began, request.attempt + 1, stopped_in)


def checked_reward(episode_reward: EpisodeReward, turns: int) -> EpisodeReward:
    """Return the reward with plain floats. Raise if a value is not finite: it would break the whole step."""
    if not isinstance(episode_reward, EpisodeReward):
        raise TypeError(f"run_episode() must return an EpisodeReward, not {type(episode_reward).__name__}")
    reward, given = episode_reward.reward, episode_reward.turn_rewards
    if not isinstance(reward, Real) or not math.isfinite(reward):
        raise ValueError(f"the reward of an episode must be a finite number, not {reward!r}")
    if given and len(given) != turns:
        raise ValueError(f"{len(given)} turn_rewards are given for {turns} turns; give one for each turn, or none")
    turn_rewards = tuple(map(float, given))
    if not all(map(math.isfinite, turn_rewards)):
        raise ValueError(f"turn_rewards must be finite numbers, not {given}")
    return replace(episode_reward, reward=float(reward), turn_rewards=turn_rewards)


def last_state(transcript: Transcript) -> Ints:
    """Return the tokens of a truncated episode's last state. Raise if the policy's turn came last."""
    shown = transcript.shown_last()
    if shown is None:
        raise ValueError(
            "is_truncated is set, but the transcript ends with the policy's own turn; give() the next observation "
            "before you return"
        )
    return shown


def describe_error(error: Exception) -> str:
    """Format an error with the line of user code that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not Path(frame.filename).is_relative_to(PACKAGE)]
    place = f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {error}{place}"


def whole_traceback(error: BaseException) -> str:
    """Format the traceback with its causes; the middle of a very long one is left out."""
    text = "".join(traceback.format_exception(error))
    return text if len(text) <= LONGEST_TRACEBACK else f"{text[:4_000]}\n[...]\n{text[4_000 - LONGEST_TRACEBACK :]}"


async def close_scenario(scenario: Scenario) -> None:
    """Call the scenario's `close`, if it has one."""
    close = getattr(scenario, "close", None)
    if close is not None:
        await call_async(close)


class GroupRollout:
    """Runs the episodes of a group. A failed episode is retried, then counted; it never ends the run."""

    def __init__(
        self,
        number: int,
        task: Task,
        began_at: int,
        runner: EpisodeRunner,
        settings: RolloutSettings,
        slots: Slots | asyncio.Semaphore,
        on_change: Callable[[], None],
    ) -> None:
        self.number, self.task, self.began_at = number, task, began_at
        self._runner, self._settings, self._slots = runner, settings, slots
        self._episodes: dict[int, Episode] = {}
        self._failed = 0
        self._is_cut_off = False
        self._last_error = ""
        self.fatal: WorkerFailed | None = None  # error that ends the run
        count = settings.num_generations + settings.extra_generations
        self._tasks = [asyncio.create_task(self._run_episode(index)) for index in range(count)]
        for running in self._tasks:
            running.add_done_callback(lambda _: on_change())

    @property
    def finished(self) -> int:
        return len(self._episodes)

    @property
    def possible(self) -> int:
        """Upper bound of finished episodes."""
        return self.finished if self.is_over else min(self._settings.num_generations, len(self._tasks) - self._failed)

    @property
    def is_over(self) -> bool:
        """Return True if no more episodes will finish."""
        return self.finished >= self._settings.num_generations or all(task.done() for task in self._tasks)

    @property
    def so_far(self) -> Group:
        """The group as of now; final once `is_over`."""
        chosen = sorted(self._episodes)[: self._settings.num_generations]
        return Group(
            self.number,
            self.task,
            self.began_at,
            tuple(self._episodes[index] for index in chosen),
            len(self._tasks) - len(chosen) - self._failed,
            self._failed,
            self._last_error,
        )

    def cut_off(self) -> None:
        """Cancel the running episodes; they count as cancelled."""
        if self._is_cut_off:
            return  # a second cancel would interrupt the cleanup of episodes
        self._is_cut_off = True
        for task in self._tasks:
            if task is not asyncio.current_task():  # it has just finished
                task.cancel()

    async def result(self) -> Group:
        """Cancel running episodes, wait for them, and return the group."""
        self.cut_off()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        return self.so_far

    async def _run_episode(self, index: int) -> None:
        for attempt in range(self._settings.episode_attempts):
            try:
                async with EpisodeSlot(self._slots):
                    episode = await self._runner.run_episode(EpisodeRequest(self.task, self.number, index, attempt))
            except WorkerFailed as error:  # a worker other than the agent's failed: more is lost than this episode
                self.fatal = error
                return
            except Exception as error:  # any other error fails this episode alone
                self._last_error = str(error)
            else:
                self._episodes[index] = episode
                if self.finished >= self._settings.num_generations:
                    self.cut_off()  # extra episodes would keep engines from other groups
                return
        self._failed += 1


def raise_fatal(rollouts: Iterable[GroupRollout]) -> None:
    """Raise the fatal error of any group."""
    for rollout in rollouts:
        if rollout.fatal is not None:
            raise rollout.fatal


def needed_of_group(settings: RolloutSettings) -> int:
    """Number of finished episodes that every group needs before the others are cancelled.

    >>> needed_of_group(RolloutSettings(num_generations=6, group_fraction=0.75))  # half of an even number rounds down
    4
    """
    return max(1, round(settings.num_generations * settings.group_fraction))


def may_end(finished: Sequence[int], possible: Sequence[int], settings: RolloutSettings) -> bool:
    """Return True if enough episodes finished, given the finished and possible episodes of each group of a step.

    Failed episodes are not waited for: a group that cannot reach its minimum needs only what is still possible.

    >>> settings = RolloutSettings(prompts_per_step=2, num_generations=4, rollout_fraction=0.75, group_fraction=0.5)
    >>> may_end([4, 2], [4, 4], settings), may_end([4, 1], [4, 4], settings), may_end([3, 2], [4, 4], settings)
    (True, False, False)
    >>> may_end([4, 1], [4, 1], settings)
    True
    """
    needed = needed_of_group(settings)
    wanted = math.ceil(sum(possible) * settings.rollout_fraction)
    counted = sum(map(min, finished, possible))
    return counted >= wanted and all(count >= min(needed, most) for count, most in zip(finished, possible, strict=True))
