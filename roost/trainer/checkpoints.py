"""The state of a run on disk: whole or not there, a few of them, the newest first."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path

from roost.trainer.feed import Position
from roost.trainer.metrics.json_lines import write_whole

NAME = re.compile(r"step-(\d+)")
STATE = "trainer.json"
LEARNER, CRITIC = "learner", "critic"


@dataclass(frozen=True, slots=True)
class TrainerState:
    """Where a run is, beside what the learner knows."""

    step: int = 0  # steps done
    version: int = 0
    position: Position = field(default_factory=Position)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder with the learner's state and the trainer's. The learner's folder gets its name when it is complete."""

    folder: Path

    @property
    def learner(self) -> Path:
        return self.folder / LEARNER

    @property
    def critic(self) -> Path:
        return self.folder / CRITIC

    @property
    def step(self) -> int:
        found = NAME.fullmatch(self.folder.name)
        return int(found[1]) if found else -1

    def is_whole(self, has_critic: bool = False) -> bool:
        return (self.folder / STATE).exists() and self.learner.is_dir() and (self.critic.is_dir() or not has_critic)

    def begin(self) -> None:
        """Make its folder. What an attempt that broke off left here goes: it would pass for the new one's."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)

    def write_state(self, state: TrainerState) -> None:
        """Say where the run is. Last, when all that is told of the step is written: a run may go on from here."""
        write_whole(self.folder / STATE, [json.dumps(asdict(state)).encode()])

    def read_state(self) -> TrainerState:
        found = json.loads((self.folder / STATE).read_text())
        position = found["position"]
        return TrainerState(found["step"], found["version"], Position(position["next"], tuple(position["waiting"])))


class Checkpoints:
    """The checkpoints of a run."""

    def __init__(self, folder: Path, keep: int, has_critic: bool = False) -> None:
        self._folder, self._keep, self._has_critic = folder, keep, has_critic

    def at(self, step: int) -> Checkpoint:
        return Checkpoint(self._folder / f"step-{step:06d}")

    def found(self) -> list[Checkpoint]:
        """Those that are whole, the newest last."""
        return [one for one in self._every() if one.is_whole(self._has_critic)]

    def newest(self) -> Checkpoint | None:
        return next(reversed(self.found()), None)

    def prune(self) -> None:
        """Remove what is older than those to keep, and what broke off before the newest: one is written at a time.

        What is not whole and newer than all others is being written.
        """
        whole = self.found()
        kept = {one.step for one in whole[-self._keep :]}
        for one in self._every():
            if whole and one.step < whole[-1].step and one.step not in kept:
                shutil.rmtree(one.folder, ignore_errors=True)

    def _every(self) -> list[Checkpoint]:
        if not self._folder.is_dir():
            return []
        every = [Checkpoint(path) for path in self._folder.iterdir() if NAME.fullmatch(path.name)]
        return sorted(every, key=lambda one: one.step)
