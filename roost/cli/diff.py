"""`roost diff`: what moves between two configs or plan files."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from roost.cli.options import GpusPerNode, InventoryFile, LayoutChoice, planned
from roost.placement.diff import diff_plans
from roost.placement.plan import Plan
from roost.placement.plan_file import read_plan_file
from roost.spec.errors import Findings
from roost.view.text import print_findings


def diff_command(
    before: Annotated[Path, typer.Argument(help="A config, or a plan that roost plan --json wrote.", metavar="BEFORE")],
    after: Annotated[Path, typer.Argument(help="The other one.", metavar="AFTER")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the changes as JSON.")] = False,
    gpus_per_node: GpusPerNode = None,
    inventory: InventoryFile = None,
    layout: LayoutChoice = None,
) -> None:
    """Show which components, processes and devices move from one plan to another.

    Exit code 0 means that nothing does, 1 that something does, 2 that one of the two has errors.
    """
    findings = Findings()
    plans = [_read(file, findings, gpus_per_node, inventory, layout) for file in (before, after)]
    print_findings(findings.errors, Console(stderr=True, highlight=False))
    old, new = plans
    if old is None or new is None:
        raise typer.Exit(2)
    changes = diff_plans(old, new)
    if as_json:
        print(json.dumps({"changes": [asdict(change) for change in changes]}, indent=2))
    else:
        console = Console(highlight=False)
        for change in changes:
            console.print(str(change), markup=False, soft_wrap=True)
        console.print(f"{len(changes)} changes" if changes else "the plans are equal")
    raise typer.Exit(1 if changes else 0)


def _read(
    file: Path, findings: Findings, gpus_per_node: int | None, inventory: Path | None, layout: LayoutChoice
) -> Plan | None:
    saved = read_plan_file(file, findings)
    if saved is not None or findings.errors:
        return saved
    return planned(file, findings, inventory, gpus_per_node, layout)
