"""The sandboxed process: confine itself, then run the code it is sent, with stubs of the APIs outside."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from roost.sandbox.inside.confine import confine
from roost.sandbox.inside.frames import Channel
from roost.sandbox.inside.notebook import Notebook


class ApiError(Exception):
    """An API call failed."""

    __module__ = "builtins"  # so that tracebacks show the bare name


class Apis:
    """`apis.<app>.<api>(**arguments)` calls an API of the process outside."""

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


def main(descriptor: int) -> NoReturn:
    """Serve requests until the peer closed the connection."""
    channel = Channel(descriptor)
    request = channel.receive()
    sys.dont_write_bytecode = True
    sys.path[:] = ["", *sys.path[1:], *request["libraries"]]  # the first entry was Roost's own folder
    sys.argv[:] = [""]
    os.environ["HOME"] = os.environ["TMPDIR"] = request["folder"]
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a TextIOWrapper at process start
    in_force = confine(request)
    notebook = Notebook({"apis": Apis(channel), "ApiError": ApiError} if request["has_apis"] else {})
    channel.send({"in_force": in_force})
    number = 0
    while True:
        try:
            reply = channel.receive()
        except EOFError:
            os._exit(0)  # without the hooks and threads that the code may have left
        number += 1
        outcome = notebook.run(reply["code"], number, request["waits_for_threads"])
        channel.send({"receipt": reply["receipt"], "outcome": outcome})
