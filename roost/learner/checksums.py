"""SHA-256 checksums of a folder's files, in the format of `sha256sum --check SHA256SUMS`."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SUMS = "SHA256SUMS"
THREADS = 8  # hashing releases the GIL
OWN = ("*.distcp", ".metadata", "trainer.json")  # files of checkpoints; others may be added by people and file systems


class Damaged(ValueError):
    """Files differ from what was written."""


def sums_of(files: Iterable[Path]) -> dict[str, str]:
    """Checksum of each file by name."""
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as threads:
        named = sorted(files)
        return dict(zip((file.name for file in named), threads.map(_sum, named), strict=True))


def sums_text(sums: Mapping[str, str]) -> bytes:
    return "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items())).encode()


def write_sums(folder: Path, sums: Mapping[str, str]) -> None:
    """Write the checksum file and sync it to disk."""
    with (folder / SUMS).open("wb") as file:
        file.write(sums_text(sums))
        file.flush()
        os.fsync(file.fileno())


def check_sums(folder: Path) -> bool:
    """Raise `Damaged` unless each file of a checkpoint's folder has its sum; False for a folder without sums.

    Other files may be added. Raises OSError if files cannot be read.
    """
    try:
        written = (folder / SUMS).read_bytes()
    except FileNotFoundError:
        return False
    listed = _listed(written)
    found = sums_of(file for file in folder.iterdir() if file.is_file() and (file.name in listed or _is_own(file)))
    if sums_text(found) != written:
        raise Damaged(f"{folder} is damaged: {_difference(found, written)}")
    return True


def _listed(written: bytes) -> dict[str, str]:
    lines = [line.partition("  ") for line in written.decode(errors="replace").splitlines()]
    return {name: digest for digest, _, name in lines}


def _is_own(file: Path) -> bool:
    return any(file.match(pattern) for pattern in OWN)


def _difference(found: Mapping[str, str], written: bytes) -> str:
    expected = _listed(written)
    changed = sorted(name for name in expected.keys() & found.keys() if expected[name] != found[name])
    missing = sorted(name for name in expected.keys() - found.keys() if name)
    if missing:
        return f"{', '.join(map(repr, missing))} missing"
    return f"{', '.join(changed)} changed" if changed else f"{SUMS} itself changed"


def _sum(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
