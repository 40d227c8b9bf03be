"""`roost doctor`: check this machine, or every node of a cluster."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from roost.cli.options import (
    WITH_RAY,
    WITH_TRAINING,
    NotationChoice,
    Overrides,
    exit_not_installed,
    open_console,
    write_file,
)
from roost.config.compose import load
from roost.config.findings import ConfigError, Findings
from roost.config.job import Job
from roost.config.notations.notation import read_job
from roost.doctor.judge import Check, Level, Measured, NodeHealth, failures, judge, judge_bandwidth, judge_job
from roost.doctor.probe import probe_node
from roost.placement.plan import Plan
from roost.placement.planner import try_plan
from roost.trainer.preflight import check_optimizer_is_installed, input_paths, needs_package_here
from roost.trainer.records.remote import url_of
from roost.view.text import print_findings


def doctor_command(
    config: Annotated[
        Path | None, typer.Argument(help="A job whose paths and accelerators are checked, too.", metavar="CONFIG")
    ] = None,
    overrides: Overrides = None,
    cluster: Annotated[bool, typer.Option("--cluster", help="Check every node of a running Ray cluster.")] = False,
    address: Annotated[
        str | None, typer.Option("--address", help="The Ray cluster. Default: the one on this machine.")
    ] = None,
    runs: Annotated[Path, typer.Option("--runs", metavar="FOLDER", help="Where runs are kept.")] = Path("runs"),
    quick: Annotated[bool, typer.Option("--quick", help="Do not measure bandwidth.")] = False,
    save: Annotated[
        Path | None,
        typer.Option(
            "--save", metavar="FILE", help="Write the machines and their bandwidth for `roost plan --inventory`."
        ),
    ] = None,
    notation: NotationChoice = None,
) -> None:
    """Check versions, GPUs, clocks, disks, limits, paths and bandwidth, and say how to fix what is wrong.

    The exit code is 1 if a check fails. `roost train` checks limits and disks, too, before it loads anything.
    """
    console = open_console()
    if url_of(str(runs)) is not None:
        raise typer.BadParameter("is a URL; name the folder of the live runs (--scratch)", param_hint="--runs")
    job = _job(config, overrides, notation)
    paths = [] if job is None or job.training is None else input_paths(job, job.training)
    runs = runs.absolute()  # processes on other nodes have other working folders
    folders = [runs, Path(tempfile.gettempdir())]
    cluster = cluster or address is not None
    if save is not None and not cluster:
        raise typer.BadParameter("needs --cluster: it describes the machines of a cluster", param_hint="--save")
    if cluster:
        checks = _check_cluster(address, folders, paths, runs, quick, save, job)
    else:
        try:
            here = probe_node("this machine", folders, paths, None, os.environ)
            checks = judge([here]) + (() if job is None else _check_job(job, [here]))
        except ImportError as error:
            raise exit_not_installed(error, WITH_TRAINING) from None
    console.print(table_of(checks))
    wrong = failures(checks)
    if wrong:
        console.print(f"{len(wrong)} of {len(checks)} checks failed")
        raise typer.Exit(1)


def _job(config: Path | None, overrides: Sequence[str] | None, notation: NotationChoice) -> Job | None:
    if config is None:
        return None
    findings = Findings()
    source = load(config, tuple(overrides or ()), findings)
    job = None if source is None else read_job(source, findings, notation, trains=True)
    if job is None or job.training is None or findings.has_errors:
        print_findings(findings.found, open_console(stderr=True))
        raise typer.Exit(1)
    return job


def _check_job(job: Job, nodes: Sequence[NodeHealth], is_cluster: bool = False) -> tuple[Check, ...]:
    """Compare the accelerators that a job uses with those of the nodes; fails if the job cannot be planned.

    On this machine, also look for the package of its optimizer.
    """
    findings = Findings()
    plan = try_plan(job, findings)
    if plan is None:
        print_findings(findings.found, open_console(stderr=True))
        return (Check("job", Level.FAILED, "cannot be planned", "correct the errors above"),)
    used = {device for part in plan.components for process in part.table for device in process.devices}
    return (judge_job(len(used), nodes, is_cluster), *(() if is_cluster else _check_optimizer(job, plan)))


def _check_optimizer(job: Job, plan: Plan) -> Iterator[Check]:
    """A row for the package of the optimizer, if it needs one and the learner runs with this interpreter."""
    if job.training is None or not needs_package_here(job.training, plan):
        return
    findings = Findings()
    check_optimizer_is_installed(job, job.training, plan, findings)
    for finding in findings.errors:
        yield Check("optimizer", Level.FAILED, f"{finding.what}: {finding.why}", finding.fix)
    if not findings.errors:
        yield Check("optimizer", Level.OK, f"the package of {job.training.learner.optimizer.optimizer} is installed")


def _check_cluster(
    address: str | None,
    folders: Sequence[Path],
    paths: Sequence[str],
    runs: Path,
    quick: bool,
    save: Path | None,
    job: Job | None,
) -> tuple[Check, ...]:
    notes = open_console(stderr=True)

    def say(text: str) -> None:
        notes.print(f"roost: {text}", soft_wrap=True)

    try:
        from roost.doctor.cluster import joined, measure, probe_nodes
    except ImportError as error:
        raise exit_not_installed(error, WITH_RAY) from None
    try:
        with joined(address, say) as nodes:
            healths = probe_nodes(nodes, folders, paths, runs)
            checks = judge(healths)
            if job is not None and job.accelerators_per_node is None:
                say("accelerators are not compared: the config does not say how many a node has")
            elif job is not None:
                checks += _check_job(job, healths, is_cluster=True)
            measured = None
            if not quick:
                say(f"measuring bandwidth over {len(nodes)} nodes" if len(nodes) > 1 else "measuring bandwidth")
                measured = measure(nodes)
                checks += judge_bandwidth(measured)
            if save is not None:
                _save(save, measured)
                say(f"written to {save}; plan on it with: roost plan CONFIG --inventory {save}")
            return checks
    except ConfigError as error:
        print_findings(error.findings, notes)
        raise typer.Exit(1) from None
    except (ConnectionError, TimeoutError) as error:
        notes.print(f"error: {error}", soft_wrap=True)
        raise typer.Exit(1) from None


def _save(file: Path, measured: Measured | None) -> None:
    """Write the inventory of the cluster, with what was measured."""
    from roost.runtime.cluster import Cluster

    with Cluster() as cluster:  # this process is connected already
        inventory = cluster.inventory
    if measured is not None and not measured.problem:
        inventory = replace(inventory, bandwidth=measured.bandwidth)
    write_file(file, json.dumps(inventory.to_dict(), indent=2) + "\n", "--save")


def table_of(checks: Sequence[Check]) -> Table:
    """Table of checks; the fix is below what is wrong."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("check", "result", "found"):
        table.add_column(name, overflow="fold")
    colours = {Level.OK: "green", Level.WARNING: "yellow", Level.FAILED: "red"}
    for check in checks:
        fix = f"\nfix  {check.fix}" if check.fix and check.level is not Level.OK else ""
        table.add_row(check.name, Text(check.level, colours[check.level]), check.found + fix)
    return table
