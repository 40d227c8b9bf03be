"""A real server of the built-in engine in a process of its own, for tests."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import httpx
import torch

from roost.torch_engine.__main__ import main
from tests.forked import FORKED
from tests.limits import HANG_S

ROOT = Path(__file__).parents[2]
NAME = "tiny"


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server that has said that it is ready."""

    process: subprocess.Popen[str] | BaseProcess
    url: str
    ready_line: str

    def client(self, key: str | None = None) -> httpx.Client:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return httpx.Client(base_url=self.url, headers=headers, timeout=HANG_S, trust_env=False)


def _arguments(model: Path | str, *options: str) -> list[str]:
    served = ("--served-model-name", NAME, "--kv-cache-memory-bytes", "4000000", "--device", "cpu")
    return ["--model", str(model), "--port", "0", *served, *options]


def launch(model: Path | str, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "roost.torch_engine", *_arguments(model, *options)]
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


@contextmanager
def forked_server(model: Path | str, *options: str) -> Iterator[RunningServer]:
    """A server whose start is not what is tested: as above, but torch is imported already."""
    reader, writer = FORKED.Pipe(duplex=False)
    process = FORKED.Process(target=_serve, args=(writer, _arguments(model, *options)))
    process.start()
    writer.close()
    try:
        with open(reader.fileno(), closefd=False) as output:
            line = output.readline()
            if not line:
                raise RuntimeError("the server did not start")
            yield RunningServer(process, line.split()[-1], line)
    finally:
        process.kill()
        process.join()


def _serve(writer: Connection, arguments: list[str]) -> None:
    os.dup2(writer.fileno(), sys.stdout.fileno())
    torch.set_num_threads(1)
    main(arguments)


def eventually(holds: Callable[[], bool]) -> None:
    """Wait until something is so that is bound to become so."""
    end = time.monotonic() + HANG_S
    while not holds():
        assert time.monotonic() < end, "it never became so"
        time.sleep(0.01)
