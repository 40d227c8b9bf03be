"""Run one episode: concurrency slots, attempts, and how failures are reported."""

from __future__ import annotations

import asyncio
import math
import time
import traceback
from collections.abc import Callable
from contextvars import ContextVar, Token
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from types import TracebackType
from typing import Protocol

from roost.procs.user_code import call, called, within
from roost.rollout.concurrency import Slots
from roost.rollout.episode import Episode, EpisodeReward, Ints, Sampler, Scenario, Split, Task, Transcript


class EpisodeSlot:
    """Concurrency slot of an episode, held until its end or until `release_slot()` is called inside it."""

    def __init__(self, slots: Slots | asyncio.Semaphore) -> None:
        self._slots = slots
        self._is_held = False
        self._before: Token[EpisodeSlot | None]

    async def __aenter__(self) -> None:
        await self._slots.acquire()
        self._is_held = True
        self._before = _CURRENT.set(self)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _CURRENT.reset(self._before)
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
            score = await within(self._limit_s, called(self._scenario.run_episode, request.task, transcript))
            checked = checked_score(score, transcript.turns)
            stopped_in = state_to_go_on_from(transcript) if checked.is_truncated else None
        except Exception as error:  # anything a scenario raises fails this episode alone
            raise EpisodeFailed(describe_error(error), whole_traceback(error)) from error
        finally:
            transcript.close()
        return Episode(transcript.sequences(), checked, time.perf_counter() - began, request.attempt + 1, stopped_in)


def checked_score(score: EpisodeReward, turns: int) -> EpisodeReward:
    """Return the reward with plain floats. Raise if a value is not finite: it would break the whole step."""
    if not isinstance(score, EpisodeReward):
        raise TypeError(f"run_episode() gives an EpisodeReward, not {type(score).__name__}")
    if not isinstance(score.reward, Real) or not math.isfinite(score.reward):
        raise ValueError(f"an episode is scored by a finite number, not {score.reward!r}")
    if score.turn_rewards and len(score.turn_rewards) != turns:
        raise ValueError(f"{len(score.turn_rewards)} turns are scored, but the policy had {turns}; score all or none")
    turn_rewards = tuple(float(reward) for reward in score.turn_rewards)
    if not all(map(math.isfinite, turn_rewards)):
        raise ValueError(f"turns are scored by finite numbers, not {score.turn_rewards}")
    return replace(score, reward=float(score.reward), turn_rewards=turn_rewards)


def state_to_go_on_from(transcript: Transcript) -> Ints:
    """Return the tokens of a cut-off episode's last state. Raise if the policy's turn came last."""
    shown = transcript.shown_last()
    if shown is None:
        raise ValueError(
            "the score says that the task goes on, but the policy's own turn was the last thing in the transcript; "
            "give() it what it would have been shown next"
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
        await called(close)
