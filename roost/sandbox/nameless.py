"""Files without a name: deleted, but on the disk for as long as a process has them open or mapped."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_DELETED = b" (deleted)"


def nameless_files(pid: int, folder: Path, largest: int) -> Iterator[int]:
    """Bytes of the disk that a process keeps so, for each descriptor and map that is looked at; a file counts once.

    Only some owners can ask how large a file is that is mapped and not open: for others it is as large as files can be.

    >>> list(nameless_files(0, Path("/nowhere"), largest=1))
    []
    """
    seen: set[int] = set()
    for descriptor in _descriptors(pid):
        try:
            status = descriptor.stat()
        except OSError:
            continue  # it was closed meanwhile
        is_new = not status.st_nlink and status.st_ino not in seen
        if is_new:
            seen.add(status.st_ino)
        yield status.st_blocks * 512 if is_new else 0
    for area, inode in _deleted_maps(pid, folder):
        if inode not in seen:
            seen.add(inode)
            yield _mapped_bytes(area, largest)


def _descriptors(pid: int) -> Iterator[Path]:
    """Of all threads, as each can have descriptors that others do not have."""
    for thread in _listed(Path(f"/proc/{pid}/task")):
        yield from _listed(thread / "fd")


def _deleted_maps(pid: int, folder: Path) -> Iterator[tuple[Path, int]]:
    """Where files of the folder are mapped that are not there any more, and their inodes."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_bytes().split(b"\n")
    except OSError:
        return  # it ended meanwhile
    within = os.fsencode(folder) + b"/"
    for line in lines:
        match line.split(maxsplit=5):
            case [area, _, _, _, inode, path] if path.startswith(within) and path.endswith(_DELETED):
                first, end = (int(address, 16) for address in area.split(b"-"))
                yield Path(f"/proc/{pid}/map_files/{first:x}-{end:x}"), int(inode)  # there without leading zeros


def _mapped_bytes(area: Path, largest: int) -> int:
    try:
        return area.stat().st_blocks * 512
    except PermissionError:
        return largest
    except OSError:
        return 0  # it is not mapped any more


def _listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []  # it ended meanwhile, or may not be looked at
