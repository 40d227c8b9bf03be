"""Temporary folders of a process. Those of processes that were killed are removed when the next one is created."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path

from roost.runtime.folder_lock import LOCK_FILE, FolderHeld, FolderLock, NoLocks

DRAFT_S = 3600.0  # a folder that has no name after this time belongs to a process that was killed


class ScratchFolder:
    """A private folder that is locked as long as this process lives and has not removed it.

    On a file system without locks it is not locked, and stays there if the process is killed.
    """

    def __init__(self, kind: str, parent: Path | str | None = None) -> None:
        place = Path(parent) if parent is not None else Path(tempfile.gettempdir())
        _clear(place, kind)
        # Locked before it has its name: a folder of that name without a holder is free to be removed.
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
    """Remove folders of this user whose holders have ended; what cannot be locked stays."""
    for folder in (*place.glob(f"roost-{kind}-*"), *place.glob(f".roost-{kind}-*")):
        try:
            if _may_be_left(folder) and os.access(folder, os.W_OK):
                with FolderLock.take(folder):
                    shutil.rmtree(folder, ignore_errors=True)
        except (FolderHeld, OSError):
            continue  # in use, another user's, removed meanwhile, or on a disk without locks


def _may_be_left(folder: Path) -> bool:
    """Whether a folder is without use if nobody holds it: it was locked, or it is a draft of long ago."""
    if folder.name.startswith("."):
        return time.time() - folder.stat().st_mtime > DRAFT_S
    return (folder / LOCK_FILE).exists()
