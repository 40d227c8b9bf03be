"""A request while the engine works on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from roost.engines.generation import Finish, Sampling
from roost.torch_engine.gathered import Gathered


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked of the engine: tokens in, tokens out."""

    request_id: str
    token_ids: tuple[int, ...]
    sampling: Sampling
    wants_prompt_logprobs: bool = False
    adapter: str | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """What a step adds to a request; the prompt's log-probabilities come once, with the first token."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: int
    finish: Finish | None = None
    prompt_logprobs: tuple[float, ...] | None = None
    cached_tokens: int = 0  # of the prompt, not computed again


@dataclass(eq=False, slots=True)
class Tracked:
    """A request with what was made so far, and where its keys and values are."""

    request: Request
    deliver: Callable[[Progress], None]
    seed: int
    stop_ids: frozenset[int]
    limit: int  # prompt and completion together
    token_ids: list[int] = field(default_factory=list)
    computed: int = 0  # tokens from the start whose keys and values are in the cache
    blocks: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)  # of the full blocks whose contents were announced or matched
    epoch: int = 0  # of the block pool when it was admitted
    gathered: Gathered | None = None
    cached_tokens: int = 0
    prompt_logprobs: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.token_ids = list(self.request.token_ids)

    @property
    def made(self) -> int:
        return len(self.token_ids) - len(self.request.token_ids)

    @property
    def is_scored(self) -> bool:
        """Whether log-probabilities of its prompt are still to be computed."""
        return self.request.wants_prompt_logprobs and self.made == 0

    def finish_after(self, token_id: int) -> Finish | None:
        """Why the sequence ends with this token, its last, or None."""
        if token_id in self.stop_ids:
            return Finish.STOP
        return Finish.LENGTH if len(self.token_ids) >= self.limit else None


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `start` up to `end` (not included) of a sequence, computed in one step."""

    tracked: Tracked
    start: int
    end: int

    @property
    def token_ids(self) -> Sequence[int]:
        return self.tracked.token_ids[self.start : self.end]

    @property
    def size(self) -> int:
        return self.end - self.start

    @property
    def scored_rows(self) -> int:
        """Positions whose logits are needed for the log-probabilities of the prompt."""
        return self.size if self.tracked.is_scored else 0

    @property
    def makes_token(self) -> bool:
        """Whether the next token can be drawn after this."""
        return self.end == len(self.tracked.token_ids)
