"""The address file that `ray start` leaves on this machine, read only if this user can trust it.

Ray keeps it in a folder that every user of the machine can write to. A user who plants an address there would receive
the job's code, data and environment.
"""

from __future__ import annotations

import ipaddress
import os
import pwd
import socket
import stat
from collections.abc import Callable
from pathlib import Path

ROOT = 0
LISTENING = "0A"  # the state of a socket in /proc/net/tcp
LONGEST = 1 << 10


def running_here(say: Callable[[str], None]) -> str | None:
    """Address of the cluster started on this machine with `ray start`, if it still answers.

    Ray's own lookup would also find the private Ray of another script.
    """
    from ray._common.utils import get_ray_address_file

    file = Path(get_ray_address_file(None))
    try:
        address = trusted_text(file)
        host, _, port = address.rpartition(":")
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
        return opened.read(LONGEST).strip()


def check_listener(host: str, port: int) -> None:
    """Raise PermissionError if the process that listens on a port of this machine is another user's."""
    if not _is_here(host):
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


def _is_here(host: str) -> bool:
    """Return True if a host is this machine, that is, its address can be bound."""
    try:
        address = ipaddress.ip_address(socket.gethostbyname(host))
        family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((str(address), 0))
    except OSError:
        return False
    return True


def _answers(host: str, port: str) -> bool:
    try:
        socket.create_connection((host, int(port)), timeout=1).close()
    except OSError:
        return False
    return True
