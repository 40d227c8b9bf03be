"""A lock on a folder that the kernel releases when its holder ends, however it ends.

A process id does not tell whether a folder is in use: another container that shares the disk has its own ids.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shlex
import socket
import sys
import time
from io import FileIO
from pathlib import Path
from weakref import WeakSet

LOCK_FILE = ".lock"
LONGEST_HOLDER = 1 << 12  # bytes
WITHOUT_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


class FolderHeld(RuntimeError):
    """Another process holds the folder; `holder` describes it."""

    def __init__(self, folder: Path, holder: str) -> None:
        super().__init__(f"{folder} is in use by {holder}")
        self.folder, self.holder = folder, holder


class NoLocks(OSError):
    """The file system of the folder has no locks (Lustre mounted without -o flock, some NFS)."""


class FolderLock:
    """An exclusive lock on a folder, held until `release()` or the end of this process.

    A fork of the process does not hold it, and neither does a program that it starts.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with FolderLock.take(folder):
    ...         try:
    ...             FolderLock.take(folder)
    ...         except FolderHeld as held:
    ...             print(f"process {os.getpid()} " in held.holder)
    True
    """

    def __init__(self, folder: Path, file: FileIO) -> None:
        self.folder, self._file = folder, file
        _held.add(self)

    @classmethod
    def take(cls, folder: str | Path) -> FolderLock:
        """Lock a folder that exists.

        Raises `FolderHeld` if another process, or this one, holds it already, and `NoLocks` if it cannot be locked.
        """
        place = Path(folder)
        descriptor = os.open(place / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with contextlib.ExitStack() as undo:
            file = undo.enter_context(FileIO(descriptor, "r+"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = file.read(LONGEST_HOLDER).decode(errors="replace").strip()
                raise FolderHeld(place, holder or "another process") from None
            except OSError as error:
                if error.errno in WITHOUT_LOCKS:
                    raise NoLocks(error.errno, error.strerror, str(place)) from None
                raise
            file.truncate(0)
            file.write(f"{_this_process()}\n".encode())
            undo.pop_all()
        return cls(place, file)

    def release(self) -> None:
        """Unlock the folder; may be called again."""
        self._file.close()

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


# The lock belongs to the open file, which a fork shares. Closed in the fork, it stays with the process that took it.
_held: WeakSet[FolderLock] = WeakSet()


def _release_all() -> None:
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_release_all)


def _this_process() -> str:
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    command = shlex.join(sys.argv)[:400]
    return f"process {os.getpid()} on {socket.gethostname()} since {now}: {command}"
