"""Connect this process to Ray: to a running cluster, or to a private one on this machine."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roost.cluster.hardware.accelerator import AcceleratorType
from roost.cluster.hardware.registry import installed_registry
from roost.procs import reaper
from roost.procs.files import ScratchFolder, private_files
from roost.procs.signals import preserve_sigterm
from roost.runtime.control_watch import local_control_service
from roost.runtime.ray_address import running_here, wait_for_answer

NAMESPACE = "roost"
LOCAL = "local"
AUTO = "auto"
UNWANTED = r"A worker died or was killed|cannot be scheduled right now|No available node types|Lease ID:"


@dataclass(slots=True, eq=False)
class Connection:
    """Connection of this process to Ray, shared by its clusters; the last one to close it disconnects."""

    address: str
    local: Reaper | None = None  # of a local Ray started for this process
    users: int = 1

    @property
    def folder(self) -> Path | None:
        """Private folder of a local Ray, removed however Ray ends."""
        return self.local.folder.path if self.local is not None else None

    def close(self) -> None:
        """Disconnect from Ray if Roost connected and no other cluster uses it; a local Ray is stopped."""
        import ray

        self.users -= 1
        if self.users > 0:
            return
        if self not in _open:
            return
        _open.remove(self)
        if ray.is_initialized():
            ray.shutdown()
        if self.local is not None:
            self.local.end()


# Ray allows one connection per process.
_open: list[Connection] = []


def connect(address: str | None, say: Callable[[str], None] = print) -> Connection:
    """Connect to Ray.

    An address (or RAY_ADDRESS) names a running cluster, `local` starts a private one. With neither, an existing
    connection of this process is used, else a cluster that runs on this machine, else a new local one is started.
    """
    import ray

    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # Roost reports failures that no wait has raised
    _leave_dead_ray()
    if ray.is_initialized():
        return _join_open(address)
    address = address or os.environ.get("RAY_ADDRESS") or None
    found = running_here(say) if address in (None, AUTO) else address
    if found is None and address == AUTO:
        raise ConnectionError("no Ray cluster of yours runs on this machine; start one with `ray start --head`")
    connection = _start_local() if found in (None, LOCAL) else _attach(str(found), say)
    _open.append(connection)
    return connection


def _leave_dead_ray() -> None:
    """Disconnect from a local Ray whose control service has died, even if clusters still use it."""
    service = local_control_service()
    if service is not None and service.poll() is not None:
        for connection in [one for one in _open if one.local is not None]:
            connection.users = 1
            connection.close()


def _join_open(address: str | None) -> Connection:
    import ray

    current = str(ray.get_runtime_context().gcs_address)
    if address not in (None, AUTO, current):
        raise ValueError(
            f"this process is connected to Ray at {current} and cannot also connect to {address}; omit the address to "
            "use the current connection, or shut it down first"
        )
    shared = next((connection for connection in _open if connection.address == current), None)
    if shared is None:
        return Connection(current)  # the user's own connection, left open
    shared.users += 1
    return shared


SLOW_S = 10.0


def _attach(address: str, say: Callable[[str], None]) -> Connection:
    import ray

    say(f"joining the Ray at {address}")
    refusal = wait_for_answer(address)
    if refusal:
        raise _no_answer(address, refusal)
    slow = threading.Timer(
        SLOW_S, say, [f"{address} accepts connections, but no Ray has answered yet; still waiting (Ctrl-C ends)"]
    )
    slow.daemon = True
    slow.start()
    try:
        try:
            _init(address=address)
        except ConnectionError:
            if not _offer_token():
                raise
            _init(address=address)
    except ConnectionError:
        raise _no_answer(address, "connections are accepted there, but no Ray answers") from None
    finally:
        slow.cancel()
    return Connection(ray.get_runtime_context().gcs_address)


def _no_answer(address: str, reason: str) -> ConnectionError:
    return ConnectionError(
        f"no Ray cluster answers at {address}: {reason}. Start one with `ray start --head`, or omit the address to run "
        "on this machine alone. If one runs there, it may require a token: put it into ~/.ray/auth_token and export "
        "RAY_AUTH_MODE=token"
    )


def _offer_token() -> bool:
    """Enable token authentication if this user has an unused token; return True if so.

    Ray's command line starts clusters that require it.
    """
    from ray._private.authentication import authentication_token_setup as setup

    if os.environ.get(setup.AUTH_MODE_ENV_VAR):
        return False
    logger = logging.getLogger(setup.__name__)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        has_token: bool = setup.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
        return has_token
    finally:
        logger.setLevel(level)


STARTS = 3  # of a local Ray: its daemon exits when the processes it starts take longer than a fixed 15 s


class RayExited(ConnectionError):
    """A process of Ray exited while Ray was being started."""


def _start_local() -> Connection:
    for _ in range(STARTS - 1):
        try:
            return _start_local_once()
        except RayExited as error:
            logging.getLogger(__name__).warning("%s; starting Ray again", error)
    return _start_local_once()


def _start_local_once() -> Connection:
    import ray

    options: dict[str, Any] = {"include_dashboard": False, "_system_config": dict(SYSTEM_CONFIG)}
    found = installed_registry(os.environ).detect(os.environ)
    simulated = found[1].count if found is not None and found[0].type == AcceleratorType.SIMULATED else 0
    if simulated:
        options["num_gpus"] = simulated  # Ray cannot detect simulated accelerators
    make_token_private()
    with (
        Reaper.started(private_folder()) as reaper,
        on_loopback(),
        simulating(simulated),
        in_own_sessions(),
        without_services(),
        patient_start(),
    ):
        _init(address=LOCAL, _temp_dir=str(reaper.folder.path / "s"), **options)
    return Connection(ray.get_runtime_context().gcs_address, local=reaper)


def _init(**options: Any) -> None:
    import ray

    with preserve_sigterm():
        ray.init(namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR, **options)
    # Suppress Ray's messages about workers that died or cannot be placed; Roost's own messages give the cause.
    from ray._private.ray_logging import stdout_deduplicator

    stdout_deduplicator.skip_re = re.compile(UNWANTED)


def alive_nodes() -> list[dict[str, Any]]:
    import ray

    return [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]


def node_resources() -> Mapping[str, Mapping[str, float]]:
    """Total resources of each alive node, by node id."""
    return {node["NodeID"]: node["Resources"] for node in alive_nodes()}


def free_resources() -> Mapping[str, Mapping[str, float]]:
    """Free resources of each node, by node id."""
    from ray._private.state import available_resources_per_node

    found: Mapping[str, Mapping[str, float]] = available_resources_per_node()  # type: ignore[no-untyped-call]
    return found


KIND = "ray"
MAX_SOCKET_PATH = 107  # bytes, without the final zero
SOCKET_SUFFIX_LENGTH = len("/roost-ray-12345678/s/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store")
SHORT_FOLDER = Path("/tmp")
# Read by Ray on first import. If off, a single node listens on loopback only.
CLUSTER_SWITCH = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
MASK = "CUDA_VISIBLE_DEVICES"  # Ray refuses to count more GPUs than it lists
# Ray kills a driver that cannot reach the control service for this long (60 s by default). Roost watches the service
# itself, and needs time to stop what still runs.
SYSTEM_CONFIG = {"gcs_rpc_server_reconnect_timeout_s": 300}


def folder_for_sessions(environ: Mapping[str, str]) -> Path:
    """Parent of private Ray folders: Ray's default, unless socket paths would get too long.

    >>> str(folder_for_sessions({"TMPDIR": "/scratch/me"})), str(folder_for_sessions({"TMPDIR": "/s" * 40}))
    ('/scratch/me', '/tmp')
    """
    chosen = environ.get("RAY_TMPDIR") or environ.get("TMPDIR") or tempfile.gettempdir()
    fits = len(os.fsencode(chosen)) + SOCKET_SUFFIX_LENGTH <= MAX_SOCKET_PATH
    return Path(chosen) if fits else SHORT_FOLDER


def private_folder() -> ScratchFolder:
    """Create a folder that only this user can enter. Ray makes its own folders world-accessible, so they go below."""
    return ScratchFolder(KIND, folder_for_sessions(os.environ))


def make_token_private() -> None:
    """Create the token that Ray's processes authenticate with, or make an existing one private.

    Ray writes it with default permissions, so that other users can read it if the home folder is open.
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
    """CUDA_VISIBLE_DEVICES with enough entries for Ray, which counts them; CUDA finds no device with id -1.

    >>> mask_for_simulated("", 2), mask_for_simulated("4", 2), mask_for_simulated("4,5,6", 2)
    ('-1,-1', '4,-1', '4,5,6')
    """
    ids = [name for name in mask.split(",") if name and name != "NoDevFiles"]
    return ",".join(ids + ["-1"] * (count - len(ids)))


