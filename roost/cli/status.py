"""`roost status`: the runs of a folder, which of them run, and what they are doing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from roost.cli.console import open_console
from roost.trainer.records.running import RunState, RunStatus, runs_in, status_of


def status_command(
    runs: Annotated[
        Path, typer.Argument(help="Where runs are kept, or one run; runs if left out.", metavar="[RUNS]")
    ] = Path("runs"),
    all_of_them: Annotated[bool, typer.Option("--all", help="Also show runs that have ended.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show running jobs: plan, step, reward, the phase they are in, and the process that runs them.

    They are found by their folders, on a disk that all machines share also those of other machines.
    """
    found = [status_of(run) for run in runs_in(runs)]
    shown = [status for status in found if all_of_them or status.state is RunState.RUNNING or len(found) == 1]
    if as_json:
        print(json.dumps([asdict(status) for status in shown], indent=2))
        return
    console = open_console()
    if not shown:
        ended = f"; {len(found)} have ended (--all shows them)" if found else ""
        console.print(f"no run is active in {runs}{ended}", soft_wrap=True)
        return
    console.print(table_of(shown))


def table_of(shown: Sequence[RunStatus]) -> Table:
    """Table of runs, one a row."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("run", "state", "step", "reward", "now", "plan", "process"):
        table.add_column(name, justify="right" if name in ("step", "reward") else "left", overflow="fold")
    for status in shown:
        holder = status.holder
        table.add_row(
            status.name,
            status.state,
            f"{status.step}/{status.steps}" if status.steps else str(status.step),
            "-" if status.reward is None else f"{status.reward:.3f}",
            "-" if status.phase is None else f"{status.phase}, {status.idle_s or 0:.0f} s ago",
            f"{status.mode}: {', '.join(status.components)}" if status.components else status.mode,
            "-" if holder is None else f"{holder.pid} on {holder.host}",
        )
    return table
