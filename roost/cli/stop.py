"""`roost stop`: end a run after its step, with a checkpoint."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Annotated

import typer

from roost.cli.console import open_console
from roost.procs.files import holder_of
from roost.trainer.records.run_folder import RunFolder

LOOK_EVERY = 0.2  # seconds


def stop_command(
    run: Annotated[Path, typer.Argument(help="The folder of a run, such as runs/first.", metavar="RUN")],
    preempts: Annotated[
        bool, typer.Option("--preempt", help="Save at once and exit with code 75, as before a machine is taken away.")
    ] = False,
    wait: Annotated[float, typer.Option("--wait", metavar="S", help="Seconds to wait for its end; 0: do not.")] = 0.0,
) -> None:
    """Ask a run to end after its step: it saves a checkpoint and exits, and `--resume` continues it.

    On the machine where it runs. Exit code 1 means that it does not run here, or still runs after --wait seconds.
    """
    notes = open_console(stderr=True)
    try:
        folder = RunFolder.open(run).path
    except FileNotFoundError as error:
        notes.print(f"error: {error}", soft_wrap=True)
        raise typer.Exit(2) from None
    holder = holder_of(folder)
    # Not SIGTERM: a run that it ends exits with 75, and a scheduler would start it again.
    number = signal.SIGUSR1 if preempts else signal.SIGINT
    if holder is None:
        notes.print(f"{folder} is not running", soft_wrap=True)
        raise typer.Exit(1)
    if not holder.is_here:
        there = f"kill -{number.name.removeprefix('SIG')} {holder.pid}"
        notes.print(f"error: it runs on {holder.host}; there: {there}", soft_wrap=True)
        raise typer.Exit(1)
    os.kill(holder.pid, number)
    when = "now" if preempts else "after this step"
    notes.print(f"process {holder.pid} saves a checkpoint and ends {when}", soft_wrap=True)
    deadline = time.monotonic() + wait
    while time.monotonic() < deadline:
        if holder_of(folder) is None:
            return
        time.sleep(LOOK_EVERY)
    if wait and holder_of(folder) is not None:
        notes.print(f"error: it still runs after {wait:g} s", soft_wrap=True)
        raise typer.Exit(1)
