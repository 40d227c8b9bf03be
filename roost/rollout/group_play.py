"""A group under way: the episodes of one task, played side by side."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Sequence

from roost.config.train import RolloutSettings
from roost.rollout.episode import Episode, Group, Task
from roost.rollout.playing import EpisodeRequest, EpisodeRunner, Place
from roost.transport.failure import WorkerFailed


class GroupRollout:
    """Plays the episodes of a group. One that fails is played again, then counted; it never takes the run down."""

    def __init__(
        self,
        number: int,
        task: Task,
        began_at: int,
        player: EpisodeRunner,
        settings: RolloutSettings,
        places: asyncio.Semaphore,
        on_change: Callable[[], None],
    ) -> None:
        self.number, self.task, self.began_at = number, task, began_at
        self._player, self._settings, self._places = player, settings, places
        self._episodes: dict[int, Episode] = {}
        self._failed = 0
        self._is_cut_off = False
        self._last_error = ""
        self.fatal: WorkerFailed | None = None  # what ends the run
        count = settings.num_generations + settings.extra_generations
        self._tasks = [asyncio.create_task(self._play(index)) for index in range(count)]
        for playing in self._tasks:
            playing.add_done_callback(lambda _: on_change())

    @property
    def finished(self) -> int:
        return len(self._episodes)

    @property
    def possible(self) -> int:
        """How many finished episodes it will have at most."""
        return self.finished if self.is_over else min(self._settings.num_generations, len(self._tasks) - self._failed)

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come of it."""
        return self.finished >= self._settings.num_generations or all(task.done() for task in self._tasks)

    @property
    def so_far(self) -> Group:
        """The group as it is now; it stays so once it is over."""
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
        for attempt in range(self._settings.episode_attempts):
            try:
                async with Place(self._places):
                    episode = await self._player.run_episode(EpisodeRequest(self.task, self.number, index, attempt))
            except WorkerFailed as error:  # of somebody else than who plays: more is lost than this episode
                self.fatal = error
                return
            except Exception as error:  # whatever goes wrong is a failure of this episode alone
                self._last_error = str(error)
            else:
                self._episodes[index] = episode
                if self.finished >= self._settings.num_generations:
                    self.cut_off()  # what is played beyond what is needed keeps engines from others
                return
        self._failed += 1


def raise_fatal(plays: Iterable[GroupRollout]) -> None:
    """What ends the run, if any of the groups has seen it."""
    for play in plays:
        if play.fatal is not None:
            raise play.fatal


def needed_of_group(settings: RolloutSettings) -> int:
    """How many finished episodes every group must have before anything is cut off.

    >>> needed_of_group(RolloutSettings(num_generations=6, group_fraction=0.75))  # half of an even number rounds down
    4
    """
    return max(1, round(settings.num_generations * settings.group_fraction))


def may_end(finished: Sequence[int], possible: Sequence[int], settings: RolloutSettings) -> bool:
    """Whether enough has finished, given how many episodes of each group of a step have, and how many still can.

    Nobody waits for what has failed: a group that cannot have what is needed of it needs what it can have.

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
