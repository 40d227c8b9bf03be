"""What a running server can do, read from the routes it lists rather than assumed from its version."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from roost.engines.errors import ContextFull, EngineRefused, NotOffered


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
        roost.engines.errors.NotOffered: this server has no /pause: set VLLM_SERVER_DEV_MODE=1 for it
        """
        if route not in self.routes:
            raise NotOffered(f"this server has no {route}: {instead}")


def listed_routes(openapi: Mapping[str, Any]) -> frozenset[str]:
    """The routes in a server's own description.

    >>> sorted(listed_routes({"paths": {"/sleep": {"post": {}}, "/health": {"get": {}}}}))
    ['/health', '/sleep']
    """
    return frozenset(openapi.get("paths", {}))
