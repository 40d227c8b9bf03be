"""Ids of scenarios: one says what it names, so that a task can be made from its id alone."""

from __future__ import annotations

import re
from dataclasses import dataclass

from roost.app_world.errors import unknown

SPLITS = ("train", "dev", "test_normal", "test_challenge")
DIFFICULTIES = (1, 2, 3)
SLOTS = 32  # for kinds of a difficulty: a new kind takes the next slot, and leaves older ids as they are
SPACE = 16**7
NUMBERS = SPACE // (SLOTS * len(DIFFICULTIES) * len(SPLITS))  # scenarios of a kind in a split
SCATTER = 0x9E3779B  # odd, so that multiplying by it has an inverse; neighbours get ids that look unlike
GATHER = pow(SCATTER, -1, SPACE)
TASK_ID = re.compile(r"([0-9a-f]{7})_([123])", re.ASCII)


@dataclass(frozen=True)
class ScenarioName:
    """What a scenario's id stands for. Two splits have no id in common.

    >>> name = ScenarioName("dev", difficulty=2, slot=5, number=1000)
    >>> name.id, ScenarioName.parse(name.id) == name
    ('391925b', True)
    """

    split: str
    difficulty: int
    slot: int  # of the kind, among those of its difficulty
    number: int

    @property
    def id(self) -> str:
        place = self.number * SLOTS + self.slot
        place = place * len(DIFFICULTIES) + DIFFICULTIES.index(self.difficulty)
        place = place * len(SPLITS) + SPLITS.index(self.split)
        return f"{place * SCATTER % SPACE:07x}"

    @classmethod
    def parse(cls, scenario_id: str) -> ScenarioName:
        place = int(scenario_id, 16) * GATHER % SPACE
        place, split = divmod(place, len(SPLITS))
        place, difficulty = divmod(place, len(DIFFICULTIES))
        number, slot = divmod(place, SLOTS)
        return cls(SPLITS[split], DIFFICULTIES[difficulty], slot, number)


def parse_task_id(task_id: str) -> tuple[str, int]:
    """The scenario's id and the variant.

    >>> parse_task_id("3f2a91c_1")
    ('3f2a91c', 1)
    """
    match = TASK_ID.fullmatch(task_id)
    if match is None:
        raise ValueError(f"{task_id!r} is no id of a task; one looks like 3f2a91c_1, with a variant from 1 to 3")
    return match[1], int(match[2])


def check_split(split: str) -> None:
    """Only splits that there are."""
    if split not in SPLITS:
        raise ValueError(str(unknown("split", split, SPLITS)))
