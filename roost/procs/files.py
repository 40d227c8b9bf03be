"""Files and folders: full disks, locks, atomic folders, private modes, scratch space."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shlex
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader, FileIO
from pathlib import Path
from weakref import WeakSet

from rich.filesize import decimal

FULL = (errno.ENOSPC, errno.EDQUOT)
# Exceptions of Rust and C++ libraries have these messages, and no errno.
NO_SPACE, NO_QUOTA = map(os.strerror, FULL)
SPARE = 1 << 20  # bytes for other files: directories, metrics, samples
LITTLE = 256 << 20  # bytes; a file system with less free may have been filled by a large write
SHARED_MEMORY = Path("/dev/shm")


class DiskFull(RuntimeError):
    """A file system has no room for what must be written."""


@dataclass(frozen=True, slots=True)
class FileSystem:
    """File system of a path, with the bytes this user may still write."""

    mount: str
    kind: str  # ext4, nfs4, tmpfs, ...
    free: int
    total: int

    @classmethod
    def of(cls, path: Path) -> FileSystem:
        """The file system of a path, which need not exist yet."""
        import psutil  # not at module level: a plan-only install lacks it

        existing = next(folder for folder in (path, *path.absolute().parents) if folder.exists()).resolve()
        # Of several mounts at one path, the last is the visible one.
        mounts = {Path(part.mountpoint): part.fstype for part in psutil.disk_partitions(all=True)}
        mount = next((folder for folder in (existing, *existing.parents) if folder in mounts), Path("/"))
        usage = shutil.disk_usage(existing)
        return cls(str(mount), mounts.get(mount, ""), usage.free, usage.total)

    def __str__(self) -> str:
        kind = f" ({self.kind})" if self.kind else ""
        return f"{self.mount}{kind} has {decimal(self.free)} free of {decimal(self.total)}"


def check_room(path: Path, needed: int, what: str) -> None:
    """Raise `DiskFull` unless this many bytes, and a small reserve, are free."""
    if FileSystem.of(path).free < needed + SPARE:
        raise disk_full(path, what, needed)


def disk_full(path: Path, what: str, needed: int | None = None) -> DiskFull:
    """Error for something that could not be written."""
    need = f", {decimal(needed)} needed" if needed is not None else ""
    return DiskFull(f"disk full: cannot write {what} to {path}: {FileSystem.of(path)}{need}")


def is_disk_full(error: BaseException, folder: Path | None = None) -> bool:
    """Return True if an error, or one in its chain of causes, comes from a full disk.

    A message without errno counts only if the file system of `folder` is nearly full: full shared memory and inotify
    have the same message.

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
    """Message for an error that may come from full shared memory; None for others."""
    if not any(NO_SPACE in str(one) for one in chain_of(error)) or not _is_nearly_full(folder):
        return None
    return (
        f"shared memory may be full: {FileSystem.of(folder)}; enlarge it (docker run --shm-size, or remount {folder})"
    )


def _is_nearly_full(folder: Path) -> bool:
    """Return True if a file system is nearly full or out of inodes; f_files is 0 if they are not limited."""
    file_system = FileSystem.of(folder)
    inodes = os.statvfs(file_system.mount)
    return file_system.free < LITTLE or (inodes.f_files > 0 and inodes.f_favail == 0)


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """An error with all its causes and contexts."""
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        one = left.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            yield one
            left += [one.__cause__, one.__context__]


