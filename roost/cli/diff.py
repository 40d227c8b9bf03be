"""`roost diff`: what moves between two configs or plan files; `roost convert`: the same job in another notation."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from roost.cli.options import (
    ConfigOrScript,
    GpusPerNode,
    InventoryFile,
    LayoutChoice,
    NotationChoice,
    Overrides,
    open_console,
    plan_with_options,
)
from roost.config.findings import Findings, Where, counted
from roost.config.job import Notation
from roost.config.notations.algorithm import ESTIMATOR, estimator_of_train
from roost.placement.convert.convert_plan import convert_plan
from roost.placement.diff import Change, diff_plans
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

    OVERRIDES apply to both configs, --before and --after to one. To see the effect of one override on a job:
    roost diff job.yaml job.yaml --after cluster.num_nodes=4

    Exit code 0 means that nothing moves, 1 that something moves, 2 that one of the two has errors.
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
            console.print(str(_as_plans_show(change)), soft_wrap=True)
        console.print(counted(len(changes), "change") if changes else "the plans are equal")
    raise typer.Exit(1 if changes else 0)


def _as_plans_show(change: Change) -> Change:
    """The change, with an estimator by the name that plans print."""
    if (change.subject, change.component) != ("settings", ESTIMATOR):
        return change
    return replace(change, **{side: str(estimator_of_train(getattr(change, side))) for side in ("before", "after")})


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
    return plan_with_options(file, findings, inventory, gpus_per_node, layout, overrides)


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

    For verl, slime, OpenRLHF and SkyRL that is the command that starts the job, for the others a file. The result is
    planned again to check it: every process with devices is where it was, or on as many GPUs in the other program's own
    order. Every other difference that roost diff shows is reported.

    Exit code 0 means that roost diff finds the plans equal; keys about training that are not converted are listed in
    comments. 1 means that a difference is reported, 2 that nothing is printed: the job has errors, or the other program
    cannot place it.
    """
    findings = Findings()
    plan = plan_with_options(config, findings, inventory, gpus_per_node, layout, overrides, notation)
    machines = plan.inventory if plan is not None and inventory is not None else None
    written = convert_plan(plan, Notation(to), findings, machines) if plan is not None else None
    print_findings(findings.found, open_console(stderr=True))
    if written is None:
        raise typer.Exit(2)
    print(written.text, end="")
    if any(finding.code == LOSS for finding in findings.found):
        raise typer.Exit(1)
