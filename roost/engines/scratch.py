"""Folders that go with the process that made them; those of processes that were killed go when the next is made."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import psutil


def scratch_folder(kind: str, parent: Path | str | None = None) -> Path:
    """A new folder for this process."""
    place = Path(parent) if parent is not None else Path(tempfile.gettempdir())
    _clear(place, kind)
    return Path(tempfile.mkdtemp(prefix=f"roost-{kind}-{os.getpid()}-", dir=place))


def _clear(place: Path, kind: str) -> None:
    """Remove what processes of this user left that no longer exist."""
    for folder in place.glob(f"roost-{kind}-*-*"):
        owner = folder.name.split("-")[2]
        if owner.isdigit() and not psutil.pid_exists(int(owner)) and os.access(folder, os.W_OK):
            shutil.rmtree(folder, ignore_errors=True)
