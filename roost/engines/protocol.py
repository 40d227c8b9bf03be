"""What every engine can be asked, whichever server is behind it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import StrEnum
from typing import Protocol

from roost.engines.capabilities import Capabilities
from roost.engines.generation import Completion, Sampling
from roost.engines.weights.parcel import GroupInvitation, Manifest, Parcel


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

    async def take(self, parcel: Parcel) -> None:
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
