"""Resource limits of a sandbox, and the size of its folder."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from itertools import chain
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Limits:
    """Resource limits of one sandboxed process.

    >>> Limits(wall_s=2.0).memory_mb
    1024
    >>> Limits(memory_mb=0)
    Traceback (most recent call last):
    ValueError: memory_mb is 0; a sandbox needs more than 0
    """

    wall_s: float = 10.0  # per execution, including its API calls
    cpu_s: int = 60  # total over all executions and threads
    memory_mb: int = 1024  # of address space; an interpreter alone takes about 100
    output_chars: int = 10_000  # shown of one execution
    processes: int = 16  # threads, in effect: processes cannot be started
    file_mb: int = 64  # per file
    folder_mb: int = 256  # all files together, checked periodically
    open_files: int = 64

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) <= 0:
                raise ValueError(f"{field.name} is {getattr(self, field.name)}; a sandbox needs more than 0")


_MAX_ENTRIES = 20_000  # a folder with more counts as too large
_HIDDEN = (errno.EACCES, errno.ENAMETOOLONG)  # of folders that cannot be listed or are too deep


def is_larger(folder: Path, most_bytes: int, others: Iterable[int] = ()) -> bool:
    """Return True if the folder exceeds `most_bytes` on disk, or has too many or unreadable entries.

    `others` are sizes of further files in bytes.

    >>> is_larger(Path(__file__).parent / "inside", most_bytes=1)
    True
    """
    size = 0
    try:
        for entries, entry_size in enumerate(chain(others, _sizes(folder)), start=1):
            size += entry_size
            if size > most_bytes or entries > _MAX_ENTRIES:
                return True
    except _Hidden:
        return True
    return False


class _Hidden(Exception):
    """Some files cannot be counted."""


def _sizes(folder: Path) -> Iterator[int]:
    """Disk usage of each file and folder inside."""
    pending = [os.fspath(folder)]
    while pending:
        try:
            listing = os.scandir(pending.pop())
        except OSError as error:
            _check_gone(error)
            continue
        with listing:
            for entry in listing:
                try:
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
                    yield entry.stat(follow_symlinks=False).st_blocks * 512
                except OSError as error:
                    _check_gone(error)
                    yield 0


def _check_gone(error: OSError) -> None:
    """Ignore entries that were removed concurrently. Raise _Hidden for unreadable ones."""
    if error.errno in _HIDDEN:
        raise _Hidden from error


def remove(folder: Path) -> None:
    """Remove a folder tree of any depth and permissions. No process may be using it.

    Folders in folders are moved to the top first, so that no path gets long and nothing recurses.
    """
    moved = 0
    while inner := _inner_folders(folder):
        for path in inner:
            path.chmod(0o700)
            for deeper in _inner_folders(path):
                deeper.chmod(0o700)  # moving a folder needs write permission
                deeper.rename(folder / f"moved {moved}")
                moved += 1
            path.rmdir()
    folder.rmdir()


def _inner_folders(folder: Path) -> list[Path]:
    """Remove the files of a folder and return its subfolders."""
    inner = []
    for entry in list(os.scandir(folder)):
        if entry.is_dir(follow_symlinks=False):
            inner.append(Path(entry.path))
        else:
            Path(entry.path).unlink()
    return inner
