"""Folders that appear under their name only once all of them is on the disk."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

UNFINISHED = ".unfinished"
REPLACED = ".replaced"


def unfinished(folder: Path) -> Path:
    """Where a folder is written before it gets its name."""
    return folder.with_name(folder.name + UNFINISHED)


def put_in_place(folder: Path) -> None:
    """Give what was written to `unfinished(folder)` its name; what had it before is removed after that."""
    draft, replaced = unfinished(folder), folder.with_name(folder.name + REPLACED)
    for path in (*draft.rglob("*"), draft):
        _sync(path)
    if folder.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        folder.rename(replaced)
    draft.rename(folder)
    _sync(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
