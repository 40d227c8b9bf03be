"""`roost report`: the page of a run, made again from its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from roost.cli.console import open_console
from roost.trainer.records.run_folder import RunFolder
from roost.trainer.report.page import write_plots, write_report


def report_command(
    run: Annotated[Path, typer.Argument(help="The folder of a run, such as runs/first.", metavar="RUN")],
) -> None:
    """Write RUN/report.html and two pictures, as far as the run is, and print where the page is."""
    notes = open_console(stderr=True)
    try:
        folder = RunFolder.open(run)
    except FileNotFoundError as error:
        notes.print(f"error: {error}", soft_wrap=True)
        raise typer.Exit(2) from None
    print(write_report(folder))
    try:
        write_plots(folder)
    except ImportError as error:
        notes.print(f"no pictures: {error.name} is missing; pip install {error.name}")
