"""`roost convert`: the same placements in another notation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
import yaml

from roost.cli.console import open_console
from roost.cli.options import GpusPerNode, InventoryFile, LayoutChoice, NotationChoice, Overrides, planned
from roost.config.findings import Findings
from roost.config.job import Notation
from roost.placement.convert import convert_plan
from roost.view.text import print_findings

LOSS = "RST-N046"  # a setting that the other notation does not have


def convert_command(
    config: Annotated[
        Path, typer.Argument(help="The config file (YAML), or the script that starts the job.", metavar="CONFIG")
    ],
    to: Annotated[Notation, typer.Option("--to", help="The notation to write: rlinf, roll or loop.")],
    overrides: Overrides = None,
    gpus_per_node: GpusPerNode = None,
    inventory: InventoryFile = None,
    notation: NotationChoice = None,
    layout: LayoutChoice = None,
) -> None:
    """Print the placements of a config in another notation.

    What is printed has been planned again, and every process is where it was. What else the other notation cannot say
    is named, and the exit code is then 1.
    """
    findings = Findings()
    plan = planned(config, findings, inventory, gpus_per_node, layout, overrides, notation)
    written = convert_plan(plan, to, findings) if plan is not None else None
    print_findings(findings.found, open_console(stderr=True))
    if written is None:
        raise typer.Exit(1)
    print(yaml.safe_dump(written, sort_keys=False, allow_unicode=True, default_flow_style=None), end="")
    if any(finding.code == LOSS for finding in findings.found):
        raise typer.Exit(1)
