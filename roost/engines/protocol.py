"""The interface of engines: `Engine`, its requests and results, and its errors."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from roost.engines.weights.payload import GroupInvitation, Manifest, WeightPayload
from roost.net.routing import Routing, joined_routing
from roost.vision.image import Image


class EngineError(RuntimeError):
    """Base class of errors of engines."""

    status = 500  # of the HTTP response


class EngineRefused(EngineError):
    """The request is invalid (token out of vocabulary, prompt too long) and fails on every engine."""


class ContextFull(EngineRefused):
    """The prompt leaves no room for a completion."""


class EngineLost(EngineError):
    """The engine is dead, hung or unreachable; the request may succeed on another engine, or after a restart."""

    status = 503


class EnginesBehind(EngineLost):
    """Engines run, but none can get the current weights before the next update; resume from a checkpoint."""


class NotOffered(EngineError):
    """The engine lacks a capability; the message names it and an alternative."""


class UpdateFailed(EngineError):
    """A weight update failed; the message names the version that the engine has now."""


class WeightsRefused(UpdateFailed):
    """An engine rejected the manifest, as it would on any weight route; it keeps its old weights."""


NO_IMAGES = "this engine takes no images; write engine: torch or vllm in train"


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of a request, and the images of its prompt.

    The defaults sample from the model's own distribution.

    >>> Sampling(max_tokens=4, temperature=0.0).is_greedy
    True
    """

    max_tokens: int = 16
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: all tokens
    min_p: float = 0.0
    min_tokens: int = 0  # before that, no end-of-text token, stop token or stop string ends a completion
    repetition_penalty: float = 1.0  # for tokens in the prompt or the completion so far; 1: none
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()  # strings that end a completion; the token in which one ends is its last
    json_schema: str | None = None  # guided decoding: the completion is JSON of this schema
    logprobs: bool = True  # return the log-prob of each token
    return_sampling_mask: bool = False  # return the token ids that top-k, top-p and min-p kept
    images: tuple[Image, ...] = ()  # of the prompt, each at the position of its first token
    return_routed_experts: bool = False  # return the experts that each token was routed to

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
        if self.min_tokens < 0:
            raise ValueError(f"min_tokens is {self.min_tokens}; it must be 0 or more")
        if not 0.0 < self.repetition_penalty < float("inf"):
            raise ValueError(f"repetition_penalty is {self.repetition_penalty}; it must be above 0; write 1 for none")

    def nth(self, index: int) -> Sampling:
        """Parameters of completion `index` of a request for several; as in vLLM, its seed is `seed + index`."""
        return self if self.seed is None or not index else replace(self, seed=self.seed + index)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def wants_mask(self) -> bool:
        """True if the sampling mask was requested and there is one: neither greedy nor the whole distribution."""
        is_truncated = self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0
        return self.return_sampling_mask and is_truncated and not self.is_greedy


