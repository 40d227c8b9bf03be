"""The sandboxed process: confine itself, then run the code it is sent."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from roost.sandbox.inside.apis import ApiError, Apis
from roost.sandbox.inside.confine import confine
from roost.sandbox.inside.frames import Channel
from roost.sandbox.inside.notebook import Notebook


def main(descriptor: int) -> NoReturn:
    """Serve requests until the peer closed the connection."""
    channel = Channel(descriptor)
    request = channel.receive()
    sys.dont_write_bytecode = True
    sys.path[:] = ["", *sys.path[1:], *request["libraries"]]  # the first is where this file was found
    sys.argv[:] = [""]
    os.environ["HOME"] = os.environ["TMPDIR"] = request["folder"]
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a real file, as this process began
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
