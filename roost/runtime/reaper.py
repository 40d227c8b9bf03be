"""Ends what a killed driver leaves of its local Ray.

Ray's processes notice the end of their driver by themselves, most of the time. A small process of its own waits for
the end of the driver as well, which a pipe tells it however the driver ends, and then ends those that are still there.
They are known by a mark in their environment.

The file is also that process's program, run by its path, so it imports nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

MARK = "ROOST_LOCAL_RAY"
GRACE = 5.0  # seconds for Ray to end by itself
ROUNDS = 50
QUIET = 5  # rounds in which nothing is seen, until nothing is left: one that is just being started shows no environment


@contextlib.contextmanager
def reaped() -> Iterator[int]:
    """Processes that are started inside are ended when the descriptor it gives is closed: by hand, or by the kernel."""
    mark = uuid.uuid4().hex
    their_end, our_end = os.pipe()
    subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, mark],
        stdin=their_end,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # an interrupt from the terminal is not for it
    )
    os.close(their_end)
    os.environ[MARK] = mark
    try:
        yield our_end
    except BaseException:
        os.close(our_end)
        raise
    finally:
        del os.environ[MARK]


def marked(mark: str) -> list[int]:
    """The processes that were started with a mark, other than this one."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:
            continue  # it is gone, or somebody else's
    return [pid for pid in found if pid != os.getpid()]


def main(mark: str) -> None:
    sys.stdin.buffer.read()  # returns when the driver is gone
    deadline = time.monotonic() + GRACE
    while marked(mark) and time.monotonic() < deadline:
        time.sleep(0.2)
    quiet = 0
    for _ in range(ROUNDS):  # one that is being ended may still start another
        left = marked(mark)
        quiet = 0 if left else quiet + 1
        if quiet == QUIET:
            return
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.2)


if __name__ == "__main__":
    main(sys.argv[1])
