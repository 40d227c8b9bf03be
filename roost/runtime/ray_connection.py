"""Connecting this process to Ray: to a cluster that runs, or to one of its own on this machine alone."""

from __future__ import annotations

import logging
import os
import re
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from roost.cluster.hardware.accelerator import AcceleratorType
from roost.cluster.hardware.registry import installed_registry
from roost.runtime.reaper import reaped

NAMESPACE = "roost"
LOCAL = "local"
AUTO = "auto"
UNWANTED = r"A worker died or was killed|cannot be scheduled right now|No available node types|Lease ID:"
# Ray reads this when it is first imported. Off, a node that is alone listens on loopback only.
CLUSTER_SWITCH = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


@dataclass(slots=True, eq=False)
class Connection:
    """How this process is connected. Several clusters of one process share it; the last one to close it leaves Ray."""

    address: str
    is_local: bool = False  # started here, and for this process only
    is_ours: bool = True  # not there before
    leash: int | None = None  # a descriptor whose end, or this process's, ends a local Ray
    users: int = 1

    def close(self) -> None:
        """Leave Ray, if this is what entered it and nobody else uses it; a local one is stopped."""
        import ray

        self.users -= 1
        if self.users > 0:
            return
        if self in _open:
            _open.remove(self)
        if self.is_ours and ray.is_initialized():
            ray.shutdown()
        if self.leash is not None:
            os.close(self.leash)


# A process has one connection to Ray, as Ray will have it.
_open: list[Connection] = []


def connect(address: str | None) -> Connection:
    """Connect to Ray.

    An address (or RAY_ADDRESS) names a running cluster, `local` asks for one of our own. With neither, a connection
    that this process has already is used, else a cluster that runs on this machine, else a new local one is started.
    """
    import ray

    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # a failure that nobody waits for is Roost's to tell
    if ray.is_initialized():
        return _join_open(address)
    address = address or os.environ.get("RAY_ADDRESS") or None
    if address is None:
        address = running_here()
    connection = _start_local() if address in (None, LOCAL) else _attach(str(address))
    _open.append(connection)
    return connection


def _join_open(address: str | None) -> Connection:
    import ray

    there = str(ray.get_runtime_context().gcs_address)
    if address not in (None, AUTO, there):
        raise ValueError(
            f"this process is connected to Ray at {there} already, and cannot be to {address} as well; leave the "
            "address out to use that one, or shut it down first"
        )
    shared = next((connection for connection in _open if connection.address == there), None)
    if shared is None:
        return Connection(there, is_ours=False)
    shared.users += 1
    return shared


def running_here() -> str | None:
    """The cluster that was started on this machine with `ray start`, if it still answers.

    Ray's own way of looking would also find the private Ray of somebody's script.
    """
    from ray._private.utils import read_ray_address

    address: str | None = read_ray_address()
    host, _, port = (address or "").rpartition(":")
    if not host:
        return None
    try:
        socket.create_connection((host, int(port)), timeout=1).close()
    except (OSError, ValueError):
        return None
    return address


def _attach(address: str) -> Connection:
    import ray

    try:
        _init(address=address)
    except ConnectionError:
        if not _offer_token():
            raise _no_answer(address) from None
        try:
            _init(address=address)
        except ConnectionError:
            raise _no_answer(address) from None
    return Connection(ray.get_runtime_context().gcs_address)


def _no_answer(address: str) -> ConnectionError:
    return ConnectionError(
        f"no Ray cluster answers at {address}; start one with `ray start --head`, or leave the address out to run on "
        "this machine alone. If one runs there, it may ask for a token: put it into ~/.ray/auth_token and export "
        "RAY_AUTH_MODE=token"
    )


def _offer_token() -> bool:
    """Whether this user has a token that was not offered: Ray's command line starts clusters that ask for it."""
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


def _start_local() -> Connection:
    import ray

    options: dict[str, Any] = {}
    found = installed_registry(os.environ).detect(os.environ)
    if found is not None and found[0].type == AcceleratorType.SIMULATED:
        options["num_gpus"] = found[1].count  # Ray cannot find what is not there
    with _OnLoopback(), reaped() as leash:
        _init(address=LOCAL, include_dashboard=False, **options)
    return Connection(ray.get_runtime_context().gcs_address, is_local=True, leash=leash)


class _OnLoopback:
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


def _init(**options: Any) -> None:
    import ray

    ray.init(namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR, **options)
    # Ray's own words about a worker that died, or that cannot be placed, would stand before Roost's, which say why.
    from ray._private.ray_logging import stdout_deduplicator

    stdout_deduplicator.skip_re = re.compile(UNWANTED)


def alive_nodes() -> list[dict[str, Any]]:
    import ray

    return [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]


def node_resources() -> Mapping[str, Mapping[str, float]]:
    """What Ray counts in all on each node that is alive, by node id."""
    return {node["NodeID"]: node["Resources"] for node in alive_nodes()}


def free_resources() -> Mapping[str, Mapping[str, float]]:
    """What of it is free at the moment."""
    from ray._private.state import available_resources_per_node

    found: Mapping[str, Mapping[str, float]] = available_resources_per_node()  # type: ignore[no-untyped-call]
    return found
