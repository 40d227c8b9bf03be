"""Addresses of Ray clusters: read the file that `ray start` writes on this machine, and check that Ray answers.

Ray keeps the file in a folder that every user of the machine can write to. A user who plants an address there would
receive the job's code, data and environment, so the file is read only if no other user can have written it.
"""

from __future__ import annotations

import os
import pwd
import socket
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = 0
LISTENING = "0A"  # the state of a socket in /proc/net/tcp
MAX_FILE_BYTES = 1 << 10
ANSWER_LIMIT_S = 12.0  # for a head that is being started; Ray itself would wait for minutes and print nothing
POLL_INTERVAL_S = 0.5
CLIENT = "ray://"
# A gRPC server answers the first line of HTTP/2 with a SETTINGS frame; one with TLS, or a busy one, may answer nothing.
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
SETTINGS, TLS_ALERT = 4, 0x15


def running_here(say: Callable[[str], None]) -> str | None:
    """Address of the cluster started on this machine with `ray start`, if it still answers.

    Ray's own lookup would also find the private Ray of another script.
    """
    from ray._common.utils import get_ray_address_file

    file = Path(get_ray_address_file(None))
    try:
        address = trusted_text(file)
        host, _, port = address.rpartition(":")
        host = host.strip("[]")
        if not host or not _answers(host, port):
            return None
        check_listener(host, int(port))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        say(f"ignoring the Ray address in {file}: {error}; name the cluster by its address (host:port) to join it")
        return None
    return address


def trusted_text(file: Path) -> str:
    """Read a file; raise PermissionError unless only this user or root can have written it."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, encoding="utf-8") as opened:  # noqa: PTH123 (a descriptor)
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise PermissionError("it is not a regular file")
        _check_owner("the file", found.st_uid)
        _check_owner(str(file.parent), file.parent.stat().st_uid)
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(f"other users can write to it (mode {stat.S_IMODE(found.st_mode):o})")
        return opened.read(MAX_FILE_BYTES).strip()


def check_listener(host: str, port: int) -> None:
    """Raise PermissionError if the process that listens on a port of this machine is another user's."""
    if not _is_this_machine(host):
        return
    for owner in listening_users(port):
        _check_owner(f"the process that listens on port {port}", owner)


def listening_users(port: int, tables: tuple[str, ...] = ("/proc/net/tcp", "/proc/net/tcp6")) -> set[int]:
    """User ids of the processes that listen on a port."""
    found = set()
    for table in tables:
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for words in map(str.split, lines):
            if words[3] == LISTENING and int(words[1].rpartition(":")[2], 16) == port:
                found.add(int(words[7]))
    return found


def _check_owner(what: str, owner: int) -> None:
    if owner not in (os.getuid(), ROOT):
        raise PermissionError(f"{what} belongs to {_name(owner)}, not to you")


def _name(user: int) -> str:
    try:
        return f"user {pwd.getpwuid(user).pw_name}"
    except KeyError:
        return f"user {user}"


def _is_this_machine(host: str) -> bool:
    """Return True if a host is this machine, that is, one of its addresses can be bound."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return any(_can_bind(family, address) for family, _, _, _, address in found)


def _can_bind(family: int, address: tuple[Any, ...]) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def _answers(host: str, port: str) -> bool:
    return not _unanswered([host], int(port), 1.0)


def wait_for_answer(address: str, limit_s: float = ANSWER_LIMIT_S) -> str:
    """Wait until a server answers. Return why not if none does, or if it is not Ray; else an empty string.

    >>> wait_for_answer("10.0.0.1")
    'it has no valid port (1 to 65535); write HOST:PORT, such as 10.0.0.1:6379'
    """
    host, _, port = address.removeprefix(CLIENT).rpartition(":")
    if not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
        return f"it has no valid port (1 to 65535); write HOST:PORT, such as {host or port}:6379"
    deadline = time.monotonic() + limit_s
    while True:
        refusal = _unanswered(_hosts_to_try(host.strip("[]")), int(port), max(1.0, deadline - time.monotonic()))
        if not refusal or time.monotonic() + POLL_INTERVAL_S >= deadline:
            return refusal
        time.sleep(POLL_INTERVAL_S)


def _hosts_to_try(host: str) -> list[str]:
    """Hosts to try: for loopback also the node's own address, which Ray uses in its place."""
    if host not in ("localhost", "127.0.0.1"):
        return [host]
    from ray.util import get_node_ip_address

    return [host, get_node_ip_address()]  # type: ignore[no-untyped-call]


def _unanswered(hosts: list[str], port: int, limit_s: float) -> str:
    """Reason that no Ray answers at a port of these hosts; empty if one may."""
    other, refusal = "", ""
    for address in _resolved(hosts):
        try:
            with socket.create_connection((address, port), timeout=limit_s) as made:
                if _may_be_ray(made):
                    return ""
                other = "the program that listens there is not Ray (its port is 6379 by default)"
        except OSError as error:
            refusal = refusal or str(error.strerror or error)
    return other or refusal


def _resolved(hosts: list[str]) -> list[str]:
    """All addresses of hosts: localhost may be ::1 and 127.0.0.1, and Ray listens on one of them."""
    found: dict[str, None] = {}
    for host in hosts:
        try:
            found |= {str(each[4][0]): None for each in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
        except OSError:
            found[host] = None  # connecting says why
    return list(found)


def _may_be_ray(made: socket.socket) -> bool:
    """Return False if the reply cannot come from a gRPC server."""
    made.settimeout(1.0)
    try:
        made.sendall(HTTP2_PREFACE)
        reply = made.recv(9)
    except OSError:
        return True
    return len(reply) < 4 or reply[3] == SETTINGS or reply[0] == TLS_ALERT
