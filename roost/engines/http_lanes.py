"""Clients side by side: the pool of one looks at all its connections for each request, so hundreds make it slow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

LANE_WIDTH = 16  # requests at a time


@dataclass(slots=True)
class _Lane:
    client: httpx.AsyncClient
    in_flight: int = 0


class Lanes:
    """As many clients as the requests under way need; each keeps its connections."""

    def __init__(self, new_client: Callable[[], httpx.AsyncClient]) -> None:
        self._new_client = new_client
        self._lanes: list[_Lane] = []
        self.is_closed = False

    async def request(self, method: str, path: str, **how: Any) -> httpx.Response:
        lane = next((lane for lane in self._lanes if lane.in_flight < LANE_WIDTH), None)
        if lane is None:
            lane = _Lane(self._new_client())
            self._lanes.append(lane)
        lane.in_flight += 1
        try:
            return await lane.client.request(method, path, **how)
        finally:
            lane.in_flight -= 1

    async def close(self) -> None:
        """Close all connections; what is under way fails."""
        self.is_closed = True
        for lane in self._lanes:
            await lane.client.aclose()
