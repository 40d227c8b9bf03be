"""Ray of one node, in a child process that ends with its parent.

`python -m roost.runtime.up.ray_node OPTIONS` prints a line of JSON when Ray runs, and another if one of Ray's processes
exits. It ends Ray and exits when its standard input closes.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

LOOK_EVERY = 0.5  # seconds
RAYLET = "raylet"


@dataclass(frozen=True, slots=True, kw_only=True)
class RayOptions:
    """Start options of Ray on a node. Without `ports` each process binds a port that the system chooses."""

    address: str | None  # of this node; None: Ray's choice
    folder: str
    cpus: int
    accelerators: int = 0
    resource: str = "GPU"  # what Ray calls the accelerators
    is_simulated: bool = False
    labels: Mapping[str, str]
    head: str | None = None  # address of Ray's control service; None: start it
    ports: tuple[int, int] | None = None  # first and last

    def command(self) -> list[str]:
        return [sys.executable, "-m", __spec__.name, json.dumps(asdict(self))]


def port_params(first: int, last: int, is_head: bool) -> dict[str, Any]:
    """Ports of Ray's services and workers: the free ports of a range."""
    free = iter([port for port in range(first, last + 1) if _is_free(port)])
    services = ("node_manager_port", "object_manager_port", *(("gcs_server_port",) if is_head else ()))
    chosen: dict[str, Any] = dict(zip(services, free, strict=False))
    workers = ",".join(map(str, free))
    if not workers:
        raise OSError(
            f"fewer than {len(services) + 1} of the ports {first} to {last} are free; choose others with --ports"
        )
    return chosen | {"worker_port_list": workers}


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def start(options: RayOptions) -> Any:
    """Start Ray's processes; they are killed by the kernel if this process ends."""
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    from roost.runtime.ray_connection import SYSTEM_CONFIG, patient_start, simulating, without_services

    are_gpus, is_head = options.resource == "GPU", options.head is None
    ports: dict[str, Any] = {"min_worker_port": 0, "max_worker_port": 0}
    if options.ports is not None:
        ports = port_params(*options.ports, is_head)
    settings: Any = dict(SYSTEM_CONFIG) if is_head else None
    params = RayParams(
        node_ip_address=options.address,
        node_name=options.labels.get("roost.host"),
        gcs_address=options.head,
        num_cpus=options.cpus,
        num_gpus=options.accelerators if are_gpus else 0,
        resources={} if are_gpus or not options.accelerators else {options.resource: options.accelerators},
        labels=dict(options.labels),
        dashboard_agent_listen_port=0,
        include_dashboard=False if is_head else None,
        temp_dir=options.folder,
        _system_config=settings,
        **ports,
    )
    with simulating(options.accelerators if options.is_simulated else 0), without_services(), patient_start():
        return Node(params, head=is_head, shutdown_at_exit=False, spawn_reaper=True, connect_only=False)


def describe_exit(name: str, code: int) -> str:
    """Exit of a process of Ray.

    >>> describe_exit("raylet", -9), describe_exit("gcs_server", 1)
    ("Ray's raylet was ended by SIGKILL", "Ray's gcs_server exited with code 1")
    """
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    return f"Ray's {name} {how}"


def first_cause(ended: Iterable[tuple[str, subprocess.Popen[bytes]]]) -> str | None:
    """The exit of a Ray process that caused the others: a raylet exits when the control service does."""
    found = sorted(ended, key=lambda one: one[0] == RAYLET)
    return describe_exit(found[0][0], found[0][1].returncode) if found else None


def send(**message: Any) -> None:
    print(json.dumps(message), flush=True)


def main(options: RayOptions) -> None:
    from roost.runtime.ray_connection import RayExited

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher handles it and closes the input
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # srun sends it to every process; Ray's processes inherit this
    try:
        node = start(options)
    except Exception as error:
        send(failed=f"{type(error).__name__}: {error}", may_retry=isinstance(error, RayExited))
        raise SystemExit(1) from error
    send(started=node.gcs_address)
    while True:
        ready, _, _ = select.select([0], [], [], LOOK_EVERY)
        if ready and not os.read(0, 1):
            break
        cause = first_cause(node.dead_processes())
        if cause is not None:
            send(ended=cause)
            break
    node.kill_all_processes(check_alive=False, allow_graceful=True, wait=True)


if __name__ == "__main__":
    main(RayOptions(**json.loads(sys.argv[1])))
