"""`roost check`: report mistakes in configs, without showing plans."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

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
    open_console,
    plan_with_options,
    split_overrides,
)
from roost.config.compose import load
from roost.config.findings import Finding, Findings, counted
from roost.config.frameworks.keys import CHECK_TRAIN
from roost.config.job import Notation
from roost.config.known_keys.tables import KeyUse
from roost.config.notations.notation import read_job
from roost.placement.plan import Plan, finding_to_dict
from roost.view.text import print_findings, print_keys


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
            "--imports",
            help="Also open the data and import the classes that each config names, and check the keys they get.",
        ),
    ] = False,
    train: Annotated[
        bool,
        typer.Option("--train", help="Also say whether each config could train, and every key that would be ignored."),
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
    reports, plans = {}, {}
    for config in files:
        findings = Findings()
        plan = plan_with_options(config, findings, inventory, gpus_per_node, layout, overrides, notation, strict, train)
        if imports:
            _check_imports(config, overrides, notation, findings, train, plan)
        reports[config], plans[config] = findings, plan
        if not as_json:
            print_findings(_without_check_hint(findings.found) if train else findings.found, console)
        if train and not as_json:
            _print_trainable(config, plan, findings, console, imports)
    wrong = [config for config, findings in reports.items() if findings.errors]
    if as_json:
        found_in = {str(config): _report(findings, plans[config], train) for config, findings in reports.items()}
        print(json.dumps(found_in, indent=2))
    else:
        errors = sum(findings.num_errors for findings in reports.values())
        warnings = sum(len(findings.warnings) for findings in reports.values())
        found = f"{counted(errors, 'error')}, {counted(warnings, 'warning')}"
        can_train = f", {len(reports) - len(wrong)} can train" if train else ""
        console.print(f"{len(reports)} checked, {len(wrong)} with errors{can_train}; {found}")
    if wrong:
        raise typer.Exit(1)


def _without_check_hint(findings: Iterable[Finding]) -> list[Finding]:
    """The findings without the hint to run `roost check --train`."""
    return [replace(found, fix="") if found.fix.startswith(CHECK_TRAIN) else found for found in findings]


def _print_trainable(config: Path, plan: Plan | None, findings: Findings, console: Console, imports: bool) -> None:
    """Print whether a config could train, and each key that training would ignore, with its line."""
    if plan is None or findings.has_errors:
        console.print(f"{config}: cannot train: {counted(findings.num_errors, 'error')}", soft_wrap=True)
        return
    ignored = _ignored(plan)
    unopened = "" if imports else "; data and classes are not opened without --imports"
    console.print(f"{config}: can train; {counted(len(ignored), 'key')} ignored{unopened}", soft_wrap=True)
    if ignored:
        print_keys(ignored, plan.file, console)


def _ignored(plan: Plan) -> list[KeyUse]:
    return [use for use in plan.keys if use.is_set]


def _report(findings: Findings, plan: Plan | None, trains: bool) -> Any:
    """The result for one config as a JSON value."""
    listed = _without_check_hint(findings.found) if trains else findings.found
    found = [finding_to_dict(finding) for finding in listed]
    if not trains:
        return found
    can_train = plan is not None and not findings.has_errors
    ignored = [] if plan is None else _ignored(plan)
    keys = [
        {
            "key": use.where.key_path,
            "file": use.where.file,
            "line": use.where.line,
            "effect": use.known.effect.value,
            "reason": use.known.reason,
        }
        for use in ignored
    ]
    return {"can_train": can_train, "findings": found, "ignored": keys}


def _check_imports(
    config: Path, overrides: list[str], notation: Notation | None, findings: Findings, trains: bool, plan: Plan | None
) -> None:
    """Report mistakes in the classes that a config names; nothing if it cannot be read or does not train.

    Where Roost trains it, also report a package that the learner needs and this interpreter lacks.
    """
    known = Findings()  # already reported by `plan_with_options`
    source = load(config, overrides, known)
    job = None if source is None else read_job(source, known, notation, trains=trains)
    if job is None or job.training is None:
        return
    try:
        from roost.trainer.preflight import check_optimizer_is_installed, needs_package_here
        from roost.trainer.targets import check_named
    except ImportError as error:
        raise typer.BadParameter(not_installed(error, WITH_TRAINING)) from None
    check_named(job.training, job, findings)
    if trains and plan is not None and needs_package_here(job.training, plan):
        check_optimizer_is_installed(job, job.training, plan, findings)
