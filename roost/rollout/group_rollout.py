"""Run the episodes of one group concurrently."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Sequence

from roost.config.train import RolloutSettings
from roost.rollout.concurrency import Slots
from roost.rollout.episode import Episode, Group, Task
from roost.rollout.episode_runner import EpisodeRequest, EpisodeRunner, EpisodeSlot
from roost.transport.failure import WorkerFailed


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
            if task is not asyncio.current_task():
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
    """Number of finished episodes that every group needs before anything is cut off.

    >>> needed_of_group(RolloutSettings(num_generations=6, group_fraction=0.75))  # half of an even number rounds down
    4
    """
    return max(1, round(settings.num_generations * settings.group_fraction))


def may_end(finished: Sequence[int], possible: Sequence[int], settings: RolloutSettings) -> bool:
    """Return True if enough episodes finished, given finished and possible episodes of each group of a step.

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
