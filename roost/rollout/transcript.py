"""The tokens of an episode, exactly as the engines saw and made them: nothing is ever tokenised again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import numpy as np

from roost.engines.generation import Completion, Finish
from roost.rollout.episode import NOT_MADE, Tokens

Draw = Callable[[Sequence[int], int, int | None], Awaitable[Completion]]  # tokens so far, the turn, and its limit


class Transcript:
    """An episode under way: the scenario gives tokens, and takes the policy's turns."""

    def __init__(self, draw: Draw) -> None:
        self._draw = draw
        self._token_ids: list[int] = []
        self._turns: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._turn = 0
        self._is_closed = False
        self.finish: Finish | None = None  # of the last turn

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(self._token_ids)

    def give(self, token_ids: Sequence[int]) -> None:
        """Tokens that the policy is shown: a prompt, an observation."""
        self._add(token_ids, [0.0] * len(token_ids), [NOT_MADE] * len(token_ids), NOT_MADE)

    async def take(self, max_tokens: int | None = None) -> tuple[int, ...]:
        """The policy's next turn; `max_tokens` is less than the run's own limit, if anything."""
        if not self._token_ids:
            raise ValueError("the policy was shown nothing yet; give it a prompt before its first turn")
        if self._is_closed:
            await asyncio.sleep(0)  # one that asks again and again lets others run
            raise asyncio.CancelledError("the episode is over; nothing more is drawn for it")
        shown = self.token_ids
        made = await self._draw(shown, self._turn, max_tokens)
        if len(self._token_ids) != len(shown):
            raise RuntimeError("tokens were added while the policy was at its turn; wait for one turn before the next")
        self._add(made.token_ids, made.logprobs, token_versions(made), self._turn)
        self._turn += 1
        self.finish = made.finish
        return made.token_ids

    def close(self) -> None:
        """The episode is over: a scenario that goes on all the same is cancelled at its next turn."""
        self._is_closed = True

    def tokens(self) -> Tokens:
        """What there is so far."""
        return Tokens(
            np.array(self._token_ids, np.int64),
            np.array(self._turns, np.int64),
            np.array(self._logprobs, np.float32),
            np.array(self._versions, np.int64),
        )

    def _add(self, token_ids: Sequence[int], logprobs: Sequence[float], versions: Sequence[int], turn: int) -> None:
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
