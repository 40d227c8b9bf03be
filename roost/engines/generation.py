"""What is asked of an engine and what comes back: sampling parameters and completions, token by token."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. The defaults draw from the model's own distribution.

    >>> Sampling(max_tokens=4, temperature=0.0).is_greedy
    True
    """

    max_tokens: int = 16
    temperature: float = 1.0  # 0: always the likeliest token
    top_p: float = 1.0
    top_k: int = 0  # 0: all tokens
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}; it must be at least 1")
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature}; it must be 0 or more")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p is {self.top_p}; it must be above 0 and at most 1")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; write 0 for all tokens")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p is {self.min_p}; it must be from 0 to 1")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


class Finish(StrEnum):
    """Why a completion ended."""

    STOP = "stop"  # the end-of-text token or a stop token, which is the last token
    LENGTH = "length"  # max_tokens, or the context is full
    ABORT = "abort"  # somebody ended it; what was made so far is there


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens `start` up to `end` (not included) of a completion were made by one policy version."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Completion:
    """The tokens an engine made, each with its log-probability under the distribution it was drawn from."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Finish
    versions: tuple[VersionSpan, ...]

    def __post_init__(self) -> None:
        if len(self.logprobs) != len(self.token_ids):
            raise ValueError(f"{len(self.token_ids)} tokens came with {len(self.logprobs)} log-probabilities")


def joined_spans(spans: tuple[VersionSpan, ...]) -> tuple[VersionSpan, ...]:
    """Spans that follow one another with the same version, as one; empty ones left out.

    >>> joined_spans((VersionSpan(1, 0, 3), VersionSpan(1, 3, 5), VersionSpan(2, 5, 6), VersionSpan(3, 6, 6)))
    (VersionSpan(version=1, start=0, end=5), VersionSpan(version=2, start=5, end=6))
    """
    joined: list[VersionSpan] = []
    for span in spans:
        if span.start == span.end:
            continue
        if joined and joined[-1].version == span.version and joined[-1].end == span.start:
            joined[-1] = VersionSpan(span.version, joined[-1].start, span.end)
        else:
            joined.append(span)
    return tuple(joined)
