"""Watch Ray's control service (GCS), because Ray reports its loss late and by killing the driver."""

from __future__ import annotations

import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

LOOK_EVERY = 1.0  # seconds
CONNECT_LIMIT = 5.0
REPORT_AFTER = 10.0  # seconds without an answer
SETTING = "RAY_gcs_rpc_server_reconnect_timeout_s"
RAY_GIVES_UP_AFTER = 60.0  # seconds (Ray's default) after which Ray kills the driver
REACT_LIMIT = 60.0  # seconds for the driver to notice
SHARE = 2 / 3  # of Ray's limit; the rest is left for an orderly shutdown


class ControlLost(RuntimeError):
    """Raised when Ray's control service, and with it every worker, is lost."""


class Silence:
    """Decides from a series of probes whether the service is late or lost.

    >>> silence = Silence("10.0.0.1:6379", limit_s=60.0)
    >>> silence.saw(True, now=0.0), silence.saw(False, now=5.0), silence.saw(False, now=12.0)
    (None, None, None)
    >>> silence.saw(False, now=16.0)
    "Ray's control service (GCS) at 10.0.0.1:6379 does not answer; waiting up to 40 s for it"
    >>> silence.is_lost(now=44.0), silence.is_lost(now=46.0)
    (False, True)
    """

    def __init__(self, address: str, limit_s: float) -> None:
        self._address, self.limit_s = address, limit_s * SHARE
        self._since = math.inf  # start of the current silence
        self._is_reported = False

    def saw(self, answered: bool, now: float) -> str | None:
        """Record a probe; return a message to print, if any."""
        if answered:
            was_reported, self._since, self._is_reported = self._is_reported, math.inf, False
            return f"{self._service} answers again" if was_reported else None
        self._since = min(self._since, now)
        if self._is_reported or now - self._since < REPORT_AFTER:
            return None
        self._is_reported = True
        return f"{self._service} does not answer; waiting up to {self.limit_s:.0f} s for it"

    def is_lost(self, now: float) -> bool:
        return now - self._since > self.limit_s

    @property
    def lost(self) -> ControlLost:
        return ControlLost(
            f"{self._service} has not answered for {self.limit_s:.0f} s; check the head node (`ray status "
            f"--address {self._address}`), start the cluster again if it is down, and continue the run with --resume"
        )

    @property
    def _service(self) -> str:
        return f"Ray's control service (GCS) at {self._address}"


class ControlWatch:
    """Probes the control service in a thread until it is lost or the watch is stopped."""

    def __init__(self, address: str, say: Callable[[str], None], environ: Mapping[str, str] = os.environ) -> None:
        self._process = local_control_service()
        self._silence = Silence(address, float(environ.get(SETTING, RAY_GIVES_UP_AFTER)))
        self._address, self._say = address, say
        self._lost: ControlLost | None = None
        self._stopped = threading.Event()
        threading.Thread(target=self._follow, name="roost-control", daemon=True).start()

    @property
    def is_lost(self) -> bool:
        """Return True if the control service is lost: calls to Ray that need it would hang."""
        return self._lost is not None

    def raise_if_lost(self) -> None:
        if self._lost is not None:
            raise ControlLost(str(self._lost))

    def stop(self) -> None:
        self._stopped.set()

    def _follow(self) -> None:
        while self._lost is None and not self._stopped.wait(LOOK_EVERY):
            self._lost = self._check_process() if self._process is not None else self._check_address()
        if self._lost is not None and not self._stopped.wait(REACT_LIMIT):
            self._say(f"{self._lost}; a call to Ray still waits for it, so Ray will end this process")

    def _check_process(self) -> ControlLost | None:
        code = self._process.poll()
        if code is None or self._stopped.is_set():
            return None
        how = f"signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exit code {code}"
        return ControlLost(f"Ray's control service (GCS) on this machine died: process {self._process.pid}, {how}")

    def _check_address(self) -> ControlLost | None:
        message = self._silence.saw(answers(self._address), time.monotonic())
        if message is not None:
            self._say(message)
        return self._silence.lost if self._silence.is_lost(time.monotonic()) else None


def local_control_service() -> Any:
    """Process of the control service if this process started it, else None."""
    from ray._private import worker

    node: Any = worker._global_node
    started = node.all_processes.get("gcs_server") if node is not None else None
    return started[0].process if started else None


def answers(address: str) -> bool:
    """Return True if the address accepts connections."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_LIMIT).close()
    except OSError:
        return False
    return True
