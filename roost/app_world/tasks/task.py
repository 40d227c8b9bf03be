"""A task as an agent gets it, with what is needed to score it."""

from __future__ import annotations

from dataclasses import dataclass

from roost.app_world.changes import Change
from roost.app_world.state import Json, Snapshot
from roost.app_world.world import World


@dataclass(frozen=True)
class AppTask:
    """A task of the supervisor. The agent sees only the id and the instruction."""

    id: str  # scenario and variant, such as 3f2a91c_1
    kind: str  # its generator
    difficulty: int
    instruction: str
    initial: Snapshot  # the world at the start
    wanted: tuple[Change, ...]  # changes that the agent has to make, and no others
    answer: Json  # None if the task needs no answer
    solution: str  # code against `apis` that solves it

    @property
    def scenario_id(self) -> str:
        return self.id.partition("_")[0]

    def open_world(self) -> World:
        """Return a new world in which the task can be done."""
        return World.from_snapshot(self.initial)
