"""Scenarios, transcripts and episodes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from roost.engines.protocol import Completion, ContextFull, Finish


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
class EpisodeReward:
    """What an episode earned, and how it is shown to people."""

    reward: float
    shown: str = ""  # the answer as text
    # What each turn of the policy earned, in order, where that is known; a critic learns from these. Their sum, and
    # what comes at the end, is `reward`.
    turn_rewards: tuple[float, ...] = ()
    # A limit cut it off, and the task would have gone on from what the policy was shown last: to a critic, what it
    # expects there follows the last reward.
    is_truncated: bool = False
    answer: str | None = None  # the text that rewards judge, where that is not what is shown
    parts: Mapping[str, float] = field(default_factory=dict)  # what each reward gave, before it was weighted


class Scenario(Protocol):
    """Makes tasks and plays them. Made once in a process; many episodes run in it at a time.

    class Echo:
        def size(self, split): return 10
        def task(self, split, index): return Task(f"say {index}", {"ids": [index]})
        async def run_episode(self, task, transcript):
            transcript.give(task.data["ids"])
            said = await transcript.take(max_tokens=1)
            return EpisodeReward(float(said == tuple(task.data["ids"])))
    """

    def size(self, split: Split) -> int:
        """How many tasks there are."""
        ...

    def task(self, split: Split, index: int) -> Task:
        """One of them; the same index is always the same task."""
        ...

    async def run_episode(self, task: Task, transcript: Transcript) -> EpisodeReward:
        """EpisodeRequest it: give tokens to the transcript, take the policy's turns from it, and score the outcome."""
        ...


Draw = Callable[[Sequence[int], int, int | None], Awaitable[Completion]]  # tokens so far, the turn, and its limit


class Transcript:
    """A sequence of an episode under way: the scenario gives tokens, and takes the policy's turns.

    An episode begins with one. Where what the policy is shown does not go on from what it was shown before, `branch`
    opens another.
    """

    def __init__(self, draw: Draw, _first: Transcript | None = None) -> None:
        self._draw = draw
        self._first = _first or self
        self._token_ids: list[int] = []
        self._turns: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._parts: list[Part] = []
        self.finish: Finish | None = None  # of the last turn
        if _first is None:
            self._branches: list[Transcript] = [self]
            self._begun_turns = 0  # of all branches: each turn is drawn with a seed of its own
            self._newest = self  # to which something was added last
            self._is_closed = False

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(self._token_ids)

    def give(self, token_ids: Sequence[int], messages: Sequence[tuple[str, str]] = ()) -> None:
        """Tokens that the policy is shown: a prompt, an observation.

        `messages` is the same as role and content, for people who look at samples; without it they see the tokens'
        text.
        """
        self._add(token_ids, [0.0] * len(token_ids), [NOT_MADE] * len(token_ids), NOT_MADE, messages=tuple(messages))

    async def take(self, max_tokens: int | None = None) -> tuple[int, ...]:
        """The policy's next turn; `max_tokens` is less than the run's own limit, if anything.

        Raises ContextFull where the engine has no room for another: then the episode is worth what it is.
        """
        if not self._token_ids:
            raise ValueError("the policy was shown nothing yet; give it a prompt before its first turn")
        first = self._first
        if first._is_closed:
            await asyncio.sleep(0)  # one that asks again and again lets others run
            raise asyncio.CancelledError("the episode is over; nothing more is drawn for it")
        shown, turn = self.token_ids, first._begun_turns
        first._begun_turns += 1
        try:
            made = await self._draw(shown, turn, max_tokens)
        except ContextFull:
            self.finish = Finish.LENGTH
            self._parts.append(Part(len(shown), len(shown), turn, self.finish))
            raise
        if len(self._token_ids) != len(shown):
            raise RuntimeError("tokens were added while the policy was at its turn; wait for one turn before the next")
        self._add(made.token_ids, made.logprobs, token_versions(made), turn, made.finish)
        self.finish = made.finish
        return made.token_ids

    def leave_out(self, start: int, count: int) -> None:
        """Take tokens that the policy made for tokens that it was shown: nothing is learnt from them."""
        end = start + count
        self._turns[start:end] = [NOT_MADE] * count
        self._logprobs[start:end] = [0.0] * count
        self._versions[start:end] = [NOT_MADE] * count

    def branch(self) -> Transcript:
        """Another sequence of the same episode, with nothing in it yet."""
        opened = Transcript(self._draw, self._first)
        self._first._branches.append(opened)
        return opened

    def close(self) -> None:
        """The episode is over: a scenario that goes on all the same is cancelled at its next turn."""
        self._first._is_closed = True

    @property
    def turns(self) -> int:
        """How many turns the policy has begun in all sequences."""
        return self._first._begun_turns

    def shown_last(self) -> Ints | None:
        """All tokens of the sequence that the policy would have gone on with; None if its own turn came last."""
        newest = self._first._newest
        was_shown = newest._turns[-1:] == [NOT_MADE]
        return np.array(newest._token_ids, np.int64) if was_shown else None

    def sequences(self) -> tuple[Tokens, ...]:
        """All sequences of the episode in which the policy made something; the first one if there is none."""
        found = tuple(branch.tokens() for branch in self._first._branches)
        return tuple(each for each in found if len(each.made_by)) or found[:1]

    def tokens(self) -> Tokens:
        """What there is so far."""
        return Tokens(
            np.array(self._token_ids, np.int64),
            np.array(self._turns, np.int64),
            np.array(self._logprobs, np.float32),
            np.array(self._versions, np.int64),
            tuple(self._parts),
        )

    def _add(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        versions: Sequence[int],
        turn: int,
        finish: str = "",
        messages: tuple[tuple[str, str], ...] = (),
    ) -> None:
        self._first._newest = self
        start = len(self._token_ids)
        self._parts.append(Part(start, start + len(token_ids), turn, finish, messages))
        self._token_ids += token_ids
        self._turns += [turn] * len(token_ids)
        self._logprobs += logprobs
        self._versions += versions


