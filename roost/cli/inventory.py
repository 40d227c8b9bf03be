"""`roost inventory`: the machines of a running cluster, shown and saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from roost.cli.options import WITH_RAY, AsJson, exit_not_installed, open_console, write_file
from roost.cluster.inventory import Inventory, Node
from roost.config.findings import ConfigError
from roost.view.text import print_findings


def inventory_command(
    config: Annotated[
        Path | None, typer.Argument(help="A config in RLinf's notation, whose node groups are shown.")
    ] = None,
    address: Annotated[
        str | None,
        typer.Option("--address", help="The Ray cluster. Default: the one on this machine, else this machine alone."),
    ] = None,
    nodes: Annotated[int | None, typer.Option("--nodes", min=1, help="Number of nodes to wait for.")] = None,
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds to wait for --nodes.")] = 60.0,
    save: Annotated[
        Path | None, typer.Option("--save", metavar="FILE", help="Write a file for `roost plan --inventory`.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Ask every node of a Ray cluster what it has: accelerators, memory, declared hardware, interpreters."""
    console, notes = open_console(), open_console(stderr=True)
    try:
        from roost.runtime.cluster import Cluster
    except ImportError as error:
        raise exit_not_installed(error, WITH_RAY) from None
    try:
        with Cluster(nodes, str(config) if config else None, address, node_timeout=timeout) as cluster:
            inventory = cluster.inventory
            addresses = [node.report.address for node in cluster.nodes]
    except ConfigError as error:
        print_findings(error.findings, notes)
        raise typer.Exit(1) from None
    except (ConnectionError, TimeoutError) as error:
        notes.print(f"error: {error}", soft_wrap=True)
        raise typer.Exit(1) from None
    if as_json:
        print(json.dumps(inventory.to_dict(), indent=2))
    else:
        console.print(table_of(inventory, addresses))
    if save is not None:
        write_file(save, json.dumps(inventory.to_dict(), indent=2) + "\n", "--save")
        if not as_json:
            console.print(f"written to {save}; plan on it with: roost plan CONFIG --inventory {save}")


def table_of(inventory: Inventory, addresses: list[str]) -> Table:
    """Table of the nodes in rank order."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("node", "address", "host", "accelerators", "memory", "host memory", "hardware", "groups"):
        table.add_column(name, justify="right" if name in ("node", "memory", "host memory") else "left")
    for rank, (node, address) in enumerate(zip(inventory.nodes, addresses, strict=True)):
        groups = [group.label for group in inventory.groups if rank in group.node_ranks]
        hardware = ", ".join(f"{len(items)} {kind}" for kind, items in node.hardware.items())
        table.add_row(
            str(rank),
            address,
            node.host,
            _accelerators(node),
            _gib(node.memory_gb),
            _gib(node.host_memory_gb),
            hardware,
            ", ".join(groups),
        )
    return table


def _accelerators(node: Node) -> str:
    if not node.accelerators:
        return "-"
    return f"{node.accelerators} {node.accelerator_model or node.accelerator_type}"


def _gib(size: float | None) -> str:
    return "-" if size is None else f"{size:g} GiB"
