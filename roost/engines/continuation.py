"""A completion put together from pieces that different engines, or versions, made one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from roost.engines.generation import Completion, Finish, Sampling, VersionSpan, joined_spans


class Continuation:
    """What was asked, and what has been made of it so far.

    >>> asked = Continuation([1, 2], Sampling(max_tokens=5, seed=3))
    >>> asked.add(Completion((7, 8), (-1.0, -2.0), Finish.ABORT, (VersionSpan(0, 0, 2),)))
    >>> asked.prompt, asked.sampling.max_tokens
    ([1, 2, 7, 8], 3)
    >>> asked.add(Completion((9,), (-3.0,), Finish.STOP, (VersionSpan(1, 0, 1),)))
    >>> asked.completion.versions
    (VersionSpan(version=0, start=0, end=2), VersionSpan(version=1, start=2, end=3))
    """

    def __init__(self, token_ids: Sequence[int], sampling: Sampling) -> None:
        self._asked = list(token_ids)
        self._sampling = sampling
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._spans: list[VersionSpan] = []
        self._finish = Finish.ABORT

    @property
    def prompt(self) -> list[int]:
        return self._asked + self._tokens

    @property
    def sampling(self) -> Sampling:
        """For the rest; a seed is moved on, so that the rest is not drawn with the numbers of the beginning."""
        made = len(self._tokens)
        seed = self._sampling.seed
        return replace(
            self._sampling,
            max_tokens=self._sampling.max_tokens - made,
            seed=seed if seed is None or not made else (seed * 1_000_003 + made) % 2**31,
        )

    @property
    def is_complete(self) -> bool:
        return self._finish is not Finish.ABORT or len(self._tokens) >= self._sampling.max_tokens

    @property
    def completion(self) -> Completion:
        return Completion(tuple(self._tokens), tuple(self._logprobs), self._finish, joined_spans(tuple(self._spans)))

    def add(self, piece: Completion) -> None:
        start = len(self._tokens)
        self._tokens += piece.token_ids
        self._logprobs += piece.logprobs
        self._spans += [VersionSpan(span.version, start + span.start, start + span.end) for span in piece.versions]
        self._finish = piece.finish
