"""Free ports, and the address of this machine."""

from __future__ import annotations

import errno
import random
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

FIRST_PORT = 20_000  # above the range that Ray gives to its workers
EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


class PortLeases:
    """Ports leased by this process until they are released or the process ends."""

    def __init__(self) -> None:
        self._locks: dict[int, socket.socket] = {}

    def lease(self) -> int:
        """Lease a port on which nothing listens, and which no other job on this machine has leased."""
        for port in _candidates():
            if port in self._locks:
                continue
            lock = _claim(port)
            if lock is None:
                continue
            if _is_free(port):
                self._locks[port] = lock
                return port
            lock.close()
        raise OSError(errno.EADDRINUSE, f"no free port between {FIRST_PORT} and {_first_ephemeral() - 1}")

    def release(self, port: int) -> None:
        lock = self._locks.pop(port, None)
        if lock is not None:
            lock.close()

    def close(self) -> None:
        for port in list(self._locks):
            self.release(port)


def _candidates() -> Iterator[int]:
    """All ports once, from a random start, so that jobs rarely try the same ones."""
    ports = range(FIRST_PORT, _first_ephemeral())
    start = random.randrange(len(ports))
    yield from ports[start:]
    yield from ports[:start]


def _first_ephemeral() -> int:
    try:
        return max(int(EPHEMERAL_RANGE.read_text().split()[0]), FIRST_PORT + 1000)
    except OSError:
        return 32_768


def _claim(port: int) -> socket.socket | None:
    """Machine-wide lock: a socket in the abstract namespace, which leaves no file behind."""
    lock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    if not sys.platform.startswith("linux"):
        return lock  # other systems have no abstract namespace; there a port is only checked
    try:
        lock.bind(f"\0roost-port-{port}")
    except OSError:
        lock.close()
        return None
    return lock


def _is_free(port: int) -> bool:
    # Without SO_REUSEADDR, because the server that gets the port may not set it, and would fail in TIME_WAIT.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def node_address() -> str:
    """Address of this machine in the cluster."""
    from ray.util import get_node_ip_address

    return str(get_node_ip_address())  # type: ignore[no-untyped-call]
