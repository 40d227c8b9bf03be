"""Time for Ray's processes to start on a busy machine."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator
from typing import Any

START_LIMIT_S = 300.0
LOOK_EVERY_S = 0.1


@contextlib.contextmanager
def patient_start() -> Iterator[None]:
    """Give nodes that are started inside more time to register than the 30 s for which Ray has no setting.

    The wait ends early when one of the processes that Ray started has exited: Ray then reports it as usual.
    """
    from ray._private import services

    replaced: Any = services
    popen, get_node = replaced.ConsolePopen, replaced.get_node
    started: list[subprocess.Popen[bytes]] = []

    def start(*args: Any, **options: Any) -> Any:
        process = popen(*args, **options)
        started.append(process)
        return process

    def wait_for_node(*args: Any, **options: Any) -> Any:
        deadline = time.monotonic() + START_LIMIT_S
        while True:
            try:
                return get_node(*args, **options)
            except RuntimeError:
                if time.monotonic() >= deadline or any(process.poll() is not None for process in started):
                    raise
            time.sleep(LOOK_EVERY_S)

    replaced.ConsolePopen, replaced.get_node = start, wait_for_node
    try:
        yield
    finally:
        replaced.ConsolePopen, replaced.get_node = popen, get_node
