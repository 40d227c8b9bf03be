"""Episodes that were played, in groups of the same task."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from roost.rollout.scenario import Score, Task

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
    score: Score
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
