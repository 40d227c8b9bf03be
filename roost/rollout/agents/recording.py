"""An endpoint like OpenAI's, by which programs of others play episodes: what the policy makes is recorded."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from roost.engines.errors import ContextFull
from roost.net.server import LoopServer
from roost.rollout.agents.chat import ChatPolicy, RecordedReply
from roost.rollout.agents.completions import TextPolicy


class EpisodeOver(Exception):
    """The episode takes no more turns; the message says why."""


class RecordedEpisode:
    """An episode as the endpoint sees it: whoever has its address talks to its policy."""

    def __init__(self, url: str, policy: ChatPolicy, max_turns: int | None = None) -> None:
        self.api_key = secrets.token_urlsafe(24)
        self.base_url = f"{url}/episodes/{self.api_key}/v1"
        self.policy, self.texts = policy, TextPolicy(policy)
        self._max_turns, self._answered = max_turns, 0
        self._under_way: set[asyncio.Task[RecordedReply]] = set()
        self._is_closed = False
        self.is_used_up = False  # turns, or the engine's context: the program's next error is the end, not a failure

    async def take(self, work: Coroutine[Any, Any, RecordedReply]) -> RecordedReply:
        """A turn; EpisodeOver where there is none left."""
        if self._is_closed or not self._has_turns:
            work.close()
            self.is_used_up = True
            raise EpisodeOver("the episode is over" if self._is_closed else f"its {self._max_turns} turns are used up")
        turn = asyncio.create_task(work)
        self._under_way.add(turn)
        turn.add_done_callback(self._under_way.discard)
        try:
            await asyncio.wait([turn])
        finally:
            turn.cancel()  # whoever asked is gone
        if turn.cancelled():
            raise EpisodeOver("the episode was cancelled")
        if isinstance(turn.exception(), ContextFull) and self._answered:
            self.is_used_up = True
        reply = turn.result()
        self._answered += 1
        self.is_used_up = False  # it showed less, and went on
        return reply

    @property
    def _has_turns(self) -> bool:
        return self._max_turns is None or self._answered + len(self._under_way) < self._max_turns

    def close(self) -> None:
        """Whoever waits for a turn is told that there is none."""
        self._is_closed = True
        for turn in self._under_way:
            turn.cancel()


class Recorder:
    """The endpoint of a process, on the loopback interface, in the event loop of its first episode."""

    def __init__(self, model: str = "policy") -> None:
        self.model = model
        self._episodes: dict[str, RecordedEpisode] = {}
        self._server: LoopServer | None = None

    @contextlib.asynccontextmanager
    async def episode(self, policy: ChatPolicy, max_turns: int | None = None) -> AsyncIterator[RecordedEpisode]:
        """An address for an episode, for as long as it lasts."""
        if self._server is None or not self._server.is_running:
            from roost.rollout.agents.recording_routes import recording_app

            self._server = LoopServer(recording_app(self))
        opened = RecordedEpisode(self._server.url, policy, max_turns)
        self._episodes[opened.api_key] = opened
        try:
            yield opened
        finally:
            opened.close()
            del self._episodes[opened.api_key]

    def find(self, key: str) -> RecordedEpisode | None:
        return self._episodes.get(key)

    async def close(self) -> None:
        """End the server."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop()
