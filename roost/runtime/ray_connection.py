"""Connecting this process to Ray: to a cluster that runs, or to one of its own on this machine alone."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roost.cluster.hardware.accelerator import AcceleratorType
from roost.cluster.hardware.registry import installed_registry
from roost.runtime.control_watch import local_control_service
from roost.runtime.local_ray import (
    SYSTEM_CONFIG,
    OnLoopback,
    in_own_sessions,
    make_token_private,
    private_folder,
    simulating,
)
from roost.runtime.patient_start import patient_start
from roost.runtime.ray_address import running_here
from roost.runtime.reaper_start import Reaper
from roost.runtime.signals import sigterm_kept_from_ray

NAMESPACE = "roost"
LOCAL = "local"
AUTO = "auto"
UNWANTED = r"A worker died or was killed|cannot be scheduled right now|No available node types|Lease ID:"


@dataclass(slots=True, eq=False)
class Connection:
    """How this process is connected. Several clusters of one process share it; the last one to close it leaves Ray."""

    address: str
    local: Reaper | None = None  # of a Ray that was started here, for this process only
    users: int = 1

    @property
    def folder(self) -> Path | None:
        """The private folder of a local Ray, which is removed when it ends, however it ends."""
        return self.local.folder.path if self.local is not None else None

    def close(self) -> None:
        """Leave Ray, if this is what entered it and nobody else uses it; a local one is stopped."""
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


# A process has one connection to Ray, as Ray will have it.
_open: list[Connection] = []


def connect(address: str | None, say: Callable[[str], None] = print) -> Connection:
    """Connect to Ray.

    An address (or RAY_ADDRESS) names a running cluster, `local` asks for one of our own. With neither, a connection
    that this process has already is used, else a cluster that runs on this machine, else a new local one is started.
    """
    import ray

    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # a failure that nobody waits for is Roost's to tell
    _leave_dead_ray()
    if ray.is_initialized():
        return _join_open(address)
    address = address or os.environ.get("RAY_ADDRESS") or None
    found = running_here(say) if address in (None, AUTO) else address
    if found is None and address == AUTO:
        raise ConnectionError("no Ray cluster of yours runs on this machine; start one with `ray start --head`")
    connection = _start_local() if found in (None, LOCAL) else _attach(str(found))
    _open.append(connection)
    return connection


def _leave_dead_ray() -> None:
    """Leave a local Ray that has lost its control service, whoever still counts on it: it cannot be used again."""
    service = local_control_service()
    if service is not None and service.poll() is not None:
        for connection in [one for one in _open if one.local is not None]:
            connection.users = 1
            connection.close()


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
        return Connection(there)  # the user's own, which stays
    shared.users += 1
    return shared


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

    options: dict[str, Any] = {"include_dashboard": False, "_system_config": dict(SYSTEM_CONFIG)}
    found = installed_registry(os.environ).detect(os.environ)
    simulated = found[1].count if found is not None and found[0].type == AcceleratorType.SIMULATED else 0
    if simulated:
        options["num_gpus"] = simulated  # Ray cannot find what is not there
    make_token_private()
    with (
        Reaper.started(private_folder()) as reaper,
        OnLoopback(),
        simulating(simulated),
        in_own_sessions(),
        patient_start(),
    ):
        _init(address=LOCAL, _temp_dir=str(reaper.folder.path / "s"), **options)
    return Connection(ray.get_runtime_context().gcs_address, local=reaper)


def _init(**options: Any) -> None:
    import ray

    with sigterm_kept_from_ray():
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
