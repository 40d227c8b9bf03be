"""A group under way: the episodes of one task, played side by side."""

from __future__ import annotations

import asyncio
import math
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from numbers import Real
from pathlib import Path

from roost.rollout.bounded import within
from roost.rollout.episode import Episode, Group
from roost.rollout.scenario import Scenario, Score, Task
from roost.rollout.transcript import Draw, Transcript
from roost.spec.training import CollectSettings

ROOM = Path(__file__).parent
OpenDraw = Callable[[int, int, int], Draw]  # number of the group, episode, attempt


class GroupPlay:
    """Plays the episodes of a group. One that fails is played again, then counted; it never takes the run down."""

    def __init__(
        self,
        number: int,
        task: Task,
        began_at: int,
        scenario: Scenario,
        open_draw: OpenDraw,
        settings: CollectSettings,
        places: asyncio.Semaphore,
        on_change: Callable[[], None],
    ) -> None:
        self.number, self.task, self.began_at = number, task, began_at
        self._scenario, self._open_draw, self._settings, self._places = scenario, open_draw, settings, places
        self._episodes: dict[int, Episode] = {}
        self._failed = 0
        self._is_cut_off = False
        self._last_error = ""
        count = settings.group_size + settings.redundancy
        self._tasks = [asyncio.create_task(self._play(index)) for index in range(count)]
        for playing in self._tasks:
            playing.add_done_callback(lambda _: on_change())

    @property
    def finished(self) -> int:
        return len(self._episodes)

    @property
    def possible(self) -> int:
        """How many finished episodes it will have at most."""
        return self.finished if self.is_over else min(self._settings.group_size, len(self._tasks) - self._failed)

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come of it."""
        return self.finished >= self._settings.group_size or all(task.done() for task in self._tasks)

    @property
    def so_far(self) -> Group:
        """The group as it is now; it stays so once it is over."""
        chosen = sorted(self._episodes)[: self._settings.group_size]
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
        """End what still runs; it is counted as cancelled."""
        if self._is_cut_off:
            return  # once is enough: twice would cut short what episodes do to end in order
        self._is_cut_off = True
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()

    async def result(self) -> Group:
        """The group as it is now; whatever still runs is cut off and waited for."""
        self.cut_off()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        return self.so_far

    async def _play(self, index: int) -> None:
        for attempt in range(self._settings.attempts):
            try:
                async with self._places:
                    episode = await self._attempt(index, attempt)
            except Exception as error:  # whatever a scenario raises is a failure of this episode alone
                self._last_error = _told(error)
            else:
                self._episodes[index] = episode
                if self.finished >= self._settings.group_size:
                    self.cut_off()  # what is played beyond what is needed keeps engines from others
                return
        self._failed += 1

    async def _attempt(self, index: int, attempt: int) -> Episode:
        transcript = Transcript(self._open_draw(self.number, index, attempt))
        began = time.perf_counter()
        try:
            score = await within(self._settings.episode_limit_s, self._scenario.play(self.task, transcript))
        finally:
            transcript.close()
        return Episode(transcript.tokens(), _checked(score), time.perf_counter() - began, attempt + 1)


def _checked(score: Score) -> Score:
    """The score with a plain number, as arrays and files take it: one that is none would take the whole step down."""
    if not isinstance(score, Score):
        raise TypeError(f"play() gives a Score, not {type(score).__name__}")
    if not isinstance(score.reward, Real) or not math.isfinite(score.reward):
        raise ValueError(f"an episode is scored by a finite number, not {score.reward!r}")
    return replace(score, reward=float(score.reward))


def _told(error: Exception) -> str:
    """What went wrong, and the line of the scenario that it happened under."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not Path(frame.filename).is_relative_to(ROOM)]
    place = f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {error}{place}"
