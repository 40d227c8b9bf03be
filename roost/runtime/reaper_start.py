"""The reaper of a local Ray as its driver sees it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator

from roost.runtime import reaper
from roost.runtime.scratch import ScratchFolder


class Reaper:
    """Ends the processes of a local Ray and removes their folder when this process ends, in whatever way."""

    def __init__(self, folder: ScratchFolder) -> None:
        self.folder = folder
        self._mark = uuid.uuid4().hex
        their_end, self._leash = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(reaper.__file__), self._mark, str(folder.path)],
            stdin=their_end,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # signals to the driver's process group are not for it
        )
        os.close(their_end)

    @classmethod
    @contextlib.contextmanager
    def started(cls, folder: ScratchFolder) -> Iterator[Reaper]:
        """A reaper of all processes that are started inside."""
        one = cls(folder)
        os.environ[reaper.MARK] = one._mark
        try:
            yield one
        except BaseException:
            one.end()
            raise
        finally:
            del os.environ[reaper.MARK]

    def end(self) -> None:
        """The local Ray has ended: let the reaper end what is left of it."""
        os.close(self._leash)
        self.folder.remove()
