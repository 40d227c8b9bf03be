"""`roost logs`: the output of a run's processes, also while it runs."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Annotated

import typer

from roost.cli.console import open_console
from roost.config.findings import did_you_mean
from roost.procs.files import holder_of
from roost.procs.logs import LogTail, log_name
from roost.trainer.records.run_folder import RunFolder
from roost.view.plain import plain_line

LOOK_EVERY = 0.3  # seconds


def logs_command(
    run: Annotated[Path, typer.Argument(help="The folder of a run, such as runs/first.", metavar="RUN")],
    process: Annotated[
        str | None,
        typer.Argument(
            help="A component, or one of its processes: actor or actor:0. All if left out.", metavar="PROCESS"
        ),
    ] = None,
    follows: Annotated[bool, typer.Option("--follow", "-f", help="Go on as long as the run does.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Lines of each process to begin with.")] = 50,
) -> None:
    """Print the end of the logs of a run's processes, each line with its process."""
    notes = open_console(stderr=True)
    try:
        folder = RunFolder.open(run)
    except FileNotFoundError as error:
        notes.print(f"error: {error}", soft_wrap=True)
        raise typer.Exit(2) from None
    tail = LogTail(folder.logs, lambda name: matches(name, process))
    for line in tail.last(lines):
        print(plain_line(line))
    if process is not None and not tail.names and not follows:
        known = sorted({path.parent.name for path in folder.logs.rglob("*.log")})
        hint = did_you_mean(process.partition(":")[0], known) or f"there are {', '.join(known) or 'no logs'}"
        notes.print(f"error: {folder.logs} has no log of {process}; {hint}", soft_wrap=True)
        raise typer.Exit(1)
    with contextlib.suppress(KeyboardInterrupt):
        is_running = follows
        while is_running:
            is_running = holder_of(folder.path) is not None  # before the last look: nothing is missed at the end
            for line in tail.new():
                print(plain_line(line), flush=True)
            time.sleep(LOOK_EVERY if is_running else 0)


def matches(name: str, process: str | None) -> bool:
    """Return True if a log, such as actor/rank_0.log, belongs to a process or component.

    >>> matches("actor/rank_0.log", "actor:0"), matches("actor/rank_10.log", "actor"), matches("actor/rank_1.log", "a")
    (True, True, False)
    """
    if process is None:
        return True
    component, colon, rank = process.rpartition(":")
    if colon and rank.isdigit():
        return name == log_name(component, int(rank)) or name.endswith(f"/{log_name(component, int(rank))}")
    return Path(name).parent.name == process