class Finish(StrEnum):
    """Finish reason of a completion."""

    STOP = "stop"  # an end-of-text or stop token, which is the last token, or a stop string
    LENGTH = "length"  # max_tokens reached, or the context is full
    ABORT = "abort"  # aborted; the completion has the tokens generated so far


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens `start` to `end` (exclusive) of a completion, generated by one policy version."""

    version: int
    start: int
    end: int


Ids: TypeAlias = NDArray[np.int32]


@dataclass(frozen=True, eq=False, slots=True)
class SamplingMasks:
    """Token ids that each token was sampled from, in flat arrays, which need a ninth of the memory of tuples.

    >>> masks = SamplingMasks.joined([SamplingMasks.of([(5, 7), ()]), SamplingMasks.of([(6,)])])
    >>> len(masks), masks.ids.tolist(), masks.lists(), masks[1:].lists()
    (3, [5, 7, 6], [[5, 7], [], [6]], [[], [6]])
    """

    ids: Ids  # of all tokens, concatenated
    sizes: Ids  # number of ids per token; 0: too many to return, or the whole vocabulary

    @classmethod
    def of(cls, masks: Iterable[Sequence[int] | Ids]) -> SamplingMasks:
        each = [np.asarray(mask, np.int32) for mask in masks]
        return cls(np.concatenate([np.zeros(0, np.int32), *each]), np.array([len(mask) for mask in each], np.int32))

    @classmethod
    def joined(cls, parts: Sequence[SamplingMasks]) -> SamplingMasks:
        nothing = np.zeros(0, np.int32)
        ids, sizes = [part.ids for part in parts], [part.sizes for part in parts]
        return cls(np.concatenate([nothing, *ids]), np.concatenate([nothing, *sizes]))

    @classmethod
    def empty(cls, count: int) -> SamplingMasks:
        """Masks of `count` tokens without ids."""
        return cls(np.zeros(0, np.int32), np.zeros(count, np.int32))

    def __len__(self) -> int:
        return len(self.sizes)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SamplingMasks):
            return NotImplemented
        return np.array_equal(self.sizes, other.sizes) and np.array_equal(self.ids, other.ids)

    def __getitem__(self, part: slice) -> SamplingMasks:
        start, stop, _ = part.indices(len(self))
        ends = np.concatenate([np.zeros(1, np.int64), self.sizes.cumsum()])
        return SamplingMasks(self.ids[ends[start] : ends[max(start, stop)]], self.sizes[part])

    def lists(self) -> list[list[int]]:
        """The ids of each token, as in JSON."""
        return [part.tolist() for part in np.split(self.ids, self.sizes.cumsum()[:-1])] if len(self) else []

    def lacking(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Indices of the tokens that are not in their own mask."""
        owners = np.repeat(np.arange(len(self)), self.sizes)
        hits = np.bincount(owners[self.ids == np.asarray(token_ids, np.int64)[owners]], minlength=len(self))
        found: list[int] = np.flatnonzero((self.sizes > 0) & (hits == 0)).tolist()
        return found


def joined_masks(parts: Iterable[SamplingMasks | None]) -> SamplingMasks | None:
    """Masks of all parts; None if no part has any."""
    found = [part for part in parts if part is not None]
    return SamplingMasks.joined(found) if found else None


@dataclass(frozen=True, slots=True)
class Completion:
    """Generated tokens, each with its log-prob under the distribution it was sampled from.

    `sampling_mask` is None if it was not requested, or if nothing was truncated.
    `routed_experts` has the experts of the prompt and of all generated tokens but the last, which was never an input;
    None if they were not requested, or no token was computed.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # NaN if they were not requested
    finish: Finish
    versions: tuple[VersionSpan, ...]
    sampling_mask: SamplingMasks | None = None
    routed_experts: Routing | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if len(self.logprobs) != len(self.token_ids):
            raise ValueError(f"{len(self.token_ids)} tokens came with {len(self.logprobs)} log-probabilities")
        if self.sampling_mask is None:
            return
        if len(self.sampling_mask) != len(self.token_ids):
            raise ValueError(f"{len(self.token_ids)} tokens came with sampling masks of {len(self.sampling_mask)}")
        for index in self.sampling_mask.lacking(self.token_ids):
            size = self.sampling_mask.sizes[index]
            raise ValueError(f"token {self.token_ids[index]} is not among the {size} ids of its sampling mask")


def unknown_logprobs(count: int) -> tuple[float, ...]:
    """Log-probs of tokens whose log-probs were not requested."""
    return (math.nan,) * count


def joined_spans(spans: tuple[VersionSpan, ...]) -> tuple[VersionSpan, ...]:
    """Merge adjacent spans of the same version and drop empty ones.

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


