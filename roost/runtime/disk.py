"""Full disks: free space is checked before large writes, and errors name the file system and the bytes."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
from rich.filesize import decimal

FULL = (errno.ENOSPC, errno.EDQUOT)
# As Rust and C++ libraries put it into exceptions that have no errno.
FULL_TEXTS = tuple(os.strerror(number) for number in FULL)
SPARE = 1 << 20  # bytes beyond a file's own: directories, metrics, samples


class DiskFull(RuntimeError):
    """A file system has no room for what must be written."""


@dataclass(frozen=True, slots=True)
class FileSystem:
    """Where a path is stored, with the bytes that this user may still write."""

    mount: str
    kind: str  # ext4, nfs4, tmpfs, ...
    free: int
    total: int

    @classmethod
    def of(cls, path: Path) -> FileSystem:
        """The file system of a path, which need not exist yet."""
        there = next(folder for folder in (path, *path.absolute().parents) if folder.exists()).resolve()
        # Of several mounts in one place the last is the visible one.
        mounts = {Path(part.mountpoint): part.fstype for part in psutil.disk_partitions(all=True)}
        mount = next((folder for folder in (there, *there.parents) if folder in mounts), Path("/"))
        usage = shutil.disk_usage(there)
        return cls(str(mount), mounts.get(mount, ""), usage.free, usage.total)

    def __str__(self) -> str:
        kind = f" ({self.kind})" if self.kind else ""
        return f"{self.mount}{kind} has {decimal(self.free)} free of {decimal(self.total)}"


def check_room(path: Path, needed: int, what: str) -> None:
    """Raise `DiskFull` unless so many bytes can be written there, and a little more."""
    if FileSystem.of(path).free < needed + SPARE:
        raise disk_full(path, what, needed)


def disk_full(path: Path, what: str, needed: int | None = None) -> DiskFull:
    """The error for something that could not be written."""
    wants = f", {decimal(needed)} needed" if needed is not None else ""
    return DiskFull(f"disk full: cannot write {what} to {path}: {FileSystem.of(path)}{wants}")


def is_disk_full(error: BaseException) -> bool:
    """Whether a full disk is the cause of an error, or of one of those that led to it.

    >>> is_disk_full(OSError(errno.ENOSPC, "No space left on device")), is_disk_full(OSError(errno.EIO, "I/O error"))
    (True, False)
    """
    return any(
        isinstance(one, DiskFull)
        or (isinstance(one, OSError) and one.errno in FULL)
        or any(text in str(one) for text in FULL_TEXTS)
        for one in chain_of(error)
    )


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """An error and all that led to it."""
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        one = left.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            yield one
            left += [one.__cause__, one.__context__]
