"""A scenario: where tasks come from, and how one is played and scored. Users plug in their own by `_target_`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from roost.rollout.transcript import Transcript


class Split(StrEnum):
    """Tasks to learn from, and tasks to be tried on."""

    TRAIN = "train"
    EVALUATION = "evaluation"


@dataclass(frozen=True, slots=True)
class Task:
    """One thing to be done."""

    name: str  # as people see it
    data: Mapping[str, Any] = field(default_factory=dict)  # what the scenario needs to play it
    tag: str = ""  # the kind of task, by which rewards choose what they score


@dataclass(frozen=True, slots=True)
class Score:
    """What an episode earned, and how it is shown to people."""

    reward: float
    shown: str = ""  # the answer as text
    # What each turn of the policy earned, in order, where that is known; a critic learns from these. Their sum, and
    # what comes at the end, is `reward`.
    of_turns: tuple[float, ...] = ()
    # A limit cut it off, and the task would have gone on from what the policy was shown last: to a critic, what it
    # expects there follows the last reward.
    goes_on: bool = False
    answer: str | None = None  # the text that rewards judge, where that is not what is shown
    parts: Mapping[str, float] = field(default_factory=dict)  # what each reward gave, before it was weighted


class Scenario(Protocol):
    """Makes tasks and plays them. Made once in a process; many episodes run in it at a time.

    class Echo:
        def size(self, split): return 10
        def task(self, split, index): return Task(f"say {index}", {"ids": [index]})
        async def play(self, task, transcript):
            transcript.give(task.data["ids"])
            said = await transcript.take(max_tokens=1)
            return Score(float(said == tuple(task.data["ids"])))
    """

    def size(self, split: Split) -> int:
        """How many tasks there are."""
        ...

    def task(self, split: Split, index: int) -> Task:
        """One of them; the same index is always the same task."""
        ...

    async def play(self, task: Task, transcript: Transcript) -> Score:
        """Play it: give tokens to the transcript, take the policy's turns from it, and score the outcome."""
        ...
