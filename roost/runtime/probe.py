"""Probe the local node: accelerators, memory, versions, interpreters and declared devices."""

from __future__ import annotations

import json
import os
import platform
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import roost
from roost.cluster.allocation import AllocationError, Fact, node_rank
from roost.cluster.hardware.registry import HardwareRegistry, installed_registry
from roost.cluster.inventory import NO_ACCELERATOR
from roost.runtime.membership import NodeReport
from roost.transport.shared_memory import memory_limit

MARK = ".roost"  # file in the driver's folder by which other nodes recognise that they share it
SIOCGIFADDR = 0x8915  # Linux's ioctl number for "get interface address"
INTERPRETER_LIMIT = 60  # seconds for an interpreter to import Ray
CHECK = "import json, sys, ray, roost; print(json.dumps([sys.version_info[:2], ray.__version__, roost.__version__]))"


def report(node_id: str, driver_node: str, counted: Mapping[str, float], environ: Mapping[str, str]) -> NodeReport:
    """Report of this node: detected hardware, Ray's resources, and versions."""
    import ray

    rank, rank_problem = _rank(environ)
    found, problem = None, ""
    try:
        found = installed_registry(environ).detect(environ)
    except ValueError as error:
        problem = str(error)
    vendor, devices = found or (None, None)
    resource = vendor.ray_resource if vendor is not None else "GPU"
    address = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return NodeReport(
        node_id=node_id,
        address=address,
        interface=environ.get("GLOO_SOCKET_IFNAME") or interface_of(address),
        hostname=socket.gethostname(),
        rank_text=None if rank is None else rank.text,
        rank_variable=None if rank is None else rank.variable,
        rank_problem=rank_problem,
        accelerator_type=str(vendor.type) if vendor is not None else NO_ACCELERATOR,
        accelerator_model=devices.model if devices is not None else "",
        memory_gb=devices.memory_gb if devices is not None else None,
        physical_ids=devices.physical_ids if devices is not None else (),
        host_memory_gb=host_memory_gb(),
        cpus=counted.get("CPU", 0.0),
        ray_accelerators=int(counted.get(resource, 0)),
        ray_resource=resource,
        python_version=platform.python_version(),
        ray_version=ray.__version__,
        roost_version=roost.__version__,
        detection_problem=problem,
        is_driver=node_id == driver_node,
        is_head="node:__internal_head__" in counted,
    )


def _rank(environ: Mapping[str, str]) -> tuple[Fact | None, str]:
    try:
        return node_rank(environ), ""
    except AllocationError as error:
        return None, str(error)


def interface_of(address: str) -> str:
    """Network interface with the given address; empty if unknown.

    >>> interface_of("192.0.2.255")
    ''
    """
    if not sys.platform.startswith("linux"):
        return ""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(any_socket, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # it has no IPv4 address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return ""


def host_memory_gb() -> float | None:
    """Memory of this machine, or the container's limit."""
    total = memory_limit()
    return None if total is None else round(total / 2**30, 1)


def check_interpreter(path: str) -> str:
    """Describe the problem with an interpreter for workers; empty if it is usable.

    >>> check_interpreter("/no/such/python")
    '/no/such/python does not exist'
    """
    import ray

    if not Path(path).exists():
        return f"{path} does not exist"
    if not os.access(path, os.X_OK) or Path(path).is_dir():
        return f"{path} cannot be run"
    try:
        done = subprocess.run([path, "-c", CHECK], capture_output=True, text=True, timeout=INTERPRETER_LIMIT)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{path} cannot be run: {error}"
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return f"{path} cannot import Ray and Roost: {lines[-1] if lines else f'exit code {done.returncode}'}"
    python, ray_version, _ = json.loads(done.stdout.strip().splitlines()[-1])
    if tuple(python) != sys.version_info[:2]:
        here = ".".join(map(str, sys.version_info[:2]))
        return f"{path} is Python {'.'.join(map(str, python))}, the driver's is {here}"
    if ray_version != ray.__version__:
        return f"{path} has Ray {ray_version}, the cluster has {ray.__version__}"
    return ""


def robots(
    kind: str, configs: Sequence[Mapping[str, Any]], rank: int, environ: Mapping[str, str]
) -> tuple[tuple[Mapping[str, Any], ...], list[str]]:
    """Declared devices of one kind completed from this node's environment variables, and the problems found."""
    from roost.cluster.hardware.robot import fill_from_environment, parse_config

    registry: HardwareRegistry = installed_registry(environ)
    kind_class = registry.kind(kind)
    if kind_class is None:
        return tuple(configs), [f"hardware kind {kind} is not known on this node"]
    parsed = [parse_config(kind_class, config) for config in configs]
    good = [config for config in parsed if not isinstance(config, list)]
    if len(good) < len(parsed):
        return tuple(configs), [str(problem) for config in parsed if isinstance(config, list) for problem in config]
    try:
        filled = fill_from_environment(kind_class, good, rank, environ)
    except ValueError as error:
        return tuple(configs), [str(error)]
    return tuple(config.model_dump(mode="json") for config in filled), []
