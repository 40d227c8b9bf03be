"""Processes of a driver's Ray, also where nothing in their environment says so any more."""

import os
import signal
import subprocess
import sys
import time
import uuid

from roost.procs.reaper import MARK, Ours
from tests.limits import HANG_S

SLEEPS = "import time; time.sleep(3600)"
PARENT = f"""
import subprocess, sys, time
print(subprocess.Popen([sys.executable, "-c", {SLEEPS!r}], env={{}}).pid, flush=True)
time.sleep(3600)
"""


def test_children_without_the_mark_are_known_when_their_parent_is_gone():
    mark = uuid.uuid4().hex
    ours = Ours(mark)
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], env={**os.environ, MARK: mark}, stdout=subprocess.PIPE
    ) as parent:
        child = int(parent.stdout.readline())
        try:
            assert sorted(ours.running()) == sorted([parent.pid, child])
            parent.kill()
            parent.wait()
            assert ours.running() == [child]
        finally:
            os.kill(child, signal.SIGKILL)
    deadline = time.monotonic() + HANG_S
    while ours.running() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert ours.running() == []