def token_versions(made: Completion) -> list[int]:
    """The policy version of each token.

    >>> from roost.engines.protocol import VersionSpan
    >>> token_versions(Completion((5, 6), (0.0, 0.0), Finish.STOP, (VersionSpan(3, 0, 1), VersionSpan(4, 1, 2))))
    [3, 4]
    """
    versions = [NOT_MADE] * len(made.token_ids)
    for span in made.versions:
        versions[span.start : span.end] = [span.version] * (span.end - span.start)
    if len(versions) != len(made.token_ids) or NOT_MADE in versions:
        raise ValueError(f"the versions of {len(made.token_ids)} tokens are not told by {made.versions}")
    return versions


Ints = npt.NDArray[np.int64]
ROUNDING = 1e-9  # rewards added up in another order differ by rounding, which is no difference
LENGTH = "length"  # the finish of a turn that a token limit or a full context ended
NOT_MADE = -1  # the turn, and the version, of a token that the policy did not make


@dataclass(frozen=True, slots=True)
class Part:
    """Tokens of a sequence that were added together: given to the policy, or generated in one turn."""

    start: int
    end: int
    turn: int = NOT_MADE
    finish: str = ""  # of a turn: stop, length or abort
    messages: tuple[tuple[str, str], ...] = ()  # what was given as role and content, where it was a conversation


@dataclass(frozen=True, eq=False)
class Tokens:
    """A sequence with, for each token, the turn that made it, its log-probability and the policy version."""

    token_ids: Ints
    turns: Ints
    logprobs: npt.NDArray[np.float32]
    versions: Ints
    parts: tuple[Part, ...] = ()  # in order; for people and metrics, nothing is learnt from them

    @property
    def made_by(self) -> Ints:
        """The versions of the tokens that the policy made."""
        made: Ints = self.versions[self.turns != NOT_MADE]
        return made


@dataclass(frozen=True, eq=False)
class Episode:
    """One play of a task to its end."""

    sequences: tuple[Tokens, ...]  # more than one where what the policy was shown did not go on from before
    score: EpisodeReward
    seconds: float
    attempts: int = 1
    stopped_in: Ints | None = None  # what the policy was shown last, where the task would have gone on from there

    @property
    def made_by(self) -> Ints:
        """The versions of all tokens that the policy made."""
        return np.concatenate([tokens.made_by for tokens in self.sequences])

    @property
    def made(self) -> int:
        """How many tokens the policy made."""
        return len(self.made_by)

    @property
    def given(self) -> int:
        """How many tokens the policy was given before its first turn."""
        firsts = [int(np.argmax(one.turns != NOT_MADE)) for one in self.sequences if len(one.made_by)]
        return firsts[0] if firsts else sum(len(one.token_ids) for one in self.sequences[:1])

    @property
    def finish(self) -> str:
        """How the last turn ended; empty where that is not known."""
        turns = [part for tokens in self.sequences for part in tokens.parts if part.turn != NOT_MADE]
        return max(turns, key=lambda part: part.turn).finish if turns else ""

    @property
    def is_truncated(self) -> bool:
        """Whether a token limit, or a full context, ended any of its turns."""
        return any(part.finish == LENGTH for tokens in self.sequences for part in tokens.parts)


@dataclass(frozen=True, eq=False)
class Group:
    """The episodes of one task that finished, and what became of the others."""

    number: int  # which task of the run it is, counted from 0
    task: Task
    began_at: int  # the policy version when it began
    episodes: tuple[Episode, ...]
    cancelled: int = 0
    failed: int = 0
    last_error: str = ""

    @property
    def rewards(self) -> tuple[float, ...]:
        return tuple(episode.score.reward for episode in self.episodes)

    @property
    def is_equal(self) -> bool:
        """Whether all its episodes got the same, so that there is nothing to learn from comparing them."""
        return not self.rewards or max(self.rewards) - min(self.rewards) <= ROUNDING
