"""Temporary folders of a process. Those of processes that were killed are removed when the next one is created."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from roost.runtime.folder_lock import LOCK_FILE, FolderHeld, FolderLock


class ScratchFolder:
    """A private folder that is locked as long as this process lives and has not removed it."""

    def __init__(self, kind: str, parent: Path | str | None = None) -> None:
        place = Path(parent) if parent is not None else Path(tempfile.gettempdir())
        _clear(place, kind)
        # Locked before it has its name: a folder of that name without a holder is free to be removed.
        draft = Path(tempfile.mkdtemp(prefix=f".roost-{kind}-", dir=place))
        self._lock = FolderLock.take(draft)
        self.path = draft.rename(place / draft.name.removeprefix("."))

    def remove(self) -> None:
        """Remove the folder; may be called again."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.release()


def _clear(place: Path, kind: str) -> None:
    """Remove folders of this user whose holders have ended."""
    for folder in place.glob(f"roost-{kind}-*"):
        if not (folder / LOCK_FILE).exists() or not os.access(folder, os.W_OK):
            continue
        try:
            with FolderLock.take(folder):
                shutil.rmtree(folder, ignore_errors=True)
        except (FolderHeld, OSError):
            continue  # in use, another user's, removed meanwhile, or on a disk without locks
