"""A fresh interpreter that takes nothing of this process along."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

_PACKAGES_FROM = str(Path(__file__).parents[2])
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_ENVIRONMENT = {"LANG": "C.UTF-8", "PATH": "/usr/bin:/bin", "MALLOC_ARENA_MAX": "2"} | dict.fromkeys(_ONE_THREAD, "1")


def start_interpreter(
    program: str, arguments: Sequence[int], stdin: IO[bytes] | int, output: IO[bytes] | int, connection: socket.socket
) -> subprocess.Popen[bytes]:
    """Run a program of this package, with `sys.argv[2:]` as arguments and the connection among its descriptors."""
    begin = f"import sys; sys.path.insert(0, sys.argv[1]); {program}"
    command = [sys.executable, "-I", "-S", "-X", "utf8", "-c", begin, _PACKAGES_FROM, *map(str, arguments)]
    return subprocess.Popen(
        command,
        stdin=stdin,
        stdout=output,
        stderr=output,
        cwd="/",
        env=_ENVIRONMENT,
        pass_fds=[connection.fileno()],
        start_new_session=True,
    )