@contextlib.contextmanager
def simulating(count: int) -> Iterator[None]:
    """Context in which a Ray started with `count` simulated devices accepts them under any mask."""
    before = os.environ.get(MASK)
    if before is None or not count:
        yield
        return
    os.environ[MASK] = mask_for_simulated(before, count)
    try:
        yield
    finally:
        os.environ[MASK] = before


@contextlib.contextmanager
def on_loopback() -> Iterator[None]:
    """Context in which a Ray that is started listens on loopback only."""
    before = os.environ.get(CLUSTER_SWITCH)
    os.environ[CLUSTER_SWITCH] = "0"
    constants: Any = sys.modules.get("ray._private.ray_constants")
    was_enabled = constants is not None and constants.ENABLE_RAY_CLUSTER
    if constants is not None:
        constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        if constants is not None:
            constants.ENABLE_RAY_CLUSTER = was_enabled
        if before is None:
            os.environ.pop(CLUSTER_SWITCH, None)
        else:
            os.environ[CLUSTER_SWITCH] = before


@contextlib.contextmanager
def in_own_sessions() -> Iterator[None]:
    """Context in which Ray's processes are started in their own sessions.

    `timeout`, a shell and Slurm signal the whole process group, but only the driver should get the signal, and stop
    the other processes in order. Ray has no setting for this.
    """
    from ray._private import services

    replaced: Any = services
    before = replaced.ConsolePopen
    replaced.ConsolePopen = functools.partial(before, start_new_session=True)
    try:
        yield
    finally:
        replaced.ConsolePopen = before


