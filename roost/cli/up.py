"""`roost up`: Ray on every node of an allocation, and a command on the first."""

from __future__ import annotations

import os
import re
import socket
from typing import Annotated

import typer

from roost.cli.options import WITH_RAY, not_installed, open_console
from roost.cluster.allocation import AllocationError, read_allocation

FEWEST_PORTS = 64  # 16 for the rendezvous, 3 for Ray's services, the rest for workers
Words = Annotated[list[str], typer.Argument(help="The command to run on the first node.", metavar="-- COMMAND")]
Nodes = Annotated[
    int | None,
    typer.Option("--nodes", min=1, metavar="N", help="Number of nodes, if no variable of the scheduler has it."),
]
Timeout = Annotated[float, typer.Option("--timeout", min=1, metavar="SECONDS", help="How long to wait for all nodes.")]
Grace = Annotated[
    float,
    typer.Option("--grace", min=0, metavar="SECONDS", help="How long the command may take to end after a SIGTERM."),
]
Ports = Annotated[
    str | None,
    typer.Option(
        "--ports",
        metavar="FIRST-LAST",
        help="Ports that Ray and the rendezvous of nodes use, such as 20000-20999, where a firewall lets few pass.",
    ),
]
Port = Annotated[
    int | None,
    typer.Option("--port", min=1, max=65_000, help="First port of the nodes' rendezvous. Default: from the job's id."),
]


def up_command(
    command: Words,
    nodes: Nodes = None,
    timeout: Timeout = 600.0,
    grace: Grace = 300.0,
    port: Port = None,
    ports: Ports = None,
) -> None:
    """Start Ray on all nodes of an allocation and run a command on the first of them. Run it on every node.

    Rank, number of nodes and the head come from the variables of Slurm, SkyPilot, dstack, Kubernetes and others. The
    exit code is the command's, on every node. When the command or any node ends, the others end too.
    """
    console = open_console(stderr=True)

    def say(text: str) -> None:
        console.print(f"roost: {text}", soft_wrap=True, markup=False, highlight=False)

    chosen = port_range(ports)
    try:
        allocation = read_allocation(os.environ, nodes, socket.getfqdn().partition(".")[2])
        from roost.runtime.up.launcher import UpOptions, run_up
    except AllocationError as error:
        say(f"error: {error}")
        raise typer.Exit(1) from None
    except ImportError as error:
        say(f"error: {not_installed(error, WITH_RAY)}")
        raise typer.Exit(1) from None
    if os.environ.get("RAY_ADDRESS"):
        say(f"RAY_ADDRESS={os.environ['RAY_ADDRESS']} is not used: this command starts a Ray of its own")
    raise typer.Exit(run_up(allocation, UpOptions(tuple(command), timeout, grace, port, chosen), os.environ, say))


def port_range(text: str | None) -> tuple[int, int] | None:
    """First and last port of `--ports`.

    >>> port_range("20000-20999"), port_range(None)
    ((20000, 20999), None)
    """
    if text is None:
        return None
    found = re.fullmatch(r"(\d+)-(\d+)", text)
    first, last = (int(found[1]), int(found[2])) if found else (0, 0)
    if not (first >= 1024 and last <= 65_535 and last - first + 1 >= FEWEST_PORTS):
        wanted = f"is {text}; write FIRST-LAST between 1024 and 65535, with at least {FEWEST_PORTS} ports"
        raise typer.BadParameter(wanted, param_hint="--ports")
    return first, last
