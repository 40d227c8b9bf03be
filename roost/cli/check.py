"""`roost check`: report mistakes in configs, without showing plans."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from roost.cli.console import open_console
from roost.cli.options import (
    WITH_TRAINING,
    AsJson,
    ConfigsAndOverrides,
    GpusPerNode,
    InventoryFile,
    LayoutChoice,
    NotationChoice,
    Strict,
    import_from_here,
    not_installed,
    planned,
    split_overrides,
)
from roost.config.compose import load
from roost.config.findings import Findings, counted
from roost.config.job import Notation
from roost.config.notations.notation import read_job
from roost.placement.plan import finding_to_dict
from roost.view.text import print_findings


def check_command(
    configs: ConfigsAndOverrides,
    as_json: AsJson = False,
    gpus_per_node: GpusPerNode = None,
    inventory: InventoryFile = None,
    notation: NotationChoice = None,
    layout: LayoutChoice = None,
    strict: Strict = False,
    imports: Annotated[
        bool,
        typer.Option(
            "--imports", help="Also import the classes that each config names by _target_, and check the keys they get."
        ),
    ] = False,
) -> None:
    """Print what is wrong or doubtful in each config. Exit code 1 means that at least one has errors.

    Overrides are written as for plan and train, and apply to every config: roost check job.yaml runner.max_steps=5
    """
    console = open_console()
    if imports:
        import_from_here()
    files, overrides = split_overrides(configs)
    if not files:
        raise typer.BadParameter("name at least one config file", param_hint="CONFIG")
    reports = {}
    for config in files:
        findings = Findings()
        planned(config, findings, inventory, gpus_per_node, layout, overrides, notation, strict)
        if imports:
            _check_imports(config, overrides, notation, findings)
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
        found = f"{counted(errors, 'error')}, {counted(warnings, 'warning')}"
        console.print(f"{len(reports)} checked, {len(wrong)} with errors; {found}")
    if wrong:
        raise typer.Exit(1)


def _check_imports(config: Path, overrides: list[str], notation: Notation | None, findings: Findings) -> None:
    """Report mistakes in the classes that a config names; nothing if it cannot be read or does not train."""
    unread = Findings()  # already reported by `planned`
    source = load(config, overrides, unread)
    job = None if source is None else read_job(source, unread, notation)
    if job is None or job.training is None:
        return
    try:
        from roost.trainer.targets import check_named
    except ImportError as error:
        raise typer.BadParameter(not_installed(error, WITH_TRAINING)) from None
    check_named(job.training, job, findings)
