"""`roost check`: what is wrong with configs, without their plans."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from roost.cli.options import (
    AsJson,
    GpusPerNode,
    InventoryFile,
    LayoutChoice,
    NotationChoice,
    Strict,
    planned,
)
from roost.placement.plan_file import finding_to_dict
from roost.spec.errors import Findings
from roost.view.text import print_findings


def check_command(
    configs: Annotated[list[Path], typer.Argument(help="Config files (YAML).", metavar="CONFIG...")],
    as_json: AsJson = False,
    gpus_per_node: GpusPerNode = None,
    inventory: InventoryFile = None,
    notation: NotationChoice = None,
    layout: LayoutChoice = None,
    strict: Strict = False,
) -> None:
    """Print what is wrong or doubtful in each config. Exit code 1 means that at least one has errors."""
    console = Console(highlight=False)
    reports = {}
    for config in configs:
        findings = Findings()
        planned(config, findings, inventory, gpus_per_node, layout, notation=notation, strict=strict)
        reports[config] = findings
        if not as_json:
            print_findings(findings.found, console)
    wrong = [config for config, findings in reports.items() if findings.errors]
    if as_json:
        print(
            json.dumps(
                {
                    str(config): [finding_to_dict(finding) for finding in findings.found]
                    for config, findings in reports.items()
                },
                indent=2,
            )
        )
    else:
        errors = sum(findings.num_errors for findings in reports.values())
        warnings = sum(len(findings.warnings) for findings in reports.values())
        console.print(f"{len(reports)} checked, {len(wrong)} with errors; {errors} errors, {warnings} warnings")
    if wrong:
        raise typer.Exit(1)
