"""How much a sandbox may use."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from itertools import chain
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one sandboxed process.

    >>> Limits(wall_s=2.0).memory_mb
    1024
    >>> Limits(memory_mb=0)
    Traceback (most recent call last):
    ValueError: memory_mb is 0; a sandbox needs more than 0
    """

    wall_s: float = 10.0  # of one execution, the calls it makes included
    cpu_s: int = 60  # in all, over all threads
    memory_mb: int = 1024  # of address space; an interpreter alone takes about 100
    output_chars: int = 10_000  # shown of one execution
    processes: int = 16  # threads, that is: other processes cannot be started
    file_mb: int = 64  # of one file
    folder_mb: int = 256  # of all files, looked at now and then
    open_files: int = 64

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) <= 0:
                raise ValueError(f"{field.name} is {getattr(self, field.name)}; a sandbox needs more than 0")


_MOST_ENTRIES = 20_000  # more are as bad as too many bytes
_HIDDEN = (errno.EACCES, errno.ENAMETOOLONG)  # as nobody needs a folder that cannot be listed, or lies that deep


def is_larger(folder: Path, most_bytes: int, others: Iterable[int] = ()) -> bool:
    """Whether the files in it take more of the disk than that, are too many to be counted, or are hidden from that.

    Other files count as well, by their bytes.

    >>> is_larger(Path(__file__).parent / "inside", most_bytes=1)
    True
    """
    size = 0
    try:
        for entries, one in enumerate(chain(others, _sizes(folder)), start=1):
            size += one
            if size > most_bytes or entries > _MOST_ENTRIES:
                return True
    except _Hidden:
        return True
    return False


class _Hidden(Exception):
    """There are files that cannot be counted."""


def _sizes(folder: Path) -> Iterator[int]:
    """What each file and folder in it takes of the disk."""
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
    """What went away meanwhile can be done without; what cannot be looked at cannot."""
    if error.errno in _HIDDEN:
        raise _Hidden from error


def remove(folder: Path) -> None:
    """Remove it with everything in it, however deep and whatever its modes. Nothing may be at work in it any more.

    Folders in folders are moved to the top first, so that no path gets long and nothing recurses.
    """
    moved = 0
    while inner := _inner_folders(folder):
        for path in inner:
            path.chmod(0o700)
            for deeper in _inner_folders(path):
                deeper.chmod(0o700)  # a folder that cannot be written cannot be moved
                deeper.rename(folder / f"moved {moved}")
                moved += 1
            path.rmdir()
    folder.rmdir()


def _inner_folders(folder: Path) -> list[Path]:
    """The folders in a folder, once its files are gone."""
    inner = []
    for entry in list(os.scandir(folder)):
        if entry.is_dir(follow_symlinks=False):
            inner.append(Path(entry.path))
        else:
            Path(entry.path).unlink()
    return inner