@contextlib.contextmanager
def without_services() -> Iterator[None]:
    """Context in which Ray starts no autoscaler, log monitor or API server: each takes a second to start.

    Roost does not scale clusters, follows logs itself, and turns the dashboard off. Ray has no setting for this.
    """
    from ray._private.node import Node

    def no_api_server(node: Any, **_: object) -> None:
        node._webui_url = None

    def nothing(node: Any) -> None:
        pass

    replaced: Any = Node
    instead = {"start_monitor": nothing, "start_log_monitor": nothing, "start_api_server": no_api_server}
    # The methods are Ray's own: a release without one of them only starts more slowly.
    before = {name: getattr(replaced, name) for name in instead if hasattr(replaced, name)}
    for name in before:
        setattr(replaced, name, instead[name])
    try:
        yield
    finally:
        for name, method in before.items():
            setattr(replaced, name, method)


START_LIMIT_S = 300.0
LOOK_EVERY_S = 0.1


@contextlib.contextmanager
def patient_start() -> Iterator[None]:
    """Context that gives started nodes more time to register than Ray's fixed 30 s.

    Raises RayExited as soon as a process that Ray started has exited; Ray itself would wait until its limit.
    """
    from ray._private import services

    replaced: Any = services
    popen, get_node = replaced.ConsolePopen, replaced.get_node
    started: list[subprocess.Popen[bytes]] = []

    def start(*args: Any, **options: Any) -> Any:
        process = popen(*args, **options)
        started.append(process)
        return process

    def wait_for_node(*args: Any, **options: Any) -> Any:
        deadline = time.monotonic() + START_LIMIT_S
        while True:
            try:
                return get_node(*args, **options)
            except RuntimeError:
                exited = [process for process in started if process.poll() is not None]
                if exited:
                    raise RayExited(_exited(exited[0])) from None
                if time.monotonic() >= deadline:
                    raise
            time.sleep(LOOK_EVERY_S)

    replaced.ConsolePopen, replaced.get_node = start, wait_for_node
    try:
        yield
    finally:
        replaced.ConsolePopen, replaced.get_node = popen, get_node


def _exited(process: subprocess.Popen[bytes]) -> str:
    name = Path(str(process.args[0] if isinstance(process.args, list) else process.args)).name
    exit_text = f"its process {name} exited with code {process.returncode}"
    return f"Ray did not start: {exit_text}; run `ray start --head` to see why"


class Reaper:
    """Stops the processes of a local Ray and removes their folder when this process ends for any reason."""

    def __init__(self, folder: ScratchFolder) -> None:
        self.folder = folder
        self._mark = uuid.uuid4().hex
        self._leash: int | None
        their_end, self._leash = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(reaper.__file__), self._mark, str(folder.path)],
            stdin=their_end,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # signals to the driver's process group must not reach it
        )
        os.close(their_end)

    @classmethod
    @contextlib.contextmanager
    def started(cls, folder: ScratchFolder) -> Iterator[Reaper]:
        """Context with a reaper of all processes started inside."""
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
        """Let the reaper stop what is left of the local Ray, and remove the folder; may be called again."""
        leash, self._leash = self._leash, None
        if leash is not None:
            os.close(leash)
            self.folder.remove()

    def wait(self, limit: float) -> None:
        """Wait after `end` until nothing is left."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(limit)
