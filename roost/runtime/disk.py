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
NO_SPACE, NO_QUOTA = map(os.strerror, FULL)
SPARE = 1 << 20  # bytes beyond a file's own: directories, metrics, samples
LITTLE = 256 << 20  # bytes free on a file system that a large write has filled
SHARED_MEMORY = Path("/dev/shm")


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


def is_disk_full(error: BaseException, folder: Path | None = None) -> bool:
    """Whether a full disk is the cause of an error, or of one of those that led to it.

    The words alone count only if the file system of `folder` is nearly full: shared memory and inotify use them too.

    >>> is_disk_full(OSError(errno.ENOSPC, "No space left on device")), is_disk_full(OSError(errno.EIO, "I/O error"))
    (True, False)
    """
    return any(
        isinstance(one, DiskFull)
        or (isinstance(one, OSError) and one.errno in FULL)
        or (folder is not None and (NO_QUOTA in str(one) or (NO_SPACE in str(one) and _is_nearly_full(folder))))
        for one in chain_of(error)
    )


def full_shared_memory(error: BaseException, folder: Path = SHARED_MEMORY) -> str | None:
    """What to say about an error that may come from full shared memory; None for others."""
    if not any(NO_SPACE in str(one) for one in chain_of(error)) or not _is_nearly_full(folder):
        return None
    return (
        f"shared memory may be full: {FileSystem.of(folder)}; enlarge it (docker run --shm-size, or remount {folder})"
    )


def _is_nearly_full(folder: Path) -> bool:
    """Whether a file system has little room, or no inodes; one that has no fixed number of them counts none."""
    there = FileSystem.of(folder)
    inodes = os.statvfs(there.mount)
    return there.free < LITTLE or (inodes.f_files > 0 and inodes.f_favail == 0)


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
