"""A group under way: the episodes of one task, played side by side."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from roost.config.training import CollectSettings
from roost.rollout.episode import Episode, Group
from roost.rollout.place import Place
from roost.rollout.playing import Play, Player
from roost.rollout.scenario import Task
from roost.transport.failure import WorkerFailed


class GroupPlay:
    """Plays the episodes of a group. One that fails is played again, then counted; it never takes the run down."""

    def __init__(
        self,
        number: int,
        task: Task,
        began_at: int,
        player: Player,
        settings: CollectSettings,
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
                async with Place(self._places):
                    episode = await self._player.play(Play(self.task, self.number, index, attempt))
            except WorkerFailed as error:  # of somebody else than who plays: more is lost than this episode
                self.fatal = error
                return
            except Exception as error:  # whatever goes wrong is a failure of this episode alone
                self._last_error = str(error)
            else:
                self._episodes[index] = episode
                if self.finished >= self._settings.group_size:
                    self.cut_off()  # what is played beyond what is needed keeps engines from others
                return
        self._failed += 1


def raise_fatal(plays: Iterable[GroupPlay]) -> None:
    """What ends the run, if any of the groups has seen it."""
    for play in plays:
        if play.fatal is not None:
            raise play.fatal
