"""A task as an agent gets it, with what is needed to score it."""

from __future__ import annotations

from dataclasses import dataclass

from roost.app_world.changes import Change
from roost.app_world.state import Json, Snapshot
from roost.app_world.world import World


@dataclass(frozen=True)
class AppTask:
    """One thing that the supervisor wants done. Only the id and the instruction are for the agent."""

    id: str  # the scenario and the variant, as 3f2a91c_1
    kind: str  # the generator that made it
    difficulty: int
    instruction: str
    initial: Snapshot  # the world as the agent finds it
    wanted: tuple[Change, ...]  # all that is to be different afterwards
    answer: Json  # None if the task needs no answer
    solution: str  # code against `apis` that solves it

    @property
    def scenario_id(self) -> str:
        return self.id.partition("_")[0]

    def open_world(self) -> World:
        """Return a new world in which the task can be done."""
        return World.from_snapshot(self.initial)
