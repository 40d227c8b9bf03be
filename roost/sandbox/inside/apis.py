"""API stubs for code in a sandbox; calls are executed outside."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from roost.sandbox.inside.frames import Channel


class ApiError(Exception):
    """An API call failed."""

    __module__ = "builtins"  # so that a traceback names it without its home


class Apis:
    """`apis.<app>.<api>(**arguments)` is executed by the other side."""

    def __init__(self, channel: Channel) -> None:
        self._channel, self._lock = channel, threading.Lock()

    def __getattr__(self, name: str) -> _App:
        if name.startswith("_"):
            raise AttributeError(name)
        return _App(self, name)

    def _call(self, app: str, api: str, arguments: dict[str, Any]) -> Any:
        with self._lock:  # one call at a time across threads
            self._channel.send({"app": app, "api": api, "arguments": arguments})
            answer = self._channel.receive()
        if "error" in answer:
            raise ApiError(answer["error"])
        return answer["value"]


class _App:
    def __init__(self, apis: Apis, name: str) -> None:
        self._apis, self._name = apis, name

    def __getattr__(self, api: str) -> Callable[..., Any]:
        if api.startswith("_"):
            raise AttributeError(api)
        apis, app = self._apis, self._name

        def call(**arguments: Any) -> Any:
            return apis._call(app, api, arguments)

        call.__name__, call.__qualname__ = api, f"apis.{app}.{api}"
        return call
