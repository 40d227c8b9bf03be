"""The folder of a sandbox, in which anything may lie that its code could think of."""

from __future__ import annotations

import os
from pathlib import Path

_MOST_ENTRIES = 20_000  # more are as bad as too many bytes


def is_larger(folder: Path, most_bytes: int) -> bool:
    """Whether the files in it take more of the disk than that, or are too many to be counted.

    >>> is_larger(Path(__file__).parent / "inside", most_bytes=1)
    True
    """
    pending, size, entries = [os.fspath(folder)], 0, 0
    while pending:
        try:
            listing = os.scandir(pending.pop())
        except OSError:
            continue  # it went away meanwhile, cannot be listed, or lies too deep
        with listing:
            for entry in listing:
                entries += 1
                try:
                    size += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
                except OSError:
                    continue
                if size > most_bytes or entries > _MOST_ENTRIES:
                    return True
    return False


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
