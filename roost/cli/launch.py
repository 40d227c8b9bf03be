"""`roost launch`: the job file of a scheduler, rendered from the plan."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from roost.cli.options import (
    ConfigOrScript,
    GpusPerNode,
    InventoryFile,
    NotationChoice,
    Overrides,
    open_console,
    write_file,
)
from roost.config.compose import load
from roost.config.findings import Findings, did_you_mean
from roost.config.job import Job
from roost.config.notations.notation import read_job
from roost.placement.plan import Plan
from roost.placement.planner import try_plan
from roost.schedulers.job_files import (
    SUFFIXES,
    CannotRender,
    Container,
    JobOptions,
    Scheduler,
    job_name,
    notes_of,
    render,
)
from roost.schedulers.node_requests import NodeRequests, ProcessSizes, requests_of
from roost.schedulers.submit import CannotSubmit, submit
from roost.view.text import print_findings


def launch_command(
    scheduler: Annotated[
        Scheduler,
        typer.Argument(help="Scheduler to render the job file for.", metavar="slurm|kuberay|skypilot|dstack|ssh"),
    ],
    config: ConfigOrScript,
    overrides: Overrides = None,
    submits: Annotated[
        bool,
        typer.Option(
            "--submit", help="Write the file, such as NAME.sbatch, and submit it: sbatch, kubectl, sky, dstack or ssh."
        ),
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write the file here instead of printing it.")
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="The run's name; default: what the config says, or its file name.")
    ] = None,
    runs: Annotated[
        str, typer.Option("--runs", metavar="FOLDER", help="Folder or URL of runs, the same on all nodes.")
    ] = "runs",
    scratch: Annotated[
        str | None,
        typer.Option(
            "--scratch",
            metavar="FOLDER",
            help="Where the run is while it trains, if --runs is a URL (default: runs). All nodes must see it.",
        ),
    ] = None,
    time: Annotated[
        str | None, typer.Option("--time", metavar="TIME", help="Time limit: 24:00:00, or 1-12:00:00 with days.")
    ] = None,
    image: Annotated[str | None, typer.Option("--image", help="Container image with Roost in it.")] = None,
    container: Annotated[Container, typer.Option("--container", help="Container runtime for Slurm.")] = Container.PYXIS,
    mount: Annotated[
        list[str] | None,
        typer.Option(
            "--mount",
            metavar="SOURCE:PATH",
            help="A folder in the container; for KubeRay a volume claim, for SkyPilot and dstack a bucket or a volume.",
        ),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(
            "--env",
            metavar="NAME[=VALUE]",
            help="A variable; without a value a secret that is not written to the file.",
        ),
    ] = None,
    setup: Annotated[
        list[str] | None,
        typer.Option("--setup", metavar="LINE", help="A shell line before the job, such as module load."),
    ] = None,
    workdir: Annotated[
        Path | None, typer.Option("--workdir", metavar="FOLDER", help="Where the job runs (default: this folder).")
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(
            "--option",
            metavar="KEY=VALUE",
            help="The scheduler's own: partition=gpu or GROUP:partition=gpu (Slurm), resources.infra=aws (others).",
        ),
    ] = None,
    cpus: Annotated[
        list[str] | None,
        typer.Option("--cpus", metavar="COMPONENT=N", help="CPUs of each process of a component, such as agent=0.25."),
    ] = None,
    memory: Annotated[
        list[str] | None,
        typer.Option("--memory", metavar="COMPONENT=GB", help="Host memory of each process of a component."),
    ] = None,
    hosts: Annotated[
        Path | None, typer.Option("--hosts", metavar="FILE", help="ssh: file with one host per line, in rank order.")
    ] = None,
    command: Annotated[
        str | None,
        typer.Option("--command", metavar="TEXT", help="Run this on the head instead of `roost train CONFIG`."),
    ] = None,
    template: Annotated[
        Path | None, typer.Option("--template", metavar="FILE", help="A Jinja template instead of Roost's own.")
    ] = None,
    inventory: InventoryFile = None,
    gpus_per_node: GpusPerNode = None,
    notation: NotationChoice = None,
) -> None:
    """Print the job file of a scheduler: exactly the nodes, accelerators, CPUs and memory that the plan needs.

    The job runs `roost up -- roost train CONFIG` on the nodes, saves a checkpoint before its time limit, and resumes
    when it is started again. With --submit the file is written and submitted.
    """
    findings = Findings()
    source = load(config, tuple(overrides or ()), findings)

    def read_and_plan(findings: Findings, trains: bool) -> tuple[Job, Plan] | None:
        job = None if source is None else read_job(source, findings, notation, trains=trains)
        plan = None if job is None else try_plan(job, findings, inventory, accelerators_per_node=gpus_per_node)
        return None if job is None or plan is None or findings.has_errors else (job, plan)

    found, notes = read_and_plan(findings, trains=command is None), open_console(stderr=True)
    print_findings(findings.found, notes)
    if found is None:
        if read_and_plan(Findings(), trains=False) is not None:
            notes.print(
                "note: Roost cannot train this config; give the command to run with --command TEXT", soft_wrap=True
            )
        raise typer.Exit(1)
    job, plan = found
    run_name = name or _configured_name(plan) or config.stem
    try:
        sizes = ProcessSizes(_sizes("--cpus", cpus, plan), _sizes("--memory", memory, plan))
        allocation = requests_of(plan, sizes, job.num_nodes)
        options = JobOptions(
            config=str(config),
            name=run_name,
            workdir=str((workdir or Path.cwd()).absolute()),
            runs=runs,
            scratch=scratch,
            command=command,
            train_args=tuple(overrides or ()) + (("--notation", notation.value) if notation else ()),
            time=time,
            image=image,
            container=container,
            mounts=tuple(mount or ()),
            env=_variables(env or ()),
            setup=tuple(setup or ()),
            scheduler_options=tuple(option or ()),
            hosts=_hosts(hosts, allocation),
        )
        text = render(scheduler, allocation, options, template.read_text(encoding="utf-8") if template else None)
    except (CannotRender, OSError) as error:
        notes.print(f"error: {error}", soft_wrap=True)
        raise typer.Exit(1) from None
    for note in (*allocation.notes, *notes_of(scheduler, options, allocation.nodes)):
        notes.print(f"note: {note}", soft_wrap=True)
    if out is None and not submits:
        print(text, end="")
        return
    file = out or Path(f"{job_name(run_name)}{SUFFIXES[scheduler]}")
    write_file(file, text, "--out")
    notes.print(f"written to {file}", soft_wrap=True)
    if submits:
        secrets = [key for key, value in options.env.items() if value is None]
        try:
            code = submit(scheduler, file, job_name(run_name), secrets, os.environ)
        except CannotSubmit as error:
            notes.print(f"error: {error}", soft_wrap=True)
            raise typer.Exit(1) from None
        if code:
            raise typer.Exit(code)


def _configured_name(plan: Plan) -> str | None:
    return next((str(setting.value) for setting in plan.training if setting.name == "name" and setting.value), None)


def _sizes(option: str, written: Iterable[str] | None, plan: Plan) -> dict[str, float]:
    names = [part.name for part in plan.components]
    sizes = {}
    for text in written or ():
        component, _, value = text.partition("=")
        try:
            size = sizes[component] = float(value)
        except ValueError:
            raise CannotRender(f"{option} {text!r} is not COMPONENT=NUMBER, such as {names[0]}=2") from None
        if not 0 <= size < math.inf:
            raise CannotRender(f"{option} {text!r}: {value} is not a size; give a finite number of 0 or more")
        if component not in names:
            hint = did_you_mean(component, names) or f"there are {', '.join(names)}"
            raise CannotRender(f"{option} {text!r}: there is no component {component}; {hint}")
    return sizes


def _variables(written: Iterable[str]) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for text in written:
        variable, equals, value = text.partition("=")
        if not variable.isidentifier():
            # Without its value, which may be a secret.
            raise CannotRender(f"--env: {variable!r} cannot be the name of a variable; write NAME=VALUE or NAME")
        found[variable] = value if equals else None
    return found


def _hosts(file: Path | None, allocation: NodeRequests) -> tuple[str, ...]:
    """Hosts from a file, else from the inventory; empty lines and comments are skipped."""
    if file is None:
        return tuple(host for request in allocation.requests for host in request.hosts)
    lines = (line.partition("#")[0].split() for line in file.read_text(encoding="utf-8").splitlines())
    return tuple(words[0] for words in lines if words)
