"""A real server of the built-in engine in a process of its own, for tests."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.limits import HANG_S

ROOT = Path(__file__).parents[2]
NAME = "tiny"


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server that has said that it is ready."""

    process: subprocess.Popen[str]
    url: str
    ready_line: str

    def client(self, key: str | None = None) -> httpx.Client:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return httpx.Client(base_url=self.url, headers=headers, timeout=HANG_S, trust_env=False)


def launch(model: Path | str, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "roost.torch_engine", "--model", str(model), "--port", "0"]
    command += ["--served-model-name", NAME, "--kv-cache-memory-bytes", "4000000", "--device", "cpu", *options]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
    )


@contextmanager
def running_server(model: Path | str, *options: str) -> Iterator[RunningServer]:
    process = launch(model, *options)
    assert process.stdout is not None and process.stderr is not None
    try:
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"the server did not start: {process.stderr.read()}")
        yield RunningServer(process, line.split()[-1], line)
    finally:
        process.kill()
        process.communicate()


def eventually(holds: Callable[[], bool]) -> None:
    """Wait until something is so that is bound to become so."""
    end = time.monotonic() + HANG_S
    while not holds():
        assert time.monotonic() < end, "it never became so"
        time.sleep(0.01)
