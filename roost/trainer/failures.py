"""Why episodes failed: for each reason a file in the run's folder, with a traceback."""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from roost.config.findings import counted
from roost.rollout.episode import Episode
from roost.rollout.playing import EpisodeFailed, EpisodeRequest, EpisodeRunner, check_episode

MOST_REASONS = 50  # files in the folder
_TASK = re.compile(r"\btask (?:'[^']*'|\"[^\"]*\")")  # by name, which is another in every group
LONGEST = 4_000  # characters of a reason, and of a task's name; those who send a traceback cut it


class FailureFiles:
    """The folder. A reason that comes again and again is written anew each time its count has doubled."""

    def __init__(self, folder: Path, note: Callable[[str], None]) -> None:
        self._folder, self._note = folder, note
        self._counts: Counter[str] = Counter()

    def add(self, reason: str, traceback: str, asked: EpisodeRequest) -> None:
        """An attempt at an episode came to nothing."""
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
            file.write_text(_told(reason, traceback, asked, count), encoding="utf-8", errors="replace")
        except OSError as error:  # a full disk ends no run here
            self._note(f"an episode failed, and {file} cannot be written: {error}")
            return
        if is_new:
            self._note(f"an episode failed: {reason.partition(chr(10))[0][:400]}; more is in {file}")


class RecordingEpisodeRunner:
    """Plays as another does, and keeps why attempts fail."""

    def __init__(self, player: EpisodeRunner, failures: FailureFiles) -> None:
        self._player, self._failures = player, failures

    async def run_episode(self, asked: EpisodeRequest) -> Episode:
        try:
            check_episode(asked.task)
            return await self._player.run_episode(asked)
        except EpisodeFailed as error:
            self._failures.add(str(error), error.traceback, asked)
            raise


def file_name(reason: str) -> str:
    """A name for all reasons that differ in numbers or the task alone, but not in the line of a file.

    >>> file_name("ValueError: 3 is odd (a.py:7)"), file_name("ValueError: 5 is odd (a.py:7)")
    ('ValueError-da29793b.txt', 'ValueError-da29793b.txt')
    """
    kind = re.sub(r"\W.*", "", reason.strip(), flags=re.DOTALL)[:40] or "failure"
    alike = re.sub(r"(?<![:\d])\d+", "0", _TASK.sub("task", reason[:LONGEST]))
    return f"{kind}-{zlib.crc32(alike.encode(errors='replace')):08x}.txt"


def _told(reason: str, traceback: str, asked: EpisodeRequest, count: int) -> str:
    attempt = f"group {asked.number}, episode {asked.episode}, attempt {asked.attempt + 1}"
    head = f"{reason[:LONGEST]}\n\n{counted(count, 'time')} so far; this is {attempt} of the task\n"
    return f"{head}{asked.task.name[:LONGEST]}\n\n{traceback.rstrip()}\n"
