"""A Ray of this process alone: private folder, loopback only, out of reach of signals to the driver's process group."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from roost.runtime.private_files import private_files
from roost.runtime.scratch import ScratchFolder

KIND = "ray"
LONGEST_SOCKET = 107  # bytes of a Unix socket's path, less its final zero
BELOW = len("/roost-ray-12345678/s/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store")
SHORT = Path("/tmp")
# Ray reads this when it is first imported. Off, a node that is alone listens on loopback only.
CLUSTER_SWITCH = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
MASK = "CUDA_VISIBLE_DEVICES"  # Ray refuses to count more GPUs than it lists
# Ray ends a driver that cannot reach the control service for this long (60 s by default). Roost watches the service
# itself, and needs time to end what still runs.
SYSTEM_CONFIG = {"gcs_rpc_server_reconnect_timeout_s": 300}


def folder_for_sessions(environ: Mapping[str, str]) -> Path:
    """The parent of private Ray folders: where Ray would put its own, unless the paths of sockets get too long.

    >>> str(folder_for_sessions({"TMPDIR": "/scratch/me"})), str(folder_for_sessions({"TMPDIR": "/s" * 40}))
    ('/scratch/me', '/tmp')
    """
    chosen = environ.get("RAY_TMPDIR") or environ.get("TMPDIR") or tempfile.gettempdir()
    return Path(chosen) if len(os.fsencode(chosen)) + BELOW <= LONGEST_SOCKET else SHORT


def private_folder() -> ScratchFolder:
    """A folder that only this user can enter. Ray opens its own folders to everybody, so they lie one level below."""
    return ScratchFolder(KIND, folder_for_sessions(os.environ))


def make_token_private() -> None:
    """Create the token that Ray's processes authenticate with, or close an existing one to other users.

    Ray writes it with the default permissions, which let everybody read it where the home folder is open.
    """
    if os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH"):
        return
    from ray._private.authentication.authentication_token_setup import generate_and_save_token

    path = Path.home() / ".ray" / "auth_token"
    if not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with private_files():
            generate_and_save_token()
    elif path.stat().st_uid == os.getuid() and path.stat().st_mode & 0o077:
        path.chmod(0o600)


def mask_for_simulated(mask: str, count: int) -> str:
    """A value of CUDA_VISIBLE_DEVICES with enough devices for Ray, which counts them; CUDA finds none by the id -1.

    >>> mask_for_simulated("", 2), mask_for_simulated("4", 2), mask_for_simulated("4,5,6", 2)
    ('-1,-1', '4,-1', '4,5,6')
    """
    ids = [name for name in mask.split(",") if name and name != "NoDevFiles"]
    return ",".join(ids + ["-1"] * (count - len(ids)))


@contextlib.contextmanager
def simulating(count: int) -> Iterator[None]:
    """While this holds, a Ray that is started with so many simulated devices accepts them whatever mask is set."""
    before = os.environ.get(MASK)
    if before is None or not count:
        yield
        return
    os.environ[MASK] = mask_for_simulated(before, count)
    try:
        yield
    finally:
        os.environ[MASK] = before


class OnLoopback:
    """While this holds, a Ray that is started listens on loopback only, with no need of a network."""

    _constants: Any

    def __enter__(self) -> None:
        self._before = os.environ.get(CLUSTER_SWITCH)
        os.environ[CLUSTER_SWITCH] = "0"
        self._constants = sys.modules.get("ray._private.ray_constants")
        if self._constants is not None:
            self._was = self._constants.ENABLE_RAY_CLUSTER
            self._constants.ENABLE_RAY_CLUSTER = False

    def __exit__(self, *_: object) -> None:
        if self._constants is not None:
            self._constants.ENABLE_RAY_CLUSTER = self._was
        if self._before is None:
            os.environ.pop(CLUSTER_SWITCH, None)
        else:
            os.environ[CLUSTER_SWITCH] = self._before


@contextlib.contextmanager
def in_own_sessions() -> Iterator[None]:
    """Ray's processes that are started inside get sessions of their own.

    `timeout`, a shell and Slurm signal the whole process group: that is for the driver, which then ends the rest in
    order. Ray has no setting for it.
    """
    from ray._private import services

    replaced: Any = services
    before = replaced.ConsolePopen
    replaced.ConsolePopen = functools.partial(before, start_new_session=True)
    try:
        yield
    finally:
        replaced.ConsolePopen = before