class Continuation:
    """A request and the tokens generated for it so far, possibly by several engines or policy versions.

    >>> continuation = Continuation([1, 2], Sampling(max_tokens=5, seed=3))
    >>> continuation.add(Completion((7, 8), (-1.0, -2.0), Finish.ABORT, (VersionSpan(0, 0, 2),)))
    >>> continuation.prompt, continuation.sampling.max_tokens
    ([1, 2, 7, 8], 3)
    >>> continuation.add(Completion((9,), (-3.0,), Finish.STOP, (VersionSpan(1, 0, 1),)))
    >>> continuation.completion.versions
    (VersionSpan(version=0, start=0, end=2), VersionSpan(version=1, start=2, end=3))
    """

    def __init__(self, token_ids: Sequence[int], sampling: Sampling) -> None:
        self._prompt_ids = list(token_ids)
        self._sampling = sampling
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._masks: list[SamplingMasks] = []
        self._spans: list[VersionSpan] = []
        self._routing: Routing | None = None
        self._finish = Finish.ABORT

    @property
    def prompt(self) -> list[int]:
        return self._prompt_ids + self._generated_ids

    @property
    def _generated_ids(self) -> list[int]:
        """Tokens to continue from; none in guided decoding, which always starts at the beginning of the schema."""
        return self._tokens if self._sampling.json_schema is None else []

    @property
    def sampling(self) -> Sampling:
        """Sampling for the remaining tokens; another seed, so that they do not repeat the first random numbers."""
        done = len(self._generated_ids)
        seed = self._sampling.seed
        return replace(
            self._sampling,
            max_tokens=self._sampling.max_tokens - done,
            min_tokens=max(0, self._sampling.min_tokens - done),
            seed=seed if seed is None or not done else (seed * 1_000_003 + done) % 2**31,
        )

    @property
    def is_complete(self) -> bool:
        return self._finish is not Finish.ABORT or len(self._tokens) >= self._sampling.max_tokens

    @property
    def completion(self) -> Completion:
        spans = joined_spans(tuple(self._spans))
        masks = SamplingMasks.joined(self._masks) if self._sampling.wants_mask else None
        return Completion(tuple(self._tokens), tuple(self._logprobs), self._finish, spans, masks, self._routing)

    def add(self, piece: Completion) -> None:
        start = len(self._generated_ids)
        if not start:
            self._tokens, self._logprobs, self._masks, self._spans = [], [], [], []
            self._routing = None
        self._tokens += piece.token_ids
        self._logprobs += piece.logprobs
        self._masks += [] if piece.sampling_mask is None else [piece.sampling_mask]
        self._spans += [VersionSpan(span.version, start + span.start, start + span.end) for span in piece.versions]
        self._routing = joined_routing(self._routing, piece.routed_experts)
        self._finish = piece.finish


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Routes and settings of a server."""

    routes: frozenset[str]
    can_sleep: bool = False  # sleeping frees memory; vLLM has the route even if it does not
    takes_adapters: bool = False
    reports_versions: bool = False  # completions carry the policy version of each token
    takes_shared_memory: bool = False
    undoes_updates: bool = False  # a failed update leaves the old weights in place
    is_built_in: bool = False  # the built-in engine behind vLLM's routes
    keeps_weights_asleep: bool = True  # waking needs no weight sync
    takes_tokens: bool = False  # has a route for token ids, and it is enabled
    takes_images: bool = False  # with token ids
    takes_n: bool = False  # one request may ask for several completions
    model: str = ""  # model name in requests
    max_context: int | None = None  # tokens of prompt and completion; None if the server does not report it

    def has(self, route: str) -> bool:
        return route in self.routes

    def room_for(self, prompt: int, wanted: int) -> int:
        """Number of wanted tokens that fit into the context after a prompt; at least 1, which the server may refuse.

        >>> Capabilities(frozenset(), max_context=10).room_for(prompt=8, wanted=5)
        2
        """
        return wanted if self.max_context is None else max(1, min(wanted, self.max_context - prompt))

    @contextmanager
    def refusing(self, prompt: int) -> Iterator[None]:
        """Convert EngineRefused to ContextFull if the prompt fills the context, even if the message does not say so."""
        try:
            yield
        except EngineRefused as error:
            if self.max_context is None or prompt < self.max_context or isinstance(error, ContextFull):
                raise
            raise ContextFull(f"{error}; its context length is {self.max_context} tokens") from error

    def require(self, route: str, instead: str) -> None:
        """Raise NotOffered with an alternative if the server lacks a route.

        >>> Capabilities(frozenset({"/health"})).require("/pause", "set VLLM_SERVER_DEV_MODE=1 for it")
        Traceback (most recent call last):
        ...
        roost.engines.protocol.NotOffered: this server has no /pause: set VLLM_SERVER_DEV_MODE=1 for it
        """
        if route not in self.routes:
            raise NotOffered(f"this server has no {route}: {instead}")


def listed_routes(openapi: Mapping[str, Any]) -> frozenset[str]:
    """Routes in a server's OpenAPI description.

    >>> sorted(listed_routes({"paths": {"/sleep": {"post": {}}, "/health": {"get": {}}}}))
    ['/health', '/sleep']
    """
    return frozenset(openapi.get("paths", {}))


def request_fields(openapi: Mapping[str, Any], name: str) -> Collection[str]:
    """Fields of a request in a server's OpenAPI description.

    >>> list(request_fields({"components": {"schemas": {"Tokens": {"properties": {"model": {}}}}}}, "Tokens"))
    ['model']
    """
    schema: Mapping[str, Any] = openapi.get("components", {}).get("schemas", {}).get(name, {})
    return frozenset(schema.get("properties", ()))


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Requests of an engine, and the fraction of its KV cache in use."""

    running: int
    waiting: int
    kv_usage: float | None = None  # 0 to 1; None if the server does not report it


