"""Files that only their user can read: prompts, samples, weights and keys are nobody else's."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def private_files() -> Iterator[None]:
    """New files get mode 0600 and new folders 0700, here and in the processes that are started meanwhile."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)
