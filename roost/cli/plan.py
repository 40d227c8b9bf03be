"""`roost plan`: where every process of a job would run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from roost.cli.options import (
    AsJson,
    GpusPerNode,
    InventoryFile,
    LayoutChoice,
    NotationChoice,
    Overrides,
    Strict,
    open_console,
    plan_with_options,
)
from roost.config.findings import Findings, Where, did_you_mean
from roost.placement.plan import SCHEMA, Plan, finding_to_dict
from roost.view.text import print_findings, print_plan

UNFIT = ("RST-M003", "RST-M004", "RST-M005")  # errors about memory, with which --grid can still be drawn


def plan_command(
    config: Annotated[
        Path,
        typer.Argument(
            help="The config file (YAML or TOML), or the shell script that starts a job of another framework (verl, "
            "slime, OpenRLHF ...). A script is read, never run; its arguments come after --.",
            metavar="CONFIG",
        ),
    ],
    overrides: Overrides = None,
    as_json: AsJson = False,
    component: Annotated[
        list[str] | None,
        typer.Option("--component", metavar="NAME", help="Show this component only; may be given several times."),
    ] = None,
    gpus_per_node: GpusPerNode = None,
    inventory: InventoryFile = None,
    notation: NotationChoice = None,
    layout: LayoutChoice = None,
    strict: Strict = False,
    grid: Annotated[
        bool, typer.Option("--grid", help="Also draw nodes by devices, the phases, and the memory of each device.")
    ] = False,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write the plan as an HTML page.")] = None,
    svg: Annotated[Path | None, typer.Option("--svg", metavar="FILE", help="Write the plan as an SVG image.")] = None,
) -> None:
    """Show where every process of a job would run, or everything that is wrong with the config.

    No GPU, no Ray and no cluster are needed. Exit code 1 means that there are errors.
    """
    findings = Findings()
    despite = UNFIT if grid else ()
    plan = plan_with_options(
        config, findings, inventory, gpus_per_node, layout, overrides, notation, strict, despite=despite
    )
    wanted = tuple(component or ())
    if plan is not None:
        _check_names(plan, wanted, findings)
    if plan is not None and not findings.has_errors:
        _write_pictures(plan, html, svg, findings)
    if as_json:
        _print_json(plan, wanted, findings)
    elif plan is not None and not findings.errors:
        console = open_console()
        print_plan(plan, console, wanted)
        if grid:
            from roost.view.terminal_grid import print_grid

            console.print()
            print_grid(plan, console)
    elif plan is not None and grid and {error.code for error in findings.errors} <= set(UNFIT):
        from roost.view.terminal_grid import print_memory

        print_memory(plan, open_console())
    print_findings(findings.found, open_console(stderr=True))
    if findings.errors:
        raise typer.Exit(1)


def _write_pictures(plan: Plan, html: Path | None, svg: Path | None, findings: Findings) -> None:
    if html is None and svg is None:
        return
    # Imported here, because most plans are only printed.
    from roost.view.html import plan_to_html
    from roost.view.svg import plan_to_svg

    for file, draw in ((html, plan_to_html), (svg, plan_to_svg)):
        if file is None:
            continue
        try:
            file.write_text(draw(plan), encoding="utf-8")
        except OSError as error:
            kind = "svg" if file is svg else "html"
            fix = f"name a file in it: {file / f'plan.{kind}'}" if file.is_dir() else "name a folder that exists"
            findings.error("RST-C031", Where(str(file)), f"cannot be written: {error.strerror}", fix=fix)


def _check_names(plan: Plan, wanted: tuple[str, ...], findings: Findings) -> None:
    names = [part.name for part in plan.components]
    for name in wanted:
        if name not in names:
            findings.error(
                "RST-P001",
                Where("command line", path=("--component",)),
                f"there is no component {name}",
                did_you_mean(name, names),
                f"components: {', '.join(names)}",
            )


def _print_json(plan: Plan | None, wanted: tuple[str, ...], findings: Findings) -> None:
    if plan is None or findings.errors:
        described: dict[str, Any] = {
            "schema": SCHEMA,
            "findings": [finding_to_dict(finding) for finding in findings.found],
        }
    else:
        described = plan.to_dict()
        if wanted:
            described["components"] = {name: part for name, part in described["components"].items() if name in wanted}
    print(json.dumps(described, indent=2))
