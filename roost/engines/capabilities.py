"""What a running server can do, read from the routes it lists rather than assumed from its version."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The routes a server has, and what its settings say on top of them."""

    routes: frozenset[str]
    can_sleep: bool = False  # the route alone does not say so: vLLM has it even where sleeping frees nothing
    takes_adapters: bool = False
    tells_spans: bool = False  # each completion says which version made which tokens
    takes_shared_memory: bool = False
    undoes_updates: bool = False  # an update that fails leaves the old weights in place

    def has(self, route: str) -> bool:
        return route in self.routes


def listed_routes(openapi: Mapping[str, Any]) -> frozenset[str]:
    """The routes in a server's own description.

    >>> sorted(listed_routes({"paths": {"/sleep": {"post": {}}, "/health": {"get": {}}}}))
    ['/health', '/sleep']
    """
    return frozenset(openapi.get("paths", {}))
