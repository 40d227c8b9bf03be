"""Environments of OpenEnv servers: each episode has its own WebSocket session."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from roost.rollout.environments.environment import Observation
from roost.rollout.episode import Task

LARGEST_MESSAGE = 100 * 2**20
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0  # backoff for a full server
FULL = "CAPACITY_REACHED"
NO_SESSION = (FULL, "FACTORY_ERROR", "SESSION_ERROR")  # after these the server closes the connection


class OpenEnvRefused(RuntimeError):
    """An OpenEnv server answered with an error."""

    def __init__(self, url: str, data: Mapping[str, Any]) -> None:
        self.code = str(data.get("code", "UNKNOWN"))
        details = f" {data['errors']}" if data.get("errors") else ""
        super().__init__(f"the server at {url} answered {self.code}: {data.get('message', data)}{details}")


class OpenEnvEnvironments:
    """Sessions of a server with OpenEnv's protocol (openenv 0.10, openenv-core 0.3): `/ws` under its address.

    Its HTTP routes are stateless, so episodes use `/ws` only. An action is a mapping with the environment's fields, or
    the value of `action_field`. The content is the whole observation, a mapping, or its `observation_field`.
    """

    def __init__(
        self,
        base_url: str,
        slots: int = 8,
        action_field: str | None = None,
        observation_field: str | None = None,
        headers: Mapping[str, str] | None = None,
        open_limit_s: float = 60.0,
        answer_limit_s: float = 60.0,
    ) -> None:
        self.url = f"{websocket_url(base_url)}/ws"
        self.action_field, self.observation_field = action_field, observation_field
        self.answer_limit_s = answer_limit_s
        self._headers, self._open_limit_s = dict(headers or {}), open_limit_s
        self._places = asyncio.Semaphore(slots)
        self._open: set[OpenEnvEnvironment] = set()

    async def open(self) -> OpenEnvEnvironment:
        await self._places.acquire()
        try:
            environment = OpenEnvEnvironment(self, await self._session())
        except BaseException:
            self._places.release()
            raise
        self._open.add(environment)
        return environment

    async def close(self) -> None:
        for environment in list(self._open):
            await environment.close()

    def release(self, environment: OpenEnvEnvironment) -> None:
        if environment in self._open:
            self._open.remove(environment)
            self._places.release()

    async def _session(self) -> _Session:
        """Open a session; retry a full server until the limit."""
        pause = FIRST_PAUSE_S
        deadline = asyncio.get_running_loop().time() + self._open_limit_s
        while True:
            try:
                return await _Session.begun(self.url, self._headers, self._open_limit_s, self.answer_limit_s)
            except OpenEnvRefused as error:
                if error.code != FULL or asyncio.get_running_loop().time() + pause > deadline:
                    raise
            await asyncio.sleep(pause)
            pause = min(pause * 2, LONGEST_PAUSE_S)


class OpenEnvEnvironment:
    """One session, for one episode."""

    def __init__(self, environments: OpenEnvEnvironments, session: _Session) -> None:
        self._environments, self._session = environments, session
        self._return = 0.0

    async def reset(self, task: Task, seed: int | None = None) -> Observation:
        """Start an episode; `reset` of the task's data goes to the environment's own reset."""
        self._return = 0.0
        arguments = {**task.data.get("reset", {}), **({} if seed is None else {"seed": seed})}
        return self._observation(await self._session.ask("reset", arguments))

    async def step(self, action: Any) -> Observation:
        seen = self._observation(await self._session.ask("step", self._fields(action)))
        self._return += seen.reward
        return seen

    async def state(self) -> Mapping[str, Any]:
        """State of the episode on the server."""
        return await self._session.ask("state")

    async def score(self) -> float:
        """Sum of rewards so far."""
        return self._return

    async def close(self) -> None:
        try:
            await self._session.end()
        finally:
            self._environments.release(self)

    def _fields(self, action: Any) -> dict[str, Any]:
        if hasattr(action, "model_dump"):
            return dict(action.model_dump())
        if isinstance(action, Mapping):
            return dict(action)
        if self._environments.action_field is None:
            raise ValueError(f"the action {action!r} is not a mapping; name the field for it in action_field")
        return {self._environments.action_field: action}

    def _observation(self, data: Mapping[str, Any]) -> Observation:
        content: Any = data.get("observation", {})
        info = {"metadata": data.get("metadata") or {}}
        name = self._environments.observation_field
        if name is not None:
            if name not in content:
                raise ValueError(f"the observation has no {name!r} but {sorted(content)}; correct observation_field")
            content = content[name]
        return Observation(content, float(data.get("reward") or 0.0), bool(data.get("done")), info)


class _Session:
    """A connection with one answer per message."""

    def __init__(self, url: str, connection: Any, answer_limit_s: float) -> None:
        self._url, self._connection, self._answer_limit_s = url, connection, answer_limit_s

    @classmethod
    async def begun(cls, url: str, headers: Mapping[str, str], open_limit_s: float, answer_limit_s: float) -> _Session:
        try:
            from websockets.asyncio.client import connect
        except ImportError as error:
            raise ImportError(f"{error}; install it: pip install 'websockets>=15'") from error
        connection = await connect(
            url,
            additional_headers=headers,
            max_size=LARGEST_MESSAGE,
            open_timeout=open_limit_s,
            ping_interval=None,  # a server busy with a step may not answer pings; steps have their own limit
            proxy=None if is_loopback(url) else True,  # proxy settings do not apply to this machine
        )
        session = cls(url, connection, answer_limit_s)
        try:
            await session.ask("state")  # a full server refuses only at the first message
        except OpenEnvRefused as error:
            if error.code in NO_SESSION:
                await session.end()
                raise
        except BaseException:
            await session.end()
            raise
        return session

    async def ask(self, kind: str, data: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Send a message and return the answer. After a timeout the session is closed."""
        from websockets.exceptions import ConnectionClosed

        try:
            async with asyncio.timeout(self._answer_limit_s):
                answer = json.loads(
                    await self._answered({"type": kind} if data is None else {"type": kind, "data": data})
                )
        except TimeoutError:
            await self.end()
            raise TimeoutError(
                f"the server at {self._url} did not answer {kind} in {self._answer_limit_s:g} s"
            ) from None
        except ConnectionClosed as error:
            raise ConnectionError(f"the server at {self._url} closed the connection at {kind}: {error}") from error
        if answer.get("type") == "error":
            raise OpenEnvRefused(self._url, answer.get("data", {}))
        found: dict[str, Any] = answer.get("data", {})
        return found

    async def end(self) -> None:
        with contextlib.suppress(Exception):  # the server may be gone, and the session with it
            await self._connection.send(json.dumps({"type": "close"}))
        await self._connection.close()

    async def _answered(self, message: Mapping[str, Any]) -> str | bytes:
        from websockets.exceptions import ConnectionClosed

        with contextlib.suppress(ConnectionClosed):  # a message received earlier may have the reason
            await self._connection.send(json.dumps(message))
        received: str | bytes = await self._connection.recv()
        return received


def websocket_url(base_url: str) -> str:
    """Convert a server's address to a WebSocket URL.

    >>> websocket_url("https://host/echo/"), websocket_url("127.0.0.1:8000")
    ('wss://host/echo', 'ws://127.0.0.1:8000')
    """
    scheme, mark, rest = base_url.rstrip("/").rpartition("://")
    if not mark:
        return f"ws://{rest}"
    if scheme not in ("http", "https", "ws", "wss"):
        raise ValueError(f"base_url is {base_url!r}; write http://, https://, ws:// or wss://")
    return f"{scheme.replace('http', 'ws')}://{rest}"


def is_loopback(url: str) -> bool:
    """Return True if the address is on the loopback interface.

    >>> is_loopback("ws://127.0.0.1:8000/ws"), is_loopback("ws://localhost/ws"), is_loopback("ws://10.0.0.1/ws")
    (True, True, False)
    """
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
