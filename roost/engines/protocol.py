"""What every engine can be asked, what it answers, and how it fails."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from roost.engines.weights.parcel import GroupInvitation, Manifest, WeightPayload


class EngineError(RuntimeError):
    """An engine could not do what was asked."""

    status = 500  # of the HTTP response


class EngineRefused(EngineError):
    """The request itself is wrong (a token out of the vocabulary, a prompt too long): the same one fails everywhere."""


class ContextFull(EngineRefused):
    """The prompt leaves no room for a completion: what was made before it is all that there will be."""


class EngineLost(EngineError):
    """The engine is dead, hung or unreachable: another one, or the same one after a restart, can do it."""

    status = 503


class EnginesBehind(EngineLost):
    """Engines run, but none can get the current weights before the next update: a new launch from a checkpoint can."""


class NotOffered(EngineError):
    """This engine has no such ability: the message says which, and what to do instead."""


class UpdateFailed(EngineError):
    """New weights did not take; the message says which version the engine is on now."""


class WeightsRefused(UpdateFailed):
    """An engine looked at what was announced and refused it, as it would by any other way; it has its old weights."""


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


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The routes a server has, and what its settings say on top of them."""

    routes: frozenset[str]
    can_sleep: bool = False  # the route alone does not say so: vLLM has it even where sleeping frees nothing
    takes_adapters: bool = False
    tells_spans: bool = False  # each completion says which version made which tokens
    takes_shared_memory: bool = False
    undoes_updates: bool = False  # an update that fails leaves the old weights in place
    takes_manifest: bool = False  # an update begins with the list of what it brings
    keeps_weights_asleep: bool = True  # they can be woken without being sent again
    takes_tokens: bool = False  # it has a route for token ids alone, and it is open
    model: str = ""  # the name that requests call the model by
    max_context: int | None = None  # tokens of prompt and completion, where the server tells

    def has(self, route: str) -> bool:
        return route in self.routes

    def room_for(self, prompt: int, wanted: int) -> int:
        """How many of the wanted tokens the context holds after a prompt; at least one, for the server to refuse.

        >>> Capabilities(frozenset(), max_context=10).room_for(prompt=8, wanted=5)
        2
        """
        return wanted if self.max_context is None else max(1, min(wanted, self.max_context - prompt))

    @contextmanager
    def refusing(self, prompt: int) -> Iterator[None]:
        """Whatever words a server finds for it: a prompt that fills the context leaves no room."""
        try:
            yield
        except EngineRefused as error:
            if self.max_context is None or prompt < self.max_context or isinstance(error, ContextFull):
                raise
            raise ContextFull(f"{error}; its context length is {self.max_context} tokens") from error

    def require(self, route: str, instead: str) -> None:
        """Refuse what the server has no route for, and say what to do instead.

        >>> Capabilities(frozenset({"/health"})).require("/pause", "set VLLM_SERVER_DEV_MODE=1 for it")
        Traceback (most recent call last):
        ...
        roost.engines.protocol.NotOffered: this server has no /pause: set VLLM_SERVER_DEV_MODE=1 for it
        """
        if route not in self.routes:
            raise NotOffered(f"this server has no {route}: {instead}")


def listed_routes(openapi: Mapping[str, Any]) -> frozenset[str]:
    """The routes in a server's own description.

    >>> sorted(listed_routes({"paths": {"/sleep": {"post": {}}, "/health": {"get": {}}}}))
    ['/health', '/sleep']
    """
    return frozenset(openapi.get("paths", {}))


class InFlight(StrEnum):
    """What becomes of requests that are being worked on when an engine pauses."""

    DROP = "drop"  # ended now; they come back as far as they got
    DRAIN = "drain"  # finished first
    HOLD = "hold"  # kept as they are, and continued afterwards


class Part(StrEnum):
    """What of a sleeping engine is woken."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"


class Engine(Protocol):
    """A running engine, seen through its control routes. Every call is bounded in time."""

    @property
    def url(self) -> str: ...

    async def alive(self, is_changing: bool = False) -> bool:
        """Whether the server answers; one that is changing need not be able to compute meanwhile."""
        ...

    async def capabilities(self) -> Capabilities: ...

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, request_id: str | None = None, adapter: str | None = None
    ) -> Completion: ...

    async def score(self, token_ids: Sequence[int], adapter: str | None = None) -> tuple[float, ...]:
        """The log-probability of every token but the first, each given those before it, at temperature 1."""
        ...

    async def abort(self, request_ids: Collection[str] | None = None) -> None:
        """End these requests, or all; each comes back as far as it got."""
        ...

    async def pause(self, in_flight: InFlight) -> None: ...

    async def resume(self) -> None: ...

    async def sleep(self, level: int) -> None:
        """Free device memory: 1 keeps the weights in host memory, 2 drops them."""
        ...

    async def wake(self, parts: Collection[Part] | None = None) -> None:
        """Take device memory again, all or some of it; requests are worked on once everything is there."""
        ...

    async def reset_cache(self) -> None: ...

    async def version(self) -> int: ...

    async def set_version(self, version: int) -> None: ...

    async def join_group(self, invitation: GroupInvitation) -> None:
        """Join the process group that weights are broadcast in; returns when the sender has joined, too."""
        ...

    async def leave_group(self) -> None: ...

    async def start_update(self, manifest: Manifest) -> None: ...

    async def take(self, parcel: WeightPayload) -> None:
        """Take one bucket of new weights; returns when the engine has copied it."""
        ...

    async def finish_update(self, version: int) -> None: ...

    async def abandon_update(self) -> None:
        """End an update that cannot be finished; an engine that can goes back to what it had."""
        ...

    async def load_checkpoint(self, path: str, version: int) -> None:
        """Replace all weights by those of a folder that the engine's machine can read."""
        ...

    async def load_adapter(self, name: str, path: str) -> None: ...

    async def unload_adapter(self, name: str) -> None: ...

    async def fingerprints(self) -> dict[str, str]:
        """A fingerprint of every tensor, for engines that have names in common with the learner."""
        ...

    async def close(self) -> None:
        """Close the connections; the server goes on."""
        ...