class InFlight(StrEnum):
    """Treatment of running requests when an engine pauses."""

    DROP = "drop"  # aborted; they return the tokens so far
    DRAIN = "drain"  # finished first
    HOLD = "hold"  # suspended, and continued afterwards


class Part(StrEnum):
    """Part of a sleeping engine's memory that can be woken."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"


class Engine(Protocol):
    """Client of a running engine. Every call has a time limit."""

    @property
    def url(self) -> str: ...

    async def alive(self, is_changing: bool = False) -> bool:
        """Return True if the server is healthy; during a change (an update, sleep, wake) it need not complete steps."""
        ...

    async def capabilities(self) -> Capabilities: ...

    async def load(self) -> EngineLoad | None:
        """Running and waiting requests; None if the server does not report them."""
        ...

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, request_id: str | None = None, adapter: str | None = None
    ) -> Completion: ...

    async def generate_n(
        self, token_ids: Sequence[int], sampling: Sampling, n: int, adapter: str | None = None
    ) -> tuple[Completion, ...]:
        """Sample `n` completions of one prompt, as `generate` does with the seeds `seed`, `seed + 1`, ..."""
        ...

    async def score(
        self, token_ids: Sequence[int], adapter: str | None = None, images: tuple[Image, ...] = ()
    ) -> tuple[float, ...]:
        """Log-probs of all tokens but the first at temperature 1."""
        ...

    async def abort(self, request_ids: Collection[str] | None = None) -> None:
        """Abort these requests, or all; each returns the tokens generated so far."""
        ...

    async def pause(self, in_flight: InFlight) -> None: ...

    async def resume(self) -> None: ...

    async def sleep(self, level: int) -> None:
        """Free device memory: level 1 keeps the weights in host memory, level 2 drops them."""
        ...

    async def wake(self, parts: Collection[Part] | None = None) -> None:
        """Restore all parts of device memory, or some; requests continue once all are restored."""
        ...

    async def reset_cache(self) -> None: ...

    async def version(self) -> int: ...

    async def set_version(self, version: int) -> None: ...

    async def join_group(self, invitation: GroupInvitation) -> None:
        """Join the process group for weight broadcasts; return when the sender has joined too."""
        ...

    async def leave_group(self) -> None: ...

    async def start_update(self, manifest: Manifest) -> None: ...

    async def take(self, payload: WeightPayload) -> None:
        """Load one bucket of new weights; return when the engine has copied it."""
        ...

    async def finish_update(self, version: int) -> None: ...

    async def abandon_update(self) -> None:
        """Cancel an update; an engine that can undo it restores its old weights."""
        ...

    async def load_checkpoint(self, path: str, version: int) -> None:
        """Load all weights from a checkpoint folder that the engine's node can read."""
        ...

    async def load_adapter(self, name: str, path: str) -> None: ...

    async def unload_adapter(self, name: str) -> None: ...

    async def fingerprints(self) -> dict[str, str]:
        """Fingerprints of the weights by tensor name; comparable if the names are those of the learner."""
        ...

    async def close(self) -> None:
        """Close the connections; the server keeps running."""
        ...
