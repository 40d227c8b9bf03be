"""The server as a program."""

import re
import signal
import subprocess
import sys

import httpx
import pytest

from roost.app_world.serving.command_line import arguments, limits_of
from tests.app_world.serving.session import NOTE
from tests.limits import HANG_S

COMMAND = [sys.executable, "-m", "roost.app_world.serving"]


def test_it_says_where_it_is_and_ends_when_it_is_told():
    with subprocess.Popen([*COMMAND, "--port", "0", "--worlds", "3"], stdout=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline()
            found = re.fullmatch(r"app world ready for 3 worlds at (http://127\.0\.0\.1:\d+)\n", line)
            assert found, line
            begun = httpx.post(f"{found[1]}/initialize", json={"task_id": NOTE.id}, timeout=HANG_S, trust_env=False)
            assert begun.status_code == 200
            process.send_signal(signal.SIGTERM)
            assert (process.wait(HANG_S), process.stdout.read()) == (0, "")
        finally:
            process.kill()


def test_what_is_given_and_what_is_not():
    limits = limits_of(arguments(["--idle-s", "5", "--memory-mb", "300", "--allows-weak"]))
    assert (limits.idle_s, limits.sandbox.memory_mb, limits.allows_weak) == (5.0, 300, True)
    assert (limits.worlds, limits.sandbox.wall_s) == (64, 10.0)


@pytest.mark.parametrize(
    ("options", "reported"),
    [
        pytest.param(["--worlds", "0"], "error: worlds is 0", id="no worlds"),
        pytest.param(["--host", "192.0.2.1", "--port", "0"], "error: [Errno", id="an address of others"),
    ],
)
def test_what_is_wrong_is_told_in_a_line(options, reported):
    ended = subprocess.run([*COMMAND, *options], capture_output=True, text=True, timeout=HANG_S)
    assert ended.returncode == 1
    assert reported in ended.stderr
    assert "Traceback" not in ended.stderr
