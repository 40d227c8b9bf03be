"""`roost convert`: the same placements in another notation."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from roost.cli.console import open_console
from roost.cli.options import (
    ConfigOrScript,
    GpusPerNode,
    InventoryFile,
    LayoutChoice,
    NotationChoice,
    Overrides,
    planned,
)
from roost.config.findings import Findings
from roost.config.job import Notation
from roost.placement.convert.convert_plan import convert_plan
from roost.view.text import print_findings

Target = Literal["rlinf", "roll", "loop", "verl", "slime", "nemo", "openrlhf", "skyrl", "prime", "areal"]
LOSS = "RST-N046"  # a setting that the other notation does not have


def convert_command(
    config: ConfigOrScript,
    to: Annotated[Target, typer.Option("--to", help="The notation to write.")],
    overrides: Overrides = None,
    gpus_per_node: GpusPerNode = None,
    inventory: InventoryFile = None,
    notation: NotationChoice = None,
    layout: LayoutChoice = None,
) -> None:
    """Print the placements of a config in another notation.

    For verl, slime, OpenRLHF and SkyRL that is the command that starts the job, for the others a file. What is printed
    has been planned again: every process with devices is where it was, or on as many GPUs in the other program's own
    order. Every other difference that roost diff shows is named, and the exit code is then 1.
    """
    findings = Findings()
    plan = planned(config, findings, inventory, gpus_per_node, layout, overrides, notation)
    machines = plan.inventory if plan is not None and inventory is not None else None
    written = convert_plan(plan, Notation(to), findings, machines) if plan is not None else None
    print_findings(findings.found, open_console(stderr=True))
    if written is None:
        raise typer.Exit(1)
    print(written.text, end="")
    if any(finding.code == LOSS for finding in findings.found):
        raise typer.Exit(1)
