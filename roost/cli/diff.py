"""`roost diff`: what moves between two configs or plan files."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from roost.cli.console import open_console
from roost.cli.options import GpusPerNode, InventoryFile, LayoutChoice, Overrides, planned
from roost.config.findings import Findings, Where, counted
from roost.placement.diff import diff_plans
from roost.placement.plan import Plan, read_plan_file
from roost.view.text import print_findings


def diff_command(
    before: Annotated[Path, typer.Argument(help="A config, or a plan that roost plan --json wrote.", metavar="BEFORE")],
    after: Annotated[Path, typer.Argument(help="The other one.", metavar="AFTER")],
    overrides: Overrides = None,
    overrides_before: Annotated[
        list[str] | None,
        typer.Option("--before", metavar="KEY=VALUE", help="An override for BEFORE only; may be given several times."),
    ] = None,
    overrides_after: Annotated[
        list[str] | None,
        typer.Option("--after", metavar="KEY=VALUE", help="An override for AFTER only; may be given several times."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the changes as JSON.")] = False,
    gpus_per_node: GpusPerNode = None,
    inventory: InventoryFile = None,
    layout: LayoutChoice = None,
) -> None:
    """Show which components, processes and devices move from one plan to another.

    OVERRIDES apply to both configs, --before and --after to one. The effect of one override on a job is
    roost diff job.yaml job.yaml --after cluster.num_nodes=4

    Exit code 0 means that nothing does, 1 that something does, 2 that one of the two has errors.
    """
    findings = Findings()
    sides = (
        (before, [*(overrides or ()), *(overrides_before or ())]),
        (after, [*(overrides or ()), *(overrides_after or ())]),
    )
    plans = [_read(file, changes, findings, gpus_per_node, inventory, layout) for file, changes in sides]
    print_findings(findings.errors, open_console(stderr=True))
    old, new = plans
    if old is None or new is None:
        raise typer.Exit(2)
    changes = diff_plans(old, new)
    if as_json:
        print(json.dumps({"changes": [asdict(change) for change in changes]}, indent=2))
    else:
        console = open_console()
        for change in changes:
            console.print(str(change), soft_wrap=True)
        console.print(counted(len(changes), "change") if changes else "the plans are equal")
    raise typer.Exit(1 if changes else 0)


def _read(
    file: Path,
    overrides: list[str],
    findings: Findings,
    gpus_per_node: int | None,
    inventory: Path | None,
    layout: LayoutChoice,
) -> Plan | None:
    errors = findings.num_errors
    saved = read_plan_file(file, findings)
    if saved is not None and overrides:
        findings.error(
            "RST-C032",
            Where(str(file)),
            f"is a saved plan, to which overrides cannot apply: {' '.join(overrides)}",
            fix="give the config that it was made from, or override the other side with --before or --after",
        )
        return None
    if saved is not None or findings.num_errors > errors:
        return saved
    return planned(file, findings, inventory, gpus_per_node, layout, overrides)
