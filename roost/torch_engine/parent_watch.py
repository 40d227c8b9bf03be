"""End a server with the process it was started for, so that a killed driver leaves nothing behind."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable

import psutil

GRACE_S = 5.0


def end_with(pid: int) -> None:
    """End this process when process `pid` ends."""
    wait = wait_for(pid)

    def watch() -> None:
        wait()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE_S)  # loading a model can keep a signal waiting
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def wait_for(pid: int) -> Callable[[], object]:
    """Return a function that waits for the process to end, even if its pid is reused meanwhile."""
    if hasattr(os, "pidfd_open"):
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError as error:
            raise ValueError(f"there is no process {pid} to end with") from error
        except OSError:
            pass  # an older kernel
        else:
            return lambda: select.select([descriptor], [], [])
    try:
        return psutil.Process(pid).wait
    except psutil.NoSuchProcess as error:
        raise ValueError(f"there is no process {pid} to end with") from error
