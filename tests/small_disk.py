"""A real file system of a few bytes."""

import contextlib
import subprocess

import pytest


@contextlib.contextmanager
def small_disk(folder, size):
    """Mount a tmpfs of this many bytes on a new folder; tests are skipped where mounting is not permitted."""
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
