"""The tokens of an episode, exactly as the engines saw and made them: nothing is ever tokenised again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import numpy as np

from roost.engines.errors import ContextFull
from roost.engines.generation import Completion, Finish
from roost.rollout.episode import NOT_MADE, Ints, Part, Tokens

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

    >>> from roost.engines.generation import VersionSpan
    >>> token_versions(Completion((5, 6), (0.0, 0.0), Finish.STOP, (VersionSpan(3, 0, 1), VersionSpan(4, 1, 2))))
    [3, 4]
    """
    versions = [NOT_MADE] * len(made.token_ids)
    for span in made.versions:
        versions[span.start : span.end] = [span.version] * (span.end - span.start)
    if len(versions) != len(made.token_ids) or NOT_MADE in versions:
        raise ValueError(f"the versions of {len(made.token_ids)} tokens are not told by {made.versions}")
    return versions
