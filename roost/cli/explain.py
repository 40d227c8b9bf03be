"""`roost explain`: why a process is where it is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from roost.cli.console import open_console
from roost.cli.options import GpusPerNode, InventoryFile, LayoutChoice, NotationChoice, Overrides, planned
from roost.placement.explain import explain_component, explain_process
from roost.placement.plan import Plan
from roost.spec.errors import Findings, Where, did_you_mean, shown
from roost.view.text import print_findings


def explain_command(
    config: Annotated[Path, typer.Argument(help="The config file (YAML).", metavar="CONFIG")],
    process: Annotated[
        str, typer.Argument(help="A component, or one of its processes: rollout:3.", metavar="COMPONENT[:RANK]")
    ],
    overrides: Overrides = None,
    gpus_per_node: GpusPerNode = None,
    inventory: InventoryFile = None,
    notation: NotationChoice = None,
    layout: LayoutChoice = None,
) -> None:
    """Say which rule put a component or a process where it is, with the numbers."""
    findings = Findings()
    plan = planned(config, findings, inventory, gpus_per_node, layout, overrides, notation)
    sentences = _explain(plan, process, findings) if plan is not None else []
    console = open_console()
    for sentence in sentences:
        console.print(sentence)
    print_findings(findings.errors, open_console(stderr=True))
    if findings.errors:
        raise typer.Exit(1)


def _explain(plan: Plan, wanted: str, findings: Findings) -> list[str]:
    name, colon, rank = wanted.partition(":")
    names = [part.name for part in plan.components]
    place = Where("command line", path=(wanted,))
    part = next((part for part in plan.components if name in (part.name, part.written_name)), None)
    if part is None:
        findings.error(
            place, f"there is no component {name}", did_you_mean(name, names), f"components: {', '.join(names)}"
        )
        return []
    if not colon:
        return explain_component(plan, part)
    if not rank.isdecimal() or int(rank) >= part.world_size:
        findings.error(
            place, f"{part.name} has no process {shown(rank)}", fix=f"use a rank from 0 to {part.world_size - 1}"
        )
        return []
    return explain_process(plan, part, int(rank))