LOCK_FILE = ".lock"
LONGEST_HOLDER = 1 << 12  # bytes
READERS_S = 2.0  # longest wait for processes that only check whether the lock is held
LOOK_EVERY = 0.02  # seconds
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

    Neither a fork of the process nor a program that it starts holds the lock.

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
        """Lock an existing folder.

        Raise `FolderHeld` if another process, or this one, holds it already, and `NoLocks` if it cannot be locked. Wait
        briefly for processes that take a shared lock to check whether the folder is held.
        """
        place = Path(folder)
        descriptor = os.open(place / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with contextlib.ExitStack() as undo:
            file = undo.enter_context(FileIO(descriptor, "r+"))
            deadline = time.monotonic() + READERS_S
            try:
                while not _flock(file, fcntl.LOCK_EX):
                    if not _flock(file, fcntl.LOCK_SH) or time.monotonic() >= deadline:
                        holder = file.read(LONGEST_HOLDER).decode(errors="replace").strip()
                        raise FolderHeld(place, holder or "another process")
                    fcntl.flock(file, fcntl.LOCK_UN)
                    time.sleep(LOOK_EVERY)
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


def _flock(file: FileIO | BufferedReader, kind: int) -> bool:
    """Lock an open file without waiting; False if another has locked it."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


# A lock belongs to the open file, which a fork shares. So the fork closes the file, and only this process holds it.
_held: WeakSet[FolderLock] = WeakSet()


def _release_all() -> None:
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_release_all)


def _this_process() -> str:
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    command = shlex.join(sys.argv)[:400]
    return f"process {os.getpid()} on {socket.gethostname()} since {now}: {command}"


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that holds a folder, as its lock file says."""

    pid: int
    host: str
    since: str
    command: str

    @property
    def is_here(self) -> bool:
        """Return True if it runs on this machine."""
        return self.host == socket.gethostname()


def holder_of(folder: Path) -> Holder | None:
    """The process that holds a folder now; None if none does."""
    file = folder / LOCK_FILE
    try:
        found = _HOLDER.match(file.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    if found is None:
        return None
    holder = Holder(int(found[1]), found[2], found[3], found[4].strip())
    return holder if (_has_open(holder.pid, file) if holder.is_here else _is_locked(file)) else None


_HOLDER = re.compile(r"process (\d+) on (\S+) since ([\d-]+ [\d:]+): (.*)")


def _has_open(pid: int, file: Path) -> bool:
    """Return True if a process has a file open. Unlike taking a lock, this cannot disturb a starting run."""
    wanted = file.stat()
    for link in Path(f"/proc/{pid}/fd").glob("*"):
        with contextlib.suppress(OSError):
            found = link.stat()
            if (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino):
                return True
    return False


def _is_locked(file: Path) -> bool:
    """Return True if a process of another machine holds a lock; False on file systems without locks."""
    with file.open("rb") as opened:
        try:
            return not _flock(opened, fcntl.LOCK_SH)
        except OSError:
            return False


UNFINISHED = ".unfinished"
REPLACED = ".replaced"


def unfinished(folder: Path) -> Path:
    """Path under which a folder is written before it is renamed."""
    return folder.with_name(folder.name + UNFINISHED)


def put_in_place(folder: Path, is_durable: bool = True) -> None:
    """Rename `unfinished(folder)` to `folder`, and remove the previous one. `is_durable`: fsync before and after."""
    draft, replaced = unfinished(folder), folder.with_name(folder.name + REPLACED)
    for path in (*draft.rglob("*"), draft) if is_durable else ():
        _sync(path)
    if folder.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        folder.rename(replaced)
    draft.rename(folder)
    if is_durable:
        _sync(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def private_files() -> Iterator[None]:
    """New files get mode 0600 and new folders 0700, here and in processes started inside the context."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


DRAFT_S = 3600.0  # a folder still unnamed after this time was left by a killed process


class ScratchFolder:
    """A private temporary folder, locked until it is removed or this process ends.

    If the process is killed, the next scratch folder of its kind removes the old one. On a file system without locks,
    it stays.
    """

    def __init__(self, kind: str, parent: Path | str | None = None) -> None:
        place = Path(parent) if parent is not None else Path(tempfile.gettempdir())
        _clear(place, kind)
        # Locked before it gets its name, because others remove a folder of that name without a holder.
        draft = Path(tempfile.mkdtemp(prefix=f".roost-{kind}-", dir=place))
        try:
            self._lock = _locked(draft)
            self.path = draft.rename(place / draft.name.removeprefix("."))
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise

    def remove(self) -> None:
        """Remove the folder; may be called again."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            self._lock.release()


def _locked(draft: Path) -> FolderLock | None:
    """The lock of a folder; None on a file system without locks."""
    try:
        return FolderLock.take(draft)
    except NoLocks:
        (draft / LOCK_FILE).unlink()  # another machine may have mounted this file system with locks
        return None


def _clear(place: Path, kind: str) -> None:
    """Remove this user's scratch folders whose holders have ended; those that cannot be locked stay."""
    for folder in (*place.glob(f"roost-{kind}-*"), *place.glob(f".roost-{kind}-*")):
        try:
            if _may_be_left(folder) and os.access(folder, os.W_OK):
                with FolderLock.take(folder):
                    shutil.rmtree(folder, ignore_errors=True)
        except (FolderHeld, OSError):
            continue  # in use, another user's, removed meanwhile, or on a disk without locks


def _may_be_left(folder: Path) -> bool:
    """Return True if an unlocked folder is stale: it has a lock file, or is an old draft."""
    if folder.name.startswith("."):
        return time.time() - folder.stat().st_mtime > DRAFT_S
    return (folder / LOCK_FILE).exists()
